"""Pages on disk that a request needs: they are read into host pages, if its prompt is then filled sooner (`split_reads.py`).

A host page that is being read has an owner and no key, so nothing finds it, and nothing replaces it. When the read has ended, which
is a fact from outside, `arrived` gives it its key, or frees it if the file was damaged or has gone.

In a model with sliding-window layers a page is read with its frame where the request needs it. If host memory has the page without its
frame, both are read anew, and the page that comes takes the place of the other one.
"""

from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.state import lru, offload
from nanovllm.state import pages as page_ops
from nanovllm.state.disk_frames import FrameNeeds
from nanovllm.state.disk_reads import NOTHING, PAGE, WHOLE, DiskReads, Wait
from nanovllm.state.offload import HostPages
from nanovllm.state.prefix_keys import frame_key, is_full
from nanovllm.state.split_reads import Paces, pages_to_load

READ_LATENCY = 1e-3  # seconds that the first page of a read takes, whatever its size
NONE = NOTHING, -1  # what is being read of a page that is not being read, and its host page


def lasting(host: HostPages, pages: Iterable[int]) -> list[tuple[int, bytes]]:
    """The pages, and the frames that are apart from them, which may go to the disk of some host pages, each with its key.

    The pages of a chunk that the prefix index did not hold have no key. The partly filled last page of a preempted request is for this
    request alone.
    """
    full = [(at, key) for at in pages if (key := host.key_of.get(at)) is not None and is_full(key)]
    if not host.apart:
        return full
    return [(at, name) for at, key in full for name in ((key,) if at in host.bare else (key, frame_key(key)))]


def timed(host: HostPages, now: float, alive: Container[int]) -> HostPages:
    """The host pages at another time. Of the requests that were looked up, only those in `alive` are kept."""
    disk = _disk(host)
    waits = disk.waits
    for request_id in [rid for rid in waits if rid not in alive]:
        waits = waits.delete(request_id)
    return replace(host, disk=replace(disk, waits=waits, now=now))


def read_ahead(
    host: HostPages,
    request_id: int,
    keys: Seq[bytes],
    num_tokens: int,
    page_size: int,
    *,
    start: int = 0,
    before_run: float = 0.0,
    frames: FrameNeeds | None = None,
) -> tuple[HostPages, tuple[tuple[int, bytes], ...]]:
    """Reserve host pages for what a request needs from the disk, if it is filled sooner by reading than by running all tokens.

    Args:
        host: The host pages.
        request_id: The request, which waits in the queue.
        keys: The keys of pages in a row that the request could begin with, after those that it has. Each page is in host memory, is
            being read, or is on the disk. In a model with windows the first ones may be on the device, where they lack frames.
        num_tokens: How many tokens of the request these pages can save.
        page_size: Tokens per page.
        start: The place in the prompt of the first of these pages.
        before_run: Seconds for which the device runs the prompts that come first.
        frames: The frames that the request needs with these pages. None: the model has no layers with windows.

    Returns:
        The host pages, in which the request is noted in any case, and the (host page, key) pairs to read, in the order of the keys. If the
        request runs meanwhile (`Wait.stop`), the last one is read first. At most half of host memory is read at a time, and nothing into
        pages of chunks in host memory.
    """
    disk, coming = _disk(host), _coming(host)
    there = [host.by_key[key] for key in keys if key in host.by_key]
    idle = np.array([at for at in there if host.used.refcount(at) == 1], np.int32)  # the others are those of chunks
    room = max(0, min(host.num_pages // 2 - len(disk.reading), host.used.num_free + host.ages.count - len(idle)))
    found = [_found(host, key) for key in keys]
    first = _num_found(found) if frames is None else frames.begins(found)
    count = len(keys) if frames is None else frames.served(len(keys))
    wanted, absent = _needed(keys, count, found, coming, frames)
    saved = min(count * page_size, num_tokens) - first * page_size
    paces = paces_of(host, page_size, before_run, wanted[first:], start + first)
    begin, end = pages_to_load(paces, absent[first:], room) if saved > 0 else (0, 0)
    if frames is not None and 0 < first + end < count:  # what it can begin with there needs the frames of another window
        count = frames.served(first + end)
        wanted, absent = _needed(keys, count, found, coming, frames)
        end = max(0, count - first) if sum(absent[first:]) <= room else 0
    if not end:
        return replace(host, disk=replace(disk, waits=disk.waits.set(request_id, Wait(until=disk.now)))), ()
    host = replace(host, ages=lru.add(lru.remove(host.ages, idle), idle[::-1]))  # what it goes on with must stay
    places = range(first + begin, first + end)
    fresh = [place for place in places if absent[place]]
    host = offload.make_room(host, len(fresh))
    used, taken = page_ops.allocate(host.used, min(len(fresh), host.used.num_free)) or (host.used, ())
    pairs, reads = tuple((at, keys[place]) for at, place in zip(taken, fresh, strict=False)), disk
    for (at, key), place in zip(pairs, fresh, strict=False):
        reads = reads.begun(at, key, framed=host.apart and wanted[place] == WHOLE)
        coming[key] = wanted[place], at
    pages = tuple(coming[keys[place]][1] for place in places if found[place] < wanted[place] <= coming.get(keys[place], NONE)[0])
    wait = Wait(until=disk.now + paces.running(len(absent) - first), pages=pages)
    wait = replace(wait, start=start + places.start, stop=start + places.stop) if begin else wait
    return replace(host, used=used, disk=replace(reads, waits=reads.waits.set(request_id, wait))), pairs


def paces_of(host: HostPages, page_size: int, before_run: float, wanted: Seq[int] = (), start: int = 0) -> Paces:
    """How long it takes to fill pages, after the prompts that come first and the reads that are under way.

    Args:
        host: The host pages.
        page_size: Tokens per page.
        before_run: Seconds for which the device runs these prompts.
        wanted: What is needed of each page. Pages with and without frames take their mean time.
        start: The place of the first page in its prompt. The tokens of all pages take their mean time.
    """
    disk, rates, count = _disk(host), host.rates, max(1, len(wanted))
    each = sum(host.bytes_of(part == WHOLE) for part in wanted) / len(wanted) if wanted else host.page_bytes
    under_way = sum(host.bytes_of(at in disk.framed) for at in disk.reading)
    return Paces(
        run=rates.seconds_to_run(start * page_size, (start + count) * page_size) / count,
        read=each / disk.bytes_per_second,
        copy=each / rates.bytes_per_second,
        before_run=before_run,
        before_read=READ_LATENCY + under_way / disk.bytes_per_second,
    )


def arrived(host: HostPages, ended: Seq[tuple[int, int]]) -> HostPages:
    """The host pages after some reads have ended: (host page, what has come of its page) in the order of their prompts."""
    if not ended:
        return host
    disk, ages, bare = _disk(host), host.ages, host.bare
    by_key, key_of, found, lost = host.by_key, host.key_of, list[int](), list[int]()
    for at, part in ended:
        key = disk.reading[at]
        known = by_key.get(key)
        if part == NOTHING or (known is not None and (part < WHOLE or known not in bare)):
            lost.append(at)
            continue
        if known is not None:  # without its frame, so it is no chunk's
            key_of, bare, ages = key_of.delete(known), bare.delete(known), lru.remove(ages, np.array([known], np.int32))
            found = [page for page in found if page != known]
            lost.append(known)
        by_key, key_of = by_key.set(key, at), key_of.set(at, key)
        bare = bare.set(at, True) if host.apart and part < WHOLE else bare
        found.append(at)
    ages = lru.add(ages, np.array(found[::-1], np.int32))  # the last page of a prompt is replaced first
    used = page_ops.release(host.used, np.array(lost, np.int32)) if lost else host.used
    disk = disk.without(at for at, _ in ended)
    return replace(host, used=used, by_key=by_key, key_of=key_of, bare=bare, ages=ages, disk=disk)


def _found(host: HostPages, key: bytes) -> int:
    """What host memory has of a page."""
    at = host.by_key.get(key)
    return NOTHING if at is None else PAGE if at in host.bare else WHOLE


def _num_found(found: list[int]) -> int:
    """The number of pages in a row from the first one on of which there is something."""
    return found.index(NOTHING) if NOTHING in found else len(found)


def _coming(host: HostPages) -> dict[bytes, tuple[int, int]]:
    """By key what is being read of its page, and the host page."""
    disk, coming = _disk(host), dict[bytes, tuple[int, int]]()
    for at, key in disk.reading.items():
        part = WHOLE if at in disk.framed or not host.apart else PAGE
        coming[key] = max(coming.get(key, NONE), (part, at))
    return coming


def _needed(
    keys: Seq[bytes], count: int, found: list[int], coming: dict[bytes, tuple[int, int]], frames: FrameNeeds | None
) -> tuple[list[int], list[bool]]:
    """What is needed of each of the first `count` pages, and whether it must be read for that."""
    wanted = [PAGE] * count if frames is None else frames.wanted(count)
    there = [max(part, coming.get(key, NONE)[0]) for part, key in zip(found, keys, strict=True)]
    return wanted, [part < need for part, need in zip(there, wanted, strict=False)]


def _disk(host: HostPages) -> DiskReads:
    assert host.disk is not None
    return host.disk
