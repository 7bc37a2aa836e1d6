"""The fast form of a model's decode steps: functions that replace its `layer` and `layers.head`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.models.common.params import Params
from nanovllm.models.fast import cpu, fused
from nanovllm.models.fast.choice import HeadFunction, LayerFunction
from nanovllm.models.fast.cuts import Cuts, with_cuts
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.backends import against_own_kernels
from nanovllm.ops.cpu.build import library
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPath:
    """The fast form of a model's decode steps.

    Attributes:
        name: `fused` (Triton kernels) or `C`.
        layer: Replaces the model's `layer`.
        head: Replaces `layers.head`.
        plan: Makes the attention plan for a number of rows; its handle goes into `Batch.plan`. Returns None if none is needed.
    """

    name: str
    layer: LayerFunction
    head: HeadFunction
    plan: Callable[[int], FusedDecodePlan | None]


def fast_path(params: Params[Tensor], config: ModelConfig, cuts: Cuts | None = None) -> FastPath | None:
    """The fast form of the model's decode steps on its device; None if the device or the model does not allow one.

    On a GPU these are the kernels of `fused.py`, with the tile configurations `cuts`. On a CPU with a C compiler it is C (`cpu.py`), in
    float32 and bfloat16.
    """
    device, dtype = params.embed.device, params.embed.dtype
    if fused.serves(params, config):

        def plan(rows: int) -> FusedDecodePlan:
            cut = () if cuts is None else cuts.at(rows).attend
            return FusedDecodePlan(rows, config.num_heads, config.num_kv_heads, config.head_dim, device, cut)

        return FastPath(name="fused", layer=with_cuts(fused.layer, cuts), head=with_cuts(fused.head, cuts), plan=plan)
    if device.type == "cpu" and not against(params, config, device, dtype):
        return FastPath(name="C", layer=cpu.decode_layer, head=cpu.head, plan=lambda _: None)
    return None


def against(params: Params[Any], config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The reason why `fast_path` is None for a model in `dtype` on `device`; empty if it is not None. `params` may be without memory."""
    if device.type == "cuda":
        return fused.unknown(params, config) or against_own_kernels(device, dtype)
    if unknown := cpu.unknown(params, config):
        return unknown
    if dtype not in cpu.DTYPES:
        return f"the dtype {str(dtype).removeprefix('torch.')}"
    return "" if library(cpu.SOURCE, cpu.SYMBOLS) is not None else "no C compiler"
