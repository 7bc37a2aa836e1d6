"""Logits beside transformers' own: in float32 over many batches and pages, in bfloat16 on the average."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanovllm import models
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast import cpu
from nanovllm.models.fast import path as fast
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState
from nanovllm.testing.driver import layout, run_chunks, step_batch
from nanovllm.types import Float, Tensor
from tests.parity.pair import Pair

LEAST = 1e-4  # of the bound in float32
LENGTHS = (1, 33, 8, 60, 60, 60)
CHUNKS = ((7, 1), (64, 16), (100, 4))  # tokens a step, tokens a page
ROWS, ROW_LEN, BATCHES = 64, 40, 16  # in bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Error:
    """The worst logit's distance to transformers' float64 run: `ours`, `theirs` in float32, and the `bound`, three times theirs."""

    ours: float
    theirs: float

    @property
    def bound(self) -> float:
        """What ours may be."""
        return max(LEAST, 3 * self.theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The mean distance of our logits to transformers' float64 run over that of transformers' own, and the ratio's standard error."""

    value: float
    deviation: float

    @property
    def no_larger(self) -> bool:
        """Whether ours errs no more, as far as so many rows can tell."""
        return self.value - 2 * self.deviation <= 1.0


def float32_error(pair: Pair, chunks: Sequence[tuple[int, int]] = CHUNKS, *, single: bool = True) -> Float32Error:
    """Prompts of one token, of some, and of the full context, batched; `chunks` are tokens a step and tokens a page.

    `single`: also one token at a time, as prompts and as decode batches.
    """
    rows = pair.draw(1, pair.ours.config.max_position_embeddings, *LENGTHS)
    exact = [pair.reference([row], torch.float64)[0] for row in rows]
    theirs = max(_worst(pair.reference([row])[0], wide) for row, wide in zip(rows, exact, strict=True))
    ours = 0.0
    for chunk, page_size in chunks:
        at = layout(pair.ours, [len(row) for row in rows], page_size)
        ours = max(ours, *map(_worst, run_chunks(pair.ours, rows, at, chunk), exact))
    short, at = rows[1:], layout(pair.ours, LENGTHS, 4)
    for run in (run_chunks(pair.ours, short, at, 1), decoded(pair.ours, short)) if single else ():
        ours = max(ours, *map(_worst, run, exact[1:]))
    return Float32Error(ours=ours, theirs=theirs)


def bfloat16_ratios(pair: Pair, most: int = BATCHES) -> tuple[Ratio, Ratio]:
    """Of prompts, and of the same tokens decoded one after another on the path that a CPU takes.

    While rows leave it open whether ours errs less, more are drawn, up to `most` batches of `ROWS`.
    """
    model, length = pair.load("bfloat16"), min(ROW_LEN, pair.ours.config.max_position_embeddings)
    errors: list[Tensor] = []  # [3, ROWS]: theirs, ours of prompts, ours of decode
    while True:
        rows = pair.draw(3 + len(errors), *[length] * ROWS)
        at = layout(model, [length] * ROWS, 4)
        runs = pair.reference(rows, torch.bfloat16), torch.stack(run_chunks(model, rows, at, length)), torch.stack(decoded(model, rows))
        exact = pair.reference(rows, torch.float64)
        errors.append(torch.stack([(run.double() - exact).abs().mean((1, 2)) for run in runs]))
        theirs, *ours = torch.cat(errors, 1)
        prompts, decode = (_ratio(mine, theirs) for mine in ours)
        if len(errors) == most or all(ratio.value + 2 * ratio.deviation <= 1 for ratio in (prompts, decode)):
            return prompts, decode


def decoded(model: Model, rows: Sequence[Sequence[int]], page_size: int = 4, *, plain: bool = False) -> list[Tensor]:
    """Given tokens, fed one at a time as decode batches: the logits of every token, `[len(row), V]` a row. `plain`: never in C."""
    forward = model.spec.forward if plain else models.forward
    at = layout(model, [len(row) for row in rows], page_size)
    seen: list[list[Tensor]] = [[] for _ in rows]
    for place in range(max(map(len, rows))):
        live = [i for i, row in enumerate(rows) if place < len(row)]
        batch: Batch = step_batch(at, [(i, [rows[i][place]], place) for i in live], model.device, decode=True)
        out: tuple[Tensor, KVState] = forward(model.params, at.kv, batch, model.config)
        for i, logits in zip(live, out[0], strict=True):
            seen[i].append(logits)
    return [torch.stack(logits) for logits in seen]


def decode_path(model: Model) -> str:
    """What runs decode steps here: `C`, or plain torch and why."""
    found = fast.fast_path(model.params, model.config)
    return found.name if found is not None else f"torch: {cpu.unknown(model.params, model.config) or 'no C compiler'}"


def _worst(got: Tensor, exact: Tensor) -> float:
    error = (got.double() - exact).abs().max().item()
    return math.inf if math.isnan(error) else error


def _ratio(ours: Float[Tensor, "rows"], theirs: Float[Tensor, "rows"]) -> Ratio:
    """By rows, which are independent of each other: the delta method for a ratio of means."""
    value = (ours.sum() / theirs.sum()).item()
    spread = (ours - value * theirs).square().sum() * len(ours) / (len(ours) - 1)
    return Ratio(value=value, deviation=spread.sqrt().item() / theirs.sum().item())
