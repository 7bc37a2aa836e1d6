"""Compare logits with those of transformers: the worst logit in float32, and the mean error in bfloat16."""

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

LEAST = 1e-4  # smallest bound in float32
LENGTHS = (1, 33, 8, 60, 60, 60)
CHUNKS = ((7, 1), (64, 16), (100, 4))  # tokens per step, tokens per page
ROWS, ROW_LEN, BATCHES = 64, 40, 16  # rows per batch, tokens per row, and batches at most, in bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Error:
    """The largest difference of a logit to transformers' float64 run, for our float32 run (`ours`) and transformers' (`theirs`)."""

    ours: float
    theirs: float

    @property
    def bound(self) -> float:
        """The largest allowed value of `ours`: three times `theirs`, and at least 1e-4."""
        return max(LEAST, 3 * self.theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Our mean error relative to transformers' mean error, both against its float64 run, and the standard error of this ratio."""

    value: float
    deviation: float

    @property
    def no_larger(self) -> bool:
        """Whether our error is not larger than transformers' error, within two standard errors."""
        return self.value - 2 * self.deviation <= 1.0


def float32_error(pair: Pair, chunks: Sequence[tuple[int, int]] = CHUNKS, *, single: bool = True) -> Float32Error:
    """Measure the worst logit of batched prompts of one token, of several tokens and of the full context.

    Args:
        pair: The two models.
        chunks: Pairs of tokens per step and tokens per page.
        single: Whether to run the prompts also one token at a time, in prefill batches and in decode batches.
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
    """Measure the error ratios of prompts, and of the same tokens decoded one after another on the CPU's decode path.

    As long as the rows do not show that our error is not larger, more rows are sampled, up to `most` batches of `ROWS`.
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
    """Feed given tokens one at a time in decode batches, and return each row's logits, `[len(row), V]`.

    With `plain`, the C decode path is not used.
    """
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
    """Return the path of decode steps on this CPU: `C`, or plain torch with the reason."""
    path = fast.fast_path(model.params, model.config)
    return path.name if path is not None else f"torch: {cpu.unknown(model.params, model.config) or 'no C compiler'}"


def _worst(got: Tensor, exact: Tensor) -> float:
    error = (got.double() - exact).abs().max().item()
    return math.inf if math.isnan(error) else error


def _ratio(ours: Float[Tensor, "rows"], theirs: Float[Tensor, "rows"]) -> Ratio:
    """Return the ratio of means and its standard error by the delta method; rows are independent samples."""
    value = (ours.sum() / theirs.sum()).item()
    spread = (ours - value * theirs).square().sum() * len(ours) / (len(ours) - 1)
    return Ratio(value=value, deviation=spread.sqrt().item() / theirs.sum().item())
