"""Chunks in files: what comes back is what was saved, any change is refused with its reason, and a refusal changes nothing."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import nanovllm as nv
from nanovllm.chunks.storage import blocks
from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.testing.models import random_model, tiny_config

GREEDY = nv.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SHAPE = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4}
SMALL = tiny_config(**SHAPE)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(tiny_config(vocab_size=50))


@pytest.fixture(scope="module")
def small() -> Model:
    return random_model(SMALL)


def bits(state: EngineState, chunk: Chunk) -> torch.Tensor:
    """KV of a chunk's tokens, [L, T, 2, K, D], as integers."""
    (pool,), size, at = state.kv.pools, state.config.page_size, np.arange(len(chunk))
    pages = torch.from_numpy(chunk.pages.array()[at // size].astype(np.int64))
    found = pool.permute(0, 1, 4, 2, 3, 5)[:, pages, torch.from_numpy(at % size)].clone()
    return found.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.itemsize])


def filled(model: Model, tokens: list[int], page_size: int = 4, num_pages: int = 32) -> tuple[EngineState, Chunk]:
    return nv.prefill(model, nv.init_state(model, num_pages=num_pages, page_size=page_size), tokens)


def saved(model: Model, path: Path, tokens: list[int]) -> bytes:
    state, chunk = filled(model, tokens)
    nv.save_chunk(state, chunk, path)
    return path.read_bytes()


def refused(model: Model, state: EngineState, path: Path, why: str, kind: type[Exception] = nv.ChunkFileError) -> None:
    """The file is refused by name and reason, and the state is what it was."""
    pool, chunks, stats = state.pool, state.chunks, state.stats
    with pytest.raises(kind, match=why) as caught:
        nv.load_chunk(model, state, path)
    assert str(path) in str(caught.value) and type(caught.value) is kind
    nv.check(state)
    assert (state.pool, state.chunks, state.stats) == (pool, chunks, stats)


DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
MODELS = {dtype: random_model(tiny_config(vocab_size=50), dtype=dtype) for dtype in ("float32", "bfloat16", "float16", "float64")}


@given(
    tokens=st.lists(st.integers(0, 49), min_size=1, max_size=40),
    sizes=st.tuples(st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 2, 5, 16])),
    dtype=DTYPES,
    kind=st.sampled_from(["exact", "gap", "shift", "composed", "cut"]),
    data=st.data(),
)
@settings(max_examples=80)
@pytest.mark.unhooked  # the hook makes eighty engines five times as slow
def test_what_comes_back_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], sizes: tuple[int, int], dtype: str, kind: str, data: st.DataObject
) -> None:
    path, model = tmp_path_factory.getbasetemp() / "round.safetensors", MODELS[dtype]
    state, chunk = filled(model, tokens, sizes[0], 128)
    match kind:
        case "gap" | "shift":
            for _ in range(2):
                if len(chunk) > 2:
                    start = data.draw(st.integers(0, len(chunk) - 2))
                    stop = data.draw(st.integers(start + 1, len(chunk) - (start == 0)))
                    state, chunk = nv.drop(model, state, chunk, start, stop, kind)
        case "composed":
            state, chunk = nv.compose(model, state, [chunk, chunk])
        case "cut":
            state, chunk = nv.truncate(state, chunk, (len(chunk) + 1) // 2)
    nv.save_chunk(state, chunk, path)
    other = nv.init_state(model, num_pages=128, page_size=sizes[1])
    other, loaded = nv.load_chunk(model, other, path)
    nv.check(other)
    assert torch.equal(bits(other, loaded), bits(state, chunk))
    assert loaded.token_ids.tolist() == chunk.token_ids.tolist()
    assert loaded.positions.tolist() == chunk.positions.tolist()
    assert (loaded.gaps, loaded.provenance, loaded.num_exact) == (chunk.gaps, chunk.provenance, chunk.num_exact)
    assert other.stats == nv.Stats(reused_tokens=len(chunk))
    state, one = nv.generate(model, state, [chunk, [7]], GREEDY)
    other, two = nv.generate(model, other, [loaded, [7]], GREEDY)
    assert one.token_ids == two.token_ids
    nv.check(other)


@pytest.mark.parametrize("block", [64, 1000])
def test_many_windows(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    monkeypatch.setattr(blocks, "WINDOW", 2)
    tokens = [i % 50 for i in range(101)]
    state, chunk = filled(model, tokens)
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    other, loaded = nv.load_chunk(model, nv.init_state(model, num_pages=40, page_size=3), tmp_path / "chunk")
    assert torch.equal(bits(other, loaded), bits(state, chunk))
    raw = bytearray((tmp_path / "chunk").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "chunk").write_bytes(raw)
    refused(model, other, tmp_path / "chunk", "KV was changed")


def test_the_file_is_plain_safetensors(model: Model, tmp_path: Path) -> None:
    state, chunk = filled(model, list(range(10)))
    path = tmp_path / "chunk.safetensors"
    nv.save_chunk(state, chunk, path)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("kv").view(torch.int32), bits(state, chunk))
        assert file.get_tensor("tokens").tolist() == file.get_tensor("positions").tolist() == list(range(10))
        about = file.metadata()
    assert about["format"] == "nanovllm-chunk"
    assert about["fingerprint"] == model.fingerprint
    assert (about["page_size"], about["num_exact"], about["provenance"], about["key_form"]) == ("4", "10", "[]", "rotated")
    assert json.loads(about["rope"])["theta"] == model.config.rope.theta
    assert list(tmp_path.iterdir()) == [path]


def test_a_loaded_prefix_is_found_by_its_tokens_and_finds_itself(model: Model, tmp_path: Path) -> None:
    tokens = list(range(18))
    saved(model, tmp_path / "chunk", tokens)
    state = nv.init_state(model, num_pages=32, page_size=4)
    state, short = nv.prefill(model, state, tokens[:9])
    ran = state.stats
    state, loaded = nv.load_chunk(model, state, tmp_path / "chunk")
    assert loaded.pages.array()[:2].tolist() == short.pages.array()[:2].tolist()
    assert state.pool.num_available == 32 - 3 - 3
    state, again = nv.load_chunk(model, state, tmp_path / "chunk")
    assert state.pool.num_available == 32 - 3 - 3 - 1  # the partly filled page alone
    assert torch.equal(bits(state, again), bits(state, loaded))
    assert state.stats.reused_tokens - ran.reused_tokens == 2 * len(tokens)
    assert state.stats.prefill_tokens == ran.prefill_tokens
    state, _ = nv.generate(model, state, tokens, GREEDY)
    assert state.stats.prefill_tokens - ran.prefill_tokens == 2
    for chunk in (short, loaded, again):
        state = nv.release(state, chunk)
    nv.check(state)


def test_shared_pages_are_not_written(model: Model, tmp_path: Path) -> None:
    """The KV in memory is marked, so that a second write of the same values shows."""
    tokens = list(range(10))
    saved(model, tmp_path / "chunk", tokens)
    state, chunk = filled(model, tokens[:8])
    shared = list(chunk.pages)
    state.kv.pools[0][:, shared] = 7.0
    state, loaded = nv.load_chunk(model, state, tmp_path / "chunk")
    assert list(loaded.pages)[:2] == shared
    assert (state.kv.pools[0][:, shared] == 7.0).all() and not (state.kv.pools[0][:, loaded.pages[2]] == 7.0).any()


def test_approximate_pages_are_not_found(model: Model, tmp_path: Path) -> None:
    state, chunk = filled(model, list(range(12)))
    state, both = nv.compose(model, state, [chunk, chunk])
    nv.save_chunk(state, both, tmp_path / "chunk")
    state = nv.init_state(model, num_pages=32, page_size=4)
    state, loaded = nv.load_chunk(model, state, tmp_path / "chunk")
    before = state.stats.reused_tokens
    state, _ = nv.prefill(model, state, loaded.token_ids.tolist())
    assert state.stats.reused_tokens - before == 12
    nv.check(state)


def test_every_changed_byte_is_refused(small: Model, tmp_path: Path) -> None:
    path, tokens = tmp_path / "chunk", [1, 2, 3]
    raw = saved(small, path, tokens)
    state = nv.init_state(small, num_pages=8, page_size=4)
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])
        with pytest.raises(nv.ChunkFileError):
            nv.load_chunk(small, state, path)
    nv.check(state)
    path.write_bytes(raw)
    state, loaded = nv.load_chunk(small, state, path)
    assert loaded.token_ids.tolist() == tokens


def test_every_truncation_is_refused(small: Model, tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    raw = saved(small, path, [1, 2, 3])
    state = nv.init_state(small, num_pages=8, page_size=4)
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(nv.ChunkFileError):
            nv.load_chunk(small, state, path)
    for more in (b"\0", raw):
        path.write_bytes(raw + more)
        refused(small, state, path, "too long")
    path.write_bytes(raw)
    nv.load_chunk(small, state, path)


def forged(raw: bytes, change: Any = None, tokens: list[int] | None = None, positions: list[int] | None = None) -> bytes:
    """A file whose digests are right and whose head is not: `change` edits the header's dictionary."""
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    count = header["tokens"]["shape"][0]
    for place, ids in ((0, tokens), (4 * count, positions)):
        if ids is not None:
            data[place : place + 4 * count] = np.array(ids, "<i4").tobytes()
    if change:
        change(header)
    if header["__metadata__"]:
        header["__metadata__"]["sha256"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    plain = len(text).to_bytes(8, "little") + text + bytes(data[: 8 * count])
    head = plain.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + hashlib.sha256(plain).hexdigest().encode())
    return head + bytes(data[8 * count :])


def meta(**changes: str) -> Any:
    return lambda header: header["__metadata__"].update(changes)


FORGERIES = {
    "another version": (meta(version="2"), "version is '2'"),
    "another format": (meta(format="pt"), "not a chunk file"),
    "another model": (
        meta(fingerprint="f" * 64),
        r"another model, or of other weights \(quantization\): .* 'f{12}\.\.\.f{13}', this model's is '\w+\.\.\.\w+'$",
    ),
    "another rope": (lambda h: meta(rope=h["__metadata__"]["rope"].replace("10000.0", "500.0"))(h), "keys were rotated"),
    "no rope": (meta(rope="[1]"), "metadata"),
    "key form": (meta(key_form="plain"), "header differs"),
    "num_exact above": (meta(num_exact="6"), "num_exact=6"),
    "num_exact below": (meta(num_exact="-1"), "num_exact=-1"),
    "num_exact no number": (meta(num_exact="x"), "metadata"),
    "a label that lies": (meta(num_exact="3"), "num_exact=3"),
    "another label that lies": (meta(provenance='["composed"]'), "num_exact=5"),
    "page size": (meta(page_size="0"), "page_size=0"),
    "page size written oddly": (meta(page_size="04"), "header differs"),
    "more metadata": (meta(more=""), "header differs"),
    "metadata without an entry": (lambda h: h["__metadata__"].pop("num_exact"), "num_exact"),
    "no metadata at all": (lambda h: h["__metadata__"].clear(), "not a chunk file"),
    "digest of the KV": (meta(kv_sha256="0" * 64), "KV was changed"),
    "another tensor": (lambda h: h.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), "header differs"),
    "no kv": (lambda h: h.pop("kv"), "kv has dtype None"),
    "kv of integers": (lambda h: h["kv"].update(dtype="I32"), "dtype 'I32'"),
    "kv without axes": (lambda h: h["kv"].update(shape=[]), "shape \\[\\]"),
    "negative shape": (lambda h: h["kv"].update(shape=[-2, -5, 2, 1, 4]), "shape"),
    "huge shape": (lambda h: h["kv"].update(shape=[2**30, 2**30, 2, 2**30, 2**30]), "truncated"),
    "heads for layers": (lambda h: h["kv"].update(shape=[1, 5, 2, 2, 4]), "kv has shape"),
    "offsets": (lambda h: h["kv"].update(data_offsets=[0, 360]), "header differs"),
    "fewer tokens": (lambda h: h["tokens"].update(shape=[4]), "header differs"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_head_that_does_not_fit_is_refused(small: Model, tmp_path: Path, name: str) -> None:
    path, (change, why) = tmp_path / "chunk", FORGERIES[name]
    raw = saved(small, path, [1, 2, 3, 4, 5])
    assert forged(raw) == raw
    state = nv.init_state(small, num_pages=8, page_size=4)
    path.write_bytes(forged(raw, change))
    refused(small, state, path, why, nv.ChunkMismatchError if name in ("another model", "another rope") else nv.ChunkFileError)
    path.write_bytes(raw)
    state, _ = nv.load_chunk(small, state, path)
    nv.check(state)


def sparse(raw: bytes, path: Path, num_tokens: int) -> int:
    """Write a file that stores its header alone and claims so many tokens. Returns the size that it claims."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    layers, _, two, heads, dim = header["kv"]["shape"]
    size = 4 * layers * num_tokens * two * heads * dim
    for name, shape, start, count in (
        ("tokens", [num_tokens], 0, 4 * num_tokens),
        ("positions", [num_tokens], 4 * num_tokens, 4 * num_tokens),
        ("kv", [layers, num_tokens, two, heads, dim], 8 * num_tokens, size),
    ):
        header[name] |= {"shape": shape, "data_offsets": [start, start + count]}
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    whole = 8 + len(text) + 8 * num_tokens + size
    os.truncate(path, whole)
    return whole


@pytest.mark.parametrize("holes", [True, False], ids=["holes are told", "holes are not told"])
@pytest.mark.parametrize("num_tokens", [512, 513, 1 << 28])
def test_what_a_sparse_file_claims_is_not_read(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int, holes: bool
) -> None:
    assert small.config.max_position_embeddings == 512
    store, read, pread = nv.ChunkStore(tmp_path, 1 << 50), [0], os.pread
    state, chunk = filled(small, [1, 2, 3])
    key = store.save(state, chunk, "key")
    path = tmp_path / f"{key}.safetensors"
    raw = path.read_bytes()
    if not holes:
        monkeypatch.setattr(chunk_format, "_first_hole", lambda fd: math.inf)

    def counted(fd: int, count: int, offset: int) -> bytes:
        read[0] += count
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    whole = sparse(raw, path, num_tokens)
    if num_tokens > 512:
        refused(small, state, path, rf"its kv has shape \[2, {num_tokens}, 2, 1, 4\], but the model needs \[2, 512, 2, 1, 4\]")
    elif holes:
        refused(small, state, path, f"sparse: its header claims {whole} bytes, but only [0-9]+ are stored")
    else:
        refused(small, state, path, "its head was changed")
    assert store.longest(small, [1, 2, 3, 4]) is None
    assert store.load(small, state, [1, 2, 3, 4]) == (state, None)
    assert read[0] < 3 * (4096 + 8 * 512 * (not holes))
    read[0] = 0
    assert store.save(state, chunk) != key  # it has a name of its own
    assert not store._whole(key, chunk_file.head_of(state, chunk))
    assert read[0] < 4096
    path.write_bytes(raw)
    assert store.longest(small, [1, 2, 3, 4]) is not None


def test_a_file_whose_zeros_are_holes_is_loaded(tmp_path: Path) -> None:
    small = random_model(tiny_config(**SHAPE, max_position_embeddings=2048))
    state, chunk = filled(small, [0] * 1900, 16, 128)
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    raw = (tmp_path / "chunk").read_bytes()
    with (tmp_path / "copy").open("wb") as file:
        for start in range(0, len(raw), 512):
            part = raw[start : start + 512]
            file.write(part) if any(part) else file.seek(len(part), os.SEEK_CUR)
    nv.load_chunk(small, nv.init_state(small, num_pages=128, page_size=16), tmp_path / "copy")


@pytest.mark.parametrize(
    ("tokens", "positions", "why"),
    [
        ([1, 2, 50, 4, 5], None, "token id 50"),
        ([1, 2, -1, 4, 5], None, "token id -1"),
        (None, [0, 1, 2, 2, 3], "positions do not ascend"),
        (None, [-1, 0, 1, 2, 3], "positions do not ascend"),
        (None, [0, 1, 2, 3, -(2**31)], "positions do not ascend"),
        (None, [0, 1, 2, 3, 5], "num_exact"),
    ],
)
def test_ids_that_do_not_fit_are_refused(
    small: Model, tmp_path: Path, tokens: list[int] | None, positions: list[int] | None, why: str
) -> None:
    raw = saved(small, tmp_path / "chunk", [1, 2, 3, 4, 5])
    (tmp_path / "chunk").write_bytes(forged(raw, tokens=tokens, positions=positions))
    refused(small, nv.init_state(small, num_pages=8, page_size=4), tmp_path / "chunk", why)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes"),
        (b"12345678", "header claims"),
        ((2**20 + 1).to_bytes(8, "little") + b" " * 2**20, "claims 1048577 bytes"),
        ((9).to_bytes(8, "little") + b"{", "truncated"),
        ((2).to_bytes(8, "little") + b"{}", "not a chunk file"),
        ((2).to_bytes(8, "little") + b"[]", "not a chunk file"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "not JSON"),
        ((100000).to_bytes(8, "little") + b"[" * 100000, "not JSON"),
    ],
)
def test_what_is_no_chunk_file_is_refused(small: Model, tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "chunk").write_bytes(data)
    refused(small, nv.init_state(small, num_pages=8, page_size=4), tmp_path / "chunk", why)


def test_what_is_no_file_is_refused(small: Model, tmp_path: Path) -> None:
    state = nv.init_state(small, num_pages=8, page_size=4)
    os.mkfifo(tmp_path / "fifo")
    refused(small, state, tmp_path / "fifo", "not a regular file")
    refused(small, state, tmp_path, "not a regular file")
    refused(small, state, tmp_path / "none", "No such file")
    refused(small, state, tmp_path / "none" / "none", "No such file")


def test_another_models_file_is_refused(small: Model, tmp_path: Path) -> None:
    saved(small, tmp_path / "chunk", [1, 2, 3])
    for other, why in ((random_model(SMALL, seed=1), "another model"), (random_model(SMALL, dtype="bfloat16"), "dtype is torch.float32")):
        state = nv.init_state(other, num_pages=8, page_size=4)
        refused(other, state, tmp_path / "chunk", why, nv.ChunkMismatchError)
        nv.generate(other, state, [1, 2], GREEDY)


def test_what_does_not_fit_is_refused(small: Model, tmp_path: Path) -> None:
    saved(small, tmp_path / "chunk", list(range(20)))
    state = nv.init_state(small, num_pages=4, page_size=4)
    with pytest.raises(nv.InvalidRequestError, match="at most 16"):
        nv.load_chunk(small, state, tmp_path / "chunk")
    short = nv.init_state(small, num_pages=8, page_size=4, max_model_len=19)
    with pytest.raises(nv.InvalidRequestError, match="at most 19"):
        nv.load_chunk(small, short, tmp_path / "chunk")
    state = nv.init_state(small, num_pages=6, page_size=4)
    state, held = nv.prefill(small, state, [40] * 8)
    with pytest.raises(nv.OutOfPagesError, match="the chunk needs 5 pages; 4 of"):
        nv.load_chunk(small, state, tmp_path / "chunk")
    nv.check(state)
    state = nv.release(state, held)
    state, _ = nv.load_chunk(small, state, tmp_path / "chunk")
    nv.check(state)
    state, chunk = filled(small, list(range(20)))
    state, cut = nv.drop(small, state, chunk, 2, 12, "gap")
    nv.save_chunk(state, cut, tmp_path / "gap")
    with pytest.raises(nv.InvalidRequestError, match="at most 9"):
        nv.load_chunk(small, short, tmp_path / "gap")


def test_a_damaged_file_takes_nothing_from_the_index(small: Model, tmp_path: Path) -> None:
    raw = saved(small, tmp_path / "chunk", list(range(20)))
    (tmp_path / "chunk").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    state = nv.init_state(small, num_pages=6, page_size=4)
    prompt = list(range(30, 46))
    state, chunk = nv.prefill(small, state, prompt)
    state = nv.release(state, chunk)
    refused(small, state, tmp_path / "chunk", "KV was changed")
    before = state.stats.reused_tokens
    state, chunk = nv.prefill(small, state, prompt)
    assert state.stats.reused_tokens - before == 16
    state = nv.release(state, chunk)
    (tmp_path / "chunk").write_bytes(raw)
    state, loaded = nv.load_chunk(small, state, tmp_path / "chunk")  # now it evicts
    assert loaded.token_ids.tolist() == list(range(20))
    nv.check(state)


def test_a_failure_between_windows_leaves_the_old_state(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, chunk = filled(model, list(range(20)))
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    state = nv.release(state, chunk)
    state, other = nv.prefill(model, state, [49] * 124)  # evicts all but this
    state = nv.release(state, other)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.ops.kv_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            nv.load_chunk(model, state, tmp_path / "chunk")
    nv.check(state)
    state, loaded = nv.load_chunk(model, state, tmp_path / "chunk")
    nv.check(state)
    assert loaded.token_ids.tolist() == list(range(20))


def test_a_chunk_that_cannot_be_used_is_not_saved(small: Model, tmp_path: Path) -> None:
    state, chunk = filled(small, [1, 2, 3])
    _, foreign = filled(small, [1, 2, 3])
    with pytest.raises(nv.ForeignChunkError):
        nv.save_chunk(state, foreign, tmp_path / "chunk")
    old, state = state, nv.release(state, chunk)
    with pytest.raises(nv.ReleasedChunkError):
        nv.save_chunk(state, chunk, tmp_path / "chunk")
    with pytest.raises(nv.DonatedStateError):
        nv.save_chunk(old, chunk, tmp_path / "chunk")
    with pytest.raises(nv.DonatedStateError):
        nv.load_chunk(small, old, tmp_path / "chunk")
    assert not list(tmp_path.iterdir())


def test_a_bad_path_is_named(small: Model, tmp_path: Path, untyped: None) -> None:
    state, chunk = filled(small, [1, 2, 3])
    wrong: Any
    for wrong in (None, 3, "", "a\0b", "~nouserxx/a", Path("~nouserxx/a")):
        with pytest.raises(nv.InvalidRequestError, match=f"path={re.escape(repr(wrong))}"):
            nv.save_chunk(state, chunk, wrong)
        with pytest.raises(nv.InvalidRequestError, match=f"path={re.escape(repr(wrong))}"):
            nv.load_chunk(small, state, wrong)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = saved(small, tmp_path / "chunk", [1, 2, 3])
    state, chunk = filled(small, [4, 5, 6])
    at = re.escape(str(tmp_path))
    with pytest.raises(nv.ChunkFileError, match=f"^{at}/none/chunk: could not be written: No such file or directory$"):
        nv.save_chunk(state, chunk, tmp_path / "none" / "chunk")
    (tmp_path / "folder").mkdir()
    with pytest.raises(nv.ChunkFileError, match=f"^{at}/folder: could not be written: Is a directory$"):
        nv.save_chunk(state, chunk, tmp_path / "folder")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("pwrite", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(nv.ChunkFileError, match="No space"):
                nv.save_chunk(state, chunk, tmp_path / "chunk")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunk", "folder"]
    assert (tmp_path / "chunk").read_bytes() == raw
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    assert (tmp_path / "chunk").read_bytes() != raw


WRITER = """
import sys, time
import nanovllm as nv
from nanovllm.chunks.storage import blocks, format as chunk_format
from nanovllm.testing.models import random_model, tiny_config
model = random_model(tiny_config(vocab_size=50, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4))
state, chunk = nv.prefill(model, nv.init_state(model, num_pages=8, page_size=4), [9, 8, 7, 6])
whole = chunk_format.encode
def slow(head):
    if head.kv_sha256 != chunk_format.UNKNOWN:  # the KV is written, the head is not
        print("here", flush=True)
        time.sleep(600)
    return whole(head)
blocks.encode = slow
nv.save_chunk(state, chunk, sys.argv[1])
"""


def test_a_writer_that_is_killed_leaves_the_old_file(small: Model, tmp_path: Path) -> None:
    raw = saved(small, tmp_path / "chunk", [1, 2, 3])
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "chunk")], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout as out:
        assert out.readline() == "here\n"
    writer.kill()
    writer.wait()
    assert (tmp_path / "chunk").read_bytes() == raw
    state, _ = nv.load_chunk(small, nv.init_state(small, num_pages=8, page_size=4), tmp_path / "chunk")
    (left,) = [path for path in tmp_path.iterdir() if path.name != "chunk"]
    refused(small, state, left, "not")


def test_reading_while_the_file_is_replaced(small: Model, tmp_path: Path) -> None:
    """A reader gets one of the chunks, whole."""
    state, chunk = filled(small, [1, 2, 3])
    other, longer = filled(small, list(range(20)))
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            nv.save_chunk(other, longer, tmp_path / "chunk")
            nv.save_chunk(state, chunk, tmp_path / "chunk")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        reader, seen, until = nv.init_state(small, num_pages=8, page_size=4), set(), time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < until:
            reader, loaded = nv.load_chunk(small, reader, tmp_path / "chunk")
            seen.add(len(loaded))
            reader = nv.release(reader, loaded)
    finally:
        stop.set()
        thread.join()
    assert seen == {3, 20}


def test_host_memory_does_not_grow_with_the_chunk(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 1024)
    made: list[int] = []
    stages = blocks._stages

    def counted(head: chunk_format.Head, device: torch.device) -> list[torch.Tensor]:
        found = stages(head, device)
        made.append(sum(stage.nbytes for stage in found))
        return found

    monkeypatch.setattr(blocks, "_stages", counted)
    state, chunk = filled(model, [i % 50 for i in range(500)], num_pages=128)
    nv.save_chunk(state, chunk, tmp_path / "chunk")
    nv.load_chunk(model, nv.init_state(model, num_pages=128, page_size=4), tmp_path / "chunk")
    assert made == [3 * 16 * 1024] * 2
    assert (tmp_path / "chunk").stat().st_size > 4 * made[0]
