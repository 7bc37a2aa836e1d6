"""The bytes of a chunk file: a head that describes the content, KV in blocks, and digests of all bytes.

A file is plain safetensors (github.com/huggingface/safetensors#format), little-endian. Its tensors are `tokens` I32 `[T]`, `positions`
I32 `[T]` and, last, `kv` `[L, T, 2, K, D]`. The tokens are in order, whatever pages held them; axis 2 is keys, values. A row is one token
in one layer. KV in FP8 is U8 `[L, T, 2, K, D + 4]`: the D codes of a head in e4m3, then its scale in float32. KV is divided into blocks of
whole rows, at most 2 MiB each.

The metadata has two digests. `kv_sha256` is the SHA-256 of the concatenated SHA-256s of the blocks. `sha256` is that of everything before
the KV, with its own digits replaced by zeros. They detect accidents, not forgery: anybody who can write a file can compute both.
"""

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from nanovllm.errors import ChunkFileError, ChunkMismatchError
from nanovllm.ops.kv_cache.fp8 import FP8, stored_width
from nanovllm.state.chunk import Gaps, Provenance
from nanovllm.types import FLOATS

FORMAT, VERSION, KEY_FORM = "nanovllm-chunk", "1", "rotated"


STORED: Mapping[str, torch.dtype] = MappingProxyType({**FLOATS, "U8": FP8})  # KV dtypes by the codes of safetensors
CODES = MappingProxyType({dtype: code for code, dtype in STORED.items()})


MAX_HEADER = 1 << 20  # the largest JSON header that is read, in bytes; `encode` writes smaller ones


UNKNOWN = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """The description of a chunk file: everything except the KV.

    Attributes:
        fingerprint: The model's fingerprint.
        dtype: The KV's dtype.
        shape: The KV's shape `[L, T, 2, K, D]`; in FP8 `[L, T, 2, K, D + 4]`.
        page_size: Tokens per page of the engine that saved the file; readers do not need it.
        rope: The fields of the `RopeConfig` by which the keys were rotated.
        provenance: Whether the KV is exact.
        num_exact: Leading tokens whose KV is exact.
        tokens: int32 `[T]`.
        positions: int32 `[T]`.
        kv_sha256: The digest of the KV, or zeros while it is unknown.
    """

    fingerprint: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    page_size: int
    rope: Mapping[str, Any]
    provenance: Provenance
    num_exact: int
    tokens: np.ndarray
    positions: np.ndarray
    kv_sha256: str = UNKNOWN

    @property
    def head_dim(self) -> int:
        """Channels of a head, without the bytes of a scale."""
        return self.shape[-1] - stored_width(0, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return math.prod(self.shape[2:]) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Rows of the whole KV: layers times tokens."""
        return self.shape[0] * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """The size of the file in bytes."""
        return len(encode(self)) + self.num_rows * self.row_bytes

    @property
    def gaps(self) -> Gaps:
        """Where positions are left out, computed from the positions."""
        offsets = self.positions - np.arange(len(self.positions), dtype=np.int32)
        starts = np.flatnonzero(np.diff(offsets, prepend=np.int32(0)))
        return tuple((int(start), int(offsets[start])) for start in starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outline:
    """What the safetensors header of a chunk file says, before anything after it is read.

    Attributes:
        metadata: The metadata, whose entries are not checked yet but for the format and its version.
        dtype: The KV's dtype.
        shape: The KV's shape, as in `Head`.
        header_len: Bytes of the JSON header.
    """

    metadata: Mapping[str, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]
    header_len: int

    @property
    def num_before(self) -> int:
        """Bytes before the KV."""
        return 8 + self.header_len + 8 * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """The size that the file must have."""
        return self.num_before + math.prod(self.shape) * self.dtype.itemsize


def encode(head: Head) -> bytes:
    """All bytes before the KV."""
    count, place, header = len(head.tokens), 0, {}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": head.fingerprint,
        "key_form": KEY_FORM,
        "rope": json.dumps(dict(head.rope)),
        "page_size": str(head.page_size),
        "provenance": json.dumps(head.provenance.operations),
        "num_exact": str(head.num_exact),
        "kv_sha256": head.kv_sha256,
        "sha256": UNKNOWN,
    }
    for name, code, shape, size in (
        ("tokens", "I32", [count], 4 * count),
        ("positions", "I32", [count], 4 * count),
        ("kv", CODES[head.dtype], list(head.shape), head.num_rows * head.row_bytes),
    ):
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    arrays = (np.ascontiguousarray(array, "<i4").tobytes() for array in (head.tokens, head.positions))
    plain = len(text).to_bytes(8, "little") + text + b"".join(arrays)
    return plain.replace(_entry(UNKNOWN), _entry(hashlib.sha256(plain).hexdigest()), 1)


def decode(fd: int, path: Path, fingerprint: str, most: tuple[int, ...]) -> Head:
    """Read and check the head of an open file.

    All sizes that the file claims are checked before anything of such a size is read.

    Args:
        fd: The file.
        path: Its name, for errors.
        fingerprint: The model's fingerprint.
        most: The shape `[L, T, 2, K, D]` of the KV of the longest chunk, with D channels per head whatever the dtype.

    Raises:
        ChunkMismatchError: The file is of another model.
        ChunkFileError: The file cannot be read, is not a valid chunk file, or has another shape.
    """
    with _refusing(path):
        return _decode(fd, fingerprint, most)


def outline(fd: int, path: Path) -> Outline:
    """Read the safetensors header of an open file and nothing else, and compare what it claims with the size of the file.

    Args:
        fd: The file.
        path: Its name, for errors.

    Raises:
        ChunkFileError: The file cannot be read, is not a chunk file, or has another size.
    """
    with _refusing(path):
        return _outline(fd)


def require_fit(outline: Outline, path: Path, fingerprint: str, most: tuple[int, ...], rope: Mapping[str, Any]) -> None:
    """Require a header of KV of a model. The arguments are those of `decode`, and the fields of the model's `RopeConfig`.

    Raises:
        ChunkMismatchError: The file is of another model, or its keys were rotated in another way.
        ChunkFileError: It has another shape, or its metadata is wrong.
    """
    with _refusing(path):
        _require_fit(outline, fingerprint, most)
        try:
            own = dict(json.loads(outline.metadata["rope"]))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise _RefusedError(f"its metadata is not that of a chunk: {error!r}") from error
        if own != rope:
            raise _OtherModelError(f"its keys were rotated by {reprlib.repr(own)}, but the model rotates by {dict(rope)}")


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn what is wrong with a file into errors that have its name."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise ChunkFileError(f"{path}: could not be read: {error}") from error
    except _OtherModelError as error:
        raise ChunkMismatchError(f"{path}: {error}") from None
    except _RefusedError as error:
        raise ChunkFileError(f"{path}: {error}") from error.__cause__


class _RefusedError(Exception):
    """Why a file is refused; `decode` adds the file's name."""


class _OtherModelError(_RefusedError):
    """The file is of another model."""


def _outline(fd: int) -> Outline:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _RefusedError("not a regular file")
    if status.st_size < 8:
        raise _RefusedError(f"not a safetensors file: it has {status.st_size} bytes")
    length = int.from_bytes(_read(fd, 8, 0), "little")
    if length > MAX_HEADER:
        raise _RefusedError(f"not a chunk file: its header claims {length} bytes, but at most {MAX_HEADER} are allowed")
    if 8 + length > status.st_size:
        raise _RefusedError(f"truncated: its header claims {length} bytes, but the file has {status.st_size}")
    try:
        header = json.loads(_read(fd, length, 8))
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"not a safetensors file: its header is not JSON: {error}") from error
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _RefusedError(f"not a chunk file: its metadata does not say format={FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise _RefusedError(f"its format version is {reprlib.repr(metadata.get('version'))}; this package reads version {VERSION!r}")
    dtype, shape = _kv_layout(header.get("kv"))
    found = Outline(metadata=metadata, dtype=dtype, shape=shape, header_len=length)
    if (whole := found.num_bytes) != status.st_size:
        raise _RefusedError(
            f"{'truncated' if status.st_size < whole else 'too long'}: it has {status.st_size} bytes, but its header claims {whole}"
        )
    return found


def _require_fit(outline: Outline, fingerprint: str, most: tuple[int, ...]) -> None:
    shape, own = outline.shape, outline.metadata.get("fingerprint")
    if own != fingerprint:
        marks = f"its fingerprint is {reprlib.repr(own)}, this model's is {reprlib.repr(fingerprint)}"
        raise _OtherModelError(f"KV of another model, or of other weights (quantization): {marks}")
    most = (*most[:-1], stored_width(most[-1], outline.dtype))
    if shape[1] > most[1] or (shape[0], *shape[2:]) != (most[0], *most[2:]):
        raise _RefusedError(f"its kv has shape {list(shape)}, but the model needs {list(most)}, with {most[1]} tokens or fewer")


def _decode(fd: int, fingerprint: str, most: tuple[int, ...]) -> Head:
    found = _outline(fd)
    _require_fit(found, fingerprint, most)
    metadata, shape, before, whole = found.metadata, found.shape, found.num_before, found.num_bytes
    stored = 512 * os.fstat(fd).st_blocks  # a file that was copied with holes for its zeros has more than half of its bytes
    if 2 * stored < whole and _first_hole(fd) < whole:
        raise _RefusedError(f"sparse: its header claims {whole} bytes, but only {stored} are stored")
    raw = _read(fd, before, 0)
    given = metadata.get("sha256")
    zeroed = raw.replace(_entry(given), _entry(UNKNOWN)) if isinstance(given, str) and len(given) == len(UNKNOWN) else b""
    digest = hashlib.sha256(zeroed).hexdigest()
    if digest != given:
        raise _RefusedError(f"its head was changed: SHA-256 is {digest}, but the file says {given!r}")
    arrays = np.frombuffer(raw, "<i4", offset=8 + found.header_len).astype(np.int32)
    try:
        head = Head(
            fingerprint=metadata["fingerprint"],
            dtype=found.dtype,
            shape=shape,
            page_size=int(metadata["page_size"]),
            rope=MappingProxyType(dict(json.loads(metadata["rope"]))),
            provenance=Provenance(operations=tuple(map(str, json.loads(metadata["provenance"])))),
            num_exact=int(metadata["num_exact"]),
            tokens=arrays[: shape[1]],
            positions=arrays[shape[1] :],
            kv_sha256=metadata["kv_sha256"],
        )
        _require_written_so(head, raw)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _RefusedError(f"its metadata is not that of a chunk: {error!r}") from error
    _check(head)
    return head


def _first_hole(fd: int) -> int | float:
    """Where the first part of a file begins that is not stored; beyond all files if the system does not tell."""
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE)
    except OSError:
        return math.inf


def _require_written_so(head: Head, raw: bytes) -> None:
    """Require the same bytes that `encode` makes, which checks offsets, dtypes, key form and names."""
    if encode(head) != raw:
        raise _RefusedError("its header differs from the header that this version of the format writes")


def _kv_layout(entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if dtype not in STORED or not isinstance(dtype, str):
        raise _RefusedError(f"its kv has dtype {reprlib.repr(dtype)}, expected one of {', '.join(STORED)}")
    if not isinstance(shape, list) or len(shape) != 5 or any(type(n) is not int or not 0 < n < 2**31 for n in shape) or shape[2] != 2:
        raise _RefusedError(f"its kv has shape {reprlib.repr(shape)}, expected [layers, tokens, 2, heads, head_dim]")
    return STORED[dtype], tuple(shape)


def _check(head: Head) -> None:
    count, exact, positions = len(head.tokens), head.num_exact, head.positions
    if not 0 <= exact <= count or head.provenance.exact != (exact == count):
        raise _RefusedError(f"num_exact={exact} does not fit {count} tokens that are {head.provenance}")
    if positions[0] < 0 or (np.diff(positions.astype(np.int64)) <= 0).any():
        raise _RefusedError("its positions do not ascend from 0 or later")
    if exact and positions[exact - 1] != exact - 1:
        raise _RefusedError(f"num_exact={exact} does not fit its positions, which have a gap before that token")
    if head.page_size < 1:
        raise _RefusedError(f"page_size={head.page_size} must be at least 1")


def _entry(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode(errors="replace")


def _read(fd: int, count: int, offset: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) != count:
        raise EOFError("it ends while it is being read")
    return data
