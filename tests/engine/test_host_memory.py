"""KV that is kept in host memory: what an engine loads again, what it counts, what it refuses, and that replies do not change."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.chunks.compose import compose
from nanovllm.chunks.generate import generate
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.score import score
from nanovllm.chunks.session import abandon, begin
from nanovllm.chunks.storage.file import load_chunk, save_chunk
from nanovllm.config import Mesh
from nanovllm.engine import host_memory
from nanovllm.engine.host_copies import ALONE
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.memory.report import memory
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.executor.device_memory import Room
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.digest import digest
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.offload import Rates
from nanovllm.state.prefix_keys import key_of, keys_of
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.late_copies import LateCopies
from nanovllm.testing.shadows.memory import freeze
from nanovllm.testing.shadows.worlds import drain

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODEL = random_model(tiny_config(**SIZES))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ALWAYS, NEVER = Rates(tokens_per_second=1.0, bytes_per_second=1e15), Rates(tokens_per_second=1e15, bytes_per_second=1.0)
GIB = 1 / 1024  # a MiB: 256 pages and more


def engine(rates: Rates = ALWAYS, host_kv_gib: float = GIB, **options) -> EngineState:
    """An engine with 8 pages of 4 tokens, and host memory that loads by given rates."""
    state = init_state(MODEL, **{"num_pages": 8, "page_size": 4, "host_kv_gib": host_kv_gib, **options})
    host = state.pool.host
    return state if host is None else replace(state, pool=replace(state.pool, host=replace(host, rates=rates)))


def prompt(seed: int, length: int = 21) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def reply(state: EngineState, tokens: list[int]):
    state, rid = submit(MODEL, state, tokens, GREEDY)
    state, outputs = drain(MODEL, state)
    check(state)
    return state, outputs[rid]


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_prompt_that_was_pushed_out_comes_back_without_being_run(kv_dtype):
    plain, state = engine(host_kv_gib=0, kv_dtype=kv_dtype), engine(kv_dtype=kv_dtype)
    for seed in (0, 1, 2, 0, 1, 2, 2):
        plain, expected = reply(plain, prompt(seed))
        state, output = reply(state, prompt(seed))
        assert output.token_ids == expected.token_ids
    assert output.num_cached_tokens == 20
    assert plain.stats.reused_tokens == 20 and plain.stats.loaded_tokens == plain.stats.offloaded_tokens == 0
    assert state.stats.reused_tokens == 4 * 20  # three from host memory and one from the device
    assert state.stats.loaded_tokens == 3 * 20
    total = state.stats.prefill_tokens + state.stats.reused_tokens
    assert total == plain.stats.prefill_tokens + plain.stats.reused_tokens


def test_a_beginning_that_other_prompts_share_is_loaded_and_the_rest_is_run():
    state = engine()
    state, _ = reply(state, prompt(0))
    state, _ = reply(state, prompt(1))
    state, output = reply(state, prompt(0)[:13] + prompt(5)[:8])
    assert output.num_cached_tokens == 12


def test_it_goes_on_after_pages_of_the_device():
    state = engine()
    state, _ = reply(state, prompt(0))
    state, _ = reply(state, prompt(1, 15))  # takes the last pages of the first prompt
    before = state.stats
    state, output = reply(state, prompt(0))
    assert output.num_cached_tokens == 20 and 0 < state.stats.loaded_tokens - before.loaded_tokens < 20


def test_nothing_is_loaded_where_running_is_faster():
    state = engine(NEVER)
    for seed in (0, 1, 2, 0):
        state, output = reply(state, prompt(seed))
    assert output.num_cached_tokens == 0 and state.stats.loaded_tokens == 0 and state.stats.offloaded_tokens > 0


def test_namespaces_do_not_share_host_memory():
    state = engine()
    for namespace, cached in ((1, 0), (2, 0), (1, 20)):
        state, (rid,) = submit_many(MODEL, state, [prompt(0)], [GREEDY], namespace=namespace)
        state, outputs = drain(MODEL, state)
        assert outputs[rid].num_cached_tokens == cached
        for other in (8, 9):
            state, _ = reply(state, prompt(other))


def test_a_preempted_request_finds_its_pages_again():
    options = {"num_pages": 10, "max_num_seqs": 2}
    long = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    replies, stats = [], []
    for gib in (0, GIB):
        state = engine(host_kv_gib=gib, **options)
        state, a = submit(MODEL, state, prompt(0, 12), long)
        state, b = submit(MODEL, state, prompt(1, 12), long)
        state, outputs = drain(MODEL, state)
        check(state)
        replies.append([outputs[a].token_ids, outputs[b].token_ids])
        stats.append(state.stats)
    assert replies[0] == replies[1]
    assert stats[0].preemptions == stats[1].preemptions > 0
    assert stats[0].rerun_tokens > stats[1].rerun_tokens and stats[1].loaded_tokens > 0


def under_pressure(gib: float):
    """Twelve requests that need twice the pages of the pool: their replies, and the share of tokens that were run again."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    state, ids = engine(host_kv_gib=gib, num_pages=24, max_num_seqs=6), []
    for seed in range(12):
        state, rid = submit(MODEL, state, prompt(seed, 11 + seed % 5), long)
        ids.append(rid)
    state, outputs = drain(MODEL, state)
    check(state)
    assert state.stats.preemptions > 10
    return [outputs[rid].token_ids for rid in ids], state.stats.rerun_tokens / (state.stats.prefill_tokens + state.stats.decode_tokens)


def test_preempted_requests_run_no_token_again():
    (expected, without), (replies, share) = under_pressure(0), under_pressure(GIB)
    assert replies == expected
    assert without > 0.25 and share == 0


def test_the_last_page_of_a_preempted_request_is_kept_with_the_tokens_that_it_has():
    state = engine(num_pages=24, max_num_seqs=6)
    for seed in range(12):
        state, _ = submit(MODEL, state, prompt(seed, 11 + seed % 5), replace(GREEDY, max_tokens=40))
    while not (lost := [s for s in state.waiting if s.most_filled % 4]):
        state, _ = step(MODEL, state)
    tokens, host = lost[0].tokens.array(0, lost[0].most_filled), state.pool.host
    assert host is not None and key_of(tokens) in host.by_key and key_of(tokens[:-1]) not in host.by_key


def fails_late(state: EngineState, name: str, monkeypatch) -> None:
    """Let a method of host memory fail after it has begun its copies."""
    real = getattr(runtime_of(state).host, name)

    def failing(*given):
        real(*given)
        raise RuntimeError("planted")

    monkeypatch.setattr(runtime_of(state).host, name, failing)


def test_a_failed_copy_leaves_the_old_state_usable(monkeypatch):
    state = engine()
    state, expected = reply(state, prompt(0))
    state, _ = reply(state, prompt(1))
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    content = freeze(state.pool)
    fails_late(state, "move", monkeypatch)
    with pytest.raises(RuntimeError, match="planted"):
        step(MODEL, state)
    assert freeze(state.pool) == content
    monkeypatch.undo()
    state, outputs = drain(MODEL, state)
    check(state)
    assert outputs[rid].token_ids == expected.token_ids


@pytest.mark.parametrize("short", [False, True])
def test_a_reply_that_is_stuck_ends_alike_if_the_device_has_no_memory_for_its_pages(short, monkeypatch):
    """It was preempted after four tokens. A chunk leaves three of its four pages. They come from host memory, and nothing runs beside them.

    It keeps its tokens, as it does where memory is not short.
    """
    state = engine(num_pages=5)
    state, _ = submit(MODEL, state, prompt(2, 13), replace(GREEDY, max_tokens=16))
    state, rid = submit(MODEL, state, prompt(2, 9), replace(GREEDY, max_tokens=8))
    while state.running or not state.stats.preemptions:
        state, _ = step(MODEL, state)
    state, _ = prefill(MODEL, state, prompt(11, 6))
    before = state.stats

    def failing(*given):
        raise torch.OutOfMemoryError("planted")

    if short:
        monkeypatch.setattr(runtime_of(state).host, "move", failing)
    state, (out,) = step(MODEL, state)
    check(state)
    assert (state.stats.loaded_tokens > before.loaded_tokens) == (not short) == (not state.stats.memory_shortages)
    assert out.request_id == rid and out.error is None and out.output is not None
    assert out.output.finish_reason == "length" and out.output.out_of_pages and len(out.output.token_ids) == 4


def test_a_request_can_be_cancelled_after_its_pages_were_loaded():
    state = engine(max_num_batched_tokens=2)
    state, _ = reply(state, prompt(0, 17))
    state, _ = reply(state, prompt(1, 17))
    state, rid = submit(MODEL, state, prompt(0, 25), GREEDY)
    state, _ = step(MODEL, state)
    assert state.stats.loaded_tokens > 0 and len(state.running) == 1
    state = cancel(state, rid)
    check(state)
    assert state.pool.num_available == 8


@pytest.mark.parametrize("name", ["prefill", "compose", "load_chunk", "generate", "begin", "score"])
def test_pages_that_calls_on_chunks_push_out_are_kept(name, tmp_path, nothing_ahead):
    state, file = engine(), tmp_path / "chunk.safetensors"
    if name == "load_chunk":
        state, chunk = prefill(MODEL, state, prompt(3, 29))
        save_chunk(state, chunk, file)
        state = release(state, chunk)
        state = cleared(state)
    state, both = prefill(MODEL, state, prompt(4, 6)) if name == "compose" else (state, None)
    state, expected = reply(state, prompt(0))
    before = state.stats
    match name:
        case "prefill":
            state, made = prefill(MODEL, state, prompt(3, 29))
        case "compose":
            state, made = compose(MODEL, state, [both] * 3)
        case "load_chunk":
            state, made = load_chunk(MODEL, state, file)
        case "generate":
            state, out = generate(MODEL, state, prompt(3, 26), GREEDY)
            made = out.chunk
        case "begin":
            state, carry = begin(MODEL, state, [prompt(3, 26)], GREEDY, room=4)
            state = abandon(state, carry)
            made = None
        case _:
            state, _ = score(MODEL, state, [prompt(3, 26)], [prompt(5, 3)])
            made = None
    check(state)
    assert state.stats.offloaded_tokens > before.offloaded_tokens
    for chunk in (made, both):
        state = state if chunk is None else release(state, chunk)
    state, output = reply(state, prompt(0))
    assert output.token_ids == expected.token_ids and output.num_cached_tokens == 20


def cleared(state: EngineState) -> EngineState:
    """The state whose pages hold another prompt."""
    state, _ = reply(state, prompt(9, 28))
    return state


def planned_copies(state: EngineState, monkeypatch) -> list[int]:
    """How many pages each later plan copies out before its step."""
    memory, counts = runtime_of(state).host, []
    assert memory is not None
    move = memory.move
    monkeypatch.setattr(memory, "move", lambda kv, moves, *more: counts.append(len(moves.out)) or move(kv, moves, *more))
    return counts


def test_pages_are_copied_before_they_are_evicted(monkeypatch):
    state = engine()
    counts = planned_copies(state, monkeypatch)
    wanted = {}
    for seed in (0, 1, 2, 0, 1, 2):
        state, output = reply(state, prompt(seed))
        assert wanted.setdefault(seed, output.token_ids) == output.token_ids
    assert not any(counts) and state.stats.loaded_tokens == 3 * 20
    assert state.stats.offloaded_tokens == 3 * 24  # each page once


def test_a_pool_with_enough_free_pages_copies_nothing_ahead():
    state = engine(num_pages=64, max_model_len=32)
    for seed in range(6):
        state, _ = reply(state, prompt(seed))
    assert state.stats.offloaded_tokens == 0  # 28 pages are free: a quarter of the pool, and more than the longest request
    for seed in range(6, 9):
        state, _ = reply(state, prompt(seed))
    assert state.pool.num_free == 64 - 9 * 6 and state.stats.offloaded_tokens == 4 * 6  # the first page to be evicted with its request


def test_replies_that_wait_for_a_prompt_do_not_wait_for_copies_ahead_too():
    state = engine(num_pages=192, max_model_len=48)
    for seed in range(28):
        state, _ = reply(state, prompt(seed))
    state, _ = submit(MODEL, state, prompt(100), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    found = dict[bool, list[int]]()  # by whether a step ran a prompt: the steps that copied
    for at in range(16):
        if at % 2:
            state, _ = submit(MODEL, state, prompt(101 + at), SamplingParams(temperature=0.0, max_tokens=1))
        ran, copied = state.stats.prefill_tokens, state.stats.offloaded_tokens
        state, _ = step(MODEL, state)
        if at:
            steps = found.setdefault(state.stats.prefill_tokens > ran, [])
            steps.extend([state.num_steps] if state.stats.offloaded_tokens > copied else [])
    assert all(number % ALONE == 0 for number in found[True])
    assert len(found[False]) >= 4  # the steps after them copied what they left


def test_long_prompts_beside_replies_do_not_outrun_copies_ahead(monkeypatch):
    late, move = list[int](), HostMemory.move

    def watched(memory: HostMemory, kv: Any, moves: Any, *landing: Any) -> Any:
        late.append(len(moves.out))
        return move(memory, kv, moves, *landing)

    state = engine(num_pages=128, max_model_len=64)
    for seed in range(24):
        state, _ = reply(state, prompt(seed))
    monkeypatch.setattr(HostMemory, "move", watched)
    state, _ = submit(MODEL, state, prompt(100, 6), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    for at in range(30):
        state, _ = submit(MODEL, state, prompt(30 + at, 56), SamplingParams(temperature=0.0, max_tokens=1))
        state, _ = step(MODEL, state)
    assert state.stats.offloaded_tokens > 128 * 4 and not sum(late)


def test_an_engine_that_becomes_idle_copies_what_a_step_with_a_prompt_left():
    state = engine(num_pages=192, max_model_len=48)
    for seed in range(28):
        state, _ = reply(state, prompt(seed))
    for at in range(2 * ALONE):  # whatever the number of steps
        state, _ = submit(MODEL, state, prompt(100 + at), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        state, _ = step(MODEL, state)
        state, _ = submit(MODEL, state, prompt(200 + at), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        state, _ = step(MODEL, state)
        assert not state.running and state.pool.host is not None and not state.pool.host.behind


def test_what_was_copied_ahead_is_found_on_the_device(monkeypatch):
    state = engine()
    state, expected = reply(state, prompt(0))
    assert state.stats.offloaded_tokens == 24
    state, output = reply(state, prompt(0))
    assert output.num_cached_tokens == 20 and output.token_ids == expected.token_ids
    assert state.stats.loaded_tokens == 0 and state.stats.offloaded_tokens == 24


def test_pages_that_were_copied_ahead_are_written_to_the_disk(tmp_path):
    state = engine(kv_dir=tmp_path, kv_dir_gib=1)
    state, expected = reply(state, prompt(0))
    disk = runtime_of(state).disk
    assert disk is not None
    disk.drain()
    assert state.stats.offloaded_tokens == 24 and len(disk.folder) == 6
    again = engine(kv_dir=tmp_path, kv_dir_gib=1)
    again, output = reply(again, prompt(0))
    assert output.token_ids == expected.token_ids and output.num_cached_tokens == 20


def test_a_composition_waits_for_pages_that_were_copied_ahead_and_are_free_by_now():
    state = engine(num_pages=16)
    runtime = runtime_of(state)
    assert runtime.host is not None
    runtime.host = memory = HostMemory(state.kv, runtime.host.num_pages, LateCopies)
    state, one = prefill(MODEL, state, prompt(1, 6))
    state, other = prefill(MODEL, state, prompt(2, 6))
    state, _ = reply(state, prompt(0))
    pages, host = state.prefix.idle_pages(), state.pool.host
    assert host is not None and len(pages) == 6
    held = [host.by_key[key] for key in keys_of(state.prefix, np.array(pages, np.int32))]
    wanted = state.kv.pools[0][:, pages].clone()
    runtime.lease.lose(pages)  # as a call does that fails before it writes
    check(compose(MODEL, state, [one, other])[0])
    memory.synchronize()
    assert memory.images[0][held].transpose(0, 1).equal(wanted)


def test_at_most_half_of_host_memory_is_used_ahead():
    state = engine(host_kv_gib=10.5 * bytes_per_page(MODEL.config, page_size=4, dtype=MODEL.dtype) / 2**30, num_pages=32)
    for seed in range(4):
        state, _ = reply(state, prompt(seed, 25))
    host = state.pool.host
    assert host is not None and host.num_pages == 10
    assert state.pool.num_free == 4 and state.stats.offloaded_tokens == 5 * 4  # one more page than free ones, so half of host memory


def test_a_failed_copy_ahead_leaves_the_old_state_usable(monkeypatch):
    state = engine()
    state, expected = reply(state, prompt(0))
    state, rid = submit(MODEL, state, prompt(1), GREEDY)
    fails_late(state, "move_ahead", monkeypatch)
    with pytest.raises(RuntimeError, match="planted"):
        while state.running or state.waiting:
            content = freeze(state.pool)
            after, _ = step(MODEL, state)
            state = after
    assert freeze(state.pool) == content
    monkeypatch.undo()
    state, outputs = drain(MODEL, state)
    check(state)
    _, wanted = reply(engine(), prompt(1))
    assert outputs[rid].token_ids == wanted.token_ids
    state, output = reply(state, prompt(0))
    assert output.token_ids == expected.token_ids


def test_old_values_stay_as_they_were():
    state = engine()
    state, _ = reply(state, prompt(0))
    pool = state.pool
    content = freeze(pool)
    for seed in (1, 2, 0):
        state, _ = reply(state, prompt(seed))
    assert freeze(pool) == content


@pytest.mark.usefixtures("untyped")
def test_sizes_that_are_refused():
    for size in (-1, float("nan"), float("inf"), "1", True, None):
        with pytest.raises(InvalidRequestError, match="host_kv_gib"):
            init_state(MODEL, num_pages=8, host_kv_gib=size)
    with pytest.raises(InvalidRequestError, match="less than one page"):
        init_state(MODEL, num_pages=8, host_kv_gib=1e-9)


def test_auto_takes_a_quarter_of_the_free_memory_and_at_most_twice_the_kv_of_the_device(monkeypatch):
    page = bytes_per_page(MODEL.config, page_size=4, dtype=MODEL.dtype)
    for pages, count in ((40, 10), (400, 16), (3, None)):
        monkeypatch.setattr(host_memory, "room", lambda device, pages=pages: Room(total=1 << 40, free=pages * page))
        if count is None:
            with pytest.raises(InvalidRequestError, match="less than one page"):
                init_state(MODEL, num_pages=8, page_size=4, host_kv_gib="auto")
        else:
            host = init_state(MODEL, num_pages=8, page_size=4, host_kv_gib="auto").pool.host
            assert host is not None and host.num_pages == count
    monkeypatch.setattr(host_memory, "room", lambda device: None)
    with pytest.raises(InvalidRequestError, match="does not tell how much memory is free"):
        init_state(MODEL, num_pages=8, page_size=4, host_kv_gib="auto")


def test_without_the_option_there_is_nothing():
    state = init_state(MODEL, num_pages=8)
    assert state.pool.host is None and runtime_of(state).host is None


def test_the_rates_are_measured_at_the_start():
    state = init_state(MODEL, num_pages=8, page_size=4, host_kv_gib=GIB)
    assert state.pool.host is not None and "0 of" in repr(state.pool.host)
    assert state.pool.host.rates.tokens_per_second > 1 and state.pool.host.rates.bytes_per_second > 1
    state, output = reply(state, prompt(0))
    _, expected = reply(init_state(MODEL, num_pages=8, page_size=4), prompt(0))
    assert output.token_ids == expected.token_ids


def test_the_memory_report_tells_how_much_is_used():
    state = engine()
    for seed in (0, 1):
        state, _ = reply(state, prompt(seed))
    report = memory(state)
    assert (report.num_host_pages, report.num_host_used) == (state.pool.host.num_pages, state.stats.offloaded_tokens // 4)
    assert f"{report.num_host_used} of {report.num_host_pages:,} pages of host memory used" in report.text()
    assert "host memory" not in memory(engine(host_kv_gib=0)).text()


# Several ranks

HEADS = tiny_config(**{**SIZES, "num_kv_heads": 2})


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_ranks_keep_their_own_heads_and_plan_alike(kv_dtype):
    def run(mesh: Mesh | None):
        model = random_model(HEADS, dtype="float64", mesh=mesh)
        state = init_state(model, num_pages=8, page_size=4, host_kv_gib=2 * GIB, kv_dtype=kv_dtype)
        host = state.pool.host
        assert host is not None
        state = replace(state, pool=replace(state.pool, host=replace(host, rates=ALWAYS)))
        told = []
        for seed in (0, 1, 2, 0, 1, 2, 2):
            state, rid = submit(model, state, prompt(seed), GREEDY)
            state, outputs = drain(model, state)
            check(state)
            told.append((outputs[rid].token_ids, outputs[rid].num_cached_tokens))
        return told, state.stats, host.num_pages, host.page_bytes, digest(state, whole=True)

    told, stats, num_pages, page_bytes, _ = run(None)
    assert stats.loaded_tokens == 3 * 20
    one, two = run_ranks(run, 2)
    assert one == two, "the ranks differ"
    assert one[:3] == (told, stats, num_pages) and 2 * one[3] == page_bytes


def test_ranks_have_the_least_of_the_host_pages_and_the_rates_of_rank_0():
    def run(mesh: Mesh):
        model = random_model(HEADS, dtype="float64", mesh=mesh)
        host = init_state(model, num_pages=8, page_size=4, host_kv_gib=(2 - mesh.rank) * GIB).pool.host
        assert host is not None
        return host.num_pages, host.rates

    one, two = run_ranks(run, 2)
    page = bytes_per_page(HEADS, page_size=4, dtype=MODEL.dtype) * 2  # in float64
    assert one == two and one[0] == int(GIB * 2**30) // page


def test_no_rank_goes_on_if_one_gets_no_host_memory(monkeypatch):
    memory = host_memory.HostMemory

    def short(kv, num_pages):
        if not failed:
            failed.append(True)
            raise OutOfPagesError("planted: lower host_kv_gib")
        return memory(kv, num_pages)

    failed = []
    monkeypatch.setattr(host_memory, "HostMemory", short)
    told = run_ranks(_raised, 2)
    assert sorted(map(str.split, told), key=len)[0][0] == "planted:" and len({*told}) == 2


def _raised(mesh: Mesh) -> str:
    with pytest.raises(OutOfPagesError, match="lower host_kv_gib") as caught:
        init_state(random_model(HEADS, dtype="float64", mesh=mesh), num_pages=8, page_size=4, host_kv_gib=GIB)
    return str(caught.value)
