"""Scoring: the batch of tokens whose successors are given, and the log-probabilities of these successors.

`asked` is an int64 array `[K, 2]`: for each log-probability the index of a token in the batch, ascending, and the id of the token after it.
An index may occur more than once.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.executor.batch import HostBatch, first_dummy, prefill_batch
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Float, Float32, Int32, Int64, Tensor

LOGIT_BYTES = 512 << 20  # of the logits of one batch, as if they were float32
PIECE_BYTES = 64 << 20  # of the float32 logits that are normalised at once


class Scored(NamedTuple):
    """Log-probabilities on the device, K of tokens that were asked for.

    Attributes:
        logprobs: Those of the tokens, float32 `[K]`.
        top_ids: The C most probable tokens in the place of each, sorted, int32 `[K, C]`. C is 0 if nobody asked for them.
        top_logprobs: The log-probabilities of `top_ids`, float32 `[K, C]`.
    """

    logprobs: Float32[Tensor, "K"]
    top_ids: Int32[Tensor, "K C"]
    top_logprobs: Float32[Tensor, "K C"]


def most_logits(vocab_size: int) -> int:
    """The most tokens of one batch whose logits are computed, so that the logits have at most `LOGIT_BYTES`."""
    return max(1, LOGIT_BYTES // (4 * vocab_size))


def score_batch(
    rows: Seq[tuple[Sequence, int]],
    asked: Int64[np.ndarray, "K 2"],
    *,
    page_size: int,
    dummy_page: int,
    frames: Frames | None = None,
) -> HostBatch:
    """The batch of the next `count` unfilled tokens of each sequence, with the logits of the tokens in `asked`.

    A filled sequence has a count of 1: its last token runs again. It reads its KV, and writes to the dummy page.

    Args:
        rows: Each sequence, with its count.
        asked: The log-probabilities that are wanted.
        page_size: Tokens per page.
        dummy_page: The number of the dummy page.
        frames: The frames of the sequences' pages, if layers have a sliding window.
    """
    again = np.repeat([s.todo == 0 for s, _ in rows], [count for _, count in rows])
    pieces = [(s if s.todo else replace(s, num_filled=s.tokens.length - 1), count) for s, count in rows]
    host = prefill_batch(pieces, page_size=page_size, dummy_page=dummy_page, frames=frames, draw=False)
    slots, frame_slots = np.where(again, np.int32(first_dummy(dummy_page, frames) * page_size), host.slots), None
    if frames is not None and host.frame_slots is not None:
        frame_slots = np.where(again, np.int32(frames.num_frames * page_size), host.frame_slots)
    return replace(host, slots=slots, frame_slots=frame_slots, logit_indices=np.unique(asked[:, 0]).astype(np.int32))


def whole_prompts(rows: Seq[Sequence], *, page_size: int, dummy_page: int, frames: Frames | None = None) -> HostBatch:
    """The batch of all unfilled tokens of the sequences, with the logits of the last token of each. Arguments are as in `score_batch`."""
    counts = [max(1, s.todo) for s in rows]
    last = np.stack((np.cumsum(counts) - 1, np.zeros(len(rows), np.int64)), 1)
    return score_batch(list(zip(rows, counts, strict=True)), last, page_size=page_size, dummy_page=dummy_page, frames=frames)


def asked_logprobs(logits: Float[Tensor, "R V"], asked: Int64[np.ndarray, "K 2"], num_top: int = 0) -> Scored:
    """The log-probabilities that are wanted, and those of the `num_top` most probable tokens in the same places.

    Row r of the logits belongs to the r-th different index in `asked`.
    """
    size = max(1, PIECE_BYTES // (4 * logits.shape[1]))
    row_of = np.unique(asked[:, 0], return_inverse=True)[1].reshape(-1)
    rows, token_ids = torch.from_numpy(np.stack((row_of % size, asked[:, 1]))).to(logits.device)
    ends = np.searchsorted(row_of, np.arange(0, len(logits) + size, size))
    none = logits.new_empty(0, min(num_top, logits.shape[1]), dtype=torch.float32)
    parts = [Scored(none.new_empty(0), none.int(), none)]
    for piece, start, stop in zip(logits.split(size) if len(logits) else (), ends, ends[1:], strict=False):
        logprobs, own = piece.float().log_softmax(-1), rows[start:stop]
        top = logprobs.topk(none.shape[1])
        parts.append(Scored(logprobs[own, token_ids[start:stop]], top.indices[own].int(), top.values[own]))
    return Scored(*map(torch.cat, zip(*parts, strict=True)))
