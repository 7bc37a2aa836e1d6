"""`Frames`: the KV memory of layers with a window, for fewer pages than there are. Persistent.

A page is `page_size` tokens of a run, and its number is where layers without a window keep their KV. Layers with one keep theirs in a
*frame*, which a page has only while somebody needs it: a token attends to no more than the window before it, so a request gives up its
need of what lies behind (`Sequence.retired`). A frame that nobody needs keeps its contents, so that a later request may find them, until it
is taken for another page: spare frames go in the order in which they became so. A page that nobody owns has no frame.
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
    """`frame_of[page]` (-1: none), and `needs[page]`, the owners of a page that need its frame. `used` says which frames are free.

    `window` is the widest, in tokens. `alone`: every layer has one, so that a page without a frame has no memory at all. `spare` are the
    pages with a frame that nobody needs.
    """

    window: int
    alone: bool
    used: PageState
    frame_of: IntArray
    needs: IntArray
    spare: Ages

    @property
    def num_frames(self) -> int:
        """All frames but the dummy, whose number this is."""
        return self.used.num_pages

    @property
    def num_available(self) -> int:
        """Frames that pages could get: free ones, and spare ones."""
        return self.used.num_free + self.spare.count

    def __repr__(self) -> str:
        return f"Frames({self.used.num_used} of {self.num_frames} used, {self.spare.count} of them spare)"

    def have(self, pages: np.ndarray) -> np.ndarray:
        """Which of these pages have a frame."""
        return self.frame_of.get(pages) >= 0

    def of(self, pages: np.ndarray) -> np.ndarray:
        """The frames of pages, int32; the dummy frame for those that have none."""
        found = self.frame_of.get(pages)
        return np.where(found < 0, np.int32(self.num_frames), found)


def init_frames(num_frames: int, num_pages: int, *, window: int, alone: bool) -> Frames:
    """Free frames, and as many pages without one."""
    return Frames(
        window=window, alone=alone, used=init_pages(num_frames), frame_of=IntArray.full(num_pages, -1), needs=IntArray.full(num_pages),
        spare=init_ages(num_pages),
    )  # fmt: skip


def give(frames: Frames, pages: np.ndarray) -> Frames:
    """A frame, and a need, for each page; spare ones are taken, the oldest first, where free ones do not suffice.

    Raises `BrokenInvariantError` where there are too few, and for a page that has one.
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


def need(frames: Frames, pages: Ints) -> Frames:
    """One more need of each page, which has a frame: raises `BrokenInvariantError` for one without."""
    pages = as_array(pages)
    if not len(pages):
        return frames
    if not frames.have(pages).all():
        raise BrokenInvariantError(f"page {pages[~frames.have(pages)][0]} has lost its frame and cannot be needed")
    unique, times = page_ops.distinct(pages)
    needs = frames.needs.put(unique, frames.needs.get(unique) + times)
    return replace(frames, needs=needs, spare=age_ops.remove(frames.spare, unique))


def retire(frames: Frames, pages: Ints) -> Frames:
    """One need of each page less; where none is left the frame is spare. The first of these is the first to be taken.

    Raises `BrokenInvariantError` for a page that nobody needs.
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
    """Pages lose their frames, those that have one; raises `BrokenInvariantError` for one that is needed."""
    pages = pages[frames.have(pages)]
    if not len(pages):
        return frames
    needs = frames.needs.get(pages)
    if needs.any():
        raise BrokenInvariantError(f"the frame of page {pages[needs > 0][0]} is needed and cannot be given back")
    return _without(replace(frames, spare=age_ops.remove(frames.spare, pages)), pages)


def pages_with(frames: Frames, wanted: Ints) -> list[int]:
    """The pages that have one of these frames; linear in the pages, for calls that failed."""
    wanted = as_array(wanted)
    return np.flatnonzero(np.isin(frames.frame_of.copy(), wanted)).tolist() if len(wanted) else []


def frame_slots(frames: Frames, slots: np.ndarray, page_size: int) -> np.ndarray:
    """Slots of pages as slots of their frames."""
    page, within = np.divmod(slots.astype(np.int32), np.int32(page_size))
    return frames.of(page) * np.int32(page_size) + within


def num_retired(num_filled: int, num_tokens: int, window: int, page_size: int) -> int:
    """Leading pages of which no token that still runs sees anything in a layer with this window: the next to run is the first that is not
    filled, or the last once more, for its logits."""
    return max(0, min(num_filled, num_tokens - 1) - window + 1) // page_size


def least_frames(window: int, page_size: int) -> int:
    """Frames with which a request of any length goes on, a token at a time: the pages that a window can lie in."""
    return 1 + -(-(window - 1) // page_size)


def _without(frames: Frames, pages: np.ndarray) -> Frames:
    used = page_ops.release(frames.used, frames.frame_of.get(pages))
    return replace(frames, used=used, frame_of=frames.frame_of.put(pages, -1))
