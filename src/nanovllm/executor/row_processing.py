"""Functions between logits and samples of the rows of a batch: from sequences to the tensors of a carry, and back."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.sampling.process_logits import (
    LogitsProcessor,
    Processing,
    blamed,
    first_carried,
    process,
    processing_of,
    require_alike,
    tokens_of,
)
from nanovllm.state.request import Sequence
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CarriedRow:
    """What a processor carries for one sequence: a row of the tensors of a step. No later step changes them."""

    tree: Any
    row: int

    def value(self) -> Any:
        """The tree of this row alone, without the axis of rows."""
        return pytree.tree_map(lambda tensor: tensor[self.row], self.tree)


def processors_of(rows: Seq[Sequence]) -> tuple[LogitsProcessor, ...]:
    """The processors of these sequences, each once."""
    return tuple(dict.fromkeys(s.request.process_logits for s in rows if s.request.process_logits is not None))


def carries(processors: Seq[LogitsProcessor]) -> bool:
    """Whether a processor carries tensors from step to step."""
    return any(processor.init is not None for processor in processors)


def row_processing(
    rows: Seq[Sequence], processors: Seq[LogitsProcessor], width: int, device: torch.device, pad_to: int | None = None
) -> tuple[Processing, ...]:
    """The processors over a batch of these rows, followed by rows that no processor serves.

    A sequence that has carried nothing yet begins with its present tokens, in a table of `width` columns.

    Raises:
        InvalidRequestError: A processor's `init` returns other shapes for one row than for another.
    """
    size = len(rows) if pad_to is None else pad_to
    made = []
    for processor in processors:
        uses = np.zeros(size, bool)
        uses[: len(rows)] = [s.request.process_logits == processor for s in rows]
        carried = _carried(rows, np.flatnonzero(uses).tolist(), processor, size, width, device)
        made.append(processing_of(processor, carried, torch.from_numpy(uses).to(device)))
    return tuple(made)


def _carried(rows: Seq[Sequence], places: list[int], processor: LogitsProcessor, size: int, width: int, device: torch.device) -> Any:
    """What a processor carries for a batch of `size` rows, of which it serves `places`."""
    if processor.init is None:
        return None
    values: dict[int, Any] = {place: rows[place].carried.value() for place in places if rows[place].carried is not None}
    fresh = [place for place in places if place not in values]
    if fresh or not places:  # for a batch of padding, one row says what the tensors are like
        ids = [rows[place].tokens.array() for place in fresh] or [np.zeros(1, np.int32)]
        with blamed(processor, [rows[place].request.request_id for place in fresh]):
            tree = first_carried(processor, tokens_of(ids, width, device))
        values |= {place: CarriedRow(tree=tree, row=row).value() for row, place in enumerate(fresh or [0])}
    first = next(iter(values.values()))
    for place, value in values.items():
        with blamed(processor, [rows[place].request.request_id] if rows else []):
            require_alike(processor, value, first)
    none = pytree.tree_map(torch.zeros_like, first)
    trees = [values.get(place, none) for place in range(size)]
    return pytree.tree_map(lambda *each: torch.stack(each), *trees)


def with_processing(carry: DecodeCarry, rows: Seq[Sequence], width: int) -> DecodeCarry:
    """The carry of these rows, with their processors and with their tokens in a table of `width` columns."""
    if not (processors := processors_of(rows)):
        return carry
    device = carry.active.device
    tokens = tokens_of([s.tokens.array() for s in rows], width, device)
    return replace(carry, processing=row_processing(rows, processors, width, device), token_ids=tokens.token_ids)


def process_rows(logits: Tensor, rows: Seq[Sequence], width: int) -> tuple[Tensor, "tuple[Processing, ...]"]:
    """The logits of the next token of each sequence after its processor, and what the processors carry."""
    processors = processors_of(rows)
    if not processors:
        return logits, ()
    tokens = tokens_of([s.tokens.array() for s in rows], width, logits.device)
    return process(logits, tokens, row_processing(rows, processors, width, logits.device))


def carried_rows(processing: Seq[Processing], sequence: Sequence, row: int) -> CarriedRow | None:
    """What the processor of a sequence carries after a step in which it was row `row`. None: nothing."""
    for one in processing:
        if one.processor.init is not None and one.processor == sequence.request.process_logits:
            return CarriedRow(tree=one.carried, row=row)
    return None


def kept(processing: Seq[Processing]) -> tuple[Processing, ...]:
    """Processors with copies of what they carry, which a later replay of a graph does not change."""
    return tuple(replace(one, carried=pytree.tree_map(torch.clone, one.carried)) for one in processing if one.processor.init is not None)
