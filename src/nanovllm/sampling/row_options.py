"""The options of the rows of a captured batch as columns of one buffer, and the kinds of sampling that are captured.

Options are data: one captured step of a kind serves all options of that kind. A row that needs less gets the neutral values, and the same
token as in a step of a lesser kind.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import numpy as np
import torch

from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.tensors import Sampling, penalises
from nanovllm.types import Float32, Int32, Int64, Tensor

Kind = Literal["greedy", "random", "filtered", "everything", "logprobs"]
# Ascending: each also does what those before it do. `random` has temperatures, `filtered` also top-k, top-p and min-p, `everything` also
# penalties, biases and masks.
KINDS: tuple[Kind, ...] = ("greedy", "random", "filtered", "everything", "logprobs")
TABLED: tuple[Kind, ...] = ("everything", "logprobs")  # the kinds that read the tables of penalties and biases
LINES = 11  # of int32 per row; the first two are a seed of 64 bits
NEUTRAL = (0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, -1.0, -1.0)  # of the lines after the seeds
SMALLEST_DIVISOR = 1e-6  # with a smaller repetition penalty logits would leave float32's range
NUMBERS = struct.Struct("=i6f")  # of `PackedOptions.numbers`
LINES_OF_NUMBERS = (3, 2, 4, 5, 6, 7, 8)  # the lines of a buffer to which they go


class PackedOptions(NamedTuple):
    """What a step asks of a request's options. It is made once for a request, because a step may load hundreds of rows.

    Attributes:
        rank: The least kind of sampling that serves the options, as an index of `KINDS`.
        tabled: Whether a row needs a slot in the tables of penalties and biases.
        masked: Whether some steps of the reply may not sample every token.
        numbers: top_k, temperature, top_p, min_p and the penalties for repetition, presence and frequency, of 4 bytes each.
    """

    rank: int
    tabled: bool
    masked: bool
    numbers: bytes


Row = tuple[PackedOptions, int, int]  # options, seed, and slot in the tables of penalties and biases (-1: none)


def packed_options(p: SamplingParams) -> PackedOptions:
    """The options in the form that steps read.

    Examples:
        >>> packed_options(SamplingParams(temperature=0)).rank == KINDS.index("greedy")
        True
    """
    repetition = max(p.repetition_penalty, SMALLEST_DIVISOR)
    numbers = NUMBERS.pack(p.top_k, p.temperature, p.top_p, p.min_p, repetition, p.presence_penalty, p.frequency_penalty)
    return PackedOptions(rank=_rank(p), tabled=needs_tables(p), masked=is_masked(p), numbers=numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """The options of B rows: views of the lines of one buffer.

    Attributes:
        seeds: int64 `[B]`.
        temperature: float32 `[B]`; neutral: 0 (greedy).
        top_k: int32 `[B]`; neutral: 0.
        top_p: float32 `[B]`; neutral: 1.
        min_p: float32 `[B]`; neutral: 0.
        repetition: float32 `[B]`; neutral: 1.
        presence: float32 `[B]`; neutral: 0.
        frequency: float32 `[B]`; neutral: 0.
        slots: The rows' slots in the tables of penalties and biases, int32 `[B]`; -1: none.
        masks: The rows' lines in the table of masks, int32 `[B]`; -1: none.
    """

    seeds: Int64[Tensor, "B"]
    temperature: Float32[Tensor, "B"]
    top_k: Int32[Tensor, "B"]
    top_p: Float32[Tensor, "B"]
    min_p: Float32[Tensor, "B"]
    repetition: Float32[Tensor, "B"]
    presence: Float32[Tensor, "B"]
    frequency: Float32[Tensor, "B"]
    slots: Int32[Tensor, "B"]
    masks: Int32[Tensor, "B"]

    def random(self) -> Sampling:
        """The seeds and the temperatures."""
        return Sampling(seeds=self.seeds, temperature=self.temperature)

    def filtered(self, start: int = 0, stop: int | None = None) -> Sampling:
        """The seeds, the temperatures and the filters of rows `start` to `stop`."""
        on = slice(start, stop)
        return Sampling(
            seeds=self.seeds[on], temperature=self.temperature[on], top_k=self.top_k[on], top_p=self.top_p[on], min_p=self.min_p[on]
        )


def kind_of(options: Iterable[PackedOptions]) -> Kind:
    """The least kind of sampling that serves all rows."""
    return KINDS[max([each.rank for each in options], default=0)]


def _rank(p: SamplingParams) -> int:
    if p.logprobs is not None:
        return 4
    if needs_tables(p) or is_masked(p):
        return 3
    if p.temperature == 0:
        return 0
    return 2 if p.top_k > 0 or p.top_p < 1 or p.min_p > 0 else 1


def needs_tables(p: SamplingParams) -> bool:
    """Whether a row with these options needs a slot in the tables of penalties and biases."""
    return p.logit_bias is not None or penalises(p)


def is_masked(p: SamplingParams) -> bool:
    """Whether some steps of a reply with these options may not sample every token: the host tells each step which ones."""
    may_end = not p.ignore_eos or bool(p.stop_token_ids)
    return p.grammar is not None or bool(p.bad_words) or (p.min_tokens > 0 and may_end)


def mask_lines(rows: Sequence[Row]) -> list[int]:
    """The line of each row in the table of masks: rows that are masked have one after another, others have -1."""
    lines = count()
    return [next(lines) if options.masked else -1 for options, _, _ in rows]


def pack(rows: Sequence[Row], lines: Int32[np.ndarray, "11 n"]) -> None:
    """Write the options of rows into the lines of a buffer, followed by neutral rows. n is a multiple of 2."""
    size = len(rows)
    seeds, floats, ints = lines[:2].reshape(-1).view(np.int64), lines.view(np.float32), lines.view(np.int32)
    seeds[size:] = 0
    for line, neutral in enumerate(NEUTRAL, 2):
        (ints if line in (3, 9, 10) else floats)[line, size:] = neutral
    if not size:
        return
    seeds[:size] = [seed for _, seed, _ in rows]
    ints[9, :size] = [slot for _, _, slot in rows]
    ints[10, :size] = mask_lines(rows)
    numbers = np.frombuffer(b"".join([options.numbers for options, _, _ in rows]), np.int32)
    ints[LINES_OF_NUMBERS, :size] = numbers.reshape(size, -1).T


def row_options(lines: Int32[Tensor, "11 n"], size: int) -> RowOptions:
    """The options of the first `size` rows, as views of the lines that `pack` fills, which are contiguous."""
    floats, ints = lines.view(torch.float32)[:, :size].unbind(), lines[:, :size].unbind()
    return RowOptions(
        seeds=lines[:2].reshape(-1).view(torch.int64)[:size],
        temperature=floats[2],
        top_k=ints[3],
        top_p=floats[4],
        min_p=floats[5],
        repetition=floats[6],
        presence=floats[7],
        frequency=floats[8],
        slots=ints[9],
        masks=ints[10],
    )
