"""Models with sliding windows in an engine with host memory: frames go there and come back, and replies do not change."""

from dataclasses import replace

import numpy as np
import pytest

from nanovllm.chunks.generate import generate
from nanovllm.chunks.handles import release
from nanovllm.chunks.offload import offload
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.storage.file import save_chunk
from nanovllm.config import Mesh
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.engine.step import step
from nanovllm.executor.executor import runtime_of
from nanovllm.models.model import Model
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.digest import digest
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.state.kv_cache import bytes_by_group
from nanovllm.state.offload import Rates
from nanovllm.state.prefix_keys import keys_from
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.memory import freeze
from nanovllm.testing.shadows.worlds import drain

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MIXED = random_model(tiny_config(**SIZES, windows=(0, 6)))
ALONE = random_model(tiny_config(**SIZES, windows=(6, 5)))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ALWAYS, NEVER = Rates(tokens_per_second=1.0, bytes_per_second=1e15), Rates(tokens_per_second=1e15, bytes_per_second=1.0)
GIB = 1 / 1024


def engine(model: Model = MIXED, gib: float = GIB, rates: Rates = ALWAYS, **options) -> EngineState:
    """An engine with 24 pages of 4 tokens and 8 frames, and host memory that loads by given rates."""
    limits = {"num_pages": 24, "num_frames": 8, "page_size": 4, "max_model_len": 64, "max_num_seqs": 4}
    state = init_state(model, **{**limits, "host_kv_gib": gib, **options})
    host = state.pool.host
    return state if host is None else replace(state, pool=replace(state.pool, host=replace(host, rates=rates)))


def prompt(seed: int, length: int = 21) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def reply(model: Model, state: EngineState, tokens: list[int], params: SamplingParams = GREEDY):
    state, rid = submit(model, state, tokens, params)
    state, outputs = drain(model, state)
    check(state)
    return state, outputs[rid]


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("model", [MIXED, ALONE], ids=["mixed", "alone"])
def test_replies_are_the_same_and_fewer_tokens_are_run(model: Model, kv_dtype):
    plain, state = engine(model, 0, kv_dtype=kv_dtype), engine(model, kv_dtype=kv_dtype)
    for seed in (0, 1, 2, 3, 0, 1, 2, 3, 0):
        plain, expected = reply(model, plain, prompt(seed, 29))
        state, output = reply(model, state, prompt(seed, 29))
        assert output.token_ids == expected.token_ids
    assert output.num_cached_tokens == 28 and state.stats.loaded_tokens > 0
    assert state.stats.prefill_tokens < plain.stats.prefill_tokens
    total = state.stats.prefill_tokens + state.stats.reused_tokens
    assert total == plain.stats.prefill_tokens + plain.stats.reused_tokens


@pytest.mark.parametrize("model", [MIXED, ALONE], ids=["mixed", "alone"])
def test_no_copies_begin_before_the_plan(model: Model, monkeypatch):
    state = engine(model)
    monkeypatch.setattr(runtime_of(state).host, "begin", lambda held: pytest.fail(f"copies of {held} began"))
    for seed in (0, 1, 2, 3, 0):
        state, _ = reply(model, state, prompt(seed, 29))
    assert state.stats.loaded_tokens > 0


@pytest.mark.parametrize(("length", "num_left"), [(29, 0), (21, 1)])
def test_only_frames_come_back_to_pages_that_stayed_on_the_device(length: int, num_left: int):
    """A second prompt takes frames of the first one, and none of its pages. Of the window two pages need frames; some have them still."""
    state = engine()
    state, expected = reply(MIXED, state, prompt(0))
    state, _ = reply(MIXED, state, prompt(1, length))
    matched = pools.match(state.pool, np.array(prompt(0), np.int32))
    assert len(matched) == 5 and np.count_nonzero(state.pool.frames.have(matched)) == num_left
    before, num_indexed = state.stats, len(state.prefix.pages())
    state, output = reply(MIXED, state, prompt(0))
    assert output.token_ids == expected.token_ids and output.num_cached_tokens == 20
    assert state.stats.loaded_tokens - before.loaded_tokens == (2 - num_left) * 4
    assert len(state.prefix.pages()) == num_indexed, "no page was copied"


def test_pages_before_the_window_come_back_without_frames():
    state = engine(num_pages=14)
    state, expected = reply(MIXED, state, prompt(0))
    for seed in (1, 2):
        state, _ = reply(MIXED, state, prompt(seed, 45))
    assert not len(pools.match(state.pool, np.array(prompt(0), np.int32))), "the prompt is still on the device"
    state, rid = submit(MIXED, state, prompt(0), GREEDY)
    state, _ = step(MIXED, state)
    (sequence,) = state.running
    assert sequence.retired == 3 and not state.pool.frames.have(sequence.pages.array(0, 3)).any()
    assert state.pool.frames.have(sequence.pages.array(3)).all()
    check(state)
    state, outputs = drain(MIXED, state)
    assert outputs[rid].token_ids == expected.token_ids and outputs[rid].num_cached_tokens == 20


def test_a_prefix_whose_window_has_a_hole_is_used_up_to_it():
    """Of the five host pages of a prompt the fourth is bare, so that a request begins after the third one."""
    state = engine(num_pages=14)
    state, expected = reply(MIXED, state, prompt(0))
    for seed in (1, 2):
        state, _ = reply(MIXED, state, prompt(seed, 45))
    host, keys = state.pool.host, list(keys_from(np.array(prompt(0), np.int32), 0, 4))
    assert host is not None and all(key in host.by_key for key in keys)
    bare = replace(host, bare=host.bare.set(host.by_key[keys[3]], True))
    state = replace(state, pool=replace(state.pool, host=bare))
    state, output = reply(MIXED, state, prompt(0))
    assert output.token_ids == expected.token_ids and output.num_cached_tokens == 12


def test_a_bare_host_page_gets_its_frame_later():
    """Frames of a long reply are taken while it runs, so its pages leave the device without them. As a prompt, its tokens run again."""
    long = replace(GREEDY, max_tokens=30)
    state = engine(num_pages=12, num_frames=5)
    state, output = reply(MIXED, state, prompt(0, 9), long)
    for seed in (1, 2):
        state, _ = reply(MIXED, state, prompt(seed, 40))
    host = state.pool.host
    assert host is not None and len(host.bare) > 0
    bare = {host.key_of[at] for at in host.bare}
    tokens = [*prompt(0, 9), *output.token_ids][:25]
    _, expected = reply(MIXED, engine(gib=0), tokens)
    state, again = reply(MIXED, state, tokens)
    assert again.token_ids == expected.token_ids and again.num_cached_tokens < 24
    for seed in (3, 4):
        state, _ = reply(MIXED, state, prompt(seed, 40))
    host = state.pool.host
    assert bare - {host.key_of[at] for at in host.bare}, "no bare page got its frame"
    state, again = reply(MIXED, state, tokens)
    assert again.token_ids == expected.token_ids and again.num_cached_tokens == 24


def test_where_every_layer_has_a_window_pages_without_frames_are_not_kept():
    state = engine(ALONE, num_pages=12, num_frames=5, max_num_seqs=1)
    state, output = reply(ALONE, state, prompt(0, 9), replace(GREEDY, max_tokens=30))
    for seed in range(1, 5):
        state, _ = reply(ALONE, state, prompt(seed, 40))
    host, keys = state.pool.host, [*keys_from(np.array([*prompt(0, 9), *output.token_ids], np.int32), 0, 4)]
    assert host is not None and not host.bare
    there = [key in host.by_key for key in keys]
    assert there[:2] == [True, True] and there[2:5] == [False] * 3, "frames in the middle of the reply were taken while it ran"


def test_preempted_requests_load_their_pages():
    long, told = replace(GREEDY, max_tokens=30), []
    for gib in (0, GIB):
        state, ids = engine(gib=gib, num_pages=20, num_frames=20, max_num_seqs=6), []
        for seed in range(8):
            state, rid = submit(MIXED, state, prompt(seed, 11 + seed % 5), long)
            ids.append(rid)
        state, outputs = drain(MIXED, state)
        check(state)
        assert state.stats.preemptions > 0
        told.append(([outputs[rid].token_ids for rid in ids], state.stats.rerun_tokens, state.stats.loaded_tokens))
    (expected, rerun, _), (replies, less, loaded) = told
    assert replies == expected and less < rerun and loaded > 0


def test_nothing_is_loaded_where_running_is_faster():
    state = engine(rates=NEVER)
    for seed in (0, 1, 2, 0):
        state, _ = reply(MIXED, state, prompt(seed, 29))
    assert state.stats.loaded_tokens == 0 and state.stats.offloaded_tokens > 0


@pytest.mark.parametrize("model", [MIXED, ALONE], ids=["mixed", "alone"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_chunk_moves_with_all_of_its_frames(model: Model, kv_dtype, tmp_path):
    state, file = engine(model, kv_dtype=kv_dtype), tmp_path / "chunk.safetensors"
    state, chunk = prefill(model, state, prompt(0, 18))
    save_chunk(state, chunk, file)
    content = file.read_bytes()
    state = offload(state, chunk)
    check(state)
    assert state.pool.frames.num_available == 8
    save_chunk(state, chunk, file)
    assert file.read_bytes() == content
    state, other = prefill(model, state, prompt(1, 30))
    state = release(state, other)
    state, out = generate(model, state, [chunk, prompt(2, 2)], GREEDY)
    check(state)
    _, wanted = generate(model, engine(model, 0, kv_dtype=kv_dtype, num_frames=20), [*prompt(0, 18), *prompt(2, 2)], GREEDY)
    assert out.token_ids == wanted.token_ids
    save_chunk(state, chunk, file)
    assert file.read_bytes() == content


def test_a_failed_copy_leaves_the_old_state_usable(monkeypatch, nothing_ahead):
    """The copy restores frames of indexed pages, and pushes out frames of others."""
    state = engine()
    state, expected = reply(MIXED, state, prompt(0))
    state, _ = reply(MIXED, state, prompt(1, 29))
    state, rid = submit(MIXED, state, prompt(0), GREEDY)
    memory, content = runtime_of(state).host, freeze(state.pool)
    assert memory is not None
    move = memory.move

    def failing(kv, moves, *more):
        assert moves.frames_into and moves.frames_out
        move(kv, moves, *more)
        raise RuntimeError("planted")

    monkeypatch.setattr(memory, "move", failing)
    with pytest.raises(RuntimeError, match="planted"):
        step(MIXED, state)
    assert freeze(state.pool) == content
    monkeypatch.undo()
    state, outputs = drain(MIXED, state)
    check(state)
    assert outputs[rid].token_ids == expected.token_ids


def test_a_host_page_has_room_for_a_page_and_its_frame():
    host = engine().pool.host
    assert host is not None
    page, frame = bytes_by_group(MIXED.config, page_size=4, dtype=MIXED.dtype)
    assert (host.page_bytes, host.frame_bytes) == (page + frame, frame) and host.num_pages == 2**20 // (page + frame)
    alone = engine(ALONE).pool.host
    assert alone is not None and alone.page_bytes == alone.frame_bytes


HEADS = tiny_config(**{**SIZES, "num_kv_heads": 2}, windows=(0, 6))


def test_ranks_keep_their_own_heads_and_plan_alike():
    def run(mesh: Mesh | None):
        model = random_model(HEADS, dtype="float64", mesh=mesh)
        state, told = engine(model, 2 * GIB), []
        for seed in (0, 1, 2, 0, 1, 2, 2):
            state, output = reply(model, state, prompt(seed))
            told.append((output.token_ids, output.num_cached_tokens))
        return told, state.stats, digest(state, whole=True)

    told, stats, _ = run(None)
    assert stats.loaded_tokens > 0
    one, two = run_ranks(run, 2)
    assert one == two, "the ranks differ"
    assert one[:2] == (told, stats)


def test_more_frames_than_pages_are_no_pages() -> None:
    state = init_state(MIXED, num_pages=16, num_frames=40, page_size=4, host_kv_gib=GIB)
    assert state.pool.host is not None and state.pool.host.rates.bytes_per_second > 0
