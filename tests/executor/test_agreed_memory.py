"""Ranks agree on the memory of a pass before it begins; what one rank does alone has no such meeting."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.executor import agreed_memory
from nanovllm.executor.agreed_memory import SharedShortage, pass_bytes, prepared
from nanovllm.models.common.sharding import sharded_config
from nanovllm.models.model import Model
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.state.device_errors import out_of_memory
from nanovllm.testing.models import random_model, tiny_config


def outcomes(failing: dict[int, Exception], size: int = 2) -> list[Any]:
    """What `prepared` returns or raises on each rank, if some of them fail while they make the inputs."""

    def run(mesh: Mesh) -> Any:
        model: Model = random_model(tiny_config(), mesh=mesh)

        def make() -> str:
            if mesh.rank in failing:
                raise failing[mesh.rank]
            return "made"

        try:
            return prepared(model, 5, 5, make)
        except Exception as error:
            return error

    return run_ranks(run, size)


def test_all_ranks_raise_the_same() -> None:
    assert outcomes({}) == ["made", "made"]
    lacking = torch.OutOfMemoryError("no memory")
    for failing, which in (({1: lacking}, "rank 1"), ({0: lacking, 1: lacking}, "ranks 0, 1")):
        found = outcomes(failing)
        assert all(isinstance(one, SharedShortage) and out_of_memory(one) for one in found)
        assert {str(one) for one in found} == {f"out of memory on {which} of 2: a pass of 5 tokens does not fit"}
        assert [one.__cause__ for one in found] == [failing.get(rank) for rank in range(2)]


def test_a_rank_that_fails_otherwise_lets_the_others_know() -> None:
    found = outcomes({1: ValueError("a bug")})
    assert isinstance(found[1], ValueError) and isinstance(found[0], nv.EngineDeadError)


def test_a_rank_that_failed_waits_for_none() -> None:
    def run(mesh: Mesh) -> list[type[BaseException]]:
        model, met = random_model(tiny_config(), mesh=mesh), list[type[BaseException]]()

        def make() -> None:
            if mesh.rank == 1:
                raise ValueError("a bug")

        for _ in range(2):
            try:
                prepared(model, 5, 5, make)
            except Exception as error:
                met.append(type(error))
        return met

    assert run_ranks(run, 2) == [[nv.EngineDeadError] * 2, [ValueError] * 2]


def test_other_errors_are_raised_as_they_are() -> None:
    found = outcomes({0: ValueError("a bug"), 1: ValueError("a bug")})
    assert [type(one) for one in found] == [ValueError, ValueError]


def test_one_rank_takes_nothing_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed_memory, "take_memory", lambda *_: pytest.fail("memory was taken"))
    assert prepared(random_model(tiny_config()), 5, 5, lambda: "made") == "made"
    assert outcomes({}, size=1) == ["made"]


def test_the_bytes_of_a_pass_by_hand() -> None:
    config = replace(tiny_config(), hidden_size=100, intermediate_size=400, num_heads=4, num_kv_heads=2, head_dim=10, vocab_size=1000)
    part = sharded_config(config, Mesh(size=2, rank=0, group=0))
    assert pass_bytes(config, 2, 1000, 0) == 1000 * 2 * (4 * 100 + 3 * 400)
    assert pass_bytes(part, 2, 1000, 0) == 1000 * 2 * (4 * 100 + 3 * 200)
    assert pass_bytes(part, 2, 1, 300) == 300 * 2 * (500 + 1000) + 256 * 1000 * 8
    wide = replace(part, num_heads=40, num_kv_heads=20)
    assert pass_bytes(wide, 2, 1, 0) == 2 * (4 * 100 + 120 * 10)


def test_the_experts_of_a_pass_by_hand() -> None:
    config = tiny_config("Qwen3MoeForCausalLM")
    assert config.moe is not None
    routed = config.moe.top_k * (3 * config.moe.intermediate_size + config.hidden_size) + 3 * config.moe.shared_size
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    widest = max(attention, 3 * config.intermediate_size, routed)
    assert pass_bytes(config, 4, 10, 0) == 10 * 4 * (4 * config.hidden_size + widest)
