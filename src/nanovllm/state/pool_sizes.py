"""How many pages and frames an engine has: KV memory, shared out between the layers with a window and those without.

**Frames for all.** As many as can be needed at once where no chunk is alive: for each of `max_num_seqs` sequences the pages that a window
can lie in, those that it gets ahead of need and one more, and what the prompts of a step fill; at least what one sequence of
`max_model_len` tokens fills, for a chunk of so many. Seldom are so many sequences at their longest, and what is not needed serves prefix
reuse. Chunks need frames for all their tokens: who holds many gives `num_frames`.

**Some layers without a window.** There are never more frames than pages. Where memory is short both get it page by page; frames no longer
once there are enough for all.

**All layers with a window.** Frames are the memory, and `num_pages` means them. Pages are entries of host arrays: as many as `max_num_seqs`
sequences of `max_model_len` tokens have, so that a long request needs memory for its window alone.
"""

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.errors import OutOfPagesError
from nanovllm.state.kv_cache import bytes_by_group, pages_for
from nanovllm.state.window_frames import least_frames

LOOKAHEAD = 64  # tokens whose pages a decoding sequence gets ahead of need, while an eighth of the pool stays available


def pool_sizes(
    config: ModelConfig, limits: EngineConfig, num_pages: int | None, num_frames: int | None, budget: int | None, dtype: torch.dtype
) -> tuple[int, int]:
    """`num_pages` and `num_frames` of an engine, where they are given, and by the rules above where not, within `budget` bytes, which
    `num_pages=None` wants. Raises `OutOfPagesError` where not a page fits."""
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
    """The dummy page of the first KV pool, and that of the second (None: there is none)."""
    if len(config.pool_sizes) == 2:
        return limits.num_pages, limits.num_frames
    return limits.num_frames if config.all_windowed else limits.num_pages, None


def frames_for_all(window: int, limits: EngineConfig) -> int:
    """What all sequences that run can need at once."""
    size = limits.page_size
    each = min(pages_for(limits.max_model_len, size), least_frames(window, size) + 1 + pages_for(LOOKAHEAD, size))
    return limits.max_num_seqs * each + pages_for(limits.max_num_batched_tokens, size)


def bytes_of(config: ModelConfig, limits: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of an engine's KV memory, the dummies aside."""
    page, frame = bytes_by_group(config, page_size=limits.page_size, dtype=dtype)
    return limits.num_pages * page + limits.num_frames * frame


def _within(
    config: ModelConfig, limits: EngineConfig, budget: int | None, most: int, enough: int, dtype: torch.dtype, *, fixed: bool = False
) -> int:
    """The most pages, of at most `most`, that fit beside their frames, of which `enough` are enough; `fixed`: there are so many."""
    page, frame = bytes_by_group(config, page_size=limits.page_size, dtype=dtype)
    assert budget is not None
    left = budget - page - frame  # the dummies
    count = (left - enough * frame) // page if page else left // frame
    if page and not fixed and count < enough:  # a frame for each page
        count = left // (page + frame)
    if min(most, count) < 1:
        raise OutOfPagesError(f"{budget / 2**20:.0f} MiB are left for KV and one page takes {(page + frame) / 2**20:.1f} MiB")
    return min(most, count)
