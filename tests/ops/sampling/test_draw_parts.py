"""`draw_parts`: tokens from parts of the logits are those from all logits, whatever the number of ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.config import Mesh, ModelConfig
from nanovllm.models.common.sharding import in_parts
from nanovllm.ops.distributed.in_process import run_ranks, thread_meshes
from nanovllm.ops.sampling.draw import draw, highest
from nanovllm.ops.sampling.draw_parts import Parts, candidates, draw_parts
from nanovllm.sampling.sampler import sample
from nanovllm.sampling.tensors import Sampling
from nanovllm.testing.models import random_model, tiny_config

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
VALUES = [-INF, -0.0, 0.0, 1.0, 1.0 + 2.0**-23, 1.0 + 2.0**-50, 3.0]  # many ties; some in float32 but not in float64


def part_of(logits: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """A rank's logits: columns beyond the vocabulary hold what must never win."""
    width = -(-logits.shape[1] // size)
    own = logits[:, rank * width : (rank + 1) * width]
    return torch.cat([own, logits.new_full((len(logits), width - own.shape[1]), INF)], 1)


def by_ranks(logits: torch.Tensor, size: int, draws: Callable[[torch.Tensor, Parts], torch.Tensor]) -> torch.Tensor:
    """What all ranks sample, which must be the same."""

    def run(mesh: Mesh) -> torch.Tensor:
        return draws(part_of(logits, size, mesh.rank), Parts(mesh=mesh, vocab_size=logits.shape[1]))

    first, *others = run_ranks(run, size)
    assert all(torch.equal(first, other) for other in others)
    return first


def keys_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2**40, (rows, 2), generator=torch.Generator().manual_seed(seed))


@st.composite
def problems(draws: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, temperatures and keys: rows of few values, with ties across ranks, rows of -inf, and rows of noise."""
    rows, vocab, dtype = draws(st.integers(1, 4)), draws(st.integers(1, 23)), draws(st.sampled_from(DTYPES))
    kinds = st.one_of(
        st.lists(st.sampled_from(VALUES), min_size=vocab, max_size=vocab),
        st.just([-INF] * vocab),
        st.lists(st.floats(-20, 20), min_size=vocab, max_size=vocab),
    )
    logits = torch.tensor([draws(kinds) for _ in range(rows)], dtype=torch.float64).to(dtype)
    temperature = torch.tensor(draws(st.lists(st.sampled_from([0.0, 1e-3, 0.7, 5.0]), min_size=rows, max_size=rows)))
    return logits, temperature, keys_of(rows, draws(st.integers(0, 2**32)))


@given(problem=problems(), size=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=150)
def test_tokens_are_those_of_all_logits(problem: tuple[torch.Tensor, ...], size: int) -> None:
    logits, temperature, keys = problem
    found = by_ranks(logits, size, lambda own, parts: draw_parts(own, temperature, keys, parts))
    assert found.dtype == torch.int32
    assert torch.equal(found, draw(logits, temperature, None, keys))
    assert torch.equal(by_ranks(logits, size, lambda own, parts: draw_parts(own, None, None, parts)), highest(logits))


@pytest.mark.parametrize("vocab", [4096, 4099])
@pytest.mark.parametrize("size", [2, 4])
def test_wide_rows(vocab: int, size: int) -> None:
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    temperature, keys = torch.tensor([0.0, 0.3, 1.0, 2.0]).repeat(16), keys_of(64, 1)
    found = by_ranks(logits, size, lambda own, parts: draw_parts(own, temperature, keys, parts))
    assert torch.equal(found, draw(logits, temperature, None, keys))


@pytest.mark.parametrize("vocab", [1, 5, 9])  # with 4 ranks some have no token at all
def test_rows_without_a_proper_maximum(vocab: int) -> None:
    logits = torch.tensor([[NAN] * vocab, [NAN, INF, -INF, NAN, 0.0, INF, NAN, 1.0, 2.0][:vocab], [INF] * vocab])
    for temperature in (None, torch.zeros(3), torch.ones(3)):
        keys = None if temperature is None else keys_of(3, 2)
        found = by_ranks(logits, 4, lambda own, parts, t=temperature, keys=keys: draw_parts(own, t, keys, parts))
        assert ((found >= 0) & (found < vocab)).all()


def test_no_rows() -> None:
    empty = torch.zeros(0, 6)
    assert by_ranks(empty, 2, lambda own, parts: draw_parts(own, None, None, parts)).shape == (0,)


@pytest.mark.parametrize("size", [2, 4])
def test_other_options_gather_the_logits(size: int) -> None:
    logits, rows = torch.randn(3, 13, generator=torch.Generator().manual_seed(5)), torch.arange(3, dtype=torch.int64)
    temperature, positions = torch.tensor([0.0, 0.8, 1.5]), torch.tensor([4, 5, 6])
    for options in (
        {},
        {"top_k": torch.tensor([0, 2, 3], dtype=torch.int32)},
        {"top_p": torch.tensor([1.0, 0.5, 0.9])},
        {"min_p": torch.tensor([0.0, 0.5, 0.1])},
        {"logit_bias": torch.eye(3, 13) * 9},
        {"allowed": torch.tensor([[0b1000000000001], [0b110], [-1]], dtype=torch.int32)},
        {"num_logprobs": 2},
    ):
        sampling = Sampling(seeds=rows, temperature=temperature, **options)
        for each in (sampling, Sampling(seeds=rows, **{name: options[name] for name in options if name in ("logit_bias", "allowed")})):
            expected = sample(logits, each, positions)
            found = run_ranks(
                lambda mesh, each=each: sample(part_of(logits, size, mesh.rank), each, positions, Parts(mesh=mesh, vocab_size=13)), size
            )
            for one in found:
                assert torch.equal(one.token_ids, expected.token_ids)
                assert expected.logprobs is None or (one.logprobs is not None and torch.equal(one.logprobs, expected.logprobs))


def test_opcheck() -> None:
    (mesh,) = thread_meshes(1)
    logits, temperature, keys = torch.randn(3, 9), torch.tensor([0.0, 1.0, 2.0]), keys_of(3, 0)
    for given_ in ((None, None), (temperature, keys)):
        torch.library.opcheck(torch.ops.nanovllm.draw_parts.default, (logits, *given_, mesh.group, 8))


@pytest.mark.compile
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_in_parts_compiles_whole(temperature: float) -> None:
    (mesh,) = thread_meshes(1)
    model = random_model(tiny_config(), dtype="float64", mesh=mesh)
    options = nv.SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True)

    def run(config: ModelConfig, wrap: Callable[[Any], Any] = lambda step: step) -> list[list[int]]:
        state = nv.init_state(model, num_pages=32, compile=False)
        state, carry = nv.begin(model, state, ["Once upon a time", "a fox"], options, room=4)
        step = wrap(lambda carry: nv.decode_step(model.params, carry, config, forward=nv.forward)[0])
        for _ in range(4):
            carry = step(carry)
        return [row.token_ids for row in nv.commit(model, state, carry)[1]]

    expected = run(model.config)
    assert run(in_parts(model.config)) == expected
    assert run(in_parts(model.config), lambda step: torch.compile(step, fullgraph=True)) == expected


@pytest.mark.interpret
@pytest.mark.parametrize(("first", "num"), [(0, 3), (2, 5), (7, 2049), (2048, 2048), (4099, 4100), (6, 1), (9, 0)])
def test_blocks_interpreted(first: int, num: int) -> None:
    from nanovllm.ops.sampling import triton_sampling

    logits = torch.randn(3, num + 2, generator=torch.Generator().manual_seed(num))
    logits[:, num:] = INF  # no tokens
    logits[1, :num] = -INF
    logits[2, num // 2 : num] = 7.0
    temperature, keys = torch.tensor([0.7, 0.0, 0.0]), keys_of(3, first)
    for x in (logits, logits.bfloat16()):
        for values, ids, t in (
            (*triton_sampling.highest_of_blocks(x, first, num), None),
            (*triton_sampling.drawn_of_blocks(x, temperature, None, keys, first, num), temperature),
        ):
            assert ((ids >= max(0, min(first, first + num - 1))) & (ids < max(1, first + num))).all()
            best, best_id = candidates(x, t, None if t is None else keys, first, num)
            at = values.argmax(1, keepdim=True)
            torch.testing.assert_close(values.gather(1, at).double(), best, rtol=1e-6, atol=1e-6)
            assert torch.equal(ids.gather(1, at), best_id)
