"""Engines with `kv_dtype="fp8"` on a CPU: what they compute, hold and refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.config import EngineConfig
from nanovllm.ops.kv_cache.fp8 import FP8, numbers
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.pool_sizes import pool_sizes
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [1], [4, 3, 2, 1] * 6, [9] * 17]
ARCHITECTURES = ["Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel"]


def state_of(model: nv.Model, **options: Any) -> nv.EngineState:
    return nv.init_state(model, **{"num_pages": 64, "page_size": 4, "max_model_len": 128, "kv_dtype": "fp8", **options})


def replies(model: nv.Model, state: nv.EngineState, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    state, gens = nv.generate_many(model, state, prompts, GREEDY)
    nv.check(state)
    return [(gen.token_ids, [one.logprob for one in gen.logprobs]) for gen in gens]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES[:-1])  # replies of GPT-2 differ in the last bits, whatever the dtype of KV
def test_a_reply_has_the_same_bits_in_every_batch(architecture: str, dtype: str) -> None:
    model = random_model(tiny_config(architecture), dtype=dtype)
    together = replies(model, state_of(model))
    assert together == [replies(model, state_of(model), [prompt])[0] for prompt in PROMPTS]
    assert together == replies(model, state_of(model), PROMPTS[::-1])[::-1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_prompt_in_pieces_writes_what_a_whole_prompt_writes(architecture: str, budget: int) -> None:
    """Attention of prompts reads the rounded keys and values of the prompt's own tokens, as later pieces have to."""
    model = random_model(tiny_config(architecture), dtype="float64")
    whole, one = nv.prefill(model, state_of(model), PROMPTS[2])
    pieces, other = nv.prefill(model, state_of(model, max_num_batched_tokens=budget), PROMPTS[2])
    assert list(one.pages) == list(other.pages)
    for mine, theirs in zip(whole.kv.pools, pieces.kv.pools, strict=True):
        # The last bit of float64 differs by the number of rows, and the dummy page by what ran again.
        assert torch.equal(numbers(mine)[:, :-1], numbers(theirs)[:, :-1])


def test_numbers_are_near_those_of_kv_that_is_not_rounded() -> None:
    model = random_model(tiny_config(), std=0.05)
    ids = PROMPTS[2] + PROMPTS[0]
    state, _ = nv.prefill(model, state_of(model), ids)
    plain, _ = nv.prefill(model, state_of(model, kv_dtype=None), ids)
    stored, exact = numbers(state.kv.pools[0])[0, :-1], plain.kv.pools[0][0, :-1]  # of the first layer
    largest = exact.abs().amax(-1, keepdim=True)
    assert ((stored - exact).abs() <= largest / 16 + 1e-7).all() and (stored != exact).any()


def test_the_default_is_the_models_dtype() -> None:
    model = random_model(tiny_config())
    assert nv.init_state(model, num_pages=4).kv.pools[0].dtype == torch.float32
    state = state_of(model)
    assert state.kv.pools[0].dtype == FP8 and state.config.kv_dtype == "fp8"
    assert state.kv.pools[0].shape == (2, 65, 2, 2, 4, 20)
    assert "float8_e4m3fn[2, 65, 2, 2, 4, 20]" in repr(state.kv)


@pytest.mark.parametrize("windows", [(), (8, 0), (8, 8)])
def test_the_pool_of_a_budget_has_19_tenths_of_the_tokens(windows: tuple[int, ...]) -> None:
    config = tiny_config(head_dim=128, windows=windows)
    limits = EngineConfig(
        num_pages=1,
        page_size=16,
        max_model_len=1 << 20,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        seed=0,
        num_frames=1 if windows else 0,
    )
    sizes = [pool_sizes(config, limits, None, None, 1 << 28, dtype) for dtype in (torch.bfloat16, FP8)]
    place = 1 if windows == (8, 8) else 0
    assert sizes[1][place] >= 1.9 * sizes[0][place]
    page = [bytes_per_page(config, page_size=16, dtype=dtype) for dtype in (torch.bfloat16, FP8)]
    assert page == [2 * 2 * 2 * 16 * 256, 2 * 2 * 2 * 16 * 132]


def test_the_pool_takes_the_bytes_that_are_counted() -> None:
    model = random_model(tiny_config())
    state = state_of(model)
    assert state.kv.pools[0].nbytes == 65 * bytes_per_page(model.config, page_size=4, dtype=FP8)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("value", ["fp9", "bfloat16", "", 8, True, FP8, ["fp8"]])
def test_an_unknown_dtype_is_refused(value: Any) -> None:
    model = random_model(tiny_config())
    with pytest.raises(nv.InvalidRequestError, match=r"kv_dtype=.* must be 'fp8', or None"):
        nv.init_state(model, num_pages=4, kv_dtype=value)


def test_heads_that_have_no_room_for_aligned_scales_are_refused() -> None:
    model = random_model(tiny_config(head_dim=6))
    with pytest.raises(nv.InvalidRequestError, match="kv_dtype='fp8' needs a head_dim that is a multiple of 4, and this model has 6"):
        nv.init_state(model, num_pages=4, kv_dtype="fp8")
    nv.init_state(model, num_pages=4)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_chunks_in_files(architecture: str, tmp_path: Path) -> None:
    model = random_model(tiny_config(architecture))
    state, chunk = nv.prefill(model, state_of(model), PROMPTS[2])
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    other, loaded = nv.load_chunk(model, state_of(model, page_size=7), tmp_path / "chunk")
    assert loaded.token_ids.tolist() == PROMPTS[2] and loaded.provenance.exact and other.stats.prefill_tokens == 0
    nv.check(other)
    _, ours = nv.generate(model, state, chunk, GREEDY)
    _, theirs = nv.generate(model, other, loaded, GREEDY)
    assert ours.token_ids == theirs.token_ids
    assert [one.logprob for one in ours.logprobs or []] == [one.logprob for one in theirs.logprobs or []]


def test_a_file_of_another_kv_dtype_is_refused(tmp_path: Path) -> None:
    model = random_model(tiny_config())
    for name, written, reads in (("a", "fp8", None), ("b", None, "fp8")):
        state, chunk = nv.prefill(model, state_of(model, kv_dtype=written), PROMPTS[0])
        nv.save_chunk(state, chunk, tmp_path / name)
        other = state_of(model, kv_dtype=reads)
        with pytest.raises(nv.ChunkMismatchError, match=rf"{name}: its KV is torch.*, but this engine's is torch.*kv_dtype={written!r}"):
            nv.load_chunk(model, other, tmp_path / name)
        nv.check(other)  # the state is as it was
        _, again = nv.load_chunk(model, state_of(model, kv_dtype=written), tmp_path / name)
        assert len(again) == len(PROMPTS[0])


def test_a_store_finds_chunks_of_the_engines_kv_dtype(tmp_path: Path) -> None:
    model, store = random_model(tiny_config()), nv.ChunkStore(tmp_path, max_bytes=1 << 30)
    keys = {}
    for kv_dtype in (None, "fp8"):
        state, chunk = nv.prefill(model, state_of(model, kv_dtype=kv_dtype), PROMPTS[0])
        keys[kv_dtype] = store.save(state, chunk)
        assert store.save(state, chunk) == keys[kv_dtype]  # not written again
        assert store.longest(model, PROMPTS[0], kv_dtype=kv_dtype) == keys[kv_dtype]
        fresh, found = store.load(model, state_of(model, kv_dtype=kv_dtype), PROMPTS[0])
        assert found is not None and fresh.kv.pools[0].dtype == state.kv.pools[0].dtype
    assert len(set(keys.values())) == 2
    with pytest.raises(nv.InvalidRequestError, match="kv_dtype='fp9'"):
        store.longest(model, PROMPTS[0], kv_dtype="fp9")


def test_chunks_that_move_stay_approximate_and_near() -> None:
    model = random_model(tiny_config(), std=0.05)
    state = state_of(model)
    state, a = nv.prefill(model, state, PROMPTS[0])
    state, b = nv.prefill(model, state, PROMPTS[2])
    state, joined = nv.compose(model, state, [a, b])
    assert not joined.provenance.exact and joined.num_exact == len(a)
    state, half = nv.compose(model, state, [a, b], recompute=0.5)
    state, whole = nv.compose(model, state, [a, b], recompute="all")
    assert whole.provenance.exact and not half.provenance.exact
    state, short = nv.drop(model, state, whole, 2, 6, mode="shift")
    assert not short.provenance.exact
    nv.check(state)


def test_sessions_forks_and_branches() -> None:
    model = random_model(tiny_config())
    state = state_of(model)
    _, want = nv.generate_many(model, state_of(model), PROMPTS, GREEDY)
    state, carry = nv.begin(model, state, PROMPTS, GREEDY, room=12)
    address = carry.kv.pools[0].data_ptr()
    for _ in range(12):
        carry, _ = nv.decode_step(model.params, carry, model.config)
    assert carry.kv.pools[0].data_ptr() == address
    state, gens = nv.commit(model, state, carry)
    assert [gen.token_ids for gen in gens] == [gen.token_ids for gen in want]
    state, twin = nv.fork(state, gens[0].chunk)
    state, head = nv.truncate(state, twin, 5)  # a partial page: the next token copies it
    state, one = nv.generate(model, state, head, GREEDY)
    _, fresh = nv.generate(model, state_of(model), twin.token_ids.tolist()[:5], GREEDY)
    assert one.token_ids == fresh.token_ids
    nv.check(state)


def test_shared_pages_are_read_once_on_request() -> None:
    model = random_model(tiny_config(), dtype="float64")
    state = state_of(model, cascade=True)
    state, chunk = nv.prefill(model, state, PROMPTS[2])
    state, gens = nv.generate_many(model, state, [[chunk, [1]], [chunk, [2]], [chunk, [3]]], GREEDY)
    _, want = nv.generate_many(model, state_of(model), [[*PROMPTS[2], last] for last in (1, 2, 3)], GREEDY)
    assert [gen.token_ids for gen in gens] == [gen.token_ids for gen in want]


@pytest.mark.compile
def test_a_compiled_program_copies_no_kv() -> None:
    model = random_model(tiny_config(num_layers=1))
    for options in ({}, {"forward": nv.forward}):
        _, want = nv.generate_many(model, state_of(model), PROMPTS[:2], GREEDY)
        state, carry = nv.begin(model, state_of(model), PROMPTS[:2], GREEDY, room=4)
        address = carry.kv.pools[0].data_ptr()

        def run(params: Any, carry: nv.DecodeCarry, options: Any = options) -> tuple[nv.DecodeCarry, torch.Tensor]:
            carry, first = nv.decode_step(params, carry, model.config, **options)
            carry, second = nv.decode_step(params, carry, model.config, **options)
            return carry, torch.stack((first.token_ids, second.token_ids), 1)

        compiled, drawn = torch.compile(run, fullgraph=True), []
        for _ in range(2):
            carry, tokens = compiled(model.params, carry)
            drawn.append(tokens)
        assert carry.kv.pools[0].data_ptr() == address
        nv.commit(model, state, carry)
        assert torch.cat(drawn, 1).tolist() == [gen.token_ids[:4] for gen in want]
