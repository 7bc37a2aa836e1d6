"""`Frames`: the KV memory of layers with a sliding window, which has room for fewer pages than there are. Persistent.

A page is `page_size` tokens of a sequence. Its number says where layers without a window keep its KV. Layers with a window keep it in a
*frame* (the KV memory of a sliding-window page). A page has a frame only while somebody needs it. A token attends only to the window before
it, so a request gives up the frames before its window (`Sequence.retired`).

A frame that nobody needs is spare. It keeps its contents, which a later request may reuse, until it is taken for another page. Spare frames
are taken in the order in which they became spare. A free page has no frame.
"""

from dataclasses import dataclass, replace

import numpy as np

from nanovllm.errors import BrokenInvariantError
from nanovllm.state import lru as age_ops
from nanovllm.state import pages as page_ops
from nanovllm.state.array import IntArray
from nanovllm.state.lru import Ages, init_ages
from nanovllm.state.pages import PageState, init_pages
from nanovllm.state.vector import Ints, as_array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frames:
    """Which pages have frames, and which frames are free, needed or spare.

    Attributes:
        window: The widest window, in tokens.
        alone: Whether every layer has a window, so that a page without a frame has no memory at all.
        used: Which frames are free.
        frame_of: The frame of each page; -1: none.
        needs: For each page how many of its owners need its frame.
        spare: The pages whose frame nobody needs.
    """

    window: int
    alone: bool
    used: PageState
    frame_of: IntArray
    needs: IntArray
    spare: Ages

    @property
    def num_frames(self) -> int:
        """The number of frames without the dummy frame, which has this number."""
        return self.used.num_pages

    @property
    def num_available(self) -> int:
        """The number of frames that pages could get: free and spare frames."""
        return self.used.num_free + self.spare.count

    def __repr__(self) -> str:
        return f"Frames({self.used.num_used} of {self.num_frames} used, {self.spare.count} of them spare)"

    def have(self, pages: np.ndarray) -> np.ndarray:
        """Which of these pages have a frame."""
        return self.frame_of.get(pages) >= 0

    def of(self, pages: np.ndarray) -> np.ndarray:
        """The frames of pages, int32; the dummy frame for pages without one."""
        frames = self.frame_of.get(pages)
        return np.where(frames < 0, np.int32(self.num_frames), frames)


def init_frames(num_frames: int, num_pages: int, *, window: int, alone: bool) -> Frames:
    """Free frames, and `num_pages` pages without a frame."""
    return Frames(
        window=window, alone=alone, used=init_pages(num_frames), frame_of=IntArray.full(num_pages, -1), needs=IntArray.full(num_pages),
        spare=init_ages(num_pages),
    )  # fmt: skip


def give(frames: Frames, pages: np.ndarray) -> Frames:
    """Give each page a frame, and note one need. If free frames do not suffice, spare ones are taken, the oldest first.

    Raises `BrokenInvariantError` if there are too few, or if a page already has a frame.
    """
    if frames.have(pages).any():
        raise BrokenInvariantError(f"page {pages[frames.have(pages)][0]} has a frame already")
    missing = len(pages) - frames.used.num_free
    if missing > 0:
        spare, overtaken = age_ops.take(frames.spare, missing)
        frames = _without(replace(frames, spare=spare), overtaken)
    taken = page_ops.allocate(frames.used, len(pages))
    if taken is None:
        raise BrokenInvariantError(f"{len(pages)} frames were promised, {frames.used.num_free} are free")
    frame_of, needs = frames.frame_of.put(pages, np.array(taken[1], np.int32)), frames.needs.put(pages, 1)
    return replace(frames, used=taken[0], frame_of=frame_of, needs=needs)


def overtaken(frames: Frames, count: int) -> np.ndarray:
    """The pages whose spare frames the next `count` frames are taken from."""
    return age_ops.take(frames.spare, max(0, count - frames.used.num_free))[1]


def need(frames: Frames, pages: Ints) -> Frames:
    """Note one more need of each page's frame. Raises `BrokenInvariantError` for a page without one."""
    pages = as_array(pages)
    if not len(pages):
        return frames
    if not frames.have(pages).all():
        raise BrokenInvariantError(f"page {pages[~frames.have(pages)][0]} has lost its frame and cannot be needed")
    unique, times = page_ops.distinct(pages)
    needs = frames.needs.put(unique, frames.needs.get(unique) + times)
    return replace(frames, needs=needs, spare=age_ops.remove(frames.spare, unique))


def retire(frames: Frames, pages: Ints) -> Frames:
    """Note one need less of each page's frame. Frames without a need become spare, in this order.

    Raises `BrokenInvariantError` for a page whose frame nobody needs.
    """
    pages = as_array(pages)
    if not len(pages):
        return frames
    unique, times = page_ops.distinct(pages)
    left = frames.needs.get(unique) - times
    if (left < 0).any():
        raise BrokenInvariantError(f"nobody needs the frame of page {unique[left < 0][0]}")
    return replace(frames, needs=frames.needs.put(unique, left), spare=age_ops.add(frames.spare, unique[left == 0]))


def vacate(frames: Frames, pages: np.ndarray) -> Frames:
    """Take the frames of these pages away, if they have any. Raises `BrokenInvariantError` for a frame that is needed."""
    pages = pages[frames.have(pages)]
    if not len(pages):
        return frames
    needs = frames.needs.get(pages)
    if needs.any():
        raise BrokenInvariantError(f"the frame of page {pages[needs > 0][0]} is needed and cannot be given back")
    return _without(replace(frames, spare=age_ops.remove(frames.spare, pages)), pages)


def pages_with(frames: Frames, wanted: Ints) -> list[int]:
    """The pages that have one of these frames. The cost grows with the pool; for calls that failed."""
    wanted = as_array(wanted)
    return np.flatnonzero(np.isin(frames.frame_of.copy(), wanted)).tolist() if len(wanted) else []


def frame_slots(frames: Frames, slots: np.ndarray, page_size: int) -> np.ndarray:
    """Slots of pages as slots of their frames."""
    page, within = np.divmod(slots.astype(np.int32), np.int32(page_size))
    return frames.of(page) * np.int32(page_size) + within


def num_retired(num_filled: int, num_tokens: int, window: int, page_size: int) -> int:
    """The number of leading pages that no token still to run sees in a layer with this window.

    The next token to run is the first unfilled one, or the last one again, for its logits.
    """
    return max(0, min(num_filled, num_tokens - 1) - window + 1) // page_size


def num_served(have: np.ndarray, before: int, window: int | None, num_tokens: int, page_size: int) -> int:
    """The largest number of pages after the first `before` with which a request can begin: all that later tokens see have frames.

    Args:
        have: For each page after the first `before` whether its frame is there.
        before: The leading pages whose frames are there as far as they are needed.
        window: The window. None: all frames are needed, because the request may become a chunk.
        num_tokens: The tokens of the request.
        page_size: Tokens per page.
    """
    counts = np.arange(before + 1, before + len(have) + 1)
    behind = np.maximum.accumulate(np.where(have, 0, counts))  # leading pages up to the last page without a frame
    retired = 0 if window is None else np.maximum(0, np.minimum(counts * page_size, num_tokens - 1) - window + 1) // page_size
    served = np.flatnonzero(behind <= retired)
    return int(served[-1]) + 1 if len(served) else 0


def least_frames(window: int, page_size: int) -> int:
    """The frames that a request of any length needs to decode: the pages that a window can span."""
    return 1 + -(-(window - 1) // page_size)


def _without(frames: Frames, pages: np.ndarray) -> Frames:
    used = page_ops.release(frames.used, frames.frame_of.get(pages))
    return replace(frames, used=used, frame_of=frames.frame_of.put(pages, -1))
