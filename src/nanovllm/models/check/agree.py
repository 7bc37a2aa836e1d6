"""Greedy agreement: a text decoded token by token on the chosen path, compared with the same text as one prompt in plain layers."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from nanovllm.models.check.compare import text_batch, wide_logits
from nanovllm.models.common import decoder
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast.choice import FastChoice, by_layer
from nanovllm.models.fast.path import FastPath
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import init_kv, pages_for
from nanovllm.types import Float, Int64, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A place of the text where the most probable next tokens of the two paths differ.

    Attributes:
        place: The place, counted from 0.
        fast: The most probable token on the chosen path.
        plain: The most probable token of the plain layers.
        exact: The most probable token in float64.
        margin: The difference between the two largest logits in float64.
    """

    place: int
    fast: int
    plain: int
    exact: int
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often two of three agree on the most probable token: the chosen path, the plain layers in the same dtype, and float64.

    Attributes:
        num_tokens: The number of compared tokens.
        both: Agreements of the chosen path and the plain layers.
        fast_exact: Agreements of the chosen path and float64.
        plain_exact: Agreements of the plain layers and float64.
        apart: The places where the chosen path and the plain layers differ.
    """

    num_tokens: int
    both: int
    fast_exact: int
    plain_exact: int
    apart: tuple[Disagreement, ...]


@torch.no_grad()
def agreement(
    model: Model, fast: FastPath, choice: FastChoice, token_ids: Seq[int], final: Float[Tensor, "T M"], page_size: int = 16
) -> Agreement:
    """Compare the most probable tokens at every place of the text. `final` is `Compared.final` of the same tokens."""
    ids = torch.tensor(token_ids, dtype=torch.int32, device=model.device)
    mine, theirs = decoded(model, fast, choice, ids, page_size), prompted(model, ids, page_size)
    values, tokens = two_likeliest(model, final)
    rows = torch.stack((mine, theirs, tokens[:, 0])).T.tolist()
    margins = (values[:, 0] - values[:, 1]).tolist()
    return Agreement(
        num_tokens=len(rows),
        both=sum(a == b for a, b, _ in rows),
        fast_exact=sum(a == c for a, _, c in rows),
        plain_exact=sum(b == c for _, b, c in rows),
        apart=tuple(
            Disagreement(place=place, fast=a, plain=b, exact=c, margin=margin)
            for place, ((a, b, c), margin) in enumerate(zip(rows, margins, strict=True))
            if a != b
        ),
    )


def decoded(model: Model, fast: FastPath, choice: FastChoice, ids: Tensor, page_size: int) -> Int64[Tensor, "T"]:
    """The most probable token after each token of the text, from decode steps of one row on the chosen path."""
    kv = init_kv(model.config, num_pages=pages_for(len(ids), page_size), page_size=page_size, dtype=model.dtype, device=model.device)
    plan = fast.plan(1)
    layer = by_layer(fast.layer, model.spec.layer, choice.layers, None if plan is None else plan.handle)
    head, text, best = fast.head if choice.head else model.spec.head, text_batch(ids, page_size), []
    for place in range(len(ids)):
        here = ids.new_tensor([place])
        step = Batch(input_ids=ids[place : place + 1].clone(), positions=here, slots=here, page_tables=text.page_tables, seq_lens=here + 1)
        logits, kv = decoder.forward(model.params, kv, step, model.config, layer=layer, head=head)
        best.append(logits[0].argmax())
    return torch.stack(best)


def prompted(model: Model, ids: Tensor, page_size: int) -> Int64[Tensor, "T"]:
    """The most probable token after each token of the text, as one prompt through the plain layers."""
    kv = init_kv(model.config, num_pages=pages_for(len(ids), page_size), page_size=page_size, dtype=model.dtype, device=model.device)
    logits, _ = model.spec.forward(model.params, kv, text_batch(ids, page_size), model.config)
    return logits.argmax(-1)


def two_likeliest(model: Model, final: Float[Tensor, "T M"]) -> tuple[Float[Tensor, "T 2"], Int64[Tensor, "T 2"]]:
    """The two largest logits in float64 and their tokens. With a vocabulary of one token, the second logit is -inf."""
    values = final.new_full((len(final), 2), -torch.inf)
    tokens = torch.zeros_like(values, dtype=torch.int64)
    first = 0
    for logits in wide_logits(model, final):
        count = logits.shape[1]
        best, at = logits.topk(min(2, count))
        values, chosen = torch.cat((values, best), 1).topk(2)
        tokens, first = torch.cat((tokens, at + first), 1).gather(1, chosen), first + count
    return values, tokens
