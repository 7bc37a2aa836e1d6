"""Requests that run the front of their prompts while the pages behind it are read: replies, counts, and reads that fail or come late."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.executor.executor import runtime_of
from nanovllm.state.invariants import check
from nanovllm.state.offload import HostPages, Rates
from nanovllm.state.prefix_keys import keys_from
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.late_disk import LateDiskTier
from nanovllm.testing.shadows.worlds import drain

pytestmark = pytest.mark.usefixtures("nothing_ahead")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODEL = random_model(tiny_config(**SIZES))
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PAGE, PAGES = 4, 10  # tokens of a page, and full pages of the prompt
GIB = 1 / 1024


def prompt(seed: int = 0, length: int = PAGE * PAGES + 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def host_of(state: nv.EngineState) -> HostPages:
    assert state.pool.host is not None
    return state.pool.host


def engine(folder: Path, **options: Any) -> tuple[nv.EngineState, LateDiskTier]:
    """An engine that reads a page as fast as it runs one, whose reads end when a test says so."""
    state = nv.init_state(MODEL, **{"num_pages": 32, "page_size": PAGE, "host_kv_gib": GIB, "kv_dir": folder, "kv_dir_gib": GIB, **options})
    host, runtime = host_of(state), runtime_of(state)
    assert host.disk is not None and runtime.disk is not None and runtime.host is not None
    runtime.disk = tier = LateDiskTier(runtime.disk.folder, runtime.host)
    rates = Rates(tokens_per_second=float(PAGE), bytes_per_second=1e15)
    host = replace(host, rates=rates, disk=replace(host.disk, bytes_per_second=float(host.page_bytes)))
    return replace(state, pool=replace(state.pool, host=host)), tier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the KV of the prompt."""
    state, tier = engine(tmp_path)
    state, _ = nv.submit(MODEL, state, prompt(), GREEDY)
    state, _ = drain(MODEL, state)
    assert flush_kv(state)
    tier.writes.drain()
    return tmp_path


def expected() -> list[int]:
    state = nv.init_state(MODEL, num_pages=32, page_size=PAGE)
    state, rid = nv.submit(MODEL, state, prompt(), GREEDY)
    _, outputs = drain(MODEL, state)
    return list(outputs[rid].token_ids)


def begun(folder: Path, **options: Any) -> tuple[nv.EngineState, LateDiskTier, int]:
    """An engine after the first step of a split request: its front has run, and the five pages behind it are being read."""
    state, tier = engine(folder, **options)
    state, rid = nv.submit(MODEL, state, prompt(), GREEDY)
    state, outputs = nv.step(MODEL, state)
    assert not outputs and len(tier.reads.jobs) == 5 and filled(state) == [5 * PAGE]
    check(state)
    return state, tier, rid


def filled(state: nv.EngineState) -> list[int]:
    return [sequence.num_filled for sequence in state.running]


def damage(folder: Path, state: nv.EngineState, place: int) -> None:
    """Change the file of a page of the prompt."""
    key = [*keys_from(np.array(prompt(), np.int32), 0, PAGE)][place]
    (path,) = folder.rglob(f"{key.hex()}.kv")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def ended(state: nv.EngineState, rid: int) -> tuple[nv.EngineState, Any]:
    state, outputs = drain(MODEL, state)
    check(state)
    assert list(outputs[rid].token_ids) == expected()
    return state, outputs[rid]


@pytest.mark.parametrize("budget", [1000, 3])
def test_a_request_jumps_over_the_pages_that_were_read_while_its_front_ran(folder: Path, budget: int) -> None:
    state, tier = engine(folder, max_num_batched_tokens=budget)
    state, rid = nv.submit(MODEL, state, prompt(), GREEDY)
    while not state.running or filled(state)[0] < 5 * PAGE:
        state, _ = nv.step(MODEL, state)
        check(state)
        tier.reads.drain()
    assert filled(state) == [5 * PAGE], "the front ends where the plan says, and no token later"
    state, (out,) = nv.step(MODEL, state)
    assert out.token_ids == (expected()[0],), "the last token alone was left to run"
    assert state.stats.prefill_tokens + state.stats.reused_tokens == len(prompt()) and state.stats.reused_tokens == 5 * PAGE
    assert state.stats.read_tokens == state.stats.loaded_tokens == 5 * PAGE
    _, output = ended(state, rid) if state.running else (state, out.output)
    assert output.num_cached_tokens == 5 * PAGE


def test_reads_go_from_the_last_page_to_the_front_and_both_meet_earlier_if_reads_are_slow(folder: Path) -> None:
    state, tier, rid = begun(folder)
    tier.reads.run(2)
    state, _ = nv.step(MODEL, state)
    assert filled(state) == [7 * PAGE], "three pages are missing, and it runs half of them, rounded up"
    tier.reads.run(1)
    state, (out,) = nv.step(MODEL, state)
    assert out.token_ids == (expected()[0],) and state.stats.loaded_tokens == 3 * PAGE and state.stats.reused_tokens == 3 * PAGE
    assert len(tier.reads.jobs) == 2, "nobody waits for the pages that were run meanwhile"
    tier.reads.drain()
    state, output = ended(state, rid)
    assert output.num_cached_tokens == 3 * PAGE and not host_of(state).disk.reading


def test_a_page_that_is_damaged_is_run_and_the_ones_around_it_are_taken(folder: Path) -> None:
    state, tier, rid = begun(folder)
    damage(folder, state, 7)
    tier.reads.drain()
    state, outputs = nv.step(MODEL, state)
    assert filled(state) == [8 * PAGE] and not outputs, "two pages were taken, and the damaged one was run"
    state, (out,) = nv.step(MODEL, state)
    assert out.token_ids == (expected()[0],) and tier.counts.pages_damaged == 1
    state, output = ended(state, rid)
    assert output.num_cached_tokens == 4 * PAGE and state.stats.prefill_tokens == 6 * PAGE + 1


def test_a_front_that_ends_within_a_page_gives_this_page_up_for_the_whole_one(folder: Path) -> None:
    state, tier, rid = begun(folder, max_num_batched_tokens=5 * PAGE)
    state = replace(state, config=replace(state.config, max_num_batched_tokens=PAGE + 2))
    state, _ = nv.step(MODEL, state)
    assert filled(state) == [6 * PAGE + 2]
    before = list(state.running[0].pages)
    tier.reads.drain()
    state, (out,) = nv.step(MODEL, state)
    check(state)
    assert out.token_ids == (expected()[0],) and state.stats.reused_tokens == 4 * PAGE - 2
    after = list(state.running[0].pages)
    assert before[:6] == after[:6] and state.pages.num_free == state.pages.num_pages - len(after)
    state, output = ended(state, rid)
    assert output.num_cached_tokens == 4 * PAGE - 2


def test_a_request_that_is_cancelled_meanwhile_leaves_its_pages_to_others(folder: Path) -> None:
    state, tier, rid = begun(folder)
    state = nv.cancel(state, rid)
    check(state)
    tier.reads.drain()
    state, other = nv.submit(MODEL, state, prompt(), GREEDY)
    state, output = ended(state, other)
    assert output.num_cached_tokens == PAGES * PAGE and not tier.reads.jobs and not host_of(state).disk.waits.get(rid)


def test_a_failed_call_that_jumped_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, tier, rid = begun(folder)
    tier.reads.drain()
    executor = type(runtime_of(state).executor)
    with monkeypatch.context() as patch:

        def broken(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(executor, "decode", broken)
        with pytest.raises(KeyboardInterrupt):
            nv.step(MODEL, state)
    ended(state, rid)


def test_a_pool_without_room_runs_the_pages(folder: Path) -> None:
    state, tier, rid = begun(folder, num_pages=16)
    pages = state.pages.num_free + state.prefix.num_idle - 3
    state, chunk = nv.prefill(MODEL, state, prompt(7, pages * PAGE))
    tier.reads.drain()
    state, _ = nv.step(MODEL, state)
    check(state)
    assert state.stats.loaded_tokens == 0
    state = nv.release(state, chunk)
    ended(state, rid)


def test_two_requests_with_the_same_beginning_share_what_is_read(folder: Path) -> None:
    state, tier, rid = begun(folder)
    state, other = nv.submit(MODEL, state, prompt(), GREEDY)
    tier.reads.drain()
    state, outputs = drain(MODEL, state)
    check(state)
    assert list(outputs[rid].token_ids) == list(outputs[other].token_ids) == expected()
    assert tier.counts.pages_read == 5 and state.stats.loaded_tokens == 5 * PAGE


def test_a_busy_device_leaves_all_to_the_disk(folder: Path) -> None:
    state, tier = engine(folder)
    state, _ = nv.submit(MODEL, state, prompt(3, 60), GREEDY)
    state, rid = nv.submit(MODEL, state, prompt(), GREEDY)
    state, _ = nv.step(MODEL, state)
    assert rid in state.waiting.items and len(tier.reads.jobs) == PAGES, "fifteen pages of the other prompt run meanwhile"
    tier.reads.drain()
    state, output = ended(state, rid)
    assert output.num_cached_tokens == PAGES * PAGE


def test_a_prompt_that_runs_keeps_the_device_busy_too(folder: Path) -> None:
    state, tier = engine(folder, max_num_batched_tokens=PAGE)
    state, _ = nv.submit(MODEL, state, prompt(3, 60), GREEDY)
    state, _ = nv.step(MODEL, state)
    state, rid = nv.submit(MODEL, state, prompt(), GREEDY)
    state, _ = nv.step(MODEL, state)
    assert rid in state.waiting.items and len(tier.reads.jobs) == PAGES, "fourteen pages of the other prompt run meanwhile"


@pytest.mark.parametrize("reads", [False, True])
def test_no_copies_from_host_memory_begin_before_the_plan_while_pages_are_read(
    folder: Path, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request finds its pages in host memory, those of the second one are on disk."""
    state, tier = engine(folder)
    for seed in range(20, 27):  # so many that the pages of the first one leave the device
        state, _ = nv.submit(MODEL, state, prompt(seed, 21), GREEDY)
        state, _ = drain(MODEL, state)
    memory, begun = runtime_of(state).host, list[int]()
    assert memory is not None
    begin = memory.begin
    monkeypatch.setattr(memory, "begin", lambda held: begun.extend(held) or begin(held))
    state, _ = nv.submit(MODEL, state, prompt(20, 21), GREEDY)
    if reads:
        state, _ = nv.submit(MODEL, state, prompt(), GREEDY)
    loaded = state.stats.loaded_tokens
    state, _ = nv.step(MODEL, state)
    assert bool(tier.reads.jobs) == reads and len(begun) == (0 if reads else 5)
    assert state.stats.loaded_tokens - loaded == 5 * PAGE


def test_nothing_is_split_where_reads_take_hardly_longer_than_nothing(folder: Path) -> None:
    state, _ = engine(folder)
    host = host_of(state)
    assert host.disk is not None
    host = replace(host, disk=replace(host.disk, bytes_per_second=1e15))
    state = replace(state, pool=replace(state.pool, host=host))
    state, rid = nv.submit(MODEL, state, prompt(), GREEDY)
    state, other = nv.submit(MODEL, state, prompt(5, 5), GREEDY)
    state, outputs = nv.step(MODEL, state)
    assert [out.request_id for out in outputs] == [other] and rid in state.waiting.items
