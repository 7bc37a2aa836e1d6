"""`ChunkStore`: a folder of chunk files with a size limit, which evicts the least recently used. Several processes may share it.

The store's index lists its files and changes only under a lock. A file's modification time says when it was last used. New files are
written under a temporary name and renamed, so readers need no lock: they see the old file, the new file, or none.
"""

import hashlib
import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm.chunks.storage import file as chunk_file
from nanovllm.chunks.storage import format as chunk_format
from nanovllm.chunks.storage.format import Head
from nanovllm.chunks.storage.store_index import KEYS, Entry, entry_of, read_index, write_index
from nanovllm.config import require_known_kv_dtype
from nanovllm.engine.donation import enter, enter_with, require_live, require_model
from nanovllm.engine.mirrored import require_one_caller
from nanovllm.engine.prompt import encode, token_array
from nanovllm.errors import ChunkFileError, InvalidRequestError, OutOfPagesError
from nanovllm.files import as_path, delete_abandoned, open_file, put, temporary
from nanovllm.models.model import Model
from nanovllm.ops.kv_cache.fp8 import FP8
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState

LOCK = ".nanovllm-store.lock"
KEY_FORM = "a key of 1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit"


@dataclass(frozen=True, slots=True)
class ChunkStore:
    """Chunks in the files `KEY.safetensors` of a folder, with a limit on their total size.

    Files of other programs in the folder are left alone. A file that is being written is not counted in the limit.

    Attributes:
        folder: The folder, as an absolute path.
        max_bytes: The limit of all chunk files, in bytes.

    Examples:
        >>> store = nv.ChunkStore("chunks", max_bytes=1 << 30)
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> key = store.save(state, facts)
        >>> other = nv.init_state(model, num_pages=64)
        >>> other, loaded = store.load(model, other, key)
        >>> loaded.token_ids.tolist() == facts.token_ids.tolist()
        True
    """

    folder: Path
    max_bytes: int

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | float):
        """Open a store, and make its folder if it is missing.

        Args:
            folder: The folder.
            max_bytes: The limit of all chunk files, in bytes; a whole number, also as a float such as `1e9`.

        Raises:
            InvalidRequestError: `max_bytes` is not a whole number of at least 1, or `folder` is not a path.
            ChunkFileError: `folder` is a file, or cannot be made.

        Examples:
            >>> nv.ChunkStore("chunks", max_bytes=1e9).keys()
            ()
        """
        limit = _bytes(max_bytes, 1)
        path = as_path(folder)
        if path.exists() and not path.is_dir():
            raise ChunkFileError(f"{path} is a file, but a chunk store needs a folder")
        with chunk_file.writing(path):
            path.mkdir(parents=True, exist_ok=True)
        object.__setattr__(self, "folder", path.resolve())
        object.__setattr__(self, "max_bytes", limit)

    def save(self, state: EngineState, chunk: Chunk, key: str | None = None) -> str:
        """Write a chunk to the store; the least recently used chunks make room.

        Does not donate `state`.

        Args:
            state: The newest state of the engine. It stays usable.
            chunk: The chunk to write.
            key: The chunk's name: letters, digits, ".", "_" and "-". It replaces an older chunk of that name. None: a hash of model,
                tokens, positions and provenance, and also of the KV if it is approximate. An exact chunk that is already stored is not
                written again.

        Returns:
            The key.

        Raises:
            InvalidRequestError: The key is invalid, or the chunk is larger than the store's limit.
            ChunkFileError: The file cannot be written, the index is damaged, or a file of another program has the chunk's name.
            OutOfPagesError: The device has no memory for the staging buffers.
            DonatedStateError: `state` was donated to a later call.
            ReleasedChunkError: `chunk` was released.
            ForeignChunkError: `chunk` belongs to another engine.

        Examples:
            >>> store = nv.ChunkStore("chunks", max_bytes=1 << 30)
            >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
            >>> store.save(state, facts, "king")
            'king'
            >>> store.save(state, facts) == store.save(state, facts)
            True
        """
        require_one_caller(state)
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
                    raise ChunkFileError(f"{self._path(name)}: another program made this file: use another key")
                kept, _ = self._shrink({k: entry for k, entry in index.items() if k != name}, self.max_bytes - head.num_bytes)
                # The index is written first: a process that dies here leaves a key without a file, never a file without a key.
                write_index(self.folder, {**kept, name: entry_of(head)})
                put(made, self._path(name))
        return name

    def load(self, model: Model, state: EngineState, key_or_tokens: str | Seq[int] | np.ndarray) -> tuple[EngineState, Chunk | None]:
        """Load the chunk of a key, or the longest exact chunk that is a prefix of token ids.

        Donates `state` if a chunk is found; otherwise `state` is returned unchanged. When loading by tokens, damaged files are skipped.
        So are chunks that are too long for the engine, if a shorter one fits.

        Args:
            model: The model of `init_state`.
            state: The newest state of the engine.
            key_or_tokens: A key, or token ids. For a text, ask `longest` for the key.

        Returns:
            The next state, and the chunk, or None if there is none. A file that another process has just evicted counts as none.

        Raises:
            InvalidRequestError: The key or the token ids are invalid, or the chunk is too long for the engine.
            ChunkFileError: The index is damaged, or the file of the key is damaged or of another model.
            OutOfPagesError: Too few pages are available now.
            DonatedStateError: `state` was donated to a later call.

        Examples:
            >>> store = nv.ChunkStore("chunks", max_bytes=1 << 30)
            >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
            >>> key = store.save(state, facts)
            >>> state, missing = store.load(model, state, "another-key")
            >>> missing is None
            True
            >>> tokens = model.tokenizer.encode("The king of Aistonia is Oswin. The king of Aistonia is")
            >>> state, prefix = store.load(model, state, tokens)
            >>> len(prefix), len(tokens)
            (11, 18)
        """
        require_one_caller(enter_with(model, state))  # raise for an unusable state even if no chunk is found
        if isinstance(key_or_tokens, str):
            if not KEYS.fullmatch(key_or_tokens):
                raise InvalidRequestError(
                    f"key_or_tokens={reprlib.repr(key_or_tokens)} must be {KEY_FORM}, or token ids; "
                    "for a text, pass the key that longest(model, text) returns"
                )
            return self._load(model, state, key_or_tokens) if key_or_tokens in read_index(self.folder) else (state, None)
        if not isinstance(key_or_tokens, list | tuple | np.ndarray):
            raise InvalidRequestError(f"key_or_tokens={reprlib.repr(key_or_tokens)} must be a key or token ids")
        tokens = token_array(key_or_tokens, model.config.vocab_size)
        too_long: InvalidRequestError | OutOfPagesError | None = None
        for key in self._candidates(model, tokens, state.kv.pools[0].dtype):
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
            raise too_long  # from the shortest candidate
        return state, None

    def longest(self, model: Model, tokens: str | Seq[int] | np.ndarray, *, verify: bool = True, kv_dtype: str | None = None) -> str | None:
        """Find the longest stored chunk that is exact, of this model, and a prefix of the tokens.

        Damaged files are skipped.

        Args:
            model: The model.
            tokens: Token ids, or a text, which is encoded as a prompt.
            verify: Whether to read the whole file and check its digests. False: check only its head.
            kv_dtype: The option of the engine that shall load the chunk; see `init_state`.

        Returns:
            The key, or None if no chunk matches.

        Raises:
            InvalidRequestError: `tokens` is neither a text nor valid token ids.
            ChunkFileError: The index is damaged.

        Examples:
            >>> store = nv.ChunkStore("chunks", max_bytes=1 << 30)
            >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
            >>> key = store.save(state, facts, "king")
            >>> store.longest(model, "The king of Aistonia is Oswin. Who is the king?")
            'king'
        """
        require_model(model)
        require_known_kv_dtype(kv_dtype)
        if not isinstance(tokens, str | list | tuple | np.ndarray):
            raise InvalidRequestError(f"tokens={reprlib.repr(tokens)} must be a text or token ids")
        ids = encode(model, tokens, first=True) if isinstance(tokens, str) else token_array(tokens, model.config.vocab_size)
        for key in self._candidates(model, ids, model.dtype if kv_dtype is None else FP8):
            with suppress(ChunkFileError):
                opened = self._open(key)
                if opened is None:
                    continue
                fd, path = opened
                try:
                    head = chunk_file.decode(model, fd, path)
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
        """The keys of all chunks, the most recently used first.

        Raises:
            ChunkFileError: The index is damaged.

        Examples:
            >>> store = nv.ChunkStore("chunks", max_bytes=1 << 30)
            >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
            >>> key = store.save(state, facts, "king")
            >>> store.keys()
            ('king',)
        """
        used = self._used(read_index(self.folder))
        return tuple(sorted(used, key=used.__getitem__, reverse=True))

    @property
    def size(self) -> int:
        """The size of all chunk files, in bytes.

        Raises:
            ChunkFileError: The index is damaged.

        Examples:
            >>> nv.ChunkStore("chunks", max_bytes=1 << 30).size
            0
        """
        index = read_index(self.folder)
        return sum(index[key].num_bytes for key in self._used(index))

    def evict(self, max_bytes: int | float | None = None) -> tuple[str, ...]:
        """Delete the least recently used chunks until the rest is within a limit.

        Args:
            max_bytes: The limit in bytes. None: the store's own limit; 0: delete all.

        Returns:
            The keys of the deleted chunks.

        Raises:
            InvalidRequestError: `max_bytes` is not a whole number of at least 0.
            ChunkFileError: The index is damaged, or the folder cannot be written.

        Examples:
            >>> store = nv.ChunkStore("chunks", max_bytes=1 << 30)
            >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
            >>> key = store.save(state, facts, "king")
            >>> store.evict(0)
            ('king',)
        """
        limit = self.max_bytes if max_bytes is None else _bytes(max_bytes, 0)
        with chunk_file.writing(self.folder), self._locked():
            index = read_index(self.folder)
            kept, gone = self._shrink(self._sweep(index), limit)
            if len(kept) != len(index):
                write_index(self.folder, kept)
        return gone

    def discard(self, key: str) -> bool:
        """Delete one chunk.

        Args:
            key: The chunk's key.

        Returns:
            Whether the store had a chunk of this key.

        Raises:
            InvalidRequestError: `key` is not a string.
            ChunkFileError: The index is damaged, or the folder cannot be written.

        Examples:
            >>> nv.ChunkStore("chunks", max_bytes=1 << 30).discard("king")
            False
        """
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
        """A file descriptor and the path of a key's file, or None if the file is missing."""
        path = self._path(key)
        try:
            return open_file(path), path
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ChunkFileError(f"{path}: could not be opened: {error.strerror or error}") from error

    def _load(self, model: Model, state: EngineState, key: str, tokens: np.ndarray | None = None) -> tuple[EngineState, Chunk | None]:
        """Load the chunk of a key, if its file exists and its tokens are a prefix of `tokens`."""
        opened = self._open(key)
        if opened is None:
            return state, None
        fd, path = opened
        try:
            if tokens is not None:
                stored = chunk_file.decode(model, fd, path).tokens
                if not np.array_equal(stored, tokens[: len(stored)]):
                    return state, None
            state, chunk = chunk_file.load(model, enter_with(model, state), fd, path)
        finally:
            os.close(fd)
        self._touch(key)
        return state, chunk

    def _candidates(self, model: Model, tokens: np.ndarray, kv_dtype: torch.dtype) -> list[str]:
        """Keys of chunks with this dtype that are exact prefixes of the tokens according to the index, the longest first."""
        data, dtype = memoryview(tokens.astype("<i4").tobytes()), chunk_format.CODES[kv_dtype]
        index, digests, digest, done = read_index(self.folder), dict[int, str](), hashlib.sha256(), 0
        fitting = [
            (entry.num_tokens, key)
            for key, entry in index.items()
            if entry.exact and 0 < entry.num_tokens <= len(tokens) and (entry.fingerprint, entry.dtype) == (model.fingerprint, dtype)
        ]
        for count in sorted({count for count, _ in fitting}):  # one hash runs over the tokens and is read at each stored length
            digest.update(data[4 * done : 4 * count])
            digests[count], done = digest.hexdigest(), count
        return [key for count, key in sorted(fitting, reverse=True) if index[key].digest == digests[count]]

    def _whole(self, key: str, head: Head) -> bool:
        """Whether the store has an undamaged file of this key with the content that `head` describes."""
        opened = self._open(key) if key in read_index(self.folder) else None
        if opened is None:
            return False
        fd, path = opened
        try:
            stored = chunk_format.decode(fd, path, head.fingerprint, (*head.shape[:-1], head.head_dim))
            chunk_file.verify(fd, stored, path, torch.device("cpu"))
        except ChunkFileError:
            return False
        finally:
            os.close(fd)
        return _key(stored) == _key(head)

    def _touch(self, key: str) -> None:
        with suppress(OSError):  # evicted meanwhile, or owned by another user: its time stays unchanged
            os.utime(self._path(key))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's lock, which excludes other processes and threads."""
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            flock(fd, LOCK_EX)  # each call opens the file anew, so threads exclude each other too
            yield
        finally:
            os.close(fd)

    def _used(self, index: Mapping[str, Entry]) -> dict[str, int]:
        """When each chunk was last used, in nanoseconds; chunks without a file are left out."""
        used = {}
        for key in index:
            with suppress(FileNotFoundError):
                used[key] = self._path(key).stat().st_mtime_ns
        return used

    def _sweep(self, index: Mapping[str, Entry]) -> dict[str, Entry]:
        """The index without chunks whose file is missing. Temporary files of dead processes are deleted."""
        delete_abandoned(self.folder)
        return {key: index[key] for key in self._used(index)}

    def _shrink(self, index: Mapping[str, Entry], limit: int) -> tuple[dict[str, Entry], tuple[str, ...]]:
        """Delete files until the rest of the index takes at most `limit` bytes. Returns the rest, and the deleted keys."""
        used, size, gone = self._used(index), sum(entry.num_bytes for entry in index.values()), []
        for key in sorted(used, key=used.__getitem__):
            if size <= limit:
                break
            self._path(key).unlink(missing_ok=True)
            size -= index[key].num_bytes
            gone.append(key)
        return {key: entry for key, entry in index.items() if key not in gone}, tuple(gone)


def _bytes(max_bytes: Any, least: int) -> int:
    """A limit as an integer; floats such as `1e9` are accepted."""
    limit = int(max_bytes) if isinstance(max_bytes, float) and max_bytes.is_integer() else max_bytes
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < least:
        raise InvalidRequestError(f"max_bytes={reprlib.repr(max_bytes)} must be a whole number of bytes, at least {least}")
    return limit


def _key(head: Head) -> str:
    """The key of a file's content. Exact KV is a function of model and tokens, so only approximate KV is hashed too."""
    identity = [head.fingerprint, chunk_format.CODES[head.dtype], list(head.shape), head.provenance.operations, head.num_exact]
    digest = hashlib.sha256(json.dumps([*identity, "" if head.provenance.exact else head.kv_sha256]).encode())
    digest.update(head.tokens.astype("<i4").tobytes())
    digest.update(head.positions.astype("<i4").tobytes())
    return digest.hexdigest()
