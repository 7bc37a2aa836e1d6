"""Builds the tensors of a step from the sequences that it runs. Padding rows own the dummy page."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.models.common.batch import Batch, Windowed
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pool_sizes import dummies
from nanovllm.state.request import Sequence
from nanovllm.state.vector import joined
from nanovllm.state.window_frames import Frames
from nanovllm.types import Int64

EXTENSION = 128  # the most prompt tokens that run as the rows of a captured decode step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostBatch:
    """A `Batch` as int32 host arrays, with the number of pages in use per row for the attention plans.

    Attributes:
        input_ids: Tokens to run, `[T]`.
        positions: Their positions, `[T]`.
        slots: Where their keys and values are written, `[T]`.
        page_tables: The pages of each row, `[B, P]`.
        seq_lens: Tokens of each row, those of this step included, `[B]`.
        page_counts: Pages in use by each row, `[B]`.
        cu_seqlens: Where each prompt begins and ends in `input_ids`, `[B + 1]`. None for a decode batch.
        logit_indices: The tokens whose logits are computed, `[R]`. None: all.
        frame_tables: The frames of each row's pages, `[B, P]`, for `Batch.windowed`; None without a second KV pool.
        frame_slots: Where keys and values are written in the second pool, `[T]`, or None.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    seq_lens: np.ndarray
    page_counts: np.ndarray
    cu_seqlens: np.ndarray | None = None
    logit_indices: np.ndarray | None = None
    frame_tables: np.ndarray | None = None
    frame_slots: np.ndarray | None = None


def prefill_batch(
    rows: Seq[tuple[Sequence, int]], *, page_size: int, dummy_page: int, frames: Frames | None = None, draw: bool = True
) -> HostBatch:
    """The batch of the next `count` unfilled tokens of each sequence.

    Args:
        rows: Each sequence, with its count.
        page_size: Tokens per page.
        dummy_page: The number of the dummy page.
        frames: The frames of the sequences' pages, if layers have a sliding window.
        draw: Whether to compute logits for the last token of each sequence that is complete afterwards.
    """
    counts, ends = [count for _, count in rows], list(accumulate([count for _, count in rows]))
    offsets, (tables, frame_tables) = [s.offset for s, _ in rows], _tables([s for s, _ in rows], dummy_page, frames)
    places = np.concatenate([np.arange(s.num_filled, s.num_filled + count, dtype=np.int32) for s, count in rows])
    row_of = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    pages, within = np.divmod(places, page_size)
    seq_lens = np.array([s.num_filled + count for s, count in rows], np.int32)
    return HostBatch(
        input_ids=np.concatenate([s.tokens.array(s.num_filled, s.num_filled + count) for s, count in rows]),
        positions=places + np.repeat(np.array(offsets, np.int32), counts) if any(offsets) else places,
        slots=tables[row_of, pages] * page_size + within,
        page_tables=tables,
        frame_tables=frame_tables,
        frame_slots=None if frame_tables is None else frame_tables[row_of, pages] * page_size + within,
        seq_lens=seq_lens,
        page_counts=-(-seq_lens // page_size),
        cu_seqlens=np.array([0, *ends], np.int32),
        logit_indices=np.array([end - 1 for end, (s, count) in zip(ends, rows, strict=True) if draw and count == s.todo], np.int32),
    )


def decode_batch(rows: Seq[Sequence], *, page_size: int, dummy_page: int, frames: Frames | None = None) -> HostBatch:
    """The batch of the newest token of each sequence. A sequence that is already filled only reads, and writes to the dummy page.

    Arguments are as in `prefill_batch`.
    """
    last = np.array([s.tokens.length - 1 for s in rows], np.int32)
    tables, frame_tables = _tables(rows, dummy_page, frames)
    filled = np.array([s.todo == 0 for s in rows])

    def slots(tables: np.ndarray, dummy: int) -> np.ndarray:
        own = tables[np.arange(len(rows)), np.minimum(last // page_size, tables.shape[1] - 1)] * page_size + last % page_size
        return np.where(filled, dummy * page_size, own).astype(np.int32)

    return HostBatch(
        input_ids=np.array([s.tokens[-1] for s in rows], np.int32),
        positions=last + np.array([s.offset for s in rows], np.int32),
        slots=slots(tables, first_dummy(dummy_page, frames)),
        page_tables=tables,
        frame_tables=frame_tables,
        frame_slots=None if frame_tables is None or frames is None else slots(frame_tables, frames.num_frames),
        seq_lens=last + 1,
        page_counts=np.array([s.pages.length for s in rows], np.int32),
    )


def token_rows(host: HostBatch, page_size: int) -> HostBatch:
    """Turn prompt tokens into the rows of a decode batch.

    Each token attends to its sequence up to itself, since all KV is written first.
    """
    assert host.cu_seqlens is not None
    ends = host.cu_seqlens[1:]
    row_of = np.repeat(np.arange(len(ends), dtype=np.int32), ends - host.cu_seqlens[:-1])
    seq_lens = (host.seq_lens - ends + 1)[row_of] + np.arange(len(row_of), dtype=np.int32)
    return HostBatch(
        input_ids=host.input_ids,
        positions=host.positions,
        slots=host.slots,
        page_tables=host.page_tables[row_of],
        seq_lens=seq_lens,
        page_counts=-(-seq_lens // page_size),
        frame_tables=None if host.frame_tables is None else host.frame_tables[row_of],
        frame_slots=host.frame_slots,
    )


def padded(host: HostBatch, size: int, *, page_size: int, dummy_page: int, dummy_frame: int = 0) -> HostBatch:
    """Add padding rows to a decode batch up to `size`.

    The dummies are the last page of the first KV pool, and the last frame of the second.
    """
    extra = size - len(host.input_ids)
    if not extra:
        return host

    def pad(array: np.ndarray, value: int) -> np.ndarray:
        wide = np.full((size, *array.shape[1:]), value, np.int32)
        wide[: len(array)] = array
        return wide

    return HostBatch(
        input_ids=pad(host.input_ids, 0),
        positions=pad(host.positions, 0),
        slots=pad(host.slots, dummy_page * page_size),
        page_tables=pad(host.page_tables, dummy_page),
        seq_lens=pad(host.seq_lens, 1),
        page_counts=pad(host.page_counts, 1),
        frame_tables=None if host.frame_tables is None else pad(host.frame_tables, dummy_frame),
        frame_slots=None if host.frame_slots is None else pad(host.frame_slots, dummy_frame * page_size),
    )


def reordered(host: HostBatch, order: Int64[np.ndarray, "B"]) -> HostBatch:
    """A decode batch whose row r is row `order[r]` of this one."""

    given = {field.name: getattr(host, field.name) for field in fields(host)}
    return replace(host, **{name: array[order] for name, array in given.items() if array is not None})


def widened(host: HostBatch, *, dummy_page: int, frames: Frames | None = None) -> HostBatch:
    """A decode batch whose page tables have a power of two of columns, at least 8, so that few widths occur."""
    width = host.page_tables.shape[1]
    extra = max(8, 1 << (width - 1).bit_length()) - width

    def wide(table: np.ndarray, dummy: int) -> np.ndarray:
        return np.pad(table, ((0, 0), (0, extra)), constant_values=dummy)

    own = host.frame_tables
    return replace(
        host,
        page_tables=wide(host.page_tables, first_dummy(dummy_page, frames)),
        frame_tables=None if own is None or frames is None else wide(own, frames.num_frames),
    )


def _tables(rows: Seq[Sequence], dummy_page: int, frames: Frames | None) -> tuple[np.ndarray, np.ndarray | None]:
    """The tables for the first KV pool and for the second."""
    if frames is None:
        return page_tables(rows, dummy_page), None
    if frames.alone:
        return frame_tables(rows, frames), None
    return page_tables(rows, dummy_page), frame_tables(rows, frames)


def first_dummy(dummy_page: int, frames: Frames | None) -> int:
    """The number of the dummy in the first KV pool: a frame if every layer has a sliding window."""
    return frames.num_frames if frames is not None and frames.alone else dummy_page


def frame_tables(rows: Seq[Sequence], frames: Frames) -> np.ndarray:
    """The frames of each row's pages, padded with the dummy frame to the longest row.

    The table also lists frames of pages that the row no longer needs but another owner does. Rows that share pages are read through the
    table of one of them.
    """
    counts = [s.pages.length for s in rows]
    tables = np.full((len(rows), max([1, *counts])), frames.num_frames, np.int32)
    tables[np.arange(tables.shape[1]) < np.array(counts)[:, None]] = frames.of(joined([(s.pages, 0, s.pages.length) for s in rows]))
    return tables


def page_tables(rows: Seq[Sequence], dummy_page: int) -> np.ndarray:
    """The pages of each row, padded with the dummy page to the longest row."""
    tables = np.full((len(rows), max([1, *(s.pages.length for s in rows)])), dummy_page, np.int32)
    for row, sequence in zip(tables, rows, strict=True):
        sequence.pages.copy_to(row)
    return tables


def aligned(count: int) -> int:
    """Round a number of int32 up to whole 16 bytes. Kernels are compiled again for addresses that are not aligned to 16 bytes."""
    return count + -count % 4


def to_device(host: HostBatch, device: torch.device, plan: int = 0, windowed_plan: int = 0) -> Batch:
    """The tensors of a step, moved in one copy. Each starts at a multiple of 16 bytes, which compiled kernels assume."""
    fields = ("input_ids", "positions", "slots", "page_tables", "seq_lens", "cu_seqlens", "logit_indices", "frame_tables", "frame_slots")
    arrays = {name: array for name in fields if (array := getattr(host, name)) is not None}
    sizes = [aligned(array.size) for array in arrays.values()]
    flat = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    values, at = flat.numpy(), 0
    for size, array in zip(sizes, arrays.values(), strict=True):
        values[at : at + array.size] = array.ravel()
        at += size
    parts = zip(arrays.items(), flat.to(device, non_blocking=True).split(sizes), strict=True)
    tensors: dict[str, Any] = {name: part[: array.size].view(array.shape) for (name, array), part in parts}
    frame_tables, frame_slots = tensors.pop("frame_tables", None), tensors.pop("frame_slots", None)
    windowed = None if frame_tables is None else Windowed(page_tables=frame_tables, slots=frame_slots, plan=windowed_plan)
    return Batch(**tensors, plan=plan, windowed=windowed)


def sample_prompts(limits: EngineConfig, shapes: Seq[tuple[int, int]], config: ModelConfig) -> list[HostBatch]:
    """Prompts on the dummy page, which warm kernels up: running them compiles and loads the kernels.

    Args:
        limits: The engine's limits; a prompt beyond them is made shorter, or left out.
        shapes: The number of rows and the tokens per row of each prompt.
        config: The model's config.
    """
    (dummy, frame), size = dummies(config, limits), limits.page_size
    fitting = [(rows, min(count, limits.max_model_len, limits.max_num_batched_tokens // rows)) for rows, count in shapes]
    return [
        HostBatch(
            input_ids=np.zeros(rows * count, np.int32),
            positions=np.tile(np.arange(count, dtype=np.int32), rows),
            slots=np.full(rows * count, dummy * size, np.int32),
            page_tables=np.full((rows, max(2, pages_for(count, size))), dummy, np.int32),  # a width of 1 would be compiled as a constant
            frame_tables=None if frame is None else np.full((rows, max(2, pages_for(count, size))), frame, np.int32),
            frame_slots=None if frame is None else np.full(rows * count, frame * size, np.int32),
            seq_lens=np.full(rows, count, np.int32),
            page_counts=np.full(rows, pages_for(count, size), np.int32),
            cu_seqlens=np.arange(0, (rows + 1) * count, count, dtype=np.int32),
            logit_indices=np.arange(count, rows * count + 1, count, dtype=np.int32) - 1,
        )
        for rows, count in dict.fromkeys(fitting)
        if count >= 2 and rows <= limits.max_num_seqs
    ]
