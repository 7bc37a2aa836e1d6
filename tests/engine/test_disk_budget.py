"""What goes to a folder that has less room than the engine has KV, and to a disk that is slower than the engine."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanovllm.engine import disk_flush
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.page_file import size_of
from nanovllm.executor.page_folder import PageFolder
from nanovllm.executor.unwritten import Unwritten
from nanovllm.executor.workers import Threads
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.offload import Rates
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.late_disk import LateDiskTier
from nanovllm.testing.shadows.worlds import drain

# Whole engines run many steps, which the hook makes three to six times as long.
pytestmark = [pytest.mark.unhooked, pytest.mark.usefixtures("nothing_ahead")]
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODEL = random_model(tiny_config(**SIZES))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PAGE = bytes_per_page(MODEL.config, page_size=4, dtype=MODEL.dtype)
ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)


def engine(folder: Path, num_files: int, num_host_pages: int, num_pages: int = 8) -> EngineState:
    """An engine with pages of 4 tokens, and with so many host pages and files of pages."""
    limit = num_files * size_of(PAGE) / 2**30
    state = init_state(
        MODEL, num_pages=num_pages, page_size=4, host_kv_gib=num_host_pages * PAGE / 2**30, kv_dir=folder, kv_dir_gib=limit
    )  # fmt: skip
    assert state.pool.host is not None and state.pool.host.num_pages == num_host_pages
    return replace(state, pool=replace(state.pool, host=replace(state.pool.host, rates=ALWAYS)))


def served(state: EngineState, seeds: Iterable[int]) -> EngineState:
    """Serve prompts of 20 tokens, whose first pages are full at their ends: 5 of them, and one of the reply."""
    for seed in seeds:
        prompt = np.random.default_rng(seed).integers(0, 64, 21).tolist()
        state, _ = submit(MODEL, state, prompt, GREEDY)
        state, _ = drain(MODEL, state)
    return state


def late(state: EngineState) -> LateDiskTier:
    """Give an engine a disk whose reads and writes end when a test says so."""
    runtime = runtime_of(state)
    assert runtime.disk is not None and runtime.host is not None
    runtime.disk = tier = LateDiskTier(runtime.disk.folder, runtime.host)
    return tier


@pytest.mark.parametrize(("num_files", "written"), [(1, 1), (4, 4), (8, 8), (40, 38), (60, 48)])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_flush_writes_what_was_used_last_and_no_more_than_the_folder_keeps(tmp_path: Path, num_files: int, written: int, *, pieces: bool):
    state = engine(tmp_path, num_files, 64)
    tier = late(state)
    state = served(state, range(8))  # with 6 pages each, 48 in all
    assert tier.num_queued > 30 and not tier.counts.pages_written
    while not flush_kv(state, max_bytes=2 * PAGE if pieces else None):
        tier.writes.drain()
    tier.writes.drain()
    assert tier.counts.pages_written == written == len([*tmp_path.rglob("*.kv")]) and tier.num_queued == 0
    later = served(engine(tmp_path, num_files, 64), [7])
    assert later.stats.read_tokens == 4 * min(5, num_files), "the last prompt is there"


def test_what_a_flush_writes_first_is_deleted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_flush, "FLUSHED", 2 * PAGE)
    monkeypatch.setattr(disk_flush, "LOOKED_AT", 2)
    state = served(engine(tmp_path, 16, 64), range(3))  # 8 pages are on the device, 10 in host memory
    flush_kv(state)
    folder = runtime_of(state).disk.folder
    for number in range(4):
        folder.write(bytes([number]) * 32, memoryview(bytes(PAGE)))
    assert len(folder) == 16
    assert served(engine(tmp_path, 16, 64), [2, 1]).stats.read_tokens == 40, "the files of the first prompt were deleted"


@pytest.mark.parametrize("num_files", [16, 40], ids=["crowded", "with room"])
def test_a_flush_does_not_replace_files_of_what_was_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int):
    touched, touch = list[bytes](), PageFolder.touch
    monkeypatch.setattr(PageFolder, "touch", lambda self, keys, used: (touched.extend(keys), touch(self, keys, used)))
    state = served(engine(tmp_path, num_files, 64), [0, 1])
    flush_kv(state)
    flush_kv(served(state, [2, 0]))  # the first prompt was used last, and its files are the oldest
    assert bool(touched) == (num_files == 16)
    assert served(engine(tmp_path, num_files, 64), [0]).stats.read_tokens == 20
    assert served(engine(tmp_path, num_files, 64), [2]).stats.read_tokens == 20


def test_pages_wait_longer_for_a_folder_that_is_smaller_than_host_memory(tmp_path: Path):
    held = {files: runtime_of(engine(tmp_path / str(files), files, 64)).disk.num_held for files in (8, 32, 64, 200)}
    assert held == {8: 60, 32: 48, 64: 32, 200: 32}


def test_an_idle_engine_does_not_replace_the_files_of_what_has_left_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = list[bool]()
    monkeypatch.setattr(Threads, "hold", lambda self, held: told.append(held))
    small, large = (runtime_of(engine(tmp_path / str(files), files, 64)).disk for files in (8, 64))
    for tier in (small, large):
        tier.hold(True)
        tier.hold(False)
        tier.let_go()
    assert told == [True, True, False, True, False, False]


def test_pages_that_are_about_to_be_replaced_are_left_out_while_the_engine_is_busy(tmp_path: Path):
    tier = late(engine(tmp_path, 64, 64))
    assert tier.most_late == 56
    pairs = [(at, bytes([at]) * 32) for at in range(60)]
    tier.hold(True)
    tier.keep(pairs)
    tier.writes.run(8)
    assert tier.counts.pages_dropped == 4 and tier.counts.pages_written == 4 and tier.num_queued == 52 and tier.num_late == 20
    assert [key in tier.folder for _, key in pairs[:8]] == [False] * 4 + [True] * 4
    tier.hold(False)
    tier.keep(pairs[:4])
    tier.writes.drain()
    assert tier.counts.pages_dropped == 4 and len(tier.folder) == 60, "an idle engine replaces nothing"


def test_what_was_given_up_is_not_written_and_what_was_asked_for_again_is(tmp_path: Path):
    tier = late(engine(tmp_path, 64, 64))
    one, two = bytes(32), bytes([1]) * 32
    tier.keep([(0, one), (1, two)])
    tier.give_up()
    assert not tier.num_queued and not tier.has(one)
    tier.keep([(1, two)])
    tier.writes.run(2)
    assert tier.has(two) and two not in tier.folder, "the writes that were given up end nothing"
    tier.writes.drain()
    assert two in tier.folder and one not in tier.folder and tier.counts.pages_written == 1 and not tier.counts.pages_dropped


def test_what_has_no_room_takes_none_and_ends_the_flush():
    todo = Unwritten(pages=[1], host_pages=[2], room=10)
    assert todo.fits(6) and todo.room == 4 and todo
    assert not todo.fits(5) and not todo.fits(4) and not todo


def test_a_drain_may_leave_some_jobs():
    import threading

    done, gate, workers = list[int](), threading.Event(), Threads(1, "test", most_held=9)
    workers.hold(True)
    workers.submit(lambda: done.append(0))
    workers.submit(lambda: gate.wait(120) and done.append(1))
    workers.drain(1)
    assert done == [0]
    gate.set()
    workers.drain()
    assert done == [0, 1]
