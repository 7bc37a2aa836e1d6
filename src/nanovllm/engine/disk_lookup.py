"""What a waiting request could read from the disk: looked up in the index, in host memory, among the reads under way, and in the folder."""

import numpy as np

from nanovllm.config import Mesh
from nanovllm.engine.disk_facts import on_all_disks
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.state import pool as pools
from nanovllm.state.disk_frames import FrameNeeds
from nanovllm.state.disk_reads import NOTHING, PAGE, WHOLE
from nanovllm.state.offload import HostPages
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_keys import frame_key, keys_from
from nanovllm.state.request import Sequence


def looked_up(
    pool: Pool, disk: DiskTier, mesh: Mesh | None, sequence: Sequence, page_size: int
) -> tuple[int, list[bytes], FrameNeeds | None]:
    """The pages in a row with which a request could go on after those that it has or can reuse on the device.

    Args:
        pool: The pool.
        disk: The disk of this rank.
        mesh: The ranks, which call this at the same time.
        sequence: The request.
        page_size: Tokens per page.

    Returns:
        The place in the prompt of the first page; the keys of the pages, each of which is on the device, in host memory, on the disks of
        all ranks, or being read; and the frames that the request needs with them, if the model has layers with windows.
    """
    tokens, asked, filled = sequence.tokens.array(), sequence.request, sequence.num_filled
    usable, _ = pools.reusable(pool, tokens, whole=asked.keep, namespace=asked.namespace)
    start, keys, had, here = max(len(usable), filled // page_size), list[bytes](), list[int](), np.zeros(0, np.bool_)
    in_order = not filled % page_size and sequence.num_exact == filled
    if pool.frames is not None:
        here = pool.frames.have(pools.match(pool, tokens, asked.namespace)[start:])
        in_order &= sequence.pages.length == filled // page_size
    parts = _Parts(pool, disk)
    for place, key in enumerate(keys_from(tokens, start, page_size, asked.namespace) if in_order else ()):
        part = WHOLE if place < len(here) and here[place] else parts.of(key)
        if part == NOTHING and place >= len(here):
            break
        keys.append(key)
        had.append(part)
    every = on_all_disks(mesh, np.array(had, np.uint8))
    keys = keys[: len(every)]
    if pool.frames is None:
        return start, keys, None
    window = None if asked.keep else pool.frames.window
    return start, keys, FrameNeeds(
        before=start, num_tokens=len(tokens), page_size=page_size, window=window, had=every == WHOLE, here=here[: len(every)]
    )  # fmt: skip


class _Parts:
    """What there is of pages in host memory, on the disk and among the reads under way."""

    def __init__(self, pool: Pool, disk: DiskTier) -> None:
        assert pool.host is not None and pool.host.disk is not None
        reads = pool.host.disk
        self._host: HostPages = pool.host
        self._folder = disk.folder
        self._coming = {*reads.reading.values()}
        self._framed = {reads.reading[at] for at in reads.framed}

    def of(self, key: bytes) -> int:
        """What there is of a page: `NOTHING`, the `PAGE`, or the `WHOLE` with its frame."""
        at, host = self._host.by_key.get(key), self._host
        if (at is not None and at not in host.bare) or key in self._framed:
            return WHOLE
        stored = self._folder.look(key)
        if not host.apart:
            return WHOLE if stored or key in self._coming else NOTHING
        if stored and self._folder.look(frame_key(key)):
            return WHOLE
        return PAGE if stored or at is not None or key in self._coming else NOTHING
