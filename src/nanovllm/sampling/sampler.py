"""Sampling: `sample(logits, sampling, positions)` samples a token for every row, and `record` counts it for the penalties.

A row's token depends on its logits, its options, its seed and its position. It depends neither on the other rows nor on the options that
they use. So the neutral value of every option is a branch of `where`, and each filter compares, counts or adds integers.

Shapes: B rows, one per sequence; V vocabulary; C most probable tokens that are reported.
"""

from dataclasses import dataclass, replace

import torch

from nanovllm.ops.sampling.adjusted import adjusted
from nanovllm.ops.sampling.draw import draw, highest
from nanovllm.ops.sampling.draw_parts import Parts, draw_parts
from nanovllm.ops.sampling.least_kept import least_kept
from nanovllm.ops.sampling.penalised import allowed_tokens
from nanovllm.ops.sampling.token_logprobs import token_logprobs
from nanovllm.sampling.tensors import Penalties, Sampling
from nanovllm.types import Float, Float32, Int32, Int64, Tensor, register_value, writable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The sampled tokens of B rows.

    Attributes:
        token_ids: The tokens, int32 `[B]`.
        logprobs: Natural logarithms of their probabilities under the model's own distribution, before any option; float32 `[B]` or None.
        top_ids: The most probable tokens, sorted, int32 `[B, C]` or None.
        top_logprobs: Their log-probabilities, float32 `[B, C]` or None.
    """

    token_ids: Int32[Tensor, "B"]
    logprobs: Float32[Tensor, "B"] | None = None
    top_ids: Int32[Tensor, "B C"] | None = None
    top_logprobs: Float32[Tensor, "B C"] | None = None


register_value(Sampled)


def sample(
    logits: Float[Tensor, "B V"], sampling: Sampling, positions: Int32[Tensor, "B"] | Int64[Tensor, "B"], parts: Parts | None = None
) -> Sampled:
    """Sample one token per row.

    The order is vLLM's: log-probabilities of the unchanged logits; bias; repetition, frequency and presence penalties; masks;
    temperature; min-p; top-k; top-p; sampling. The token is `argmax(logits + temperature * g)`, with Gumbel noise g from the key
    (seed, position) and the token id. At temperature 0 it is the argmax of the penalised logits, without filters and noise.

    Ties: the filters compare values, so tokens that tie with the last kept token are kept too. Top-p counts the mass of exactly top_k of
    them. Argmax takes the lowest id. The largest logit is always kept. A logit of -inf is never sampled, unless the whole row is -inf: then
    the token is 0. If a row holds NaN or +inf, its token is some id of the vocabulary; other rows are not affected.

    Args:
        logits: The logits, `[B, V]`.
        sampling: The options of the rows.
        positions: For each row the index of the sampled token in its sequence, `[B]`.
        parts: How the logits are divided among ranks, of which each gives its own. None: they are those of all tokens. They are gathered if
            a row uses more than a temperature.
    """
    if parts is not None:
        if not _needs_whole(sampling):
            keys = None if sampling.temperature is None else _keys(sampling, positions)
            return Sampled(token_ids=draw_parts(logits, sampling.temperature, keys, parts))
        logits = parts.whole(logits)
    x_BV = logits
    if sampling.logit_bias is not None or sampling.penalties is not None:
        x_BV = adjusted(logits, sampling.logit_bias, *_penalties(sampling.penalties))
    if sampling.allowed is not None:
        x_BV = torch.where(allowed_tokens(sampling.allowed, x_BV.shape[1]), x_BV, -torch.inf)
    if sampling.temperature is None:
        ids = highest(x_BV)
    else:
        ids = draw(x_BV, sampling.temperature, _least_kept(x_BV, sampling, sampling.temperature), _keys(sampling, positions))
    if sampling.num_logprobs is None:
        return Sampled(token_ids=ids)
    return with_logprobs(logits, ids, sampling.num_logprobs)


def with_logprobs(logits: Float[Tensor, "B V"], token_ids: Int32[Tensor, "B"], num: int) -> Sampled:
    """Sampled tokens with their log-probabilities, and with those of the `num` most probable tokens."""
    logprobs, top_ids, top_logprobs = token_logprobs(logits, token_ids, num)
    if num == 0:
        return Sampled(token_ids=token_ids, logprobs=logprobs)
    return Sampled(token_ids=token_ids, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def _keys(sampling: Sampling, positions: Tensor) -> Tensor:
    """The keys of the rows' noise."""
    return torch.stack((sampling.seeds, positions.long()), 1)


def _needs_whole(s: Sampling) -> bool:
    """Whether sampling needs the logits of all tokens on one rank: for anything but temperatures."""
    tables = (s.top_k, s.top_p, s.min_p, s.penalties, s.logit_bias, s.allowed)
    return s.num_logprobs is not None or any(table is not None for table in tables)


def _penalties(p: Penalties | None) -> tuple[Tensor | None, ...]:
    """The penalties as `adjusted` takes them."""
    return (None,) * 5 if p is None else (p.prompt_mask, p.counts, p.repetition, p.presence, p.frequency)


def _least_kept(x_BV: Tensor, sampling: Sampling, temperature: Tensor) -> Tensor | None:
    """The smallest logit that min-p, top-k and top-p keep; None if no row uses them."""
    if sampling.min_p is None and sampling.top_k is None and sampling.top_p is None:
        return None
    return least_kept(x_BV, temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.num_candidates)


def record(sampling: Sampling, token_ids: Int32[Tensor, "B"]) -> Sampling:
    """Donates `sampling`. Count the sampled tokens, one per row, for the penalties.

    The counts are increased in place: O(B) numbers are written, and nothing of size `[B, V]` is copied. The returned value shares all
    memory. Without penalties nothing is done.
    """
    if sampling.penalties is not None:
        counts = writable(sampling.penalties.counts)
        ids_B1 = token_ids.long().unsqueeze(1)
        counts.scatter_add_(1, ids_B1, torch.ones_like(ids_B1, dtype=counts.dtype))
        if counts is not sampling.penalties.counts:
            return replace(sampling, penalties=replace(sampling.penalties, counts=counts))
    return sampling
