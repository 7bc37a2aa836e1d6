"""KV on disk beside chunks in host memory and evictions by calls on chunks: none of them replaces pages of another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.chunks.offload import relieved
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.disk_pages import look_ahead
from nanovllm.executor.executor import runtime_of
from nanovllm.state import lru
from nanovllm.state import pages as page_ops
from nanovllm.state.disk_pages import arrived, read_ahead
from nanovllm.state.disk_reads import DiskReads
from nanovllm.state.offload import HostPages, Rates, init_host
from nanovllm.state.pool import Taken
from nanovllm.state.prefix_keys import is_full, keys_from
from nanovllm.testing.machines.engine_holder import kv_bytes
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.late_disk import LateDiskTier
from nanovllm.testing.shadows.worlds import drain

pytestmark = pytest.mark.usefixtures("nothing_ahead")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
CONFIG = tiny_config(**SIZES)
MODEL = random_model(CONFIG)
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)
GIB = 1 / 1024


def engine(folder: Path, num_host_pages: int | None = None, **options: Any) -> tuple[nv.EngineState, LateDiskTier]:
    """An engine with 16 pages of 4 tokens, whose reads and writes end when a test says so, and which always reads and loads."""
    more = {"num_pages": 16, "page_size": 4, "host_kv_gib": GIB, "kv_dir": folder, "kv_dir_gib": GIB}
    state = nv.init_state(MODEL, **{**more, **options})
    host, runtime = host_of(state), runtime_of(state)
    assert runtime.disk is not None and runtime.host is not None
    if num_host_pages is not None:
        host = replace(init_host(num_host_pages, host.page_bytes, ALWAYS), disk=host.disk)
    runtime.disk = tier = LateDiskTier(runtime.disk.folder, runtime.host)
    return replace(state, pool=replace(state.pool, host=replace(host, rates=ALWAYS))), tier


def host_of(state: nv.EngineState) -> HostPages:
    assert state.pool.host is not None
    return state.pool.host


def reading(state: nv.EngineState) -> dict[int, bytes]:
    disk = host_of(state).disk
    assert disk is not None
    return dict(disk.reading)


def prompt(seed: int, length: int = 21) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def filled(folder: Path, seed: int = 0) -> list[int]:
    """Serve a prompt with an engine that keeps its KV in a folder. Returns the reply."""
    state, tier = engine(folder)
    state, rid = nv.submit(MODEL, state, prompt(seed), GREEDY)
    state, outputs = drain(MODEL, state)
    assert flush_kv(state) and len(tier.folder) == 6
    return list(outputs[rid].token_ids)


def began_to_read(folder: Path, num_host_pages: int, chunk_length: int, **options: Any) -> Any:
    """An engine with a chunk, in which a request waits for pages that are on disk. One of its pages has been read."""
    state, tier = engine(folder, num_host_pages, **options)
    state, chunk = nv.prefill(MODEL, state, prompt(5, chunk_length))
    state, rid = nv.submit(MODEL, state, prompt(0), GREEDY)
    state, _ = nv.step(MODEL, state)
    assert len(reading(state)) == num_host_pages // 2 - 1 == len(tier.reads.jobs)
    return state, tier, chunk, kv_bytes(state, chunk), rid


def stored(folder: Path) -> set[bytes]:
    """The keys of the files in a folder."""
    return {bytes.fromhex(path.stem) for path in folder.rglob("*.kv")}


def test_a_chunk_takes_no_host_page_that_is_being_read(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    state, tier, chunk, kv, rid = began_to_read(tmp_path, 8, 15)
    before = reading(state)
    state = nv.offload(state, chunk)
    nv.check(state)
    assert reading(state) == before and len(tier.reads.jobs) == 3, "there is room without these pages, so nothing waits for them"
    assert not {*host_of(state).moved[chunk.liveness].pages} & before.keys()
    state, outputs = drain(MODEL, state)
    nv.check(state)
    assert list(outputs[rid].token_ids) == expected
    assert outputs[rid].num_cached_tokens == 16 and kv_bytes(state, chunk) == kv
    state, _ = nv.prefill(MODEL, state, [1], after=chunk)
    nv.check(state)


def test_a_chunk_that_needs_their_room_waits_for_reads(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    state, tier, chunk, kv, rid = began_to_read(tmp_path, 8, 23)
    state = nv.offload(state, chunk)  # six pages; five are free or replaceable before the reads end
    nv.check(state)
    assert not reading(state) and not tier.reads.jobs and state.stats.read_tokens == 16
    state, outputs = drain(MODEL, state)
    nv.check(state)
    assert list(outputs[rid].token_ids) == expected and kv_bytes(state, chunk) == kv
    state, _ = nv.prefill(MODEL, engine(tmp_path, 2)[0], prompt(5, 23))
    with pytest.raises(nv.OutOfPagesError, match="2 of 2 pages are available"):
        nv.offload(state, next(iter(state.chunks.values())))


def test_a_request_gets_the_pages_of_a_chunk_for_which_reads_leave_too_little_room(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    state, _, first, kv, _ = began_to_read(tmp_path, 8, 23, num_pages=12)
    state, _ = nv.prefill(MODEL, state, prompt(6, 23))
    assert not state.pool.num_available
    outputs = []
    while state.running or state.waiting:
        state = relieved(state)
        state, more = nv.step(MODEL, state)
        outputs += [out.output for out in more if out.output is not None]
    nv.check(state)
    assert outputs[0].error is None and list(outputs[0].token_ids) == expected
    assert first.liveness in host_of(state).moved and kv_bytes(state, first) == kv


def test_a_chunk_waits_for_reads_of_a_failed_call_into_its_pages(tmp_path: Path) -> None:
    filled(tmp_path)
    state, tier = engine(tmp_path, 4)
    state, chunk = nv.prefill(MODEL, state, prompt(5, 15))
    kv = kv_bytes(state, chunk)
    state, rid = nv.submit(MODEL, state, prompt(0), GREEDY)
    taken = Taken()
    look_ahead(state, taken)
    assert len(tier.reads.jobs) == 1 and len({*taken.host_pages}) == 2
    state.runtime.lease.lose([], taken.host_pages)  # as `guarded` does when the call fails
    state = nv.offload(state, chunk)
    assert not tier.reads.jobs and len(host_of(state).moved[chunk.liveness].pages) == 4
    nv.check(state)
    state = nv.cancel(state, rid)
    assert kv_bytes(state, chunk) == kv


def test_calls_on_chunks_evict_into_other_pages_than_those_being_read_and_write_them(tmp_path: Path) -> None:
    expected = filled(tmp_path)
    state, tier, chunk, kv, rid = began_to_read(tmp_path, 8, 8, num_pages=12)
    before, names = reading(state), stored(tmp_path)
    for seed in (8, 9):
        state, other = nv.prefill(MODEL, state, prompt(seed, 36))
        state = nv.release(state, other)
        nv.check(state)
    assert reading(state) == before and state.stats.offloaded_tokens > 0
    tier.writes.drain()
    more = stored(tmp_path) - names
    assert more and more <= {key for seed in (8, 9) for key in keys_from(np.array(prompt(seed, 36), np.int32), 0, 4)}
    state, outputs = drain(MODEL, state)
    nv.check(state)
    assert list(outputs[rid].token_ids) == expected and kv_bytes(state, chunk) == kv


def test_only_pages_of_chunks_that_others_can_use_are_written(tmp_path: Path) -> None:
    state, tier = engine(tmp_path, num_pages=32)
    state, one = nv.prefill(MODEL, state, prompt(1, 10))
    state, two = nv.prefill(MODEL, state, prompt(2, 11))
    state, both = nv.compose(MODEL, state, [one, two])
    kv = {chunk.liveness: kv_bytes(state, chunk) for chunk in (one, two, both)}
    for chunk in (both, two, one):
        state = nv.offload(state, chunk)
    tier.writes.drain()
    exact = {key for seed, length in ((1, 10), (2, 11)) for key in keys_from(np.array(prompt(seed, length), np.int32), 0, 4)}
    assert stored(tmp_path) == exact == {*host_of(state).key_of.values()} and host_of(state).used.num_used > len(exact)
    assert flush_kv(state) and stored(tmp_path) == exact
    nv.check(state)
    assert all(kv_bytes(state, chunk) == kv[chunk.liveness] for chunk in (one, two, both))
    report = nv.memory(state)
    assert report.num_host_used == host_of(state).used.num_used and report.disk.num_pages == len(exact)
    assert "pages of host memory used" in report.text() and "pages on disk" in report.text()


def test_last_pages_of_preempted_requests_are_not_written(tmp_path: Path) -> None:
    state, tier = engine(tmp_path, num_pages=24, max_num_seqs=6)
    for seed in range(12):
        state, _ = nv.submit(MODEL, state, prompt(seed, 11 + seed % 5), replace(GREEDY, max_tokens=40))
    found = 0
    while state.running or state.waiting:
        state, _ = nv.step(MODEL, state)
        if found < 3 and any(not is_full(key) for key in host_of(state).key_of.values()):
            found += 1
            flush_kv(state)
    tier.writes.drain()
    assert found and state.stats.preemptions and stored(tmp_path) and all(map(is_full, stored(tmp_path)))


def test_reads_leave_chunks_in_host_memory_alone() -> None:
    keys = [bytes([number]) * 32 for number in range(6)]
    host = replace(init_host(8, 64, ALWAYS), disk=DiskReads(bytes_per_second=1e15))
    host, pairs = read_ahead(host, 1, keys[:2], 36, 4)
    host = arrived(host, [(at, True) for at, _ in pairs])
    (first, _), (second, _) = pairs
    # the first page is that of a chunk, too, and the chunk has four more
    used, own = page_ops.allocate(host.used, 4) or (host.used, ())
    used = page_ops.retain(used, np.array([first], np.int32))
    host = replace(host, used=used, ages=lru.remove(host.ages, np.array([first], np.int32)))
    host, pairs = read_ahead(host, 2, keys, 36, 4)
    assert [key for _, key in pairs] == keys[2:4], "two pages are free, and two have what the request goes on with"
    assert host.ages.pages() == [second] and not {at for at, _ in pairs} & {first, second, *own}
    assert host.by_key[keys[0]] == first and host.by_key[keys[1]] == second
