"""`flush_kv`: KV goes to the disk that an engine would otherwise lose at its end. An idle engine does so in pieces."""

import time
from typing import TypeVar

import numpy as np

from nanovllm.config import Mesh
from nanovllm.engine.disk_facts import mesh_of
from nanovllm.engine.donation import enter
from nanovllm.engine.mirrored import calling_mesh, mirrored
from nanovllm.executor.distributed import least
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.executor.page_file import size_of
from nanovllm.executor.unwritten import Unwritten
from nanovllm.state import disk_pages
from nanovllm.state import pool as pools
from nanovllm.state.engine_state import EngineState
from nanovllm.state.offload import HostPages
from nanovllm.state.prefix_cache import PrefixIndex
from nanovllm.state.prefix_keys import frame_key, is_frame, keys_of

T = TypeVar("T")
FLUSHED = 16 << 20  # bytes that are copied from the device at once
QUEUED = 64 << 20  # bytes that wait to be written while the next ones are copied from the device, if the call waits for the writes
TOGETHER = 256 << 20  # bytes after which ranks that write all their KV wait for each other, so that no wait is long
LOOKED_AT = 2048  # pages that one piece of a flush looks up, so that a request which comes meanwhile waits for milliseconds


def flush_kv(state: EngineState, *, max_bytes: int | None = None) -> bool:
    """Write the KV that an engine with `kv_dir` would otherwise lose at its end: that of the prefix index, and that of host memory.

    Does not donate `state`. The option `kv_dir` says where the KV goes. KV that is on disk already is not written again. If the folder's
    size limit is less than all KV, that which was used last is written, and no more than the folder keeps. A server calls this when it
    is idle and at its end, and `LLM.close` does; a program that makes its own states calls it. Where each rank runs such a program, as
    with torchrun, a call writes and tells about the KV of its own rank.

    Args:
        state: The newest state of the engine. It stays usable.
        max_bytes: How many bytes of KV to copy from the device at most; the rest is for later calls. The writes then go on after the call.
            None: all, and the call waits until they are written.

    Returns:
        Whether all KV is on disk or is being written. True for an engine without `kv_dir`. What could not be written, because the disk is
        full for example, counts as written; `nv.memory(state)` tells about it.

    Raises:
        InvalidRequestError: `state` is not an `EngineState`.
        DonatedStateError: `state` was donated to a later call.

    Examples:
        >>> kept = nv.init_state(model, num_pages=64, host_kv_gib=0.01, kv_dir="kv")
        >>> kept, chunk = nv.prefill(model, kept, "The king of Aistonia is Oswin. The queen is Mira.")
        >>> nv.flush_kv(kept)
        True
        >>> nv.memory(kept).disk.num_pages
        1
    """
    state = enter(state)
    if runtime_of(state).disk is None:
        return True
    if max_bytes is not None:
        return flush_pages(state, max_bytes)[1]
    done = flush_pages(state, TOGETHER, begins=True)[1]
    while not done:
        done = flush_pages(state, TOGETHER, begins=False)[1]
    return True


@mirrored
def flush_pages(state: EngineState, max_bytes: int, begins: bool | None = None) -> tuple[EngineState, bool]:
    """`flush_kv` on all ranks of an engine with a disk.

    Args:
        state: The newest state of the engine.
        max_bytes: How many bytes of KV to copy from the device at most.
        begins: None: the writes go on after the call. Otherwise it waits for them; and with True it begins with all KV, also with what an
            earlier call could not write.

    Returns:
        `state`, and whether all KV of all ranks is on disk or is being written.
    """
    flushed = _flushed(enter(state), max_bytes, begins)
    return state, bool(least(_meeting(state), [flushed])[0])


def _meeting(state: EngineState) -> Mesh | None:
    """The ranks that make a call at the same time because they repeat the calls of one program. None if there are none."""
    return mesh_of(state) if calling_mesh(state) is None else None


def _flushed(state: EngineState, max_bytes: int, begins: bool | None) -> bool:
    """Write KV of this rank. Returns whether all of it that the folder has room for is on disk or is being written."""
    disk, host, lease = runtime_of(state).disk, state.pool.host, state.runtime.lease
    assert disk is not None and host is not None
    version = state.epoch, lease.lost  # while a failed call has lost pages, every call makes the index anew
    if disk.todo.version != version or begins:
        disk.give_up()  # what was evicted first is the least worth, and waits first
        disk.todo = _unwritten(state, disk, version)
    disk.let_go()
    todo, page_bytes, to_look_at, waits = disk.todo, host.page_bytes, LOOKED_AT, begins is not None
    most, at_once = max(1, max_bytes // page_bytes), max(1, FLUSHED // page_bytes)
    while todo and most > 0 and (waits or disk.num_queued * page_bytes < FLUSHED):
        if todo.missing:
            part = _taken(todo.missing, min(most, at_once))
            most -= len(part)
            disk.keep_images([key for key, _ in part], state.kv, [page for _, page in part], todo.used)
            todo.used -= len(part)
        elif not waits and to_look_at <= 0:
            break
        else:
            to_look_at -= _look(disk, host, todo)
        if waits:
            disk.drain(QUEUED // FLUSHED * at_once)  # the next pages are copied while these are written
    if waits:
        disk.drain()
    return not todo


def _unwritten(state: EngineState, disk: DiskTier, version: object) -> Unwritten:
    """All KV of the prefix index and of host memory, and the part of the folder's room that this rank has for it."""
    host, mesh = state.pool.host, mesh_of(state)
    assert host is not None
    idle = host.ages.pages()[::-1]
    held = sorted({*host.key_of}.difference(idle))  # those of chunks
    room = disk.folder.lasting_bytes // (1 if mesh is None else mesh.size)
    pages, host_pages = _last_evicted_first(state.pool.prefix), [*held, *idle]
    crowded = disk.folder.size + (len(pages) + len(host_pages)) * size_of(host.page_bytes) > disk.folder.max_bytes
    return Unwritten(
        version=version, pool=state.pool, pages=pages, host_pages=host_pages, room=room, crowded=crowded, used=time.time_ns()
    )  # fmt: skip


def _last_evicted_first(index: PrefixIndex) -> list[int]:
    """The pages of an index; those that are evicted last come first."""
    pages, idle = np.array(index.pages(), np.int32), np.array(index.idle_pages()[::-1], np.int32)
    return np.concatenate([pages[~np.isin(pages, idle, kind="table")], idle]).tolist()


def _look(disk: DiskTier, host: HostPages, todo: Unwritten) -> int:
    """See which of the next pages are not on disk. Those in host memory are written from there. Returns how many it has looked at.

    What the folder has no room for besides that which was looked at before is left out: it would replace what was used later.
    """
    if not todo.pages:
        part = _taken(todo.host_pages, LOOKED_AT)
        pairs = [pair for pair in disk_pages.lasting(host, part) if _fits(pair[1], host, todo)]
        _touch(disk, todo, [key for _, key in pairs if disk.has(key)])
        disk.keep(pairs, todo.used)
        todo.used -= len(pairs)
        return len(part)
    pages = np.array(_taken(todo.pages, LOOKED_AT), np.int32)
    keys, (first, second), known = keys_of(todo.pool.prefix, pages), pools.addresses(todo.pool, pages), list[bytes]()
    for place, key in enumerate(keys):
        fitting = list[tuple[bytes, int]]()
        if first[place] >= 0 and key not in host.by_key and _fits(key, host, todo):
            fitting.append((key, first.item(place)))
        frame = frame_key(key)
        if second is not None and second[place] >= 0 and _lacks_frame(host, key) and _fits(frame, host, todo):
            fitting.append((frame, second.item(place)))
        for pair in fitting:
            if disk.has(pair[0]):
                known.append(pair[0])
            else:
                todo.missing.append(pair)
    _touch(disk, todo, known)
    return len(pages)


def _touch(disk: DiskTier, todo: Unwritten, known: list[bytes]) -> None:
    """Let files count as used that what is written next would replace, although it was used earlier."""
    if todo.crowded:
        disk.touch(known, todo.used)
        todo.used -= len(known)


def _fits(key: bytes, host: HostPages, todo: Unwritten) -> bool:
    """Whether the folder has room for a page or frame, too."""
    return todo.fits(size_of(host.frame_bytes if is_frame(key) else host.bytes_of(framed=False)))


def _lacks_frame(host: HostPages, key: bytes) -> bool:
    """Whether host memory does not have the frame of a page."""
    at = host.by_key.get(key)
    return at is None or at in host.bare


def _taken(items: list[T], count: int) -> list[T]:
    """Take the first items out of a list."""
    part = items[:count]
    del items[:count]
    return part
