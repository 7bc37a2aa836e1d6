"""Ranks agree on what they find outside: values are rank 0's, or the least of all, and an engine is sized alike on all of them."""

import gc
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import pytest
import torch

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.engine import init_state as module
from nanovllm.engine.mirrored import require_alike
from nanovllm.executor.distributed import agreed, dist, joined, least, left, opened_store, store_at
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.ops.distributed.process_group import mesh_of

R = TypeVar("R")


def on_ranks(size: int, function: Callable[[Mesh], R]) -> list[R]:
    """What a function returns on each of some ranks."""
    return run_ranks(function, size, seconds=120.0)


def test_values_are_those_of_rank_0() -> None:
    told = ({"ms": 0.1 + 0.2, "name": "ä", "none": None}, [1] * 100, False)
    assert on_ranks(3, lambda mesh: agreed(mesh, told[mesh.rank])) == [told[0]] * 3
    assert agreed(None, told[1]) == told[1]


def test_the_least_values_of_all() -> None:
    assert on_ranks(3, lambda mesh: least(mesh, [mesh.rank, -mesh.rank, 1 << 40])) == [[0, -2, 1 << 40]] * 3
    assert least(None, [7]) == [7]


def test_states_that_differ_end_all_engines() -> None:
    model = nv.load_model("tiny", device="cpu")
    states = [nv.init_state(model, num_pages=8) for _ in range(3)]

    def compare(mesh: Mesh) -> str:
        state = states[mesh.rank]
        require_alike(mesh, state)
        require_alike(mesh, replace(state, num_steps=1, next_id=mesh.rank))  # not compared in this step
        with pytest.raises(nv.EngineDeadError, match="the ranks differ after step 64: rank 0: state") as caught:
            require_alike(mesh, replace(state, num_steps=64, next_id=mesh.rank // 2))
        with pytest.raises(nv.EngineDeadError, match="make a new engine"):
            nv.submit(model, state, "Hello")
        return str(caught.value)

    assert len({*on_ranks(3, compare)}) == 1


def test_an_engine_has_the_pages_that_all_ranks_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.local()
    monkeypatch.setattr(module, "device_budget", lambda model, fraction: free.bytes)

    def made(mesh: Mesh) -> int:
        free.bytes = (64 << 20) - mesh.rank * (1 << 20)
        return nv.init_state(nv.load_model("tiny", device="cpu", mesh=mesh), max_num_seqs=64).config.num_pages

    first, second = on_ranks(2, made)
    free.bytes = 2 * 63 << 20  # a rank has half of the heads
    assert first == second == nv.init_state(nv.load_model("tiny", device="cpu"), max_num_seqs=64).config.num_pages


def test_a_process_may_be_in_several_groups_and_leave_one() -> None:
    stores = [opened_store() for _ in range(2)]
    (first, own), (second, other) = (joined(store, 0, 1, torch.device("cpu"), timedelta(seconds=120)) for store in stores)
    assert first.get_group_store() is own and second.get_group_store() is other  # by which symmetric memory is found
    left(mesh_of(first, torch.device("cpu"), own))
    one, parts = torch.ones(1), [torch.empty(1)]
    dist.all_reduce(one, group=second)
    dist.all_gather(parts, one, group=second)
    assert parts == [one]
    assert store_at(stores[0].port).port == stores[0].port != stores[1].port
    assert not dist.is_initialized()


def test_a_later_group_of_a_process_may_have_the_port_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system gives the port of a closed store again, and torch keeps the names of all groups of a process."""
    opened = opened_store()
    first, kept = joined(opened, 0, 1, torch.device("cpu"), timedelta(seconds=120))
    left(mesh_of(first, torch.device("cpu"), kept))
    port = opened.port
    del first, kept, opened
    gc.collect()
    bound = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda address: bound((address[0], port)))
    try:
        again = opened_store()
    except OSError:
        pytest.skip(f"another process has taken port {port}")
    assert again.port == port
    second, _own = joined(again, 0, 1, torch.device("cpu"), timedelta(seconds=120))
    one = torch.ones(1)
    dist.all_reduce(one, group=second)
    assert one.item() == 1
