"""Comparison of a model's layers one by one: the fast form and the plain form in the model's dtype, each with the plain form in float64.

A text runs through all layers in float64. The input of each layer is rounded to the model's dtype and given to all three forms. It is a
decode batch, whose rows are tokens of the text with their own copies of the KV before them. So no layer gets the errors of another.

Ranks that share a model call this at the same time. Their errors are the worst of all ranks, so that all choose the same layers.

Legend of shape suffixes: T tokens of the text · R rows of the decode batch · M hidden_size · V vocabulary · K key/value heads · D head_dim.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast.choice import HeadFunction, LayerFunction
from nanovllm.models.fast.path import FastPath
from nanovllm.models.model import Model
from nanovllm.ops.distributed.collectives import all_gather
from nanovllm.ops.distributed.group import side_by_side
from nanovllm.ops.elementwise.norm_rope import soft_cap
from nanovllm.ops.linear.quantised import QuantisedMatrix, by_row
from nanovllm.state.kv_cache import pages_for
from nanovllm.types import Float, Int32, Int64, Tensor

FACTOR = 1.5  # allowed error of the fast form, as a multiple of the plain form's error
SUMS = 32  # additional allowed error in float32 spacings, because the order of sums differs
TINY = 1e-30  # replaces a scale of zero: an exact zero that should be zero has no error
MOST_ROWS = 64  # of several batches that run in plain torch together: KV in float64 takes memory
BLOCK = 8192  # rows of the vocabulary that are converted to float64 at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Worst relative errors of a layer compared with float64: of its output, and of the keys and values that it writes."""

    output: float
    kv: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The errors of every layer and of the head. The errors of the fast form are None if the model has no fast form.

    `final` has the hidden states of the text after the last layer in float64, before the final norm.
    """

    plain: tuple[Errors, ...]
    fast: tuple[Errors, ...] | None
    plain_head: float
    fast_head: float | None
    final: Float[Tensor, "T M"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens of a text as a decode batch over its own pages.

    Page n is a copy of the text's page `source[n]`. The new key and value of a row go to `offset` in `page`.
    """

    tokens: Int32[Tensor, "R"]  # indices into the text
    source: Int32[Tensor, "N"]
    page: Int32[Tensor, "R"]
    offset: Int32[Tensor, "R"]
    batch: Batch


def error_bound(plain: float, dtype: torch.dtype) -> float:
    """The largest allowed relative error of a fast form whose plain form has the error `plain`.

    It is 1.5 times `plain`, plus one relative spacing of the dtype for rounding, plus 32 spacings of float32 for the order of sums.
    """
    return FACTOR * plain + torch.finfo(dtype).eps + SUMS * torch.finfo(torch.float32).eps


def keeps(fast: Errors, plain: Errors, dtype: torch.dtype) -> bool:
    """Whether both errors of a layer are within their bounds. NaN is not."""
    return fast.output <= error_bound(plain.output, dtype) and fast.kv <= error_bound(plain.kv, dtype)


def relative_error(got: Tensor, want: Tensor, change: Tensor, *, routed: bool = False) -> Tensor:
    """The largest of |got - want| / (|want| + the root mean square of its row of `change`), as a float64 scalar tensor.

    Some channels of a residual stream are thousands of times as large as others. So each channel is measured by its own size, plus the
    size of the layer's contribution to the row. Otherwise the rounding of a large channel would hide an error in a small one.

    Args:
        got: The result.
        want: The expected result in float64.
        change: The layer's contribution, in float64.
        routed: Take the median over rows in place of the largest row. With experts, rounding may send a row to another expert.
    """
    scale = want.abs() + change.square().mean(-1, keepdim=True).sqrt()
    errors = (got.double() - want).abs() / scale.clamp_min(TINY)
    return errors.flatten(1).amax(1).median() if routed else errors.amax()


def spread_rows(model: Model, num_tokens: int, num_rows: int, page_size: int) -> Rows:
    """`num_rows` evenly spread tokens of a text, including the last. If there are more rows than tokens, some tokens have several rows."""
    return rows_at(model, torch.linspace(num_tokens / num_rows, num_tokens, num_rows).round().long().clamp_min(1) - 1, page_size)


def rows_at(model: Model, places: Int64[Tensor, "R"], page_size: int) -> Rows:
    """The tokens at these places of a text, on the CPU, as rows."""
    num_rows = len(places)
    counts = (places // page_size + 1).tolist()
    first = torch.tensor([0, *counts]).cumsum(0)
    # The dummy page, the last, pads each row. The width is a multiple of 16, as in an engine: other widths compile other kernels.
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
            input_ids=moved(places),  # not used: layers take hidden states
            positions=moved(places),
            slots=moved(page * page_size + offset),
            page_tables=moved(tables),
            seq_lens=moved(places + 1),
        ),
    )


@torch.no_grad()
def compare(model: Model, fast: FastPath | None, token_ids: Seq[int], rows: Seq[int], page_size: int = 16) -> Compared:
    """Compare every layer and the head on the tokens, in decode batches of each size in `rows`. Errors are the worst of all batches."""
    config, params, device = model.config, model.params, model.device
    ids = torch.tensor(token_ids, dtype=torch.int32, device=device)
    text = text_batch(ids, page_size)
    shape = (1, pages_for(len(token_ids), page_size), 2, config.num_kv_heads, page_size, config.head_dim)
    batches = [spread_rows(model, len(token_ids), count, page_size) for count in rows]
    groups = _together(batches)
    unions = [rows_at(model, torch.cat([each.tokens for each in group]).long().cpu(), page_size) for group in groups]
    kept_plans = [None if fast is None else fast.plan(len(each.tokens)) for each in batches]  # the handles are valid while these live
    handles = iter([0 if plan is None else plan.handle for plan in kept_plans])
    plans = [[next(handles) for _ in group] for group in groups]
    forms = [model.spec.layer] if fast is None else [model.spec.layer, fast.layer]
    x_TM, errors = layers.embed(params, text, config).double(), []
    for w, (cos, sin, view) in zip(params.layers, layers.given_each(params, text, config), strict=True):
        exact = pytree.tree_map(wide, w, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
        stands = pytree.tree_map(partial(_stands, model), w, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
        pages = torch.zeros(shape, dtype=torch.float64, device=device)
        y_TM = model.spec.layer(exact, x_TM, pages, 0, cos, sin, view, config)
        for every, group, planned in zip(unions, groups, plans, strict=True):
            given = [_inputs(x_TM, pages, each, model.dtype) for each in group]  # first: fused kernels read old keys before they wait
            all_RM, own = _inputs(x_TM, pages, every, model.dtype)
            angles = (cos[every.tokens], sin[every.tokens])
            want, want_kv = _run(model.spec.layer, exact, all_RM.double(), own.double(), every, angles, config, view.window)
            want_by = want - all_RM.double()
            plain = _run(model.spec.layer, stands, all_RM, own, every, angles, config, view.window)
            ends = accumulate(len(each.tokens) for each in group)
            for each, plan, (x_RM, copied), end in zip(group, planned, given, ends, strict=True):
                its = slice(end - len(each.tokens), end)
                results = [(plain[0][its], plain[1][its])]
                if fast is not None:
                    angles = (cos[each.tokens], sin[each.tokens])
                    results.append(_run(fast.layer, w, x_RM, copied, each, angles, config, view.window, plan))
                for got, got_kv in results:
                    errors += [
                        relative_error(got, want[its], want_by[its], routed=w.experts is not None),
                        relative_error(got_kv, want_kv[its], want_kv[its]),
                    ]
        x_TM = y_TM
        del exact, stands  # before the next layer: two layers in float64 would take twice the memory
    heads = [model.spec.head] if fast is None else [model.spec.head, fast.head]
    head_errors = _head_errors(model, heads, [x_TM[each.tokens].to(model.dtype) for each in batches])
    by_layer = torch.stack(errors).view(len(params.layers), len(batches), len(forms), 2).amax(1)  # amax keeps NaN
    if config.mesh is not None:  # each rank has its own keys and values
        by_layer = all_gather(by_layer, config.mesh).amax(0)
    plain, *quick = [tuple(Errors(output=output, kv=kv) for output, kv in form) for form in by_layer.transpose(0, 1).tolist()]
    plain_head, *quick_head = head_errors.tolist()
    return Compared(
        plain=plain,
        fast=quick[0] if quick else None,
        plain_head=plain_head,
        fast_head=quick_head[0] if quick_head else None,
        final=x_TM,
    )


def _together(batches: Seq[Rows]) -> list[list[Rows]]:
    """Batches in groups of at most `MOST_ROWS` rows, or of one batch.

    The forms in plain torch do not depend on the number of rows. So they run once for a group.
    """
    groups: list[list[Rows]] = []
    for each in batches:
        if groups and sum(len(one.tokens) for one in (*groups[-1], each)) <= MOST_ROWS:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _inputs(x_TM: Tensor, pages: Tensor, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The input of a layer for rows, and the KV before them on pages of their own, both rounded to `dtype`."""
    own = pages[:, rows.source].to(dtype)
    own[0, rows.page, :, :, rows.offset] = 0
    return x_TM[rows.tokens].to(dtype), own


def text_batch(ids: Int32[Tensor, "T"], page_size: int) -> Batch:
    """A text as one prompt, on pages 0, 1, 2, and so on."""
    places, length = torch.arange(len(ids), dtype=torch.int32, device=ids.device), len(ids)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ids.device)

    tables = ints(list(range(pages_for(length, page_size))))[None]
    return Batch(input_ids=ids, positions=places, slots=places, page_tables=tables, seq_lens=ints([length]), cu_seqlens=ints([0, length]))


def wide_logits(model: Model, x: Float[Tensor, "R M"]) -> Iterator[Float[Tensor, "R some"]]:
    """The logits in float64, `BLOCK` entries of the vocabulary at a time. Ranks that share the model put theirs together first."""
    own, mesh, width = _own_logits(model, x.double()), model.config.mesh, model.config.vocab_size
    if mesh is not None:
        own = side_by_side(all_gather(torch.cat(list(own), 1), mesh), width).split(BLOCK, dim=1)
    for logits in own:
        yield soft_cap(logits, model.config.logit_softcap)


def _own_logits(model: Model, x: Float[Tensor, "R M"]) -> Iterator[Float[Tensor, "R some"]]:
    """The logits of this rank's tokens, before the soft cap."""
    params = model.params
    gains = [gain.double() for gain in (params.final_norm, params.final_norm_bias) if gain is not None]
    whole = params.embed if params.head is None else params.head
    for first in range(0, whole.shape[0], BLOCK):
        last = min(first + BLOCK, whole.shape[0])
        weight = wide(by_row(whole).row_range(first, last) if isinstance(whole, QuantisedMatrix) else whole[first:last])
        assert weight is not None
        yield model.spec.head(x, gains[0], weight, model.config.rms_norm_eps, *gains[1:])


def wide(weight: Tensor | QuantisedMatrix | None) -> Tensor | None:
    """A weight in float64; a quantised matrix as the matrix that it stands for."""
    if isinstance(weight, QuantisedMatrix):
        return weight.dequantised(torch.float64)
    return None if weight is None else weight.double()


def _stands(model: Model, weight: Tensor | QuantisedMatrix | None) -> Tensor | None:
    """A weight for the plain form, which must not run the kernels that it is compared with: a quantised matrix, dequantised."""
    return weight.dequantised(model.dtype) if isinstance(weight, QuantisedMatrix) else weight


def _head_errors(model: Model, heads: Seq[HeadFunction], batches: Seq[Tensor]) -> Tensor:
    """The worst relative error of each head over all batches of hidden states, `[heads]`. The first head is the plain one."""
    plain = replace(model.params, head=_stands(model, model.params.head))
    each = [plain, *(model.params for _ in heads[1:])]
    got = [torch.cat([decoder.logits(head, x, own, model.config) for x in batches]) for head, own in zip(heads, each, strict=True)]
    blocks = zip(wide_logits(model, torch.cat(list(batches))), *(logits.split(BLOCK, dim=-1) for logits in got), strict=True)
    return torch.stack([torch.stack([relative_error(mine, want, want) for mine in given]) for want, *given in blocks]).amax(0)


def _run(
    layer: LayerFunction, w: Any, x: Tensor, pages: Tensor, rows: Rows, angles: tuple[Tensor, Tensor], config: ModelConfig, window: int,
    plan: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Donates `pages`. Run a layer. Returns its output `[R, M]`, and the keys and values that it writes `[R, 2, K, D]`."""
    out = layer(w, x, pages, 0, *angles, replace(rows.batch, plan=plan, window=window), config)
    return out, pages[0, rows.page, :, :, rows.offset]
