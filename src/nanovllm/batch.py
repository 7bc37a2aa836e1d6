"""From the plan of a step to its tensors. Padding rows own the dummy page."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from .state.request import Sequence
from .types import Int32, Tensor, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's tokens, all int32 on the model's device. A decode batch has one token a sequence and `cu_seqlens` None.

    `slots` are `page * page_size + offset`; padding, and a token that is run again only for its logits, point into the dummy page.
    `page_tables` rows are padded with the dummy page. `seq_lens` counts what the row's last token attends to, itself included;
    the queries of row b are its tokens `seq_lens[b] - q_len[b] ... seq_lens[b] - 1`. A padding row has seq_len 1 on the dummy page.
    `positions` are what the rotary embedding sees; they differ from a token's index behind a gap.
    `logit_indices` names the tokens whose logits are wanted (None: all). `plan` is the static handle of an attention plan (0: none).
    """

    input_ids: Int32[Tensor, "T"]
    positions: Int32[Tensor, "T"]
    slots: Int32[Tensor, "T"]
    page_tables: Int32[Tensor, "B P"]
    seq_lens: Int32[Tensor, "B"]
    cu_seqlens: Int32[Tensor, "B+1"] | None = None
    logit_indices: Int32[Tensor, "R"] | None = None
    plan: int = 0

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(Batch, static=("plan",))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostBatch:
    """A `Batch` as int32 host arrays, with what an attention plan needs besides: the pages in use by each row."""

    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    seq_lens: np.ndarray
    page_counts: np.ndarray
    cu_seqlens: np.ndarray | None = None
    logit_indices: np.ndarray | None = None


def prefill_batch(rows: Seq[tuple[Sequence, int]], *, page_size: int, dummy_page: int, draw: bool = True) -> HostBatch:
    """The next `count` unfilled tokens of each sequence; with `draw`, logits for the last token of those that are whole afterwards."""
    counts = np.array([count for _, count in rows], np.int32)
    starts = np.array([s.num_filled for s, _ in rows], np.int32)
    cu_seqlens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    row_of = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    places = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], counts)
    offsets = np.array([s.offset for s, _ in rows], np.int32)
    tables = page_tables([s for s, _ in rows], dummy_page)
    whole = [i for i, (s, count) in enumerate(rows) if draw and count == s.todo]
    return HostBatch(
        input_ids=np.concatenate([s.tokens.array(s.num_filled, s.num_filled + count) for s, count in rows]),
        positions=places + np.repeat(offsets, counts),
        slots=tables[row_of, places // page_size] * page_size + places % page_size,
        page_tables=tables,
        seq_lens=starts + counts,
        page_counts=-(-(starts + counts) // page_size),
        cu_seqlens=cu_seqlens,
        logit_indices=cu_seqlens[1:][whole] - 1,
    )


def decode_batch(rows: Seq[Sequence], *, page_size: int, dummy_page: int) -> HostBatch:
    """The newest token of each sequence; one that is filled already only reads, and writes into the dummy page."""
    last = np.array([s.tokens.length - 1 for s in rows], np.int32)
    tables = page_tables(rows, dummy_page)
    slots = tables[np.arange(len(rows)), np.minimum(last // page_size, tables.shape[1] - 1)] * page_size + last % page_size
    filled = np.array([s.todo == 0 for s in rows])
    return HostBatch(
        input_ids=np.array([s.tokens[-1] for s in rows], np.int32),
        positions=last + np.array([s.offset for s in rows], np.int32),
        slots=np.where(filled, dummy_page * page_size, slots).astype(np.int32),
        page_tables=tables,
        seq_lens=last + 1,
        page_counts=np.array([s.pages.length for s in rows], np.int32),
    )


def token_rows(host: HostBatch, page_size: int) -> HostBatch:
    """The tokens of prompts as the rows of a decode batch: a token attends to its sequence up to itself, all KV being written before."""
    assert host.cu_seqlens is not None
    counts = np.diff(host.cu_seqlens)
    row_of = np.repeat(np.arange(len(counts)), counts)
    seq_lens = np.arange(len(row_of)) + np.repeat(host.seq_lens - host.cu_seqlens[1:], counts) + 1
    return HostBatch(
        input_ids=host.input_ids,
        positions=host.positions,
        slots=host.slots,
        page_tables=host.page_tables[row_of],
        seq_lens=seq_lens.astype(np.int32),
        page_counts=-(-seq_lens // page_size).astype(np.int32),
    )


def padded(host: HostBatch, size: int, *, page_size: int, dummy_page: int) -> HostBatch:
    """A decode batch with padding rows up to `size`."""
    extra = size - len(host.input_ids)
    if not extra:
        return host

    def pad(array: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate((array, np.full((extra, *array.shape[1:]), value, array.dtype)))

    return HostBatch(
        input_ids=pad(host.input_ids, 0),
        positions=pad(host.positions, 0),
        slots=pad(host.slots, dummy_page * page_size),
        page_tables=pad(host.page_tables, dummy_page),
        seq_lens=pad(host.seq_lens, 1),
        page_counts=pad(host.page_counts, 1),
    )


def page_tables(rows: Seq[Sequence], dummy_page: int) -> np.ndarray:
    """The pages of each row, padded with the dummy page to the longest."""
    tables = np.full((len(rows), max([1, *(s.pages.length for s in rows)])), dummy_page, np.int32)
    for row, sequence in zip(tables, rows, strict=True):
        sequence.pages.copy_to(row)
    return tables


def to_device(host: HostBatch, device: torch.device, plan: int = 0) -> Batch:
    """The tensors of a step, moved in one copy; each starts at a multiple of 16 bytes, as compiled kernels assume."""
    fields = ("input_ids", "positions", "slots", "page_tables", "seq_lens", "cu_seqlens", "logit_indices")
    arrays = {name: array for name in fields if (array := getattr(host, name)) is not None}
    starts = np.cumsum([0] + [-(-array.size // 4) * 4 for array in arrays.values()])
    flat = torch.empty(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays.values(), strict=False):
        flat.numpy()[start : start + array.size] = array.ravel()
    flat = flat.to(device, non_blocking=True)
    tensors = {
        name: flat[int(start) : int(start) + array.size].view(array.shape)
        for start, (name, array) in zip(starts, arrays.items(), strict=False)
    }
    return Batch(**tensors, plan=plan)
