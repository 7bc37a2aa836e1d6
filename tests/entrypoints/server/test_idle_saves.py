"""Which chunk is saved next while there is nothing to do, and when one that failed is tried again."""

from pathlib import Path

import pytest
from immutables import Map

import nanovllm as nv
from nanovllm.entrypoints.server import saved_chunks
from nanovllm.entrypoints.server.idle_saves import RETRY_SECONDS, IdleSaves, Key
from nanovllm.entrypoints.server.named_chunks import ChunkLimits, Named, NamedChunks
from nanovllm.errors import ChunkFileError, ChunkLimitError
from nanovllm.testing.models import random_model, tiny_config


@pytest.fixture
def named(tmp_path: Path) -> NamedChunks:
    """Two chunks, `a` and `b`, without files."""
    model, chunks = random_model(tiny_config()), {}
    state = nv.init_state(model, num_pages=16)
    for number, name in enumerate("ab", 5):
        state, chunk = nv.prefill(model, state, [number, 7, 8])
        chunks[name] = Named(chunk=chunk, created=0)
    return NamedChunks(limits=ChunkLimits(folder=tmp_path, kept=True), spaces=Map({"": Map(chunks)}))


def tried(saves: IdleSaves, named: NamedChunks, error: nv.NanoVLLMError | None) -> str | None:
    """Try the next save, which ends with an error or well. Returns the chunk's name."""
    key: Key | None = saves.next(named)
    if key is None:
        return None
    saves.begin(key)
    saves.end(key, named, error)
    return key[1]


def test_an_error_of_one_chunk_keeps_no_other_waiting(named: NamedChunks, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    saves, full = IdleSaves(lambda: now[0]), ChunkLimitError("there are 4 files")
    assert saves.wait is None
    assert [tried(saves, named, full), tried(saves, named, None), tried(saves, named, None)] == ["a", "b", None]
    assert saves.wait == RETRY_SECONDS
    for _ in range(2):
        now[0] += RETRY_SECONDS
        assert saves.wait == 0.0 and tried(saves, named, full) == "a" and tried(saves, named, full) is None
    assert capsys.readouterr().err.count("there are 4 files") == 1
    now[0] += RETRY_SECONDS
    assert tried(saves, named, None) == "a" and saves.wait is None


def test_an_error_of_the_disk_lets_all_wait_and_is_told_once(named: NamedChunks, capsys: pytest.CaptureFixture[str]) -> None:
    now, full = [0.0], ChunkFileError("no space")
    full.__cause__ = OSError(28, "no space")
    saves = IdleSaves(lambda: now[0])
    for name in ("a", "b", "a"):  # the one that failed waits for the other
        assert tried(saves, named, full) == name and tried(saves, named, None) is None
        now[0] += RETRY_SECONDS
    assert capsys.readouterr().err.count("no space") == 1
    assert [tried(saves, named, None) for _ in range(3)] == ["b", "a", None] and saves.wait is None
    saves.clock = lambda: 1e9
    assert tried(saves, named, None) is None


def test_another_error_after_one_of_the_disk_is_told(named: NamedChunks, capsys: pytest.CaptureFixture[str]) -> None:
    now, full = [0.0], ChunkFileError("no space")
    full.__cause__ = OSError(28, "no space")
    saves = IdleSaves(lambda: now[0])
    for error in (full, full, None, ChunkLimitError("there are 4 files")):
        tried(saves, named, error)
        now[0] += RETRY_SECONDS
    told = capsys.readouterr().err
    assert told.count("no space") == 1 and told.count("there are 4 files") == 1


def test_a_rest_ends_though_the_chunk_that_failed_has_gone(named: NamedChunks) -> None:
    now, full = [0.0], ChunkFileError("no space")
    full.__cause__ = OSError(28, "no space")
    saves = IdleSaves(lambda: now[0])
    assert tried(saves, named, full) == "a"
    left = NamedChunks(limits=named.limits, spaces=Map({"": named.space("").delete("a")}))
    assert saves.next(left) is None and saves.wait == RETRY_SECONDS
    now[0] += RETRY_SECONDS
    assert saves.wait == 0.0 and tried(saves, left, None) == "b" and saves.wait is None


def test_a_chunk_that_a_client_has_saved_is_left_out(named: NamedChunks) -> None:
    path = saved_chunks.path_of(named.limits, "", "a")
    path.parent.mkdir()
    path.touch()
    saved_chunks.mark(path, "a", 0)
    saves = IdleSaves()
    assert [tried(saves, named, None), tried(saves, named, None)] == ["b", None]
