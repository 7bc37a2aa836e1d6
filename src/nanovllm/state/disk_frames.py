"""Which frames (the KV memory of sliding-window layers) a request needs with the pages that it could read from the disk.

A request can go on after some pages only if the frames of its last window are there. So these frames are read with their pages, and the
pages before the window are read without frames.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from nanovllm.state.disk_reads import NOTHING, PAGE, WHOLE
from nanovllm.state.window_frames import num_retired, num_served


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrameNeeds:
    """What a request needs of pages in a row that it could begin with, in a model with sliding-window layers.

    Attributes:
        before: The place in the prompt of the first of these pages. The request has the frames before it, as far as it needs them.
        num_tokens: The tokens of the request.
        page_size: Tokens per page.
        window: The widest window, in tokens. None: the request needs all frames, because it may become a chunk.
        had: For each page whether its frame is somewhere: on the device, in host memory, on the disk, or being read.
        here: For each of the first pages, which the device has, whether it has its frame there. The device has none of the others.
    """

    before: int
    num_tokens: int
    page_size: int
    window: int | None
    had: np.ndarray
    here: np.ndarray

    def served(self, count: int) -> int:
        """The largest number of pages, at most `count`, with which the request can begin if all is read that can be read."""
        return self._served(self.had[:count])

    def begins(self, found: Seq[int]) -> int:
        """The number of pages with which the request can begin without reads, if host memory has so much of each page."""
        held, num_here = np.array(found, np.int32), len(self.here)
        there, framed = held > NOTHING, held == WHOLE
        there[:num_here] = True
        framed[:num_here] |= self.here
        return self._served(framed[: len(there) if there.all() else int(there.argmin())])

    def wanted(self, count: int) -> list[int]:
        """What must come from elsewhere to the device of each page if the request begins with `count` of them."""
        num_filled, num_here = (self.before + count) * self.page_size, len(self.here)
        retired = 0 if self.window is None else num_retired(num_filled, self.num_tokens, self.window, self.page_size)
        inside = np.arange(self.before, self.before + count) >= retired
        wanted = np.where(inside, WHOLE, PAGE)
        wanted[:num_here] = np.where(inside[:num_here] & ~self.here[:count], WHOLE, NOTHING)
        return wanted.tolist()

    def _served(self, framed: np.ndarray) -> int:
        return num_served(framed, self.before, self.window, self.num_tokens, self.page_size)
