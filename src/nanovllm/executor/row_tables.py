"""`RowTables`: the options of sequences as rows of a batch, the tables of penalties and biases, and the first token of each sequence."""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from nanovllm.executor.batch import aligned
from nanovllm.executor.carry import to_host
from nanovllm.executor.executor import Drawn, Masks
from nanovllm.executor.row_processing import kept, process_rows, processors_of
from nanovllm.ops.sampling.draw_parts import Parts
from nanovllm.sampling.penalty_tables import PenaltyTables, draw_rows
from nanovllm.sampling.row_options import LINES, Kind, Row, kind_of, mask_lines, pack, row_options
from nanovllm.sampling.table_slots import Owner, TableSlots
from nanovllm.state.request import Sequence
from nanovllm.types import Float, Tensor


class RowTables:
    """The tables of one engine, and which sequence owns which slot of them.

    Attributes:
        tables: The tables, which captured steps read and write in place.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, parts: Parts | None = None) -> None:
        """Allocate the tables. `parts` says how the logits that `draw` gets are divided among ranks; None: they are those of all tokens."""
        self._device, self._slots, self._parts = device, TableSlots(num_slots), parts
        self.tables = PenaltyTables.empty(num_slots, vocab_size, device)

    def rows(self, sequences: Seq[Sequence], *, loaded: bool) -> list[Row]:
        """The rows that `pack` takes, in this order. Sequences with penalties or biases get slots, which are filled if they are new.

        `loaded` is as in `TableSlots.place`.
        """
        owners = [_owner(s) for s in sequences]
        placed = self._slots.place(owners, loaded=loaded)
        for index in placed.stale:
            owner, slot = owners[index], placed.slots[index]
            assert owner is not None
            self._fill(slot, sequences[index])
            self._slots.filled(slot, owner)  # not before: a fill may be interrupted
        return [(s.request.options, s.request.seed, slot) for s, slot in zip(sequences, placed.slots, strict=True)]

    def ran(self) -> None:
        """Note that the loaded rows run a step."""
        self._slots.ran()

    def keep(self, sequences: Seq[Sequence]) -> None:
        """Note that only these of the loaded rows are left."""
        self._slots.keep([_owner(s) for s in sequences])

    def holds(self, sequences: Seq[Sequence]) -> bool:
        """Whether the slots of these loaded rows hold their tokens."""
        return self._slots.holds([_owner(s) for s in sequences])

    def upload(self, masks: Masks, lines: Seq[int]) -> None:
        """Write the masks of rows into the table, by one asynchronous copy: row r, if it has one, into line `lines[r]`."""
        shape = max(lines) + 1, self.tables.masks.shape[1]
        host = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        masks.fill(host.numpy(), lines)
        self.tables.masks[: len(host)].copy_(host, non_blocking=True)

    def draw(self, logits: Float[Tensor, "R N"], sequences: Seq[Sequence], width: int, masks: Masks | None = None) -> Drawn | None:
        """Sample the first token of sequences from the logits of their prompts. None without sequences.

        Processors get the tokens in a table of `width` columns.
        """
        if not sequences:
            return None
        kind: Kind = kind_of([s.request.options for s in sequences])
        parts = self._parts
        if parts is not None and processors_of(sequences):
            logits, parts = parts.whole(logits), None
        logits, processing = process_rows(logits, sequences, width)
        size = len(sequences)
        host = torch.empty((2 + LINES, aligned(size)), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        values = host.numpy()
        values[0, :size] = [s.tokens.length for s in sequences]
        values[1, :size] = [s.tokens[-1] for s in sequences]
        rows = self.rows(sequences, loaded=False)
        pack(rows, values[2:])
        if masks is not None:
            self.upload(masks, mask_lines(rows))
        lines = host.to(self._device, non_blocking=True)
        sampled = draw_rows(kind, logits, row_options(lines[2:], size), self.tables, lines[1, :size], lines[0, :size], parts)
        return to_host(sampled, kept(processing))

    def _fill(self, slot: int, s: Sequence) -> None:
        params, start = s.request.sampling, s.request.num_prompt
        nothing = np.empty(0, np.int32)
        prompt = s.tokens.array(0, start) if params.repetition_penalty != 1.0 else nothing
        self.tables.fill(slot, prompt, s.tokens.array(start), dict(params.logit_bias or ()), s.tokens.length)


def _owner(s: Sequence) -> Owner | None:
    return Owner(s.request, s.tokens.length) if s.request.options.tabled else None
