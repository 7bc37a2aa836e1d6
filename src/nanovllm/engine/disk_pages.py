"""Pages on disk in the life of a request: looked for while it waits, and read before it runs; and what is written in the end.

Reads end at any time, which is a fact from outside, as the time is. It enters the engine's state at the beginning of a step
(`look_ahead`), and the plan of the step is a function of the state alone. A request whose pages are being read waits, and others go first.
It waits no longer than running these tokens would take. Then it goes on with the pages that have come, and runs the other tokens. Or it
runs the front of its prompt meanwhile (`split_reads.py`), and goes on after the pages that were read where it meets them (`meeting.py`).
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np

from nanovllm.engine.disk_facts import mesh_of, on_all_disks, settled
from nanovllm.engine.donation import enter
from nanovllm.engine.draft import Draft, id_of
from nanovllm.engine.mirrored import mirrored
from nanovllm.executor.distributed import least
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.kv_disk import DiskTier, Unwritten
from nanovllm.state import disk_pages
from nanovllm.state import pool as pools
from nanovllm.state.engine_state import EngineState
from nanovllm.state.offload import HostPages
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.prefix_cache import PrefixIndex
from nanovllm.state.prefix_keys import keys_from, keys_of
from nanovllm.state.request import Sequence
from nanovllm.state.steady import Steady

T = TypeVar("T")
NEXT = 4  # waiting requests whose pages are read ahead
LONGEST_WAIT = 0.005  # seconds that a step with nothing else to do waits for a read
FLUSHED = 16 << 20  # bytes that are copied from the device at once
LOOKED_AT = 2048  # pages that one piece of a flush looks up, so that a request which comes meanwhile waits for milliseconds


def look_ahead(state: EngineState, taken: Taken) -> EngineState:
    """The state at the beginning of a step: with the pages whose reads have ended, and with reads for the requests that are next.

    Args:
        state: The state of an engine that keeps KV on disk.
        taken: Gets the host pages that are written. If the call fails, the old state does not trust them.
    """
    disk, host = runtime_of(state).disk, state.pool.host
    if disk is None or host is None or host.disk is None:
        return state
    disk.hold(bool(state.running or state.waiting))
    ended, waits = disk.ended(host.disk.reading), host.disk.waits
    known = disk.looked_at[0] is state.waiting and disk.looked_at[1] is waits
    fresh = [] if known else [sequence for sequence in _next(state) if id_of(sequence) not in waits]
    disk.looked_at = state.waiting, waits
    if not (fresh or host.disk.reading):
        return state  # the same pool, so that decode steps need no schedule
    state, mesh = _with(state, disk, ended), mesh_of(state)
    host = state.pool.host
    size, num_before = state.config.page_size, sum(s.todo for s in _prompts(state))
    for sequence in _next(state) if fresh else ():
        assert host is not None and host.disk is not None
        rid = id_of(sequence)
        if rid not in host.disk.waits:
            keys, start = _on_disk(replace(state.pool, host=host), disk, sequence, size)
            num_tokens = sequence.tokens.length - 1 - start * size  # the last token runs in any case
            keys = on_all_disks(mesh, keys)
            host, pairs = disk_pages.read_ahead(host, rid, keys, num_tokens, size, start=start, num_before=num_before)
            assert host.disk is not None
            taken.host_pages.extend(at for at, _ in pairs)
            disk.read(pairs, last_first=host.disk.waits[rid].stop > 0)
        num_before += 0 if host.disk.holds(rid) else sequence.todo
    state = replace(state, pool=replace(state.pool, host=host))
    if host is not None and host.disk is not None:
        disk.looked_at = state.waiting, host.disk.waits
    if not state.running and _all_wait(state):
        assert host is not None and host.disk is not None
        disk.wait(LONGEST_WAIT)
        state = _with(state, disk, disk.ended(host.disk.reading))
    return state


def with_reads_ended(state: EngineState) -> EngineState:
    """The state after all reads have ended, for which this waits. Their host pages may then be replaced."""
    disk, host = runtime_of(state).disk, state.pool.host
    if disk is None or host is None or host.disk is None or not host.disk.reading:
        return state
    disk.end_reads()
    return _with(state, disk, disk.ended(host.disk.reading))


def set_reading_apart(draft: Draft) -> None:
    """Take the requests out of the queue that wait for reads, so that others need not wait for them."""
    host = draft.pool.host
    if host is None or host.disk is None or not host.disk.reading:
        return
    for request_id in host.disk.waits:
        if host.disk.holds(request_id) and (sequence := draft.waiting.items.get(request_id)) is not None:
            draft.reading.append(sequence)
            draft.waiting = draft.waiting.pop(request_id)


def flush_kv(state: EngineState, *, max_bytes: int | None = None) -> bool:
    """Write the KV that an engine with `kv_dir` would otherwise lose at its end: that of the prefix index, and that of host memory.

    Does not donate `state`. The option `kv_dir` says where the KV goes. KV that is on disk already is not written again. A server calls
    this when it is idle and at its end, and `LLM.close` does; a program that makes its own states calls it, on all ranks if it has some.

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
    return runtime_of(state).disk is None or flush_pages(state, max_bytes)[1]


@mirrored
def flush_pages(state: EngineState, max_bytes: int | None) -> tuple[EngineState, bool]:
    """`flush_kv` on all ranks of an engine with a disk. Returns `state`, and whether all KV of all ranks is on disk or is being written."""
    flushed = _flushed(enter(state), max_bytes)
    return state, bool(least(mesh_of(state), [flushed])[0])


def _flushed(state: EngineState, max_bytes: int | None) -> bool:
    """Write KV of this rank. Returns whether all of it is on disk or is being written."""
    disk, host, index = runtime_of(state).disk, state.pool.host, state.pool.prefix
    assert disk is not None and host is not None
    disk.hold(False)
    if disk.todo.index is not index or max_bytes is None:  # in the end, also what an earlier call could not write
        disk.todo = Unwritten(index, [*host.key_of], _last_evicted_first(index))
    todo, page_bytes, to_look_at = disk.todo, host.page_bytes, LOOKED_AT
    most = len(todo.pages) if max_bytes is None else max(1, max_bytes // page_bytes)
    while todo and (max_bytes is None or (most > 0 and disk.num_queued * page_bytes < FLUSHED)):
        if todo.missing:
            part = _taken(todo.missing, min(most, max(1, FLUSHED // page_bytes)))
            most -= len(part)
            disk.keep_images([key for key, _ in part], state.kv, [page for _, page in part])
            if max_bytes is None:
                disk.drain()
        elif max_bytes is not None and to_look_at <= 0:
            break
        else:
            to_look_at -= _look(disk, host, todo)
    if max_bytes is None:
        disk.drain()
    return not todo


def _last_evicted_first(index: PrefixIndex) -> list[int]:
    """The pages of an index; those that are evicted last come first."""
    pages, idle = np.array(index.pages(), np.int32), np.array(index.idle_pages()[::-1], np.int32)
    return np.concatenate([pages[~np.isin(pages, idle, kind="table")], idle]).tolist()


def _look(disk: DiskTier, host: HostPages, todo: Unwritten) -> int:
    """See which of the next pages are not on disk. Those in host memory are written from there. Returns how many it has looked at."""
    if todo.host_pages:
        part = _taken(todo.host_pages, LOOKED_AT)
        disk.keep(disk_pages.lasting(host, part))
        return len(part)
    part = _taken(todo.pages, LOOKED_AT)
    keys = keys_of(todo.index, np.array(part, np.int32))
    todo.missing += [(key, page) for key, page in zip(keys, part, strict=True) if not disk.has(key) and key not in host.by_key]
    return len(part)


def _taken(items: list[T], count: int) -> list[T]:
    """Take the first items out of a list."""
    part = items[:count]
    del items[:count]
    return part


def _with(state: EngineState, disk: DiskTier, ended: list[tuple[int, bool]]) -> EngineState:
    """The state at the time of the disk's clock, after some reads have ended."""
    host = state.pool.host
    assert host is not None and host.disk is not None
    ended, now = settled(disk, mesh_of(state), ended)
    prompts = {id_of(sequence) for sequence in _prompts(state)}
    alive = {request_id for request_id in host.disk.waits if request_id in prompts or request_id in state.waiting.items}
    host = disk_pages.timed(disk_pages.arrived(host, ended), now, alive)
    read = sum(whole for _, whole in ended) * state.config.page_size
    return replace(state, pool=replace(state.pool, host=host), stats=state.stats.add(read_tokens=read) if read else state.stats)


def _next(state: EngineState) -> list[Sequence]:
    """The waiting requests that come first."""
    found, waiting = list[Sequence](), state.waiting
    while len(found) < NEXT and (sequence := waiting.first()) is not None:
        found.append(sequence)
        waiting = waiting.pop(id_of(sequence))
    return found


def _prompts(state: EngineState) -> list[Sequence]:
    """The running sequences that have prompt tokens to run. If the state has a `Steady`, there are none."""
    return [] if isinstance(state.running, Steady) else [sequence for sequence in state.running if sequence.todo > 1]


def _on_disk(pool: Pool, disk: DiskTier, sequence: Sequence, size: int) -> tuple[list[bytes], int]:
    """The keys of the pages with which a request can go on after those on the device, and the place of the first of them."""
    host, tokens, namespace = pool.host, sequence.tokens.array(), sequence.request.namespace
    assert host is not None and host.disk is not None
    start = max(len(pools.match(pool, tokens, namespace)), sequence.num_filled // size)
    if sequence.num_filled % size or sequence.num_exact < sequence.num_filled:
        return [], start
    coming, keys = {*host.disk.reading.values()}, list[bytes]()
    for key in keys_from(tokens, start, size, namespace):
        if not (key in host.by_key or key in coming or disk.folder.look(key)):
            break
        keys.append(key)
    return keys, start


def _all_wait(state: EngineState) -> bool:
    """Whether all requests wait for reads."""
    disk = None if state.pool.host is None else state.pool.host.disk
    return disk is not None and len(state.waiting) > 0 and all(disk.holds(request_id) for request_id in state.waiting.items)
