"""The chunk store: keys, age, limits, damage, and several processes at once."""

import hashlib
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import nanovllm as nv
from nanovllm.chunks.storage import store as stores
from nanovllm.chunks.storage.store import ChunkStore
from nanovllm.chunks.storage.store_index import INDEX
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.testing.models import random_model, tiny_config

SMALL = tiny_config(vocab_size=50, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4)
MODEL = random_model(SMALL)


@pytest.fixture(scope="module")
def model() -> Model:
    return MODEL


def filled(model: Model, *runs: list[int]) -> tuple[EngineState, list[Chunk]]:
    state, chunks = nv.init_state(model, num_pages=64, page_size=4), []
    for run in runs:
        state, chunk = nv.prefill(model, state, run)
        chunks.append(chunk)
    return state, chunks


def aged(store: ChunkStore, *keys: str) -> None:
    """Give chunks times of use far apart, the first the oldest."""
    for i, key in enumerate(keys):
        os.utime(store.folder / f"{key}.safetensors", (1000 + i, 1000 + i))


def damage(store: ChunkStore, key: str) -> None:
    path = store.folder / f"{key}.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


def test_what_is_saved_is_loaded(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "a" / "store", 1 << 20)
    state, (chunk,) = filled(model, [1, 2, 3, 4, 5])
    key = store.save(state, chunk)
    assert store.keys() == (key,)
    assert store.size == (store.folder / f"{key}.safetensors").stat().st_size
    other, loaded = store.load(model, nv.init_state(model, num_pages=9, page_size=3), key)
    assert loaded is not None
    assert loaded.token_ids.tolist() == [1, 2, 3, 4, 5]
    nv.check(other)
    assert ChunkStore(store.folder, 1 << 20).keys() == (key,)


def test_a_miss_returns_the_state(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 1 << 20)
    state, (chunk,) = filled(model, [1, 2, 3])
    for asked in ("none", "a.-_", [1, 2, 3], np.array([4])):
        assert store.load(model, state, asked) == (state, None)
    key = store.save(state, chunk)
    (tmp_path / f"{key}.safetensors").unlink()  # as another process's eviction would
    assert store.load(model, state, key) == (state, None)
    assert store.load(model, state, [1, 2, 3]) == (state, None)
    assert store.longest(model, [1, 2, 3]) is None
    assert (store.keys(), store.size) == ((), 0)
    assert store.save(state, chunk) == key
    assert store.longest(model, [1, 2, 3]) == key
    old, state = state, nv.release(state, chunk)
    with pytest.raises(nv.DonatedStateError):
        store.load(model, old, "none")
    with pytest.raises(nv.ReleasedChunkError):
        store.save(state, chunk)


def test_a_key_names_what_is_in_the_file(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 1 << 20)
    state, (chunk, _, longer) = filled(model, [1, 2, 3, 1, 2, 3], [1, 2], [1, 2, 3, 1, 2, 3, 4])
    state, shift = nv.drop(model, state, longer, 1, 4, "shift")
    state, gap = nv.drop(model, state, longer, 1, 4, "gap")
    state, other = nv.drop(model, state, longer, 3, 6, "gap")
    keys = [store.save(state, value) for value in (chunk, longer, shift, gap, other)]
    assert len(set(keys)) == 5
    again, (twin,) = filled(model, [1, 2, 3, 1, 2, 3])
    path = tmp_path / f"{keys[0]}.safetensors"
    written = path.stat().st_ino
    assert store.save(again, twin) == keys[0]
    assert path.stat().st_ino == written  # it was there: not written again
    assert store.save(state, shift) == keys[2]
    half = random_model(SMALL, dtype="bfloat16")
    state, (small,) = filled(half, [1, 2, 3, 1, 2, 3])
    assert store.save(state, small) not in keys


def test_a_lookup_hashes_each_token_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tokens, hashed = ChunkStore(tmp_path, 1 << 20), [i * i % 50 for i in range(60)], list[int]()
    state, chunks = filled(model, *(tokens[:count] for count in range(1, 21)))
    keys = [store.save(state, chunk) for chunk in chunks]

    class Counting:
        def __init__(self, data: Any = b"") -> None:
            self.digest = hashlib.sha256(data)

        def update(self, data: Any) -> None:
            hashed.append(memoryview(data).nbytes)
            self.digest.update(data)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr(stores, "hashlib", SimpleNamespace(sha256=Counting))
    assert store._candidates(model, np.array(tokens, np.int32), model.dtype) == keys[::-1]
    assert sum(hashed) == 4 * 20
    for count in (1, 7, 19):
        assert store._candidates(model, np.array(tokens[:count], np.int32), model.dtype) == keys[:count][::-1]


def test_a_given_key_is_replaced(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 1 << 20)
    state, (one, two) = filled(model, [1, 2, 3], [4, 5])
    assert store.save(state, one, "system-prompt.v1") == store.save(state, two, "system-prompt.v1") == "system-prompt.v1"
    state, loaded = store.load(model, state, "system-prompt.v1")
    assert loaded is not None
    assert loaded.token_ids.tolist() == [4, 5]
    assert store.longest(model, [1, 2, 3]) is None
    wrong: Any
    for wrong in ("", "../x", "a/b", ".hidden", "a" * 129, "a\n"):
        with pytest.raises(nv.InvalidRequestError, match="key="):
            store.save(state, one, wrong)
    assert store.keys() == ("system-prompt.v1",)


def test_the_longest_exact_prefix(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 1 << 20)
    state, chunks = filled(model, [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 9])
    two, four, six, _ = [store.save(state, chunk) for chunk in chunks]
    state, mixed = nv.compose(model, state, [chunks[1], chunks[0]])
    store.save(state, mixed)
    assert store.longest(model, [1, 2, 3, 4, 5, 6, 7]) == six
    assert store.longest(model, [1, 2, 3, 4, 1, 2]) == four
    assert store.longest(model, np.array([1, 2])) == two
    assert store.longest(model, [1]) is None
    assert store.longest(random_model(SMALL, seed=1), [1, 2, 3]) is None
    with pytest.raises(nv.InvalidRequestError):
        store.longest(model, [50])
    state, loaded = store.load(model, state, [1, 2, 3, 4, 5])
    assert loaded is not None
    assert len(loaded) == 4
    nv.check(state)


def test_what_does_not_fit_is_passed_over(model: Model, tmp_path: Path) -> None:
    tokens, store = [i % 50 for i in range(70)], ChunkStore(tmp_path, 1 << 20)
    state, chunks = filled(model, tokens[:67], tokens[:7], tokens[:4])
    keys = [store.save(state, chunk) for chunk in chunks]
    small = nv.init_state(model, num_pages=4, page_size=4)
    small, seven = store.load(model, small, tokens)
    assert seven is not None and len(seven) == 7
    with pytest.raises(nv.InvalidRequestError, match="67 tokens"):
        store.load(model, small, keys[0])
    small, _ = nv.prefill(model, small, [9] * 5)  # all four pages belong to chunks now
    small, again = store.load(model, small, tokens)  # seven tokens would share one page and need another
    assert again is not None and len(again) == 4
    nv.check(small)


def test_what_the_shortest_lacks_is_told(model: Model, tmp_path: Path) -> None:
    tokens, store = [i % 50 for i in range(70)], ChunkStore(tmp_path, 1 << 20)
    state, (long, short) = filled(model, tokens[:67], tokens[:3])
    key = store.save(state, long)
    small = nv.init_state(model, num_pages=4, page_size=4)
    with pytest.raises(nv.InvalidRequestError, match="67 tokens"):
        store.load(model, small, tokens)
    store.save(state, short)
    small, full = nv.prefill(model, small, [9] * 16)
    with pytest.raises(nv.OutOfPagesError):
        store.load(model, small, tokens)
    assert store.longest(model, tokens) == key
    small, three = store.load(model, nv.release(small, full), tokens)
    assert three is not None and len(three) == 3
    nv.check(small)


def test_damage_is_reported_and_passed_over(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 1 << 20)
    state, (short, longer) = filled(model, [1, 2], [1, 2, 3, 4])
    two, four = store.save(state, short), store.save(state, longer)
    damage(store, four)
    with pytest.raises(nv.ChunkFileError, match="KV was changed"):
        store.load(model, state, four)
    assert store.longest(model, [1, 2, 3, 4]) == two
    assert store.longest(model, [1, 2, 3, 4], verify=False) == four
    state, loaded = store.load(model, state, [1, 2, 3, 4])
    assert loaded is not None
    assert len(loaded) == 2
    assert store.save(state, longer) == four  # a damaged file is written anew
    assert store.longest(model, [1, 2, 3, 4]) == four
    path = tmp_path / f"{four}.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert store.longest(model, [1, 2, 3, 4]) == two
    nv.check(state)
    other = random_model(SMALL, seed=1)
    with pytest.raises(nv.ChunkMismatchError, match="another model"):
        store.load(other, nv.init_state(other, num_pages=9, page_size=4), two)


def test_the_least_recently_used_goes_first(model: Model, tmp_path: Path) -> None:
    state, (a, b, c, d) = filled(model, [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4] * 16)
    probe = ChunkStore(tmp_path / "probe", 1 << 20)
    probe.save(state, a)
    store = ChunkStore(tmp_path / "store", 3 * probe.size)
    keys = [store.save(state, chunk) for chunk in (a, b, c)]
    aged(store, *keys)
    assert store.keys() == tuple(reversed(keys))
    state, _ = store.load(model, state, keys[0])
    assert store.save(state, b) == keys[1]  # a save that finds its chunk is a use too
    last = store.save(state, d)  # takes the place of c, and of a
    assert set(store.keys()) == {keys[1], last}
    assert store.size <= store.max_bytes
    assert store.evict(probe.size) == (keys[1], last)
    assert (store.keys(), store.evict(), store.evict(0)) == ((), (), ())
    with pytest.raises(nv.InvalidRequestError, match="bytes on disk"):
        ChunkStore(tmp_path / "store", 100).save(state, a)
    key = store.save(state, a)
    assert (store.discard(key), store.discard(key), store.keys()) == (True, False, ())


def test_a_larger_limit_before(model: Model, tmp_path: Path) -> None:
    state, chunks = filled(model, [1, 2], [3, 4], [5, 6])
    large = ChunkStore(tmp_path, 1 << 20)
    keys = [large.save(state, chunk) for chunk in chunks]
    aged(large, *keys)
    small = ChunkStore(tmp_path, large.size // 3)
    assert small.evict() == (keys[0], keys[1])
    assert large.keys() == (keys[2],)


def test_files_of_others_are_left_alone(model: Model, tmp_path: Path) -> None:
    state, (a, b) = filled(model, [1, 2], [3, 4])
    nv.save_chunk(state, a, tmp_path / "mine.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    store = ChunkStore(tmp_path, 1 << 20)
    store.save(state, b)
    with pytest.raises(nv.ChunkFileError, match="another program made this file"):
        store.save(state, a, "mine")
    assert store.load(model, state, "mine") == (state, None)
    assert store.longest(model, [1, 2]) is None
    store.evict(0)
    assert not store.discard("mine")
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"mine.safetensors", "notes.txt"}


def test_a_damaged_index_is_reported(model: Model, tmp_path: Path) -> None:
    state, (chunk,) = filled(model, [1, 2])
    store = ChunkStore(tmp_path, 1 << 20)
    key = store.save(state, chunk)
    for text in ("{", "[]", '{"a": {}}', '{"a": 1}', (tmp_path / INDEX).read_text().replace(key, "../x")):
        (tmp_path / INDEX).write_text(text)
        for call in (store.keys, store.evict, lambda: store.save(state, chunk), lambda: store.load(model, state, key)):
            with pytest.raises(nv.ChunkFileError, match=INDEX):
                call()
    nv.check(state)
    (tmp_path / INDEX).unlink()
    assert store.keys() == ()
    assert list(tmp_path.glob("*.safetensors"))  # whose they are is not known any more: left alone


def test_what_a_dead_writer_left_is_cleared(model: Model, tmp_path: Path) -> None:
    state, (chunk,) = filled(model, [1, 2])
    store = ChunkStore(tmp_path, 1 << 20)
    for name, age in ((".nanovllm-dead.tmp", 3600), (".nanovllm-new.tmp", 0)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    store.save(state, chunk)
    assert [path.name for path in tmp_path.glob("*.tmp")] + [path.name for path in tmp_path.glob(".*.tmp")] == [".nanovllm-new.tmp"] * 2


def test_bad_arguments_are_named(model: Model, tmp_path: Path, untyped: None) -> None:
    wrong: Any
    for wrong in (0, -1, True, 1.5, None, float("inf"), float("nan"), "1"):
        with pytest.raises(nv.InvalidRequestError, match="max_bytes="):
            ChunkStore(tmp_path, wrong)
    with pytest.raises(nv.InvalidRequestError, match="max_bytes="):
        ChunkStore(tmp_path, 1).evict(-1)
    for wrong in (None, "~nouserxx/store"):
        with pytest.raises(nv.InvalidRequestError, match="path="):
            ChunkStore(wrong, 1)
    for wrong in ([1], None, 1, b"a"):
        with pytest.raises(nv.InvalidRequestError, match="key="):
            ChunkStore(tmp_path, 1).discard(wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(nv.ChunkFileError, match="/file is a file, but a chunk store needs a folder"):
        ChunkStore(tmp_path / "file", 1)
    with pytest.raises(nv.ChunkFileError, match="/file/below: could not be written: Not a directory"):
        ChunkStore(tmp_path / "file" / "below", 1)
    assert ChunkStore(tmp_path, 1e9) == ChunkStore(tmp_path, 10**9) and isinstance(ChunkStore(tmp_path, 1e9).max_bytes, int)


class StoreMachine(RuleBasedStateMachine):
    """A store against a list of keys in order of use."""

    @initialize(limit=st.integers(1500, 9000))
    def begin(self, limit: int) -> None:
        self.folder = StoreMachine.base / str(time.monotonic_ns())
        self.store = ChunkStore(self.folder, limit)
        self.state, _ = filled(MODEL)
        self.chunks: dict[str, tuple[list[int], int]] = {}  # the oldest first
        self.clock = 1000

    def used(self, key: str) -> None:
        self.chunks[key] = self.chunks.pop(key)
        self.clock += 1
        os.utime(self.folder / f"{key}.safetensors", (self.clock, self.clock))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), key=st.sampled_from([None, "a", "b"]))
    def save(self, tokens: list[int], key: str | None) -> None:
        self.state, chunk = nv.prefill(MODEL, self.state, tokens)
        try:
            found = self.store.save(self.state, chunk, key)
        except nv.InvalidRequestError:
            found = None
        self.state = nv.release(self.state, chunk)
        if found is None:
            return
        size = (self.folder / f"{found}.safetensors").stat().st_size
        self.chunks.pop(found, None) if key else None
        here = self.chunks.pop(found, None)
        while not here and sum(size for _, size in self.chunks.values()) + size > self.store.max_bytes:
            self.chunks.pop(next(iter(self.chunks)))
        self.chunks[found] = (tokens, size)
        self.used(found)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.chunks)))
        self.state, chunk = self.store.load(MODEL, self.state, key)
        assert chunk is not None
        assert chunk.token_ids.tolist() == self.chunks[key][0]
        self.state = nv.release(self.state, chunk)
        self.used(key)

    @rule(limit=st.integers(0, 4000))
    def evict(self, limit: int) -> None:
        gone = []
        while sum(size for _, size in self.chunks.values()) > limit:
            gone.append(next(iter(self.chunks)))
            self.chunks.pop(gone[-1])
        assert self.store.evict(limit) == tuple(gone)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def longest(self, tokens: list[int]) -> None:
        found = self.store.longest(MODEL, tokens)
        best = max((len(ids) for ids, _ in self.chunks.values() if ids == tokens[: len(ids)]), default=0)
        assert (len(self.chunks[found][0]) if found else 0) == best
        assert found is None or tokens[:best] == self.chunks[found][0]

    @invariant()
    def agrees(self) -> None:
        assert self.store.keys() == tuple(reversed(self.chunks))
        assert self.store.size == sum(size for _, size in self.chunks.values()) <= self.store.max_bytes
        assert not list(self.folder.glob(".*.tmp"))
        nv.check(self.state)

    base = Path()


def test_the_store_against_a_list(tmp_path: Path) -> None:
    StoreMachine.base = tmp_path
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=25, stateful_step_count=20))


WORKER = """
import sys, random
import nanovllm as nv
from nanovllm.chunks.storage.store import ChunkStore
from nanovllm.testing.models import random_model, tiny_config
folder, seed, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = random_model(tiny_config(vocab_size=50, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4))
state, store, draw, hits = nv.init_state(model, num_pages=64, page_size=4), ChunkStore(folder, limit), random.Random(seed), 0
for turn in range(150):
    tokens = [draw.randrange(3)] * draw.randrange(1, 12)
    match draw.randrange(4):
        case 0 | 1:
            state, chunk = nv.prefill(model, state, tokens)
            store.save(state, chunk, draw.choice([None, None, "a"]))
            state = nv.release(state, chunk)
        case 2:
            keys = store.keys()
            asked = draw.choice([tokens, draw.choice(keys) if keys else "a"])
            state, chunk = store.load(model, state, asked)
            if chunk is not None:
                hits += 1
                assert isinstance(asked, str) or tokens[: len(chunk)] == chunk.token_ids.tolist()
                state = nv.release(state, chunk)
        case 3:
            store.evict(draw.randrange(limit)) if draw.randrange(4) == 0 else store.longest(model, tokens)
nv.check(state)
print(hits)
"""


def test_three_processes_at_once(model: Model, tmp_path: Path) -> None:
    limit = 8000
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(seed), str(limit)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for seed in range(3)
    ]
    for worker in workers:
        out, err = worker.communicate(timeout=600)
        assert worker.returncode == 0, err
        assert int(out) > 0
    store = ChunkStore(tmp_path, limit)
    keys = store.keys()
    assert 0 < store.size <= limit
    times = [(tmp_path / f"{key}.safetensors").stat().st_mtime_ns for key in keys]
    assert all(later >= earlier for later, earlier in pairwise(times))
    files = {path.stem for path in tmp_path.glob("*.safetensors")}
    assert files == set(keys)  # nothing is there that nobody owns
    state = nv.init_state(model, num_pages=64, page_size=4)
    for key in keys:
        state, chunk = store.load(model, state, key)
        assert chunk is not None
    nv.check(state)


def test_a_saver_that_is_killed_leaves_the_store_whole(model: Model, tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER.replace("range(150)", "range(10**6)"), str(tmp_path), "0", "8000"], stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while not (tmp_path / INDEX).exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)
    worker.kill()
    worker.wait()
    store, (state, (chunk,)) = ChunkStore(tmp_path, 8000), filled(model, [7, 7, 7])
    key = store.save(state, chunk)
    keys = store.keys()
    for each in keys:
        state, loaded = store.load(model, state, each)
        assert loaded is not None
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == set(keys) >= {key}
    nv.check(state)


def test_a_text_is_looked_up_as_a_prompt(tmp_path: Path, untyped: None) -> None:
    model, store = random_model(tiny_config()), ChunkStore(tmp_path, 1 << 20)
    state, chunk = nv.prefill(model, nv.init_state(model, num_pages=8), "hello")
    key = store.save(state, chunk)
    assert store.longest(model, "hello world") == store.longest(model, chunk.token_ids) == key
    assert store.longest(model, "other") is None
    state, found = store.load(model, state, key)
    assert found is not None
    assert store.load(model, state, "hello")[1] is None  # no such key
    wrong: Any
    for wrong in ("hello world", "", "../none", ".hidden", "a" * 129):
        with pytest.raises(nv.InvalidRequestError, match=r"^key_or_tokens='.* must be a key of 1 to 128 letters.*longest\(model, text\)"):
            store.load(model, state, wrong)
    for wrong in (None, 3, {}, chunk):
        with pytest.raises(nv.InvalidRequestError, match=r"^key_or_tokens=.* must be a key or token ids$"):
            store.load(model, state, wrong)
        with pytest.raises(nv.InvalidRequestError, match=r"^tokens=.* must be a text or token ids$"):
            store.longest(model, wrong)
    with pytest.raises(nv.InvalidRequestError, match=r"^model='tiny' must be a Model"):
        store.longest(cast(Any, "tiny"), "hello")
    with pytest.raises(nv.InvalidRequestError, match="no tokenizer"):
        store.longest(random_model(tiny_config(vocab_size=50)), "hello")
    nv.check(state)
