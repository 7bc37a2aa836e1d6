"""The sampling options of a batch as tensors of its own: `build` makes them from requests, for sessions and for steps without graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.sampling.params import MAX_LOGPROBS, SamplingParams
from nanovllm.types import Bool, Float32, Int32, Int64, Tensor, brief_fields, register_value

Row = tuple[SamplingParams, int, np.ndarray, np.ndarray]  # options, seed, prompt ids, output ids


NO_IDS = np.empty(0, np.int32)


class Features(NamedTuple):
    """Which fields of a `Sampling` are on. Traced code specialises on them and on the shapes only."""

    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    logit_bias: bool = False
    num_logprobs: int | None = None
    num_candidates: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """The penalties of B rows. Repetition acts on tokens of prompt and output, presence and frequency on tokens of the output.

    Attributes:
        repetition: Repetition penalties, float32 `[B]`; neutral: 1.
        presence: Presence penalties, float32 `[B]`; neutral: 0.
        frequency: Frequency penalties, float32 `[B]`; neutral: 0.
        prompt_mask: Whether a token occurs in the row's prompt, bool `[B, V]`.
        counts: How often a token occurs in the row's output, int32 `[B, V]`; `record` writes it in place.
    """

    repetition: Float32[Tensor, "B"]
    presence: Float32[Tensor, "B"]
    frequency: Float32[Tensor, "B"]
    prompt_mask: Bool[Tensor, "B V"]
    counts: Int32[Tensor, "B V"]

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The options of a batch as tensors. A field that no row uses is None, so that its work is neither traced nor run.

    Attributes:
        seeds: The rows' seeds, int64 `[B]`.
        temperature: float32 `[B]`; neutral: 0 (greedy).
        top_k: int32 `[B]`; neutral: 0.
        top_p: float32 `[B]`; neutral: 1.
        min_p: float32 `[B]`; neutral: 0.
        penalties: The penalties.
        logit_bias: float32 `[B, V]`; neutral: 0.
        allowed: The tokens that masks allow in the next step, one bit each, int32 `[B, ceil(V / 32)]`; neutral: -1 (all).
        num_logprobs: How many of the most probable tokens are reported in addition to the sampled one, or None.
        num_candidates: How many of the largest logits top-k and top-p examine; None: all. It may be set if every row that uses either has
            `0 < top_k <= num_candidates`, and it never changes a token.
    """

    seeds: Int64[Tensor, "B"]
    temperature: Float32[Tensor, "B"] | None = None
    top_k: Int32[Tensor, "B"] | None = None
    top_p: Float32[Tensor, "B"] | None = None
    min_p: Float32[Tensor, "B"] | None = None
    penalties: Penalties | None = None
    logit_bias: Float32[Tensor, "B V"] | None = None
    allowed: Int32[Tensor, "B W"] | None = None
    num_logprobs: int | None = None
    num_candidates: int | None = None

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(Penalties)
register_value(Sampling, static=("num_logprobs", "num_candidates"))


def features(params: Sequence[SamplingParams]) -> Features:
    """Which fields the rows of a batch need. The filters of greedy rows do not count, because they change nothing."""
    random = [p for p in params if p.temperature > 0]
    top_k, top_p = any(p.top_k > 0 for p in random), any(p.top_p < 1 for p in random)
    widest = max((p.top_k for p in random), default=0)
    unbounded = any(p.top_k == 0 and p.top_p < 1 for p in random)
    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    return Features(
        temperature=bool(random),
        top_k=top_k,
        top_p=top_p,
        min_p=any(p.min_p > 0 for p in random),
        penalties=any(penalises(p) for p in params),
        logit_bias=any(p.logit_bias is not None for p in params),
        # One number for all requests that ask for any: fewer graphs, and ties are reported alike whatever other requests ask for
        num_logprobs=None if not logprobs else MAX_LOGPROBS if max(logprobs) > 0 else 0,
        num_candidates=next((c for c in (32, 128, 1024) if widest <= c), None) if (top_k or top_p) and not unbounded else None,
    )


def penalises(p: SamplingParams) -> bool:
    """Whether a request's earlier tokens change its logits."""
    return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)


def build(rows: Sequence[Row], vocab_size: int, device: torch.device | str) -> Sampling:
    """The tensors of rows, with the fields that they need.

    Args:
        rows: For each row its options, seed, prompt ids and output ids. The ids must be in the vocabulary; see `validate_for`.
        vocab_size: V.
        device: Where the tensors go.
    """
    params, size = [p for p, *_ in rows], len(rows)
    on = features(params)

    def column(values: Sequence[int | float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    def table(ids: Sequence[np.ndarray], values: Tensor) -> Tensor:
        """Zeros `[size, V]`, with the values set (bool) or added (numbers) at each row's ids."""
        row = torch.from_numpy(np.repeat(np.arange(len(ids)), [len(i) for i in ids])).to(device)
        col = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ids]).astype(np.int64)).to(device)
        zeros = torch.zeros((size, vocab_size), dtype=values.dtype, device=device)
        return zeros.index_put_((row, col), values.to(device), accumulate=values.dtype != torch.bool)

    def penalties() -> Penalties:
        prompts, outputs = [prompt for *_, prompt, _ in rows], [output for *_, output in rows]
        return Penalties(
            # with a smaller divisor logits would leave float32's range
            repetition=column([max(p.repetition_penalty, 1e-6) for p in params], torch.float32),
            presence=column([p.presence_penalty for p in params], torch.float32),
            frequency=column([p.frequency_penalty for p in params], torch.float32),
            prompt_mask=table(prompts, torch.ones((), dtype=torch.bool)),
            counts=table(outputs, torch.ones((), dtype=torch.int32)),
        )

    def biases() -> Tensor:
        of_rows = [dict(p.logit_bias or ()) for p in params]
        values = torch.tensor([v for b in of_rows for v in b.values()], dtype=torch.float32)
        return table([np.array([*b], np.int64) for b in of_rows], values)

    return Sampling(
        seeds=column([seed for _, seed, *_ in rows], torch.int64),
        temperature=column([p.temperature for p in params], torch.float32) if on.temperature else None,
        top_k=column([p.top_k for p in params], torch.int32) if on.top_k else None,
        top_p=column([p.top_p for p in params], torch.float32) if on.top_p else None,
        min_p=column([p.min_p for p in params], torch.float32) if on.min_p else None,
        penalties=penalties() if on.penalties else None,
        logit_bias=biases() if on.logit_bias else None,
        num_logprobs=on.num_logprobs,
        num_candidates=on.num_candidates,
    )
