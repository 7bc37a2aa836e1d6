"""`ChunkStore`: a folder of chunk files with a size limit, least recently used first out, safe for several processes.

What the store made is listed in its index, which changes only under a lock; a file's time of change says when it was last used. Files are
written beside their place and renamed, so a reader needs no lock: it has the old file, the new one, or none.
"""

import hashlib
import json
import os
import reprlib
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.chunks.storage.format import Head
from nanovllm.chunks.storage.store_index import KEYS, Entry, entry_of, read_index, write_index
from nanovllm.engine.donation import enter, enter_with, require_live, require_model
from nanovllm.engine.prompt import encode, token_array
from nanovllm.errors import ChunkFileError, InvalidRequestError, OutOfPagesError
from nanovllm.files import TEMPORARY, as_path, open_file, put, temporary
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState

LOCK = ".nanovllm-store.lock"
KEY_FORM = "a key of 1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit"
ABANDONED = 60.0  # seconds after which an unlocked temporary file is a dead process's: no live one takes so long to lock what it made


@dataclass(frozen=True, slots=True)
class ChunkStore:
    """Chunks in the files `KEY.safetensors` of `folder`, together at most `max_bytes`; a file that is being written comes on top.

    The folder is made where it is missing. Files in it that the store did not make are left alone. A method raises `ChunkFileError` for a
    damaged file, index or folder, naming it.
    """

    folder: Path
    max_bytes: int

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | float):
        limit = _bytes(max_bytes, 1)
        path = as_path(folder)
        if path.exists() and not path.is_dir():
            raise ChunkFileError(f"{path}: a file, where a chunk store needs a folder")
        with chunk_file.writing(path):
            path.mkdir(parents=True, exist_ok=True)
        object.__setattr__(self, "folder", path.resolve())
        object.__setattr__(self, "max_bytes", limit)

    def save(self, state: EngineState, chunk: Chunk, key: str | None = None) -> str:
        """Keep a chunk, and return its key; what was used least recently makes room. `state` stays usable.

        None: a hash of model, tokens, positions and provenance, and of the KV where that is approximate; an exact chunk that is there
        already, whole, is not written again. A given key takes the place of an older chunk of that name. Raises as `save_chunk` does, and
        `InvalidRequestError` for a chunk above the limit or a key other than letters, digits, `.`, `_` and `-`.
        """
        state = enter(state)
        require_live(state, chunk)
        if key is not None and not (isinstance(key, str) and KEYS.fullmatch(key)):
            raise InvalidRequestError(f"key={reprlib.repr(key)} must be {KEY_FORM}")
        head = chunk_file.head_of(state, chunk)
        if head.num_bytes > self.max_bytes:
            raise InvalidRequestError(f"the chunk takes {head.num_bytes} bytes on disk; this store holds at most {self.max_bytes}")
        name = _key(head) if key is None else key
        if key is None and chunk.provenance.exact and self._whole(name, head):
            self._touch(name)
            return name
        with chunk_file.writing(self.folder), temporary(self.folder) as (fd, made):
            head = chunk_file.write(state, chunk, fd)
            name = _key(head) if key is None else key
            with self._locked():
                index = self._sweep(read_index(self.folder))
                if name not in index and self._path(name).exists():
                    raise ChunkFileError(f"{self._path(name)}: a file that this store did not make stands in the chunk's place")
                kept, _ = self._shrink({k: entry for k, entry in index.items() if k != name}, self.max_bytes - head.num_bytes)
                # Listed first: a process that dies here leaves a name without a file, never a file that nobody owns.
                write_index(self.folder, {**kept, name: entry_of(head)})
                put(made, self._path(name))
        return name

    def load(self, model: Model, state: EngineState, key_or_tokens: str | Seq[int] | np.ndarray) -> tuple[EngineState, Chunk | None]:
        """The chunk of a key, or the longest exact one that token ids begin with, in pages of this engine; None where there is none.

        A miss, also of a file that another process evicted just now, returns the state as it is. A damaged file raises `ChunkFileError` by
        its key, and by tokens is passed over, as is a chunk that the engine has no room for where a shorter one fits. Raises
        `InvalidRequestError` for a text that cannot be a key (`longest` takes texts), and as `load_chunk` does otherwise.
        """
        enter_with(model, state)  # a state that cannot be used is told on a miss too
        if isinstance(key_or_tokens, str):
            if not KEYS.fullmatch(key_or_tokens):
                raise InvalidRequestError(
                    f"key_or_tokens={reprlib.repr(key_or_tokens)} must be {KEY_FORM}, or token ids; "
                    "longest(model, text) is the key of the longest chunk that a text begins with"
                )
            return self._load(model, state, key_or_tokens) if key_or_tokens in read_index(self.folder) else (state, None)
        if not isinstance(key_or_tokens, list | tuple | np.ndarray):
            raise InvalidRequestError(f"key_or_tokens={reprlib.repr(key_or_tokens)} must be a key or token ids")
        tokens = token_array(key_or_tokens, model.config.vocab_size)
        too_long: InvalidRequestError | OutOfPagesError | None = None
        for key in self._candidates(model, tokens):
            try:
                after, chunk = self._load(model, state, key, tokens)
            except ChunkFileError:
                continue
            except (InvalidRequestError, OutOfPagesError) as error:
                too_long = error
                continue
            if chunk is not None:
                return after, chunk
        if too_long is not None:
            raise too_long  # what the shortest lacks
        return state, None

    def longest(self, model: Model, tokens: str | Seq[int] | np.ndarray, *, verify: bool = True) -> str | None:
        """The key of the longest stored chunk that is exact, of this model, and a prefix of token ids, or of a text's as a prompt; None
        where there is none.

        Damaged files are passed over: `verify` reads the whole file that is named, False its head alone.
        """
        require_model(model)
        if not isinstance(tokens, str | list | tuple | np.ndarray):
            raise InvalidRequestError(f"tokens={reprlib.repr(tokens)} must be a text or token ids")
        ids = encode(model, tokens, first=True) if isinstance(tokens, str) else token_array(tokens, model.config.vocab_size)
        for key in self._candidates(model, ids):
            with suppress(ChunkFileError):
                found = self._open(key)
                if found is None:
                    continue
                fd, path = found
                try:
                    head = chunk_format.decode(fd, path)
                    chunk_file.require_model(head, model, path)
                    if not np.array_equal(head.tokens, ids[: len(head.tokens)]):
                        continue
                    if verify:
                        chunk_file.verify(fd, head, path, torch.device("cpu"))
                    return key
                finally:
                    os.close(fd)
        return None

    def keys(self) -> tuple[str, ...]:
        """The keys of all chunks, the most recently used first."""
        used = self._used(read_index(self.folder))
        return tuple(sorted(used, key=used.__getitem__, reverse=True))

    @property
    def size(self) -> int:
        """Bytes of all chunk files."""
        index = read_index(self.folder)
        return sum(index[key].num_bytes for key in self._used(index))

    def evict(self, max_bytes: int | float | None = None) -> tuple[str, ...]:
        """Delete what was used least recently until at most `max_bytes` are left (None: the store's limit); returns the keys."""
        limit = self.max_bytes if max_bytes is None else _bytes(max_bytes, 0)
        with chunk_file.writing(self.folder), self._locked():
            index = read_index(self.folder)
            kept, gone = self._shrink(self._sweep(index), limit)
            if len(kept) != len(index):
                write_index(self.folder, kept)
        return gone

    def discard(self, key: str) -> bool:
        """Delete one chunk; False where there was none of this key."""
        if not isinstance(key, str):
            raise InvalidRequestError(f"key={key!r} must be a string")
        with chunk_file.writing(self.folder), self._locked():
            index = read_index(self.folder)
            if key not in index:
                return False
            self._path(key).unlink(missing_ok=True)
            write_index(self.folder, {k: entry for k, entry in index.items() if k != key})
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _open(self, key: str) -> tuple[int, Path] | None:
        path = self._path(key)
        try:
            return open_file(path), path
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ChunkFileError(f"{path}: could not be opened: {error.strerror or error}") from error

    def _load(self, model: Model, state: EngineState, key: str, tokens: np.ndarray | None = None) -> tuple[EngineState, Chunk | None]:
        found = self._open(key)
        if found is None:
            return state, None
        fd, path = found
        try:
            if tokens is not None:
                stored = chunk_format.decode(fd, path).tokens
                if not np.array_equal(stored, tokens[: len(stored)]):
                    return state, None
            state, chunk = chunk_file.load(model, enter_with(model, state), fd, path)
        finally:
            os.close(fd)
        self._touch(key)
        return state, chunk

    def _candidates(self, model: Model, tokens: np.ndarray) -> list[str]:
        """Keys whose entry says that they are exact prefixes of the tokens, the longest first."""
        data, dtype = tokens.astype("<i4").tobytes(), chunk_format.CODES[model.dtype]
        index, digests = read_index(self.folder), dict[int, str]()
        fitting = [
            (entry.num_tokens, key)
            for key, entry in index.items()
            if entry.exact and entry.num_tokens <= len(tokens) and (entry.fingerprint, entry.dtype) == (model.fingerprint, dtype)
        ]
        for count, _ in fitting:
            if count not in digests:
                digests[count] = hashlib.sha256(data[: 4 * count]).hexdigest()
        return [key for count, key in sorted(fitting, reverse=True) if index[key].digest == digests[count]]

    def _whole(self, key: str, head: Head) -> bool:
        found = self._open(key) if key in read_index(self.folder) else None
        if found is None:
            return False
        fd, path = found
        try:
            stored = chunk_format.decode(fd, path)
            chunk_file.verify(fd, stored, path, torch.device("cpu"))
        except ChunkFileError:
            return False
        finally:
            os.close(fd)
        return _key(stored) == _key(head)

    def _touch(self, key: str) -> None:
        with suppress(OSError):  # evicted in between, or not ours to touch: then its age stays what it was
            os.utime(self._path(key))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            flock(fd, LOCK_EX)  # each call opens the file anew, so threads exclude each other too
            yield
        finally:
            os.close(fd)

    def _used(self, index: Mapping[str, Entry]) -> dict[str, int]:
        """When each chunk was last used, in nanoseconds; only those whose file is there."""
        used = {}
        for key in index:
            with suppress(FileNotFoundError):
                used[key] = self._path(key).stat().st_mtime_ns
        return used

    def _sweep(self, index: Mapping[str, Entry]) -> dict[str, Entry]:
        """The index without names whose file is gone; temporary files of dead processes are deleted."""
        for path in self.folder.glob(TEMPORARY):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    try:
                        flock(fd, LOCK_EX | LOCK_NB)
                        path.unlink(missing_ok=True)
                    finally:
                        os.close(fd)
        return {key: index[key] for key in self._used(index)}

    def _shrink(self, index: Mapping[str, Entry], limit: int) -> tuple[dict[str, Entry], tuple[str, ...]]:
        """Delete files until those of the index take at most `limit` bytes."""
        used, size, gone = self._used(index), sum(entry.num_bytes for entry in index.values()), []
        for key in sorted(used, key=used.__getitem__):
            if size <= limit:
                break
            self._path(key).unlink(missing_ok=True)
            size -= index[key].num_bytes
            gone.append(key)
        return {key: entry for key, entry in index.items() if key not in gone}, tuple(gone)


def _bytes(max_bytes: Any, least: int) -> int:
    """A limit as an integer; `1e9` is one too."""
    limit = int(max_bytes) if isinstance(max_bytes, float) and max_bytes.is_integer() else max_bytes
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < least:
        raise InvalidRequestError(f"max_bytes={reprlib.repr(max_bytes)} must be a whole number of bytes, at least {least}")
    return limit


def _key(head: Head) -> str:
    """A name for what a file holds. Exact KV is a function of model and tokens; of approximate KV the bytes count too."""
    told = [head.fingerprint, chunk_format.CODES[head.dtype], list(head.shape), head.provenance.operations, head.num_exact]
    digest = hashlib.sha256(json.dumps([*told, "" if head.provenance.exact else head.kv_sha256]).encode())
    digest.update(head.tokens.astype("<i4").tobytes())
    digest.update(head.positions.astype("<i4").tobytes())
    return digest.hexdigest()
