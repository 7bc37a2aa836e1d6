"""One kernel of a step alone: it must give the same results with a tile configuration as by default before it is timed in a layer.

The head is also timed alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

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

ERROR = 4  # allowed difference in spacings of the dtype: the order of sums differs, so a result may round to a neighbouring value
LAUNCHES, COPIES = 8, 128  # least launches of the head in a graph; most copies of its weights

Launch = Callable[[int, Cut], tuple[Tensor, ...]]  # from the number of the launch and a tile configuration to the results


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A kernel that is launched `count` times in a row, each time over other memory."""

    launch: Launch
    count: int

    def results(self, cut: Cut) -> tuple[Tensor, ...]:
        """The results of a launch after `count` other launches, whose leftovers in memory must not matter.

        Raises `Unfit` if the kernel cannot be built or launched.
        """
        try:
            for number in range(self.count):
                self.launch(number, cut)
            results = self.launch(0, cut)
            torch.cuda.synchronize()
        except (*kernel_errors(), CutError, RuntimeError) as error:
            raise no_kernel(error) from error
        return results


def no_kernel(error: Exception) -> Unfit:
    """The `Unfit` for an error of a launch. If the GPU itself has failed, its error is raised here and ends the run."""
    torch.cuda.synchronize()
    return Unfit(f"the kernel failed: {' '.join(str(error).split())[:200]}")


def require_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Raise `Unfit` if results differ from the default's by more than `ERROR` spacings of the dtype."""
    for mine, theirs in zip(got, want, strict=True):
        wrong = float(relative_error(mine, theirs.double(), theirs.double()))
        if not wrong <= ERROR * torch.finfo(mine.dtype).eps:
            raise Unfit(f"wrong results: relative error {wrong:.2g}")


def product(model: Model, work: Work) -> Alone:
    """A product of a layer, with the model's own weights."""
    gain = "input_norm" if work.part in ("qkv", "down") else "post_norm"  # after `down` comes the next layer's input norm
    inner = f"{work.part}_norm"  # the norm of the product before the residual sum
    fields = (work.part, f"{work.part}_bias", gain, *((inner,) if work.part in ("o", "down") else ()))
    given = [tuple(getattr(w, field) for field in fields) for w in model.params.layers]
    return _product(model, work, given, len(given))


def head(model: Model, work: Work) -> Alone:
    """The head, over its weights and enough copies of them that the L2 cache cannot hold all."""
    weight = model.params.embed if model.params.head is None else model.params.head
    cached = torch.cuda.get_device_properties(model.device).L2_cache_size
    needed = max(2, min(COPIES, math.ceil(2 * cached / weight.nbytes)))
    weights = [weight, *(pytree.tree_map(torch.clone, weight) for _ in range(needed - 1))]
    return _product(model, work, [(each, None, model.params.final_norm) for each in weights], max(LAUNCHES, needed))


def _product(model: Model, work: Work, given: list[tuple[Any, ...]], count: int) -> Alone:
    """A product. Each entry of `given` has the matrix, its bias or None, a norm weight, and for sums the inner norm weight or None."""
    eps, act = model.config.rms_norm_eps, model.config.hidden_act
    x = _random(model, work.rows, work.width)
    residual = _random(model, work.rows, work.outputs) if work.part in ("o", "down") else None

    def launch(number: int, cut: Cut) -> tuple[Tensor, ...]:
        weight, bias, gain, *inner = given[number % len(given)]
        inner_norm: Tensor | None = inner[0] if inner else None
        if work.form == "sum":
            assert residual is not None
            return linear_add_norm(x, weight, bias, residual, gain, eps, inner=inner_norm, cut=cut)
        norm, added = gain if work.norm else None, residual if inner_norm is None else None
        return (norm_linear(x, weight, gain=norm, bias=bias, residual=added, eps=eps, gated=work.gated, act=act, cut=cut),)

    return Alone(launch=launch, count=count)


def attention(model: Model, context: Context, plans: Plans) -> Alone:
    """Attention over a context of the chain, each launch in the next layer's pages."""
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
