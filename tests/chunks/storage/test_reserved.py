"""A chunk that has its pages before its KV: nobody finds them until they are filled, and then it is the chunk that `load_chunk` makes."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.chunks.storage import blocks, reserved
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.testing.models import random_model, tiny_config

GREEDY = nv.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TOKENS = [number % 47 for number in range(3, 40)]
NAME = Path("king")


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(tiny_config(vocab_size=50))


def file_of(model: Model, folder: Path, tokens: list[int], **options: Any) -> int:
    """An open file with the chunk of some tokens."""
    state, chunk = nv.prefill(model, nv.init_state(model, num_pages=32, page_size=8, **options), tokens)
    nv.save_chunk(state, chunk, folder / f"{len(tokens)}")
    return os.open(folder / f"{len(tokens)}", os.O_RDWR)


def read_in_windows(model: Model, state: EngineState, fd: int, chunk: Chunk, num_before: int = 0) -> EngineState:
    """`fill` in the way of a server of one rank."""
    head = reserved.same_head(model, fd, NAME, chunk)
    with closing(blocks.read_kv(fd, head, NAME, model.device)) as windows:
        for first, rows in windows:
            reserved.put_rows(model, state, head, chunk, first, rows, num_before)
    return reserved.complete(model, state, chunk)


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "fp8"}, {"windows": (6, 0)}, {"windows": (6, 5)}], ids=str)
@pytest.mark.parametrize("fill", [reserved.fill, None], ids=["at once", "in windows"])
def test_a_filled_chunk_is_the_loaded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fill: Any) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 700)
    monkeypatch.setattr(blocks, "WINDOW", 3)
    windows, kv = options.get("windows", ()), {name: value for name, value in options.items() if name != "windows"}
    model = random_model(tiny_config(vocab_size=50, windows=windows))
    fd = file_of(model, tmp_path, TOKENS, **kv)
    limits: dict[str, Any] = {"num_pages": 32, "page_size": 4, **({"num_frames": 32} if windows else {}), **kv}
    state, chunk = reserved.reserve(model, nv.init_state(model, **limits), fd, NAME)
    nv.check(state)
    assert len(chunk) == len(TOKENS) and len(pools.match(state.pool, chunk.token_ids)) == 0  # no request finds it
    assert state.stats.reused_tokens == 0
    state = reserved.fill(model, state, fd, NAME, chunk) if fill else read_in_windows(model, state, fd, chunk)
    nv.check(state)
    other, loaded = nv.load_chunk(model, nv.init_state(model, **limits), tmp_path / f"{len(TOKENS)}")
    assert (repr(chunk), chunk.num_exact, chunk.gaps) == (repr(loaded), loaded.num_exact, loaded.gaps)
    assert len(pools.match(state.pool, chunk.token_ids)) == len(TOKENS) // 4
    nv.save_chunk(state, chunk, tmp_path / "again")
    nv.save_chunk(other, loaded, tmp_path / "other")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "other").read_bytes()
    replies = [nv.generate(model, each, [one, [7, 8]], GREEDY)[1] for each, one in ((state, chunk), (other, loaded))]
    assert replies[0].token_ids == replies[1].token_ids
    os.close(fd)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4, unique=True), order=st.randoms(use_true_random=False))
def test_chunks_that_share_pages_are_filled_in_any_order(
    model: Model, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], order: Any
) -> None:
    folder, state, size = tmp_path_factory.mktemp("chunks"), nv.init_state(model, num_pages=64, page_size=4), 4
    files = {length: file_of(model, folder, TOKENS[: min(length, 20)] + [48] * max(0, length - 20)) for length in lengths}
    chunks, longest = dict[int, Chunk](), max(lengths)
    state, chunks[longest] = reserved.reserve(model, state, files[longest], NAME)
    for length in lengths:
        if length != longest:
            common = min(length, 20) if longest > 20 else length
            state, chunks[length] = reserved.reserve(model, state, files[length], NAME, chunks[longest], common // size)
    nv.check(state)
    left = order.sample(lengths, len(lengths))
    done = list[Chunk]()
    for length in left:
        own = chunks[length].pages.array()
        shared = [int(np.argmin(np.append(own[: len(p)] == p[: len(own)], False))) for p in (one.pages.array() for one in done)]
        state = reserved.fill(model, state, files[length], NAME, chunks[length], max(shared, default=0))
        done.append(chunks[length])
        nv.check(state)
    for length, chunk in chunks.items():
        nv.save_chunk(state, chunk, folder / "again")
        last = [np.frombuffer((folder / name).read_bytes()[-64:], np.float32) for name in ("again", f"{length}")]
        np.testing.assert_allclose(*last, rtol=1e-4, atol=1e-6)  # prompts of other lengths may round differently
        state, reply = nv.generate(model, state, [chunk, [7]], GREEDY)
        fresh = nv.init_state(model, num_pages=64, page_size=4)
        assert reply.token_ids == nv.generate(model, fresh, [*chunk.token_ids.tolist(), 7], GREEDY)[1].token_ids
        os.close(files[length])


@pytest.mark.parametrize("fill", [reserved.fill, None], ids=["at once", "in windows"])
def test_a_damaged_file_leaves_a_chunk_that_can_be_released(model: Model, tmp_path: Path, fill: Any) -> None:
    fd = file_of(model, tmp_path, TOKENS)
    state, chunk = reserved.reserve(model, nv.init_state(model, num_pages=16, page_size=4), fd, NAME)
    end = os.fstat(fd).st_size
    last = os.pread(fd, 1, end - 1)
    os.pwrite(fd, bytes([last[0] ^ 1]), end - 1)
    for _ in range(2):
        with pytest.raises(nv.ChunkFileError, match="king: its KV was changed"):
            reserved.fill(model, state, fd, NAME, chunk) if fill else read_in_windows(model, state, fd, chunk)
    assert len(pools.match(state.pool, chunk.token_ids)) == 0 and len(state.chunks) == 1
    os.pwrite(fd, last, end - 1)
    state = reserved.fill(model, state, fd, NAME, chunk)
    state = nv.release(state, chunk)
    nv.check(state)
    assert state.pool.num_available == 16
    os.close(fd)


def test_a_file_that_was_replaced_by_another_is_refused(model: Model, tmp_path: Path) -> None:
    fd, *others = [file_of(model, tmp_path, tokens) for tokens in (TOKENS, TOKENS[1:], TOKENS[::-1])]
    state, chunk = reserved.reserve(model, nv.init_state(model, num_pages=16, page_size=4), fd, NAME)
    for other in others:
        with pytest.raises(nv.ChunkFileError, match="king: it has another chunk than when its pages were taken"):
            reserved.fill(model, state, other, NAME, chunk)
        os.close(other)
    state = nv.release(state, chunk)
    with pytest.raises(nv.ReleasedChunkError):
        reserved.fill(model, state, fd, NAME, chunk)
    os.close(fd)


def test_what_cannot_be_loaded_gets_no_pages(model: Model, tmp_path: Path) -> None:
    fd = file_of(model, tmp_path, TOKENS)
    full, _ = nv.prefill(model, nv.init_state(model, num_pages=12, page_size=4), [*range(12)])
    with pytest.raises(nv.OutOfPagesError, match="king: the chunk needs 10 pages"):
        reserved.reserve(model, full, fd, NAME)
    nv.check(full)
    small = nv.init_state(model, num_pages=32, page_size=4, max_model_len=20)
    with pytest.raises(nv.InvalidRequestError, match="king: the chunk has 37 tokens"):
        reserved.reserve(model, small, fd, NAME)
    other = nv.init_state(model, num_pages=32, page_size=4, kv_dtype="fp8")
    with pytest.raises(nv.ChunkMismatchError, match=r"king: its KV is torch\.float32"):
        reserved.reserve(model, other, fd, NAME)
    os.ftruncate(fd, os.fstat(fd).st_size - 1)
    with pytest.raises(nv.ChunkFileError, match="king: truncated"):
        reserved.reserve(model, small, fd, NAME)
    nv.check(small)
    assert not small.chunks and not other.chunks
    os.close(fd)
