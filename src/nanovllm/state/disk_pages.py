"""Pages on disk that a request needs: they are read into host pages, if its prompt is then filled sooner (`split_reads.py`).

A host page that is being read has an owner and no key, so nothing finds it, and nothing replaces it. When the read has ended, which
is a fact from outside, `arrived` gives it its key, or frees it if the file was damaged or has gone.
"""

from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.state import lru, offload
from nanovllm.state import pages as page_ops
from nanovllm.state.disk_reads import DiskReads, Wait
from nanovllm.state.offload import HostPages
from nanovllm.state.prefix_keys import is_full
from nanovllm.state.split_reads import Paces, pages_to_load

READ_LATENCY = 1e-3  # seconds that the first page of a read takes, whatever its size


def lasting(host: HostPages, pages: Iterable[int]) -> list[tuple[int, bytes]]:
    """Those of some host pages that may go to the disk, each with its key.

    The pages of a chunk that the prefix index did not hold have no key. The partly filled last page of a preempted request is for this
    request alone.
    """
    return [(at, key) for at in pages if (key := host.key_of.get(at)) is not None and is_full(key)]


def timed(host: HostPages, now: float, alive: Container[int]) -> HostPages:
    """The host pages at another time. Of the requests that were looked up, only those in `alive` are kept."""
    disk = _disk(host)
    waits = disk.waits
    for request_id in [rid for rid in waits if rid not in alive]:
        waits = waits.delete(request_id)
    return replace(host, disk=replace(disk, waits=waits, now=now))


def read_ahead(
    host: HostPages, request_id: int, keys: Seq[bytes], num_tokens: int, page_size: int, *, start: int = 0, num_before: int = 0
) -> tuple[HostPages, tuple[tuple[int, bytes], ...]]:
    """Reserve host pages for what a request needs from the disk, if it is filled sooner by reading than by running all tokens.

    Args:
        host: The host pages.
        request_id: The request, which waits in the queue.
        keys: The keys of pages in a row that the request could begin with, after those that the device has. Each page is in host memory, is
            being read, or is on the disk.
        num_tokens: How many tokens of the request these pages can save.
        page_size: Tokens per page.
        start: The place in the prompt of the first of these pages.
        num_before: How many prompt tokens the device runs before those of the request.

    Returns:
        The host pages, in which the request is noted in any case, and the (host page, key) pairs to read, in the order of the keys. If the
        request runs meanwhile (`Wait.stop`), the last one is read first. At most half of host memory is read at a time, and nothing into
        pages of chunks in host memory.
    """
    disk = _disk(host)
    coming = {key: at for at, key in disk.reading.items()}
    there = [host.by_key[key] for key in keys if key in host.by_key]
    idle = np.array([at for at in there if host.used.refcount(at) == 1], np.int32)  # the others are those of chunks
    room = max(0, min(host.num_pages // 2 - len(disk.reading), host.used.num_free + host.ages.count - len(idle)))
    first = next((place for place, key in enumerate(keys) if key not in host.by_key), len(keys))
    saved = min(len(keys) * page_size, num_tokens) - first * page_size
    paces = paces_of(host, page_size, num_before)
    absent = [key not in host.by_key and key not in coming for key in keys[first:]]
    begin, end = pages_to_load(paces, absent, room) if saved > 0 else (0, 0)
    if not end:
        return replace(host, disk=replace(disk, waits=disk.waits.set(request_id, Wait(until=disk.now)))), ()
    host = replace(host, ages=lru.add(lru.remove(host.ages, idle), idle[::-1]))  # what it goes on with must stay
    wanted = keys[first + begin : first + end]
    fresh = [key for key, is_absent in zip(wanted, absent[begin:end], strict=True) if is_absent]
    host = offload.make_room(host, len(fresh))
    used, taken = page_ops.allocate(host.used, min(len(fresh), host.used.num_free)) or (host.used, ())
    pairs, reading = tuple(zip(taken, fresh, strict=False)), disk.reading
    for at, key in pairs:
        reading, coming[key] = reading.set(at, key), at
    pages, place = tuple(coming[key] for key in wanted if key in coming), start + first
    wait = Wait(until=disk.now + paces.running(len(absent)), pages=pages)
    wait = replace(wait, start=place + begin, stop=place + end) if begin else wait
    return replace(host, used=used, disk=replace(disk, reading=reading, waits=disk.waits.set(request_id, wait))), pairs


def paces_of(host: HostPages, page_size: int, num_before: int) -> Paces:
    """How long it takes to fill pages, after `num_before` other prompt tokens and the reads that are under way."""
    disk, rates = _disk(host), host.rates
    read = host.page_bytes / disk.bytes_per_second
    return Paces(
        run=page_size / rates.tokens_per_second,
        read=read,
        copy=host.page_bytes / rates.bytes_per_second,
        before_run=num_before / rates.tokens_per_second,
        before_read=READ_LATENCY + len(disk.reading) * read,
    )


def arrived(host: HostPages, ended: Seq[tuple[int, bool]]) -> HostPages:
    """The host pages after some reads have ended: (host page, whether it has the page) in the order of their prompts."""
    if not ended:
        return host
    disk = _disk(host)
    reading, by_key, key_of, found, lost = disk.reading, host.by_key, host.key_of, list[int](), list[int]()
    for at, whole in ended:
        key = reading[at]
        reading = reading.delete(at)
        if whole and key not in by_key:
            by_key, key_of = by_key.set(key, at), key_of.set(at, key)
            found.append(at)
        else:
            lost.append(at)
    ages = lru.add(host.ages, np.array(found[::-1], np.int32))  # the last page of a prompt is replaced first
    used = page_ops.release(host.used, np.array(lost, np.int32)) if lost else host.used
    return replace(host, used=used, by_key=by_key, key_of=key_of, ages=ages, disk=replace(disk, reading=reading))


def _disk(host: HostPages) -> DiskReads:
    assert host.disk is not None
    return host.disk
