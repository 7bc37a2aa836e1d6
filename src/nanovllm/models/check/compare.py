"""A model's layers one by one: the fast form and the plain one in the model's dtype, both beside the plain one in float64.

A text runs through all layers in float64. What stands before a layer there is rounded to the model's dtype and given to all three as a
decode batch, whose rows are tokens of the text with their own copies of the KV before them. So no layer sees another one's errors.

Legend of shape suffixes: T tokens of the text · R rows of the decode batch · M hidden_size · V vocabulary · K key/value heads · D head_dim.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast.choice import HeadFunction, LayerFunction
from nanovllm.models.fast.path import FastPath
from nanovllm.models.model import Model
from nanovllm.ops.elementwise.norm_rope import soft_cap
from nanovllm.state.kv_cache import pages_for
from nanovllm.types import Float, Int32, Tensor

FACTOR = 1.5  # of the plain form's own error that a fast one may have
SUMS = 32  # and besides, of float32's relative spacing, because sums are taken in another order
TINY = 1e-30  # in place of a scale of zero: what should be zero and is has no error
BLOCK = 8192  # rows of the vocabulary that stand in float64 at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Worst relative errors beside float64: of what a layer returns, and of the keys and values that it writes."""

    output: float
    kv: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Errors by layer, and the head's; those of the fast form are None where there is none.

    `final` is the text behind the last layer in float64, before the final norm.
    """

    plain: tuple[Errors, ...]
    fast: tuple[Errors, ...] | None
    plain_head: float
    fast_head: float | None
    final: Float[Tensor, "T M"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens of a text as a decode batch over pages of their own: page n is a copy of the text's page `source[n]`, and each row's
    new key and value go to `offset` of `page`."""

    tokens: Int32[Tensor, "R"]  # which of the text's
    source: Int32[Tensor, "N"]
    page: Int32[Tensor, "R"]
    offset: Int32[Tensor, "R"]
    batch: Batch


def error_bound(plain: float, dtype: torch.dtype) -> float:
    """The largest relative error that a fast form may have beside a plain one with the error `plain`: 1.5 times that, one relative
    spacing of the dtype for its rounding, and 32 of float32 for the order of its sums."""
    return FACTOR * plain + torch.finfo(dtype).eps + SUMS * torch.finfo(torch.float32).eps


def keeps(fast: Errors, plain: Errors, dtype: torch.dtype) -> bool:
    """Whether both errors of a layer keep their bounds; one that is no number does not."""
    return fast.output <= error_bound(plain.output, dtype) and fast.kv <= error_bound(plain.kv, dtype)


def relative_error(got: Tensor, want: Tensor, change: Tensor, *, routed: bool = False) -> Tensor:
    """The worst of |got - want| / (|want| + the root mean square of its row of `change`), a float64 scalar tensor.

    A residual stream has channels thousands of times as large as the others: each is measured by its own size, and by what
    the layer adds to the row, so that the rounding of a large one hides no mistake in a small one. `routed`: the median row's in the place
    of the worst one's, because a rounding may send a row to another expert.
    """
    scale = want.abs() + change.square().mean(-1, keepdim=True).sqrt()
    errors = (got.double() - want).abs() / scale.clamp_min(TINY)
    return errors.flatten(1).amax(1).median() if routed else errors.amax()


def spread_rows(model: Model, num_tokens: int, num_rows: int, page_size: int) -> Rows:
    """`num_rows` tokens of a text, evenly spread, the last included; where there are more rows than tokens, some are several rows'."""
    places = torch.linspace(num_tokens / num_rows, num_tokens, num_rows).round().long().clamp_min(1) - 1
    counts = (places // page_size + 1).tolist()
    first = torch.tensor([0, *counts]).cumsum(0)
    # Behind a row's pages the dummy page, the last. A width like an engine's: kernels are compiled anew for one that is no multiple of 16.
    tables = torch.full((num_rows, -(-max(counts) // 16) * 16), sum(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.arange(count) + first[row]
    page, offset = first[1:] - 1, places % page_size

    def moved(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(model.device)

    return Rows(
        tokens=moved(places),
        source=moved([*(page for count in counts for page in range(count)), 0]),
        page=moved(page),
        offset=moved(offset),
        batch=Batch(
            input_ids=moved(places),  # nobody reads them: layers take hidden states
            positions=moved(places),
            slots=moved(page * page_size + offset),
            page_tables=moved(tables),
            seq_lens=moved(places + 1),
        ),
    )


@torch.no_grad()
def compare(model: Model, fast: FastPath | None, token_ids: Seq[int], rows: Seq[int], page_size: int = 16) -> Compared:
    """Run the tokens through every layer and the head, in decode batches of each of `rows` rows. Worst over all of them."""
    config, params, device = model.config, model.params, model.device
    ids = torch.tensor(token_ids, dtype=torch.int32, device=device)
    text = text_batch(ids, page_size)
    shape = (1, pages_for(len(token_ids), page_size), 2, config.num_kv_heads, page_size, config.head_dim)
    batches = [spread_rows(model, len(token_ids), count, page_size) for count in rows]
    held = [None if fast is None else fast.plan(len(each.tokens)) for each in batches]
    plans = [0 if plan is None else plan.handle for plan in held]
    forms = [model.spec.layer] if fast is None else [model.spec.layer, fast.layer]
    x_TM, found = layers.embed(params, text, config).double(), []
    for w, (cos, sin, view) in zip(params.layers, layers.given_each(params, text, config), strict=True):
        wide = pytree.tree_map(lambda t: None if t is None else t.double(), w)
        pages = torch.zeros(shape, dtype=torch.float64, device=device)
        y_TM = model.spec.layer(wide, x_TM, pages, 0, cos, sin, view, config)
        for each, plan in zip(batches, plans, strict=True):
            at = each.tokens
            x_RM, own = x_TM[at].to(model.dtype), pages[:, each.source].to(model.dtype)
            own[0, each.page, :, :, each.offset] = 0
            angles = (cos[at], sin[at])
            want, want_kv = _run(model.spec.layer, wide, x_RM.double(), own.double(), each, angles, config, view.window)
            copies = [own.clone() for _ in forms]  # before any of the kernels, which read old keys before they wait for each other
            want_by = want - x_RM.double()
            for layer, copied in zip(forms, copies, strict=True):
                got, got_kv = _run(layer, w, x_RM, copied, each, angles, config, view.window, 0 if layer is model.spec.layer else plan)
                found += [relative_error(got, want, want_by, routed=w.experts is not None), relative_error(got_kv, want_kv, want_kv)]
        x_TM = y_TM
        del wide  # before the next one: two layers in float64 would be the largest need
    heads = [model.spec.head] if fast is None else [model.spec.head, fast.head]
    head_errors = _head_errors(model, heads, [x_TM[each.tokens].to(model.dtype) for each in batches])
    by_layer = torch.stack(found).view(len(params.layers), len(batches), len(forms), 2).amax(1)  # NaN where any is
    plain, *quick = [tuple(Errors(output=output, kv=kv) for output, kv in form) for form in by_layer.transpose(0, 1).tolist()]
    plain_head, *quick_head = head_errors.tolist()
    return Compared(
        plain=plain,
        fast=quick[0] if quick else None,
        plain_head=plain_head,
        fast_head=quick_head[0] if quick_head else None,
        final=x_TM,
    )


def text_batch(ids: Int32[Tensor, "T"], page_size: int) -> Batch:
    """A text as one prompt, on pages in order."""
    places, length = torch.arange(len(ids), dtype=torch.int32, device=ids.device), len(ids)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ids.device)

    tables = ints(list(range(pages_for(length, page_size))))[None]
    return Batch(input_ids=ids, positions=places, slots=places, page_tables=tables, seq_lens=ints([length]), cu_seqlens=ints([0, length]))


def wide_logits(model: Model, x: Float[Tensor, "R M"]) -> Iterator[Float[Tensor, "R some"]]:
    """The head in float64, `BLOCK` words of the vocabulary at a time."""
    params, x = model.params, x.double()
    gains = [gain.double() for gain in (params.final_norm, params.final_norm_bias) if gain is not None]
    for weight in (params.embed if params.head is None else params.head).split(BLOCK):
        logits = model.spec.head(x, gains[0], weight.double(), model.config.rms_norm_eps, *gains[1:])
        yield soft_cap(logits, model.config.logit_softcap)


def _head_errors(model: Model, heads: Seq[HeadFunction], batches: Seq[Tensor]) -> Tensor:
    """The worst relative error of each head over all batches of hidden states, `[heads]`."""
    got = [torch.cat([decoder.logits(head, x, model.params, model.config) for x in batches]) for head in heads]
    blocks = zip(wide_logits(model, torch.cat(list(batches))), *(logits.split(BLOCK, dim=-1) for logits in got), strict=True)
    return torch.stack([torch.stack([relative_error(mine, want, want) for mine in given]) for want, *given in blocks]).amax(0)


def _run(
    layer: LayerFunction, w: Any, x: Tensor, pages: Tensor, rows: Rows, angles: tuple[Tensor, Tensor], config: ModelConfig, window: int,
    plan: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What a layer returns `[R, M]`, and the keys and values that it writes `[R, 2, K, D]`."""
    out = layer(w, x, pages, 0, *angles, replace(rows.batch, plan=plan, window=window), config)
    return out, pages[0, rows.page, :, :, rows.offset]
