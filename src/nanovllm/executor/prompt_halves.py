"""Cuts a batch of prompts in two, whose layers take turns where several GPUs share a model (`models/fast/halves.py`)."""

from dataclasses import replace

import numpy as np

from nanovllm.executor.batch import HostBatch
from nanovllm.models.model import Model
from nanovllm.ops.distributed.shared_memory import STAGE
from nanovllm.types import Int32

LEAST = 1024  # tokens of a half: fewer do not fill the GPU
ALIGNED = 128  # the tokens of the first half are a multiple: full tiles, and numbers for which kernels are compiled anyway
NEAR = 8  # a boundary between prompts is taken in place of the middle if it is nearer than a part of so many of the tokens


def least_tokens(model: Model) -> int | None:
    """The fewest tokens of a batch that runs as two halves: each has products that fill the GPU, and, if the cut is in the middle, sums
    of more than `STAGE` bytes.

    NCCL takes such sums. Fewer tokens were not measured. None: no batch is cut, because the model is not shared by several GPUs.
    """
    mesh = model.config.mesh
    if mesh is None or mesh.size == 1 or model.device.type != "cuda":
        return None
    large = STAGE // (model.config.hidden_size * model.dtype.itemsize) + 1
    return 2 * (max(LEAST, large) + ALIGNED)


def middle(cu_seqlens: Int32[np.ndarray, "bounds"]) -> int:
    """Where to cut a batch of prompts: near the middle, between two prompts if there is such a place, else within one.

    Examples:
        >>> middle(np.array([0, 3000], np.int32)), middle(np.array([0, 1400, 3000], np.int32))
        (1408, 1400)
    """
    total = int(cu_seqlens[-1])
    between = int(cu_seqlens[np.abs(2 * cu_seqlens - total).argmin()])
    if abs(2 * between - total) * NEAR <= 2 * total and 0 < between < total:
        return between
    aligned = total // 2 // ALIGNED * ALIGNED
    return aligned or total // 2


def cut(host: HostBatch, at: int, page_size: int) -> tuple[HostBatch, HostBatch]:
    """Cut a batch of prompts into its first `at` tokens and the others.

    If the cut is within a prompt, both halves have a row of it. The row of the second half attends to the tokens of the first, which must
    be written before. Rows keep their order, and so do tokens and logits.

    Args:
        host: The batch.
        at: How many tokens the first half has: at least one, and fewer than there are.
        page_size: Tokens per page.
    """
    bounds, seq_lens = host.cu_seqlens, host.seq_lens
    assert bounds is not None and 0 < at < bounds[-1]
    first = _part(host, 0, int(np.searchsorted(bounds, at)), 0, at, page_size)
    second = _part(host, int(np.searchsorted(bounds, at, side="right")) - 1, len(seq_lens), at, int(bounds[-1]), page_size)
    return first, second


def _part(host: HostBatch, first: int, last: int, start: int, stop: int, page_size: int) -> HostBatch:
    """The tokens from `start` to `stop`, which are in the rows from `first` to `last`."""
    assert host.cu_seqlens is not None
    rows, tokens, bounds = slice(first, last), slice(start, stop), host.cu_seqlens[first : last + 1]
    seq_lens = (host.seq_lens[rows] - np.maximum(bounds[1:] - stop, 0)).astype(np.int32)
    asked = host.logit_indices
    return replace(
        host,
        input_ids=host.input_ids[tokens],
        positions=host.positions[tokens],
        slots=host.slots[tokens],
        page_tables=host.page_tables[rows],
        seq_lens=seq_lens,
        page_counts=-(-seq_lens // page_size),
        cu_seqlens=(bounds.clip(start, stop) - start).astype(np.int32),
        logit_indices=None if asked is None else asked[(asked >= start) & (asked < stop)] - np.int32(start),
        frame_tables=None if host.frame_tables is None else host.frame_tables[rows],
        frame_slots=None if host.frame_slots is None else host.frame_slots[tokens],
    )
