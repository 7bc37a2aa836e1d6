"""The tables of penalties and biases on the device, which all captured steps share, and sampling with them.

A sequence with penalties or biases owns a slot, which is one row of the tables. Tokens are counted on the device: each step counts the
token that it runs, unless that position was counted before. So a step may run twice, or in vain, and the counts stay right.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.ops.sampling.draw_parts import Parts
from nanovllm.ops.sampling.penalised import penalised
from nanovllm.sampling.compiled_grammar import num_words
from nanovllm.sampling.params import MAX_LOGPROBS
from nanovllm.sampling.row_options import Kind, RowOptions
from nanovllm.sampling.sampler import Sampled, sample, with_logprobs
from nanovllm.sampling.tensors import Sampling
from nanovllm.types import Float, Float32, Int32, Tensor

PIECE = 64  # rows that are penalised at once, or whose log-probabilities are computed at once: it bounds the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyTables:
    """The tables of S slots, written in place.

    Attributes:
        marks: int32 `[S, V]`: bit 0 says whether a token is in the prompt, the other bits count it in the output.
        biases: float32 `[S, V]`.
        counted: How many tokens of its sequence a slot has counted, int32 `[S]`.
        masks: The tokens that may come next, one bit per token, int32 `[S, ceil(V / 32)]`. The rows of a step that are masked have the
            first lines, whatever their slots.
    """

    marks: Int32[Tensor, "S V"]
    biases: Float32[Tensor, "S V"]
    counted: Int32[Tensor, "S"]
    masks: Int32[Tensor, "S W"]

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, device: torch.device) -> "PenaltyTables":
        """Tables without tokens and biases."""
        return cls(
            marks=torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device),
            biases=torch.zeros((num_slots, vocab_size), dtype=torch.float32, device=device),
            counted=torch.zeros(num_slots, dtype=torch.int32, device=device),
            masks=torch.zeros((num_slots, num_words(vocab_size)), dtype=torch.int32, device=device),
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all tables."""
        return sum(table.numel() * table.element_size() for table in (self.marks, self.biases, self.counted, self.masks))

    def fill(
        self, slot: int, prompt: Int32[np.ndarray, "n"], output: Int32[np.ndarray, "m"], biases: dict[int, float], counted: int
    ) -> None:
        """Give a slot to a sequence, by one asynchronous copy.

        Args:
            slot: The slot.
            prompt: The tokens that its repetition penalty acts on in addition to those of the output.
            output: Its output so far, which is counted.
            biases: What to add to the logits of tokens.
            counted: How many tokens it has, of prompt and output.
        """
        device, parts = self.marks.device, (prompt, output, np.array([*biases], np.int32), np.array([*biases.values()], np.float32))
        flat = torch.empty(sum(map(len, parts)), dtype=torch.int32, pin_memory=device.type == "cuda")
        np.concatenate([part.view(np.int32) for part in parts], out=flat.numpy())
        here = flat.to(device, non_blocking=True)
        in_prompt, in_output, biased = here[: len(here) - len(biases)].long().split([len(part) for part in parts[:3]])
        marks, bias = self.marks[slot], self.biases[slot]
        marks.zero_()
        marks.index_fill_(0, in_prompt, 1)
        marks.scatter_add_(0, in_output, torch.full_like(in_output, 2, dtype=torch.int32))
        bias.zero_()
        bias.index_copy_(0, biased, here[len(here) - len(biases) :].view(torch.float32))
        self.counted[slot].fill_(counted)

    def count(self, slots: Int32[Tensor, "B"], token_ids: Int32[Tensor, "B"], lengths: Int32[Tensor, "B"]) -> None:
        """Count token number `lengths[b] - 1` of each row's sequence, `token_ids[b]`, unless its slot has counted so far already."""
        at = slots.long().clamp(min=0)
        new = (slots >= 0) & (self.counted[at] < lengths)
        self.marks.view(-1).scatter_add_(0, at * self.marks.shape[1] + token_ids, new.int() * 2)
        self.counted.scatter_reduce_(0, at, torch.where(new, lengths, 0), "amax")


def draw_rows(
    kind: Kind,
    logits: Float[Tensor, "B V"],
    options: RowOptions,
    tables: PenaltyTables,
    token_ids: Int32[Tensor, "B"],
    lengths: Int32[Tensor, "B"],
    parts: Parts | None = None,
) -> Sampled:
    """Sample a token for every row, by a step of this kind. Kinds with tables count `token_ids` in them.

    Args:
        kind: At least the kind that the rows need.
        logits: The logits, `[B, V]`.
        options: The rows' options.
        tables: The tables that `options.slots` refer to.
        token_ids: The newest token of each row, int32 `[B]`.
        lengths: The number of tokens of each row, int32 `[B]`.
        parts: How the logits are divided among ranks, of which each gives its own. None: they are those of all tokens.
    """
    if kind in ("greedy", "random", "filtered"):
        sampling = Sampling(seeds=options.seeds) if kind == "greedy" else options.random() if kind == "random" else options.filtered()
        return sample(logits, sampling, lengths, parts)
    logits = logits if parts is None else parts.whole(logits)
    tables.count(options.slots, token_ids, lengths)
    pieces = []
    for start in range(0, len(logits), PIECE):
        on = slice(start, start + PIECE)
        own = options.repetition[on], options.presence[on], options.frequency[on]
        x_BV = penalised(logits[on], options.slots[on], tables.marks, tables.biases, *own, options.masks[on], tables.masks)
        drawn = sample(x_BV, options.filtered(start, start + PIECE), lengths[on])
        pieces.append(with_logprobs(logits[on], drawn.token_ids, MAX_LOGPROBS) if kind == "logprobs" else drawn)
    return pieces[0] if len(pieces) == 1 else _joined(pieces)


def _joined(pieces: list[Sampled]) -> Sampled:
    def cat(name: str) -> Tensor | None:
        parts = [getattr(piece, name) for piece in pieces]
        return None if parts[0] is None else torch.cat(parts)

    token_ids = torch.cat([piece.token_ids for piece in pieces])
    return Sampled(token_ids=token_ids, logprobs=cat("logprobs"), top_ids=cat("top_ids"), top_logprobs=cat("top_logprobs"))
