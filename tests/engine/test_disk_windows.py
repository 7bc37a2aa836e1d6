"""Models with sliding windows in an engine with KV on disk: pages and frames go there and come back, and replies do not change."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit, submit_many
from nanovllm.engine.step import step
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.page_folder import key_in
from nanovllm.models.model import Model
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pages as page_ops
from nanovllm.state.digest import digest
from nanovllm.state.disk_frames import FrameNeeds
from nanovllm.state.disk_pages import arrived, read_ahead
from nanovllm.state.disk_reads import NOTHING, PAGE, WHOLE, DiskReads
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check, check_host
from nanovllm.state.offload import HostPages, Rates, init_host
from nanovllm.state.prefix_keys import frame_key, is_frame, keys_from
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.late_disk import LateDiskTier
from nanovllm.testing.shadows.worlds import drain

# Whole engines run many steps, which the hook makes three to six times as long.
pytestmark = [pytest.mark.unhooked, pytest.mark.usefixtures("nothing_ahead")]
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MIXED = random_model(tiny_config(**SIZES, windows=(0, 6)))
ALONE = random_model(tiny_config(**SIZES, windows=(6, 5)))
HEADS = tiny_config(**{**SIZES, "num_kv_heads": 2}, windows=(0, 6))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)
GIB = 1 / 1024
each_model = pytest.mark.parametrize("model", [MIXED, ALONE], ids=["mixed", "alone"])


def engine(model: Model, folder: Path | None, **options) -> EngineState:
    """An engine with 24 pages of 4 tokens and 16 frames, host memory and a folder, which reads whatever it finds."""
    kept = {} if folder is None else {"kv_dir": folder, "kv_dir_gib": GIB}
    limits = {"num_pages": 24, "num_frames": 16, "page_size": 4, "max_model_len": 64, "max_num_seqs": 4, "host_kv_gib": GIB}
    state = init_state(model, **{**limits, **kept, **options})
    host = state.pool.host
    assert host is not None
    return replace(state, pool=replace(state.pool, host=replace(host, rates=ALWAYS)))


def late(state: EngineState) -> LateDiskTier:
    """Give an engine a disk whose reads and writes end when a test says so."""
    runtime = runtime_of(state)
    assert runtime.disk is not None and runtime.host is not None
    runtime.disk = tier = LateDiskTier(runtime.disk.folder, runtime.host)
    return tier


def prompt(seed: int, length: int = 21) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def keys(seed: int, length: int = 21) -> list[bytes]:
    return [*keys_from(np.array(prompt(seed, length), np.int32), 0, 4)]


def files(folder: Path) -> dict[bytes, Path]:
    return {key_in(path.name): path for path in folder.rglob("*.kv")}


def reply(model: Model, state: EngineState, tokens: list[int], params: SamplingParams = GREEDY):
    state, rid = submit(model, state, tokens, params)
    state, outputs = drain(model, state)
    check(state)
    return state, outputs[rid]


def filled(model: Model, folder: Path, *seeds: int, **options) -> list[tuple[int, ...]]:
    """Serve prompts with an engine that keeps their KV in a folder. Returns the replies."""
    state, replies = engine(model, folder, **options), []
    for seed in seeds:
        state, output = reply(model, state, prompt(seed))
        replies.append(output.token_ids)
    assert flush_kv(state)
    return replies


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@each_model
def test_a_later_engine_reads_what_an_earlier_one_has_written(tmp_path: Path, model: Model, kv_dtype):
    expected = filled(model, tmp_path, 0, 1, kv_dtype=kv_dtype)
    state = engine(model, tmp_path, kv_dtype=kv_dtype)
    for seed in (0, 1, 0):
        state, output = reply(model, state, prompt(seed))
        assert output.token_ids == expected[seed] and output.num_cached_tokens == 20
    assert state.stats.read_tokens == 40 and state.stats.loaded_tokens > 0
    plain = engine(model, None, kv_dtype=kv_dtype)
    for seed in (0, 1):
        plain, output = reply(model, plain, prompt(seed))
        assert output.token_ids == expected[seed]


def test_only_frames_of_the_last_window_are_read(tmp_path: Path):
    """Five pages of the prompt are read; its last token sees the five before it, which are in the last two of these pages."""
    filled(MIXED, tmp_path, 0)
    assert len([key for key in files(tmp_path) if is_frame(key)]) == 6, "with the filled page of the reply"
    state, _ = reply(MIXED, engine(MIXED, tmp_path), prompt(0))
    counts = runtime_of(state).disk.counts
    assert (counts.pages_read, counts.frames_read) == (5, 2) and state.stats.read_tokens == 20
    host = state.pool.host
    assert counts.bytes_read == 5 * host.bytes_of(framed=False) + 2 * host.frame_bytes
    assert {host.by_key[key] for key in keys(0)[:3]} == {*host.bare}


def test_a_request_that_becomes_a_chunk_reads_all_frames(tmp_path: Path):
    filled(MIXED, tmp_path, 0)
    state = engine(MIXED, tmp_path)
    state, (rid,) = submit_many(MIXED, state, [prompt(0)], [GREEDY], keep=True)
    state, outputs = drain(MIXED, state)
    check(state)
    assert outputs[rid].num_cached_tokens == 20 and runtime_of(state).disk.counts.frames_read == 5


def test_evicted_pages_and_frames_are_written(tmp_path: Path):
    state = engine(MIXED, tmp_path, num_pages=16, num_frames=8)
    for seed in range(4):
        state, _ = reply(MIXED, state, prompt(seed, 29))
    disk = runtime_of(state).disk
    disk.drain()
    frames = [key for key in files(tmp_path) if is_frame(key)]
    assert frames and len(frames) == disk.folder.num_frames == disk.counts.frames_written
    assert len(disk.folder) - len(frames) == disk.counts.pages_written > 0
    assert disk.counts.bytes_written == sum(path.stat().st_size - 96 for path in files(tmp_path).values())


@pytest.mark.parametrize("kind", ["gone", "flipped", "cut"])
@pytest.mark.parametrize(("place", "num_cached"), [(4, 16), (3, 12), (2, 20)])
def test_a_frame_that_is_missing_or_damaged_is_run(tmp_path: Path, kind: str, place: int, num_cached: int):
    """The frames of the last two pages are needed. Without one of them the request begins where all frames of a window are there."""
    expected = filled(MIXED, tmp_path, 0)
    path = files(tmp_path)[frame_key(keys(0)[place])]
    state = engine(MIXED, tmp_path)
    if kind == "gone":
        path.unlink()
        state = engine(MIXED, tmp_path)
    elif kind == "flipped":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        os.truncate(path, 100)
    state, output = reply(MIXED, state, prompt(0))
    assert [output.token_ids] == expected and output.error is None
    counts = runtime_of(state).disk.counts
    if kind == "gone" or place == 2:
        assert output.num_cached_tokens == num_cached and not counts.frames_damaged
    else:  # found when it is read, so that nothing else was read instead
        assert output.num_cached_tokens < 20 and counts.frames_damaged == 1 and not path.exists()


def test_a_page_whose_frame_is_there_and_whose_own_file_is_gone_is_run(tmp_path: Path):
    expected = filled(MIXED, tmp_path, 0)
    files(tmp_path)[keys(0)[4]].unlink()
    _, output = reply(MIXED, engine(MIXED, tmp_path), prompt(0))
    assert [output.token_ids] == expected and output.num_cached_tokens == 16


def test_a_frame_of_another_prefix_is_not_taken(tmp_path: Path):
    expected = filled(MIXED, tmp_path, 0, 1)
    stored = files(tmp_path)
    one, other = stored[frame_key(keys(0)[4])], stored[frame_key(keys(1)[4])]
    one.write_bytes(other.read_bytes())
    state, output = reply(MIXED, engine(MIXED, tmp_path), prompt(0))
    assert output.token_ids == expected[0] and runtime_of(state).disk.counts.frames_damaged == 1


def test_only_frames_come_to_pages_that_are_still_on_the_device(tmp_path: Path):
    """Frames of a prompt are taken for other prompts while its pages stay, and host memory forgets them: they come from the disk."""
    state = engine(MIXED, tmp_path, num_pages=48, num_frames=8)
    state, expected = reply(MIXED, state, prompt(0))
    flush_kv(state)
    for seed in (1, 2):
        state, _ = reply(MIXED, state, prompt(seed, 29))
    host = state.pool.host
    state.runtime.lease.lose([], [*host.key_of])  # as after a failed call
    before = state.stats
    state, output = reply(MIXED, state, prompt(0))
    assert output.token_ids == expected.token_ids and output.num_cached_tokens == 20
    assert runtime_of(state).disk.counts.frames_read == 2 and state.stats.read_tokens == 8
    assert state.stats.loaded_tokens - before.loaded_tokens == 8


def test_two_requests_with_windows_at_other_places_read_a_page_twice(tmp_path: Path):
    """The first one needs a page without its frame, and the second one with it. The whole page takes the place of the other."""
    filled(MIXED, tmp_path, 0)
    state = engine(MIXED, tmp_path)
    tier = late(state)
    state, first = submit(MIXED, state, prompt(0), GREEDY)
    state, second = submit(MIXED, state, [*prompt(0)[:12], 1, 2, 3], GREEDY)
    state, _ = step(MIXED, state)
    check(state)
    host = state.pool.host
    assert len(host.disk.reading) + len(host.by_key) == 7 and len({*host.disk.reading.values(), *host.by_key}) == 5
    state, outputs = drain(MIXED, state)
    check(state)
    assert outputs[first].num_cached_tokens == 20 and outputs[second].num_cached_tokens == 12
    assert (tier.counts.pages_read, tier.counts.frames_read) == (7, 4)
    plain = engine(MIXED, None)
    for rid, tokens in ((first, prompt(0)), (second, [*prompt(0)[:12], 1, 2, 3])):
        plain, alone = reply(MIXED, plain, tokens)
        assert alone.token_ids == outputs[rid].token_ids


@each_model
def test_a_request_runs_its_front_while_the_rest_is_read(tmp_path: Path, model: Model):
    expected, length = [], 41
    state = engine(model, tmp_path)
    state, output = reply(model, state, prompt(0, length))
    expected = output.token_ids
    flush_kv(state)
    state = engine(model, tmp_path)
    tier, host = late(state), state.pool.host
    rates = Rates(tokens_per_second=4.0, bytes_per_second=1e15)
    disk = replace(host.disk, bytes_per_second=float(host.page_bytes))
    state = replace(state, pool=replace(state.pool, host=replace(host, rates=rates, disk=disk)))
    state, rid = submit(model, state, prompt(0, length), GREEDY)
    state, outputs = step(model, state)
    check(state)
    num_run = state.running[0].num_filled
    assert not outputs and 0 < num_run < 40 and state.pool.host.disk.waits[rid].stop == 10
    tier.reads.drain()
    state, outputs = drain(model, state)
    check(state)
    assert outputs[rid].token_ids == expected and outputs[rid].num_cached_tokens == 40 - num_run


def test_pages_and_frames_share_the_size_limit(tmp_path: Path):
    state = engine(MIXED, tmp_path)
    folder = runtime_of(state).disk.folder
    folder.max_bytes = 3 * (state.pool.host.page_bytes + 2 * 96)
    for seed in range(4):
        state, _ = reply(MIXED, state, prompt(seed))
        flush_kv(state)
        size = sum(path.stat().st_size for path in files(tmp_path).values())
        assert size == folder.size <= folder.max_bytes
    assert folder.num_frames == len([key for key in files(tmp_path) if is_frame(key)])


def test_a_killed_process_leaves_what_it_has_written(tmp_path: Path):
    program = f"""
import os
from pathlib import Path
from tests.engine.test_disk_windows import MIXED, engine, flush_kv, prompt, reply
state, output = reply(MIXED, engine(MIXED, Path({str(tmp_path)!r})), prompt(0))
flush_kv(state)
state, _ = reply(MIXED, state, prompt(1))
flush_kv(state, max_bytes=1)
print(output.token_ids, flush=True)
os.kill(os.getpid(), 9)
"""
    command, root = [sys.executable, "-c", program], Path(__file__).parents[2]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, cwd=root)
    assert ended.returncode == -9, ended.stderr
    _, output = reply(MIXED, engine(MIXED, tmp_path), prompt(0))
    assert str(output.token_ids) == ended.stdout.strip() and output.num_cached_tokens == 20


def test_the_memory_report_tells_of_frames_on_disk(tmp_path: Path):
    filled(MIXED, tmp_path, 0)
    state, _ = reply(MIXED, engine(MIXED, tmp_path), prompt(0))
    report = nv.memory(state)
    assert (report.disk.num_pages, report.disk.num_frames, report.disk.counts.frames_read) == (6, 6, 2)
    assert "6 pages and 6 frames on disk" in report.text()


@pytest.mark.parametrize("damage", ["none", "gone", "cut"])
def test_ranks_agree_on_frames(tmp_path: Path, damage: str):
    """If one rank lacks the frame of a page, all ranks run its tokens."""

    def ran(mesh: Mesh):
        model = random_model(HEADS, dtype="float64", mesh=mesh)
        state, output = reply(model, engine(model, tmp_path), prompt(0))
        assert flush_kv(state)
        return output.token_ids, output.num_cached_tokens, state.stats, digest(state, whole=True)

    first, _ = run_ranks(ran, 2)
    own = sorted({path.parent.parent.name for path in tmp_path.rglob("*.kv")})[0]
    lost = tmp_path / "pages" / own / keys(0)[4].hex()[:2] / f"{keys(0)[4].hex()}-frame.kv"
    if damage == "gone":
        lost.unlink()
    elif damage == "cut":
        lost.write_bytes(lost.read_bytes()[:-1])
    one, two = run_ranks(ran, 2)
    assert one == two, "the ranks differ"
    assert one[0] == first[0] and one[1] == {"none": 20, "gone": 16, "cut": 0}[damage]


def test_ranks_whose_reads_end_at_different_times_stay_alike(tmp_path: Path):
    """A page counts with its frame when all ranks have both, and as a page alone while one rank lacks the frame."""

    def written(mesh: Mesh):
        model = random_model(HEADS, dtype="float64", mesh=mesh)
        state = engine(model, tmp_path)
        for seed in (0, 1):
            state, _ = reply(model, state, prompt(seed))
        assert flush_kv(state)

    run_ranks(written, 2)
    own = sorted({path.parent.parent for path in tmp_path.rglob("*.kv")})[1]
    for place in (1, 4):
        lost = own / keys(1)[place].hex()[:2] / f"{keys(1)[place].hex()}-frame.kv"
        lost.write_bytes(lost.read_bytes()[:-1])

    def ran(mesh: Mesh):
        model = random_model(HEADS, dtype="float64", mesh=mesh)
        state = engine(model, tmp_path)
        tier, digests, tokens = late(state), [], dict[int, list[int]]()
        tier.time = 100.0 * mesh.rank  # each has a clock of its own
        for context in (prompt(0), [*prompt(0)[:12], 1], prompt(1), prompt(2)):
            state, rid = submit(model, state, context, GREEDY)
            tokens[rid] = []
        while state.running or state.waiting:
            tier.reads.run(1 + 2 * mesh.rank)
            state, outputs = step(model, state)
            check(state)
            digests.append(digest(state, whole=True))
            for output in outputs:
                tokens[output.request_id] += output.token_ids
        return digests, tokens, state.stats

    one, two = run_ranks(ran, 2)
    assert one == two, "the ranks differ"
    model = random_model(HEADS, dtype="float64")
    state = engine(model, None)
    for rid, context in zip(sorted(one[1]), (prompt(0), [*prompt(0)[:12], 1], prompt(1), prompt(2)), strict=True):
        state, output = reply(model, state, context)
        assert list(output.token_ids) == one[1][rid]
    assert one[2].read_tokens > 20


# The plan alone

NAMES = [bytes([number]) * 32 for number in range(10)]


def host_pages(num_pages: int = 40) -> HostPages:
    return replace(init_host(num_pages, 96, ALWAYS, 64), disk=DiskReads(bytes_per_second=1e15))


def needs(had: list[bool], *, here: tuple[bool, ...] = (), window: int | None = 6, num_tokens: int = 41, before: int = 0) -> FrameNeeds:
    return FrameNeeds(
        before=before, num_tokens=num_tokens, page_size=4, window=window, had=np.array(had, bool), here=np.array(here, bool)
    )  # fmt: skip


def begun(host: HostPages, frames: FrameNeeds, count: int = 10) -> tuple[HostPages, list[tuple[int, bool]]]:
    """The host pages with the reads of a request, and which pages are read, each with whether its frame is."""
    host, pairs = read_ahead(host, 1, NAMES[:count], 4 * count, 4, frames=frames)
    check_host(host)
    return host, [(NAMES.index(key), at in host.disk.framed) for at, key in pairs]


def test_a_prefix_whose_window_has_a_hole_is_read_up_to_it():
    _, read = begun(host_pages(), needs([True] * 8 + [False, True]))
    assert [place for place, _ in read] == [*range(8)] and [place for place, framed in read if framed] == [6, 7]
    _, read = begun(host_pages(), needs([False] * 10))
    assert not read, "without frames a request cannot begin"
    _, read = begun(host_pages(), needs([True] * 9 + [False], window=None))
    assert [framed for _, framed in read] == [True] * 9


def test_a_prefix_for_which_there_is_too_little_room_needs_the_frames_of_an_earlier_window():
    _, read = begun(host_pages(8), needs([True] * 10))
    assert [place for place, _ in read] == [0, 1, 2, 3] and [place for place, framed in read if framed] == [2, 3]
    _, read = begun(host_pages(8), needs([True, True, True, False] + [True] * 6))
    assert [place for place, _ in read] == [0, 1, 2] and [place for place, framed in read if framed] == [1, 2]


def test_of_pages_on_the_device_only_those_without_a_frame_are_read():
    _, read = begun(host_pages(), needs([True] * 5, here=(True, False, False, True, False), num_tokens=21), count=5)
    assert read == [(4, True)], "the window ends in the fourth page, whose frame is on the device"


@pytest.mark.parametrize(("part", "is_bare"), [(WHOLE, False), (PAGE, True), (NOTHING, True)])
def test_a_whole_page_takes_the_place_of_a_bare_one(part: int, is_bare: bool):
    host, pairs = read_ahead(host_pages(), 1, NAMES[:5], 20, 4, frames=needs([True] * 5, num_tokens=40))
    host = arrived(host, [(at, PAGE) for at, _ in pairs])
    check_host(host)
    assert len(host.bare) == 5
    host, pairs = read_ahead(host, 2, NAMES[:5], 20, 4, frames=needs([True] * 5, num_tokens=21))
    assert [key for _, key in pairs] == NAMES[3:5] and [at in host.disk.framed for at, _ in pairs] == [True, True]
    host = arrived(host, [(at, part) for at, _ in pairs])
    check_host(host)
    assert [host.by_key[name] in host.bare for name in NAMES[:5]] == [True] * 3 + [is_bare] * 2
    assert host.used.num_used == 5 and not host.disk.reading and not host.disk.framed


def test_a_whole_page_that_comes_with_a_bare_one_is_the_one_that_is_kept():
    disk = DiskReads(bytes_per_second=1.0).begun(0, NAMES[0], framed=False).begun(1, NAMES[0], framed=True)
    for order in ([(0, PAGE), (1, WHOLE)], [(1, WHOLE), (0, PAGE)]):
        host, taken = host_pages(), page_ops.allocate(host_pages().used, 2)
        assert taken is not None
        host = arrived(replace(host, used=taken[0], disk=disk), order)
        check_host(host)
        assert host.by_key[NAMES[0]] == 1 and not host.bare and host.used.num_used == 1
