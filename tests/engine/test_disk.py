"""KV that is kept on disk: what a later engine reads again, what is counted and refused, and that replies never change or fail by it."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.engine import disk_flush, disk_tier
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.disk_pages import look_ahead
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.llm import LLM
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.executor.page_file import DamagedPageError
from nanovllm.executor.page_folder import PageFolder
from nanovllm.executor.workers import Threads
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.disk_pages import read_ahead
from nanovllm.state.disk_reads import DiskReads
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.offload import Rates, init_host
from nanovllm.state.pool import Taken
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.late_disk import LateDiskTier
from nanovllm.testing.shadows.worlds import drain

# Whole engines run many steps, which the hook makes three to six times as long.
pytestmark = [pytest.mark.unhooked, pytest.mark.usefixtures("nothing_ahead")]
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODEL = random_model(tiny_config(**SIZES))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ALWAYS, NEVER = Rates(tokens_per_second=1.0, bytes_per_second=1e15), Rates(tokens_per_second=1e15, bytes_per_second=1.0)
GIB = 1 / 1024


def engine(folder: Path | None, rates: Rates = ALWAYS, **options) -> EngineState:
    """An engine with 16 pages of 4 tokens, host memory and a folder, which reads by given rates."""
    kept = {} if folder is None else {"kv_dir": folder, "kv_dir_gib": GIB}
    state = init_state(MODEL, **{"num_pages": 16, "page_size": 4, "host_kv_gib": GIB, **kept, **options})
    host = state.pool.host
    assert host is not None
    return replace(state, pool=replace(state.pool, host=replace(host, rates=rates)))


def late(state: EngineState) -> LateDiskTier:
    """Give an engine a disk whose reads and writes end when a test says so."""
    runtime = runtime_of(state)
    assert runtime.disk is not None and runtime.host is not None
    runtime.disk = tier = LateDiskTier(runtime.disk.folder, runtime.host)
    return tier


def prompt(seed: int, length: int = 21) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def reply(state: EngineState, tokens: list[int]):
    state, rid = submit(MODEL, state, tokens, GREEDY)
    state, outputs = drain(MODEL, state)
    check(state)
    return state, outputs[rid]


def filled(folder: Path, *seeds: int) -> list[tuple[int, ...]]:
    """Serve prompts with an engine that keeps their KV in a folder. Returns the replies."""
    state, replies = engine(folder), []
    for seed in seeds:
        state, output = reply(state, prompt(seed))
        replies.append(output.token_ids)
    assert flush_kv(state)
    return replies


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_later_engine_reads_what_an_earlier_one_has_written(tmp_path: Path, kv_dtype):
    options = {"kv_dtype": kv_dtype}
    first, plain = engine(tmp_path, **options), engine(None, **options)
    first, one = reply(first, prompt(0))
    first, two = reply(first, prompt(1))
    flush_kv(first)
    assert runtime_of(first).disk.counts.pages_written == len(runtime_of(first).disk.folder) == 12  # with the filled page of each reply
    second = engine(tmp_path, **options)
    for seed, expected in ((0, one), (1, two), (0, one)):
        second, output = reply(second, prompt(seed))
        plain, alone = reply(plain, prompt(seed))
        assert output.token_ids == expected.token_ids == alone.token_ids
        assert output.num_cached_tokens == 20
    assert second.stats.read_tokens == 40 and second.stats.loaded_tokens == 40
    assert runtime_of(second).disk.counts.pages_read == 10


def test_evicted_pages_are_written_when_nothing_runs(tmp_path: Path):
    state = engine(tmp_path, num_pages=8)
    for seed in (0, 1, 2):
        state, _ = reply(state, prompt(seed))
    disk, end = runtime_of(state).disk, time.monotonic() + 120
    while disk.num_queued and time.monotonic() < end:
        time.sleep(0.01)
    assert len(disk.folder) == state.stats.offloaded_tokens // 4 > 0


def test_nothing_is_read_where_running_is_faster(tmp_path: Path):
    filled(tmp_path, 0)
    state, output = reply(engine(tmp_path, NEVER), prompt(0))
    assert output.num_cached_tokens == 0 and state.stats.read_tokens == 0


def test_namespaces_do_not_share_the_disk(tmp_path: Path):
    state = engine(tmp_path)
    state, (rid,) = submit_many(MODEL, state, [prompt(0)], [GREEDY], namespace=1)
    state, _ = drain(MODEL, state)
    flush_kv(state)
    for namespace, cached in ((2, 0), (0, 0), (1, 20)):
        state = engine(tmp_path)
        state, (rid,) = submit_many(MODEL, state, [prompt(0)], [GREEDY], namespace=namespace)
        state, outputs = drain(MODEL, state)
        assert outputs[rid].num_cached_tokens == cached


def test_an_engine_of_another_model_page_size_or_dtype_finds_nothing(tmp_path: Path):
    filled(tmp_path, 0)
    other = replace(MODEL, fingerprint="other")
    state = init_state(other, num_pages=16, page_size=4, host_kv_gib=GIB, kv_dir=tmp_path)
    assert len(runtime_of(state).disk.folder) == 0
    assert len(runtime_of(engine(tmp_path, page_size=8)).disk.folder) == 0
    assert len(runtime_of(engine(tmp_path, kv_dtype="fp8")).disk.folder) == 0
    assert len(runtime_of(engine(tmp_path)).disk.folder) == 6


def test_others_run_while_a_request_waits_for_its_pages(tmp_path: Path):
    filled(tmp_path, 0)
    state = engine(tmp_path, num_pages=32)
    tier = late(state)
    state, slow = submit(MODEL, state, prompt(0), GREEDY)
    state, fast = submit(MODEL, state, prompt(5), replace(GREEDY, max_tokens=20))
    for _ in range(3):
        state, outputs = step(MODEL, state)
        check(state)
        assert [out.request_id for out in outputs] == [fast] and slow in state.waiting.items
    tier.reads.drain()
    state, outputs = step(MODEL, state)
    assert {out.request_id for out in outputs} == {slow, fast}
    assert state.stats.read_tokens == 20 and state.stats.reused_tokens == 20


def test_a_request_waits_no_longer_than_running_would_take(tmp_path: Path):
    filled(tmp_path, 0)
    state = engine(tmp_path)
    tier = late(state)
    state, slow = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = submit(MODEL, state, prompt(5), replace(GREEDY, max_tokens=40))
    state, _ = step(MODEL, state)
    assert slow in state.waiting.items
    tier.time += 30.0  # running 20 tokens takes 20 seconds
    tier.reads.run(2)
    state, outputs = step(MODEL, state)
    assert slow in {out.request_id for out in outputs}
    assert state.stats.reused_tokens == 8, "the two pages that have come are used, and the rest is run"
    tier.reads.drain()
    state, _ = drain(MODEL, state)
    check(state)


def test_a_request_that_is_cancelled_leaves_its_reads_to_others(tmp_path: Path):
    (expected,) = filled(tmp_path, 0)
    state = engine(tmp_path)
    tier = late(state)
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = submit(MODEL, state, prompt(5), replace(GREEDY, max_tokens=12))
    state, _ = step(MODEL, state)
    state = cancel(state, rid)
    check(state)
    tier.reads.drain()
    state, _ = step(MODEL, state)
    check(state)
    assert not state.pool.host.disk.reading and not state.pool.host.disk.waits
    state, output = reply(state, prompt(0))
    assert output.token_ids == expected and output.num_cached_tokens == 20 and tier.counts.pages_read == 5


def test_host_pages_that_a_failed_call_read_into_are_not_trusted(tmp_path: Path):
    filled(tmp_path, 0)
    state = engine(tmp_path, num_pages=8)
    host = state.pool.host
    state = replace(state, pool=replace(state.pool, host=replace(init_host(10, host.page_bytes, ALWAYS), disk=host.disk)))
    for seed in (1, 2, 3, 4):
        state, _ = reply(state, prompt(seed))
    assert state.pool.host.used.num_free == 0  # reads replace pages that have KV
    tier = late(state)
    state, _ = submit(MODEL, state, prompt(0), GREEDY)
    taken = Taken()
    after = look_ahead(state, taken)
    reading = {*after.pool.host.disk.reading}
    assert len(reading) == 4 and reading < {*taken.host_pages} and len(taken.host_pages) == 5  # it has waited for one of them
    assert reading <= {*state.pool.host.key_of} and not reading & {*after.pool.host.key_of}
    state.runtime.lease.lose([], taken.host_pages)  # as `guarded` does when the call fails
    state = nv.cancel(state, next(iter(state.waiting.items)))
    assert not {*taken.host_pages} & {*state.pool.host.key_of}
    check(state)
    assert len(tier.reads.jobs) == 4
    state, _ = reply(state, prompt(6))
    assert not tier.reads.jobs, "reads of a failed call are over before host pages get other content"


def test_damaged_and_missing_files_are_run_instead(tmp_path: Path):
    expected = filled(tmp_path, 0, 1, 2)
    for place, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        if place % 3 == 0:
            data = bytearray(path.read_bytes())
            data[-1 - place] ^= 1
            path.write_bytes(data)
        elif place % 3 == 1:
            os.truncate(path, 100)
    state = engine(tmp_path)
    for path in sorted(tmp_path.rglob("*.kv"))[2::3]:
        path.unlink()
    for seed in (0, 1, 2):
        state, output = reply(state, prompt(seed))
        assert output.token_ids == expected[seed] and output.error is None
    counts = runtime_of(state).disk.counts
    assert counts.pages_damaged > 0 and counts.pages_read == 0 and counts.errors == 0
    assert state.stats.read_tokens == 0 and not state.pool.host.disk.reading


def test_a_full_disk_is_counted_told_of_once_and_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    state = engine(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        state, output = reply(state, prompt(0))
        assert output.error is None and flush_kv(state)
        disk = runtime_of(state).disk
        assert 1 <= disk.counts.errors <= 2 and disk.counts.pages_written == 0 and disk.counts.pages_dropped >= 4
        told = f"nanovllm: KV cannot be written to {tmp_path / 'pages'}: No space left on device"
        assert capfd.readouterr().err == f"{told}; replies go on, and it is tried again after 30 seconds\n"
        disk.clock = lambda: 1e8
        state, _ = reply(state, prompt(0))
        assert flush_kv(state) and disk.counts.errors >= 2 and not capfd.readouterr().err
    disk.clock = lambda: 0.0
    assert flush_kv(state) and disk.counts.pages_written == 0  # it rests
    disk.clock = lambda: 1e9
    state, _ = reply(state, prompt(1))
    assert flush_kv(state) and len(disk.folder) == 12
    assert not [*tmp_path.rglob("*.tmp")] and not capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        state, _ = reply(state, prompt(2))
        assert flush_kv(state) and capfd.readouterr().err.count("cannot be written") == 1, "it is told of anew after it went well"


def test_what_a_full_disk_did_not_take_is_written_by_a_later_flush_of_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = engine(tmp_path)
    state, _ = reply(state, prompt(0))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert flush_kv(state)
    disk = runtime_of(state).disk
    assert len(disk.folder) == 0
    disk.clock = lambda: 1e9
    assert flush_kv(state) and len(disk.folder) == 6


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path):
    filled(tmp_path / "kv", 0)
    state = engine(tmp_path / "kv")
    rmtree(tmp_path / "kv")
    state, output = reply(state, prompt(0))
    assert output.error is None and output.num_cached_tokens == 0
    state, _ = reply(state, prompt(1))
    disk = runtime_of(state).disk
    assert flush_kv(state) and disk.counts.errors == 0 and len([*(tmp_path / "kv").rglob("*.kv")]) == disk.counts.pages_written >= 6


def test_a_disk_that_may_not_be_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    filled(tmp_path, 0)
    state, plain = engine(tmp_path), os.open

    def forbidden(path, *args, **kwargs):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", forbidden)
    state, output = reply(state, prompt(0))
    assert output.error is None and output.num_cached_tokens == 0 and runtime_of(state).disk.counts.errors == 5
    state, output = reply(state, prompt(1))
    assert flush_kv(state) and output.error is None


def test_a_job_with_an_unknown_error_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    filled(tmp_path, 0)
    state = engine(tmp_path)

    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(type(runtime_of(state).host), "wait", broken)
    state, output = reply(state, prompt(0))
    assert output.error is None and output.num_cached_tokens == 0 and runtime_of(state).disk.counts.errors == 5
    for seed in range(1, 8):
        state, _ = reply(state, prompt(seed))
    assert flush_kv(state) and not runtime_of(state).disk.num_queued


def test_two_engines_share_a_folder_at_the_same_time(tmp_path: Path):
    one, two = engine(tmp_path), engine(tmp_path)
    one, expected = reply(one, prompt(0))
    flush_kv(one)
    two, output = reply(two, prompt(0))
    assert output.token_ids == expected.token_ids and output.num_cached_tokens == 20
    two, _ = reply(two, prompt(1))
    flush_kv(two)
    one, output = reply(one, prompt(1))
    assert output.num_cached_tokens == 20
    check(one)
    check(two)


def test_a_flush_in_pieces_writes_all(tmp_path: Path):
    state = engine(tmp_path)
    for seed in (0, 1):
        state, _ = reply(state, prompt(seed))
    page, rounds = state.pool.host.page_bytes, 0
    while not flush_kv(state, max_bytes=2 * page):
        rounds += 1
    runtime_of(state).disk.drain()
    assert rounds == 5 and len(runtime_of(state).disk.folder) == 12


def test_a_killed_process_leaves_what_it_has_written(tmp_path: Path):
    program = f"""
import os, sys
from pathlib import Path
from tests.engine.test_disk import engine, flush_kv, prompt, reply, runtime_of
state = engine(Path({str(tmp_path)!r}))
state, output = reply(state, prompt(0))
flush_kv(state)
state, _ = reply(state, prompt(1))
flush_kv(state, max_bytes=1)
print(output.token_ids, flush=True)
os.kill(os.getpid(), 9)
"""
    command, root = [sys.executable, "-c", program], Path(__file__).parents[2]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, cwd=root)
    assert ended.returncode == -9, ended.stderr
    _, output = reply(engine(tmp_path), prompt(0))
    assert str(output.token_ids) == ended.stdout.strip() and output.num_cached_tokens == 20


def test_an_llm_writes_when_it_is_closed_and_the_next_one_reads(tmp_path: Path):
    model = nv.load_model("tiny", device="cpu")
    replies = []
    for _ in range(2):
        llm = LLM(model, num_pages=64, host_kv_gib=0.05, kv_dir=tmp_path, kv_dir_gib=1)
        host = llm.state.pool.host
        llm.state = replace(llm.state, pool=replace(llm.state.pool, host=replace(host, rates=ALWAYS)))
        (output,) = llm.generate("Once upon a time, there was a cat. " * 5, SamplingParams(temperature=0, max_tokens=8))
        replies.append(output)
        llm.close()
    assert replies[0].text == replies[1].text
    assert replies[0].num_cached_tokens == 0 and replies[1].num_cached_tokens == (len(replies[1].prompt_token_ids) - 1) // 16 * 16


def test_the_read_rate_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rate = engine(tmp_path).pool.host.disk.bytes_per_second
    assert 0 < rate != disk_tier.SLOWEST
    monkeypatch.setattr(disk_tier.PageFolder, "measure", lambda *_: pytest.fail("it was measured again"))
    assert engine(tmp_path).pool.host.disk.bytes_per_second == rate


@pytest.mark.usefixtures("untyped")
def test_options_that_are_refused(tmp_path: Path):
    with pytest.raises(InvalidRequestError, match="host_kv_gib"):
        init_state(MODEL, num_pages=8, kv_dir=tmp_path)
    for wrong in (0, -1, float("nan"), "1", True):
        with pytest.raises(InvalidRequestError, match="kv_dir_gib"):
            init_state(MODEL, num_pages=8, host_kv_gib=GIB, kv_dir=tmp_path, kv_dir_gib=wrong)
    for wrong in (1, "", b"kv"):
        with pytest.raises(InvalidRequestError, match=f"^kv_dir={wrong!r} must be the name of a folder"):
            init_state(MODEL, num_pages=8, host_kv_gib=GIB, kv_dir=wrong)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", "it is a file"),
        ("file/kv", "'{0}/file' is a file"),
        ("link", "it is a link to a file"),
        ("nowhere", "it is a link that leads nowhere"),
        ("loop", "it is a link that leads nowhere"),
        ("loop/kv", "'{0}/loop' is a link that leads nowhere"),
        ("with-file", "'{0}/with-file/pages' is a file"),
        ("with-link", "'{0}/with-link/pages' is a link that leads nowhere"),
    ],
)
def test_what_stands_where_a_folder_is_needed_is_named(tmp_path: Path, name: str, told: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in ("with-file", "with-link"):
        (tmp_path / folder).mkdir()
    (tmp_path / "with-file" / "pages").write_text("")
    (tmp_path / "with-link" / "pages").symlink_to(tmp_path / "missing")
    reason = f"kv_dir='{tmp_path / name}' cannot be used: {told.format(tmp_path)}, and must be a folder"
    with pytest.raises(InvalidRequestError, match=re.escape(reason)):
        init_state(MODEL, num_pages=8, host_kv_gib=GIB, kv_dir=tmp_path / name)


def test_a_folder_whose_name_the_system_refuses_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequestError, match="cannot be used: File name too long"):
        init_state(MODEL, num_pages=8, host_kv_gib=GIB, kv_dir=tmp_path / ("x" * 300))


def test_a_folder_that_is_made_is_for_its_own_user_only(tmp_path: Path):
    (tmp_path / "old").mkdir(mode=0o755)
    for name, mode in (("new", 0o700), ("old", 0o755)):
        init_state(MODEL, num_pages=8, host_kv_gib=GIB, kv_dir=tmp_path / name)
        folders = [tmp_path / name, tmp_path / name / "pages"]
        assert [folder.stat().st_mode & 0o777 for folder in folders] == [mode, 0o700]


def test_a_limit_below_one_page_is_refused(tmp_path: Path):
    for small in (1e-9, 500 / 2**30):
        with pytest.raises(InvalidRequestError, match=r"kv_dir_gib=.* is less than one page of 0.0000\d\d GiB: make it larger"):
            init_state(MODEL, num_pages=8, page_size=4, host_kv_gib=GIB, kv_dir=tmp_path / "small", kv_dir_gib=small)
    assert not (tmp_path / "small").exists()


def test_without_the_option_there_is_nothing():
    state = engine(None)
    assert state.pool.host.disk is None and runtime_of(state).disk is None and flush_kv(state)
    assert nv.memory(state).disk is None and "on disk" not in nv.memory(state).text()


def test_the_memory_report_tells_of_the_disk(tmp_path: Path):
    filled(tmp_path, 0)
    state, _ = reply(engine(tmp_path), prompt(0))
    report = nv.memory(state)
    assert report.disk.num_pages == 6 and 0 < report.disk.num_bytes < report.disk.max_bytes == 2**20
    assert report.disk.counts.pages_read == 5 and "6 pages on disk" in report.text()


def test_a_page_whose_host_page_was_overwritten_before_it_was_written_is_written_from_elsewhere(tmp_path: Path):
    state = engine(tmp_path)
    tier, key = late(state), bytes(32)
    tier.keep([(3, key)])
    assert tier.has(key)
    tier.overwriting([3])
    assert not tier.has(key), "nothing will write it"
    tier.keep([(7, key)])
    tier.keep([(5, key)])
    assert tier.has(key) and len(tier.writes.jobs) == 2
    tier.writes.run(1)
    assert tier.has(key) and tier.num_queued == 1 and key not in tier.folder
    tier.writes.run(1)
    assert key in tier.folder and tier.num_queued == 0 and tier.counts.pages_dropped == 1


def test_reads_are_bounded_by_half_of_host_memory_and_share_pages():
    host = replace(init_host(8, 64, ALWAYS), disk=DiskReads(bytes_per_second=1e15))
    keys = [bytes([number]) * 32 for number in range(9)]
    host, pairs = read_ahead(host, 1, keys, 36, 4)
    assert [key for _, key in pairs] == keys[:4] and host.disk.holds(1)
    host, more = read_ahead(host, 2, keys, 36, 4)
    assert not more and host.disk.holds(2) and host.disk.waits[2].pages == host.disk.waits[1].pages
    host, none = read_ahead(host, 3, keys[5:], 12, 4)
    assert not none and not host.disk.holds(3)


def test_threads_wait_while_they_are_held_and_lose_their_jobs_at_the_end():
    done, workers = list[int](), Threads(2, "test", most_held=2)
    workers.hold(True)
    for number in range(3):
        workers.submit(lambda number=number: done.append(number))
    workers.drain()
    assert sorted(done) == [0, 1, 2]
    gate = threading.Event()
    workers.hold(False)
    for _ in range(2):
        workers.submit(lambda: gate.wait(120) and None)
    workers.submit(lambda: done.append(9))
    workers.close()
    gate.set()
    assert 9 not in done


def test_threads_are_held_again_after_a_drain_that_was_interrupted(monkeypatch: pytest.MonkeyPatch):
    done, begun, gate, workers = list[int](), threading.Event(), threading.Event(), Threads(1, "test", most_held=8)

    def job() -> None:
        begun.set()
        gate.wait(120)

    workers.submit(job)
    assert begun.wait(120)  # so that only this thread is interrupted

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.drain()
    workers.hold(True)
    gate.set()
    workers.submit(lambda: done.append(1))
    time.sleep(0.1)
    assert not done
    workers.drain()
    assert done == [1]


def test_a_tier_that_nobody_has_ends_its_threads(tmp_path: Path):
    import gc
    import weakref

    state = engine(tmp_path)
    state, _ = reply(state, prompt(0))
    flush_kv(state)
    tier = weakref.ref(runtime_of(state).disk)
    assert isinstance(tier(), DiskTier)
    del state
    end = time.monotonic() + 60
    while tier() is not None:  # a thread may still be about to forget its last job
        assert time.monotonic() < end
        gc.collect()


def test_requests_that_wait_for_a_place_do_not_disturb_decode_steps(tmp_path: Path):
    state = engine(tmp_path, num_pages=64, max_num_seqs=2)
    for seed in range(8):
        state, _ = submit(MODEL, state, prompt(seed, 6), replace(GREEDY, max_tokens=30))
    for _ in range(4):
        state, _ = step(MODEL, state)
    pool = state.pool
    state, _ = step(MODEL, state)
    assert state.pool is pool and len(state.waiting) == 6, "the pool is the same value, so the scheduler is left out"


def test_an_async_llm_writes_when_it_is_idle_and_when_it_is_closed(tmp_path: Path):
    model = nv.load_model("tiny", device="cpu")

    async def serve(prompt: str, idle: bool) -> int:
        async with nv.AsyncLLM(model, num_pages=64, host_kv_gib=0.05, kv_dir=tmp_path, kv_dir_gib=1) as llm:
            await llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4))
            end = time.monotonic() + 120
            while idle and not [*tmp_path.rglob("*.kv")] and time.monotonic() < end:
                await asyncio.sleep(0.02)
            found = len([*tmp_path.rglob("*.kv")])
        return found

    assert asyncio.run(serve("Once upon a time, there was a cat. " * 5, True)) > 0
    before = len([*tmp_path.rglob("*.kv")])
    asyncio.run(serve("A dog went to the market. " * 5, False))
    assert len([*tmp_path.rglob("*.kv")]) > before


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_without_threads_requests_go_on_without_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (expected,) = filled(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        state = engine(tmp_path)
        tier = runtime_of(state).disk
        state, output = reply(state, prompt(0))
        assert output.error is None and output.token_ids == expected and output.num_cached_tokens == 0
        assert tier.counts.errors == 5 and not state.pool.host.disk.reading
        state, output = reply(state, prompt(1))
        assert output.error is None and flush_kv(state)
        assert tier.num_queued == 0 and tier.counts.errors > 5 and tier.counts.pages_written == 0
    assert flush_kv(state) and tier.counts.pages_written > 0, "there are threads again"


def test_evicted_pages_for_which_there_is_no_thread_are_errors_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    state = engine(tmp_path, num_pages=8)
    for seed in (0, 1, 2):
        state, output = reply(state, prompt(seed))
        assert output.error is None
    disk = runtime_of(state).disk
    assert state.stats.offloaded_tokens > 0 and disk.counts.errors == state.stats.offloaded_tokens // 4 and disk.num_queued == 0


def test_one_thread_does_the_work_of_those_that_could_not_be_started(monkeypatch: pytest.MonkeyPatch):
    done, gate, workers = list[int](), threading.Event(), Threads(2, "test")
    assert workers.submit(lambda: gate.wait(120) and None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert workers.submit(lambda: done.append(1))
        gate.set()
        workers.drain()
        assert done == [1]
        workers.close()
        assert not workers.submit(lambda: done.append(2))


def test_a_piece_of_a_flush_looks_at_so_many_pages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_flush, "LOOKED_AT", 2)
    state = engine(tmp_path)
    for seed in (0, 1):
        state, _ = reply(state, prompt(seed))
    asked, has = list[bytes](), DiskTier.has

    def counted(tier: DiskTier, key: bytes) -> bool:
        asked.append(key)
        return has(tier, key)

    monkeypatch.setattr(DiskTier, "has", counted)
    rounds = 1
    while not flush_kv(state, max_bytes=1 << 20):
        assert len(asked) <= 2 * rounds
        rounds += 1
    runtime_of(state).disk.drain()
    assert rounds == 6 and len(asked) == 12 == len(runtime_of(state).disk.folder)


def test_a_refused_offload_leaves_what_is_being_read(tmp_path: Path):
    filled(tmp_path, 0)
    page = bytes_per_page(MODEL.config, page_size=4, dtype=MODEL.dtype)
    state = engine(tmp_path, num_pages=64, host_kv_gib=16 * page / 2**30)
    tier = late(state)
    state, big = nv.prefill(MODEL, state, prompt(9, 160))  # 40 pages
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    tier.reads.run(2)
    with pytest.raises(nv.OutOfPagesError, match="needs host memory"):
        nv.offload(state, big)
    state, outputs = drain(MODEL, state)
    assert outputs[rid].num_cached_tokens == 20 and state.stats.read_tokens == 20


def test_a_flush_in_pieces_ends_though_a_failed_call_has_lost_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_flush, "LOOKED_AT", 2)
    state = engine(tmp_path, num_pages=32)
    for seed in range(4):
        state, _ = reply(state, prompt(seed))
    state.runtime.lease.lose(state.prefix.idle_pages()[:3], [])
    for _ in range(60):
        if flush_kv(state, max_bytes=1):
            break
        runtime_of(state).disk.drain()
    else:
        raise AssertionError("the flush does not end")
    assert len(runtime_of(state).disk.folder) > 12


def test_a_request_goes_on_when_others_have_run_what_it_waits_for(tmp_path: Path):
    filled(tmp_path, 0)
    state = engine(tmp_path, num_pages=64)
    tier = late(state)
    state, waits = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    assert waits in state.waiting.items and tier.reads.jobs
    state, _ = nv.prefill(MODEL, state, prompt(0))
    state, _ = step(MODEL, state)
    assert waits not in state.waiting.items, "the index has its pages"
    state, outputs = drain(MODEL, state)
    assert outputs[waits].num_cached_tokens == 20


def test_a_disk_that_corrupts_the_measurement_counts_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def damaged(self: PageFolder, num_pages: int, num_threads: int) -> float:
        raise DamagedPageError("planted")

    monkeypatch.setattr(PageFolder, "measure", damaged)
    host = engine(tmp_path).pool.host
    assert host is not None and host.disk is not None and host.disk.bytes_per_second == disk_tier.SLOWEST
