"""How a prompt whose KV is on disk is filled soonest: by running it, by reading it, or by both at the same time.

A page that was read is exact whether or not the pages before it are filled yet. So a request can run the front of its prompt while the
pages behind it are read from the last one on, and where both meet it goes on after the last page (a *split*). The device and the disk
then work at the same time, and neither does what the other has done. This is the bidirectional loading of Cake (arXiv 2410.03065).
"""

import math
from bisect import bisect, bisect_left
from dataclasses import dataclass
from itertools import accumulate

from nanovllm.state.disk_reads import Wait
from nanovllm.state.offload import LATENCY, HostPages

GAIN = 8  # a split must end sooner than running and than reading by their time divided by this
PASS = 5e-3  # seconds: a pass over fewer tokens than run in this time is inefficient


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """What it takes to fill pages, in seconds.

    Attributes:
        run: To run the tokens of a page.
        read: To read a page from the disk into host memory.
        copy: To copy a page from host memory.
        before_run: Until the device has run the prompts that come first.
        before_read: Until the first page has been read, after those that are being read.
    """

    run: float
    read: float
    copy: float
    before_run: float = 0.0
    before_read: float = 0.0

    def running(self, count: int) -> float:
        """When `count` pages are filled if all of them run."""
        return self.before_run + count * self.run

    def reading(self, count: int, loaded: int, num_read: int) -> float:
        """When `count` pages are filled if the first `loaded` are waited for, of which `num_read` are read, and the others run then."""
        return max(self.before_run, self.before_read + num_read * self.read) + LATENCY + loaded * self.copy + (count - loaded) * self.run

    def splitting(self, count: int, first: int, num_read: int) -> float:
        """When `count` pages are filled if those before `first` run while of the others `num_read` are read."""
        return max(self.running(first), self.before_read + num_read * self.read) + LATENCY + (count - first) * self.copy


def pages_to_load(paces: Paces, absent: list[bool], room: int) -> tuple[int, int]:
    """Which pages of a prompt to load, so that all are filled soonest.

    A split runs tokens for which others could use the device. So where reading or running alone takes hardly longer, that is done.

    Args:
        paces: How long all takes.
        absent: For each page whether it has to be read. The others are in host memory, or are being read already.
        room: How many pages may be read.

    Returns:
        The first page to load and the one after the last. (0, n): the request waits for the first n pages, and runs the others then.
        (k, n) with 0 < k < n = `len(absent)`: it runs the first k pages while the others are read. (0, 0): it runs all.
    """
    count, gone = len(absent), [0, *accumulate(absent)]
    running, best, found = paces.running(count), math.inf, (0, 0)
    loaded = bisect(gone, room) - 1  # as many of the first pages as there is room for
    if loaded and (reading := paces.reading(count, loaded, gone[loaded])) < running:
        best, found = reading, (0, loaded)
    most, firsts = (1 - 1 / GAIN) * min(best, running), range(1, count)
    ends_last = bisect(firsts, 0, key=lambda first: paces.running(first) - paces.before_read - (gone[-1] - gone[first]) * paces.read)
    fits = bisect_left(firsts, -room, key=lambda first: gone[first] - gone[-1])
    for at in {max(fits, ends_last - 1), max(fits, ends_last)}:  # the last place at which the reads end last, and the one after it
        first = at + 1
        if 0 < first < count and (splitting := paces.splitting(count, first, gone[-1] - gone[first])) < most:
            most, found = splitting, (first, count)
    return found


def tokens_to_meeting(host: HostPages, wait: Wait, num_filled: int, page_size: int) -> int | None:
    """How many tokens a split request runs until it meets the pages that are read for it, the last ones first. At least a pass is run.

    Args:
        host: The host pages.
        wait: What was planned.
        num_filled: The tokens that are filled.
        page_size: Tokens per page.

    Returns:
        None if no read that is under way is of use to it, or if running all would have ended by now.
    """
    assert host.disk is not None
    under_way = [at in host.disk.framed for at in wait.pages if at in host.disk.reading]
    next_page, num_read = num_filled // page_size, len(under_way)
    between = wait.start + num_read - next_page  # pages between the next one and those that have come
    if between <= 0 or next_page >= wait.stop or host.disk.now >= wait.until:
        return None
    run = host.rates.seconds_to_run(num_filled, num_filled + page_size)
    read = sum(map(host.bytes_of, under_way)) / max(1, num_read) / host.disk.bytes_per_second
    count = max(1, wait.start - next_page, math.ceil(between * read / (run + read)))
    return max((next_page + count) * page_size - num_filled, least_tokens(host, num_filled, page_size))


def least_tokens(host: HostPages, num_filled: int, page_size: int) -> int:
    """How many tokens after those that are filled a pass runs at least, if it runs part of a prompt: up to the end of a page."""
    least = int(PASS / host.rates.seconds_to_run(num_filled, num_filled + 1))
    return -(-(num_filled + least) // page_size) * page_size - num_filled
