"""One kernel of a step by itself: what is looked at before a cut is timed, for each must compute what the default does. The head is
timed so, too."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.entrypoints.cli.tune.kernel_search import Unfit
from nanovllm.entrypoints.cli.tune.layer_chain import Context, Plans
from nanovllm.models.check.compare import relative_error
from nanovllm.models.check.examine import kernel_errors
from nanovllm.models.model import Model
from nanovllm.models.tuning.launches import Work
from nanovllm.ops.attention.rope_attend import rope_attend
from nanovllm.ops.cuts import Cut, CutError
from nanovllm.ops.linear.linear_add_norm import linear_add_norm
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.types import Float, Tensor

ERROR = 4  # spacings of the dtype: each rounding of a candidate may fall on the other side of the default's
LAUNCHES, COPIES = 8, 128  # of the head in a graph, at least; of its weights, at most

Launch = Callable[[int, Cut], tuple[Tensor, ...]]  # launch number n, by a cut; its results


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A kernel to launch `count` times in a row, each time over other memory."""

    launch: Launch
    count: int

    def results(self, cut: Cut) -> tuple[Tensor, ...]:
        """Of a launch that meets what others have left behind. Raises `Unfit` where there is no such kernel."""
        try:
            for number in range(self.count):
                self.launch(number, cut)
            results = self.launch(0, cut)
            torch.cuda.synchronize()
        except (*kernel_errors(), CutError, RuntimeError) as error:
            raise no_kernel(error) from error
        return results


def no_kernel(error: Exception) -> Unfit:
    """What to raise in the place of an error of a launch. Where the GPU itself has failed, that is raised here, and ends the run."""
    torch.cuda.synchronize()
    return Unfit(f"no kernel: {' '.join(str(error).split())[:200]}")


def require_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Raise `Unfit` for results that are not the default's."""
    for mine, theirs in zip(got, want, strict=True):
        wrong = float(relative_error(mine, theirs.double(), theirs.double()))
        if not wrong <= ERROR * torch.finfo(mine.dtype).eps:
            raise Unfit(f"wrong by {wrong:.2g}")


def product(model: Model, work: Work) -> Alone:
    """The product of a layer with the model's own weights."""
    gain = "input_norm" if work.part in ("qkv", "down") else "post_norm"  # behind `down` stands the next layer's
    inner = f"{work.part}_norm"  # of the product, before it is added
    fields = (work.part, f"{work.part}_bias", gain, *((inner,) if work.part in ("o", "down") else ()))
    given = [tuple(getattr(w, field) for field in fields) for w in model.params.layers]
    return _product(model, work, given, len(given))


def head(model: Model, work: Work) -> Alone:
    """The head, over its weights and copies of them that no cache holds."""
    weight = model.params.embed if model.params.head is None else model.params.head
    cached = torch.cuda.get_device_properties(model.device).L2_cache_size
    needed = max(2, min(COPIES, math.ceil(2 * cached / (weight.numel() * weight.element_size()))))
    weights = [weight, *(weight.clone() for _ in range(needed - 1))]
    return _product(model, work, [(each, None, model.params.final_norm) for each in weights], max(LAUNCHES, needed))


def _product(model: Model, work: Work, given: list[tuple[Any, ...]], count: int) -> Alone:
    """`given`: the weight, its bias or None, the gain of a norm and, of what is added, that of its own norm or None."""
    eps, act = model.config.rms_norm_eps, model.config.hidden_act
    x = _random(model, work.rows, work.width)
    residual = _random(model, work.rows, work.outputs) if work.part in ("o", "down") else None

    def launch(number: int, cut: Cut) -> tuple[Tensor, ...]:
        weight, bias, gain, *inner = given[number % len(given)]
        behind: Tensor | None = inner[0] if inner else None
        if work.form == "sum":
            assert residual is not None
            return linear_add_norm(x, weight, bias, residual, gain, eps, inner=behind, cut=cut)
        norm, added = gain if work.norm else None, residual if behind is None else None
        return (norm_linear(x, weight, gain=norm, bias=bias, residual=added, eps=eps, gated=work.gated, act=act, cut=cut),)

    return Alone(launch=launch, count=count)


def attention(model: Model, context: Context, plans: Plans) -> Alone:
    """Attention over a context of the chain, in one layer's pages after another."""
    config, w, at, pages = model.config, model.params.layers[0], context.batch, context.pages
    qkv = _random(model, len(at.seq_lens), (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    scale, eps, cap = config.scale, config.rms_norm_eps, config.attention_softcap

    def launch(number: int, cut: Cut) -> tuple[Tensor, ...]:
        place, plan = number % len(pages), plans.at(cut).handle
        tables, lens, slots = at.page_tables, at.seq_lens, at.slots
        return (
            rope_attend(qkv, w.q_norm, w.k_norm, context.cos, context.sin, pages, place, tables, lens, slots, scale, eps, plan, 0, cap),
        )

    return Alone(launch=launch, count=len(pages))


def _random(model: Model, rows: int, width: int) -> Float[Tensor, "rows width"]:
    return torch.randn(rows, width, dtype=model.dtype, device=model.device)
