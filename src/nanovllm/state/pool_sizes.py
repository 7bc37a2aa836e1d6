"""How many pages and frames an engine has: how KV memory is divided between layers with a sliding window and layers without.

**Enough frames.** By default an engine has as many frames as it can need at once while no chunk is alive. For each of `max_num_seqs`
sequences these are the pages that a window spans, the pages that it gets ahead of need, and one more. The prompts of a step add the pages
that they fill. There are at least as many as one sequence of `max_model_len` tokens has pages, so that a chunk of this length fits. Few
engines run so many sequences at full length, and unneeded frames serve prefix reuse. Chunks need frames for all their tokens: if you keep
many chunks, set `num_frames`.

**Some layers have no window.** There are never more frames than pages. If memory is short, both grow together page by page, until there are
enough frames.

**All layers have a window.** Frames are the memory, and `num_pages` sets their number. Pages are only entries of host arrays: as many as
`max_num_seqs` sequences of `max_model_len` tokens have. So a long request needs memory for its window only.
"""

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import OutOfPagesError
from nanovllm.state.kv_cache import bytes_by_group, pages_for
from nanovllm.state.window_frames import least_frames

LOOKAHEAD = 64  # tokens for which a decoding sequence gets pages ahead, while an eighth of the pool stays available


def pool_sizes(
    config: ModelConfig, limits: EngineConfig, num_pages: int | None, num_frames: int | None, budget: int | None, dtype: torch.dtype
) -> tuple[int, int]:
    """Return `num_pages` and `num_frames` of an engine.

    Args:
        config: The model's config.
        limits: The engine's limits.
        num_pages: The number of pages, or None for the rules of this module.
        num_frames: The number of frames, or None for the rules of this module.
        budget: Bytes of KV memory; required if `num_pages` is None.
        dtype: The dtype of keys and values.

    Raises:
        OutOfPagesError: Not even one page fits.
    """
    each = pages_for(limits.max_model_len, limits.page_size)
    all_pages = limits.max_num_seqs * each
    if not config.widest_window:
        return (_within(config, limits, budget, all_pages, 0, dtype) if num_pages is None else num_pages), 0
    enough = min(all_pages, max(each, frames_for_all(config.widest_window, limits)))
    if config.all_windowed:
        if num_frames is None:
            num_frames = _within(config, limits, budget, enough, 0, dtype) if num_pages is None else num_pages
        return max(num_frames, num_pages or 0, all_pages), num_frames
    enough = enough if num_frames is None else num_frames
    if num_pages is None:
        num_pages = _within(config, limits, budget, all_pages, enough, dtype, fixed=num_frames is not None)
    return num_pages, min(num_pages, enough) if num_frames is None else num_frames


def dummies(config: ModelConfig, limits: EngineConfig) -> tuple[int, int | None]:
    """The dummy page of the first KV pool, and the dummy frame of the second; None if there is no second pool."""
    if len(config.pool_sizes) == 2:
        return limits.num_pages, limits.num_frames
    return limits.num_frames if config.all_windowed else limits.num_pages, None


def frames_for_all(window: int, limits: EngineConfig) -> int:
    """The number of frames that all running sequences can need at once."""
    size = limits.page_size
    each = min(pages_for(limits.max_model_len, size), least_frames(window, size) + 1 + pages_for(LOOKAHEAD, size))
    return limits.max_num_seqs * each + pages_for(limits.max_num_batched_tokens, size)


def bytes_of(config: ModelConfig, limits: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of an engine's KV memory, without the dummies."""
    page, frame = bytes_by_group(config, page_size=limits.page_size, dtype=dtype)
    return limits.num_pages * page + limits.num_frames * frame


def _within(
    config: ModelConfig, limits: EngineConfig, budget: int | None, most: int, enough: int, dtype: torch.dtype, *, fixed: bool = False
) -> int:
    """The largest number of pages, at most `most`, that fits with their frames.

    `enough` frames are enough; with `fixed` there are exactly so many.
    """
    page, frame = bytes_by_group(config, page_size=limits.page_size, dtype=dtype)
    assert budget is not None
    left = budget - page - frame  # the dummies
    count = (left - enough * frame) // page if page else left // frame
    if page and not fixed and count < enough:  # a frame for each page
        count = left // (page + frame)
    if min(most, count) < 1:
        raise OutOfPagesError(
            f"{budget / 2**20:.0f} MiB are left for KV, and one page takes {(page + frame) / 2**20:.1f} MiB: free some memory first"
        )
    return min(most, count)
