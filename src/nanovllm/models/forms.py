"""Which layers the fast forms know (`fused.py`, `cpu.py`): what an architecture has beyond them runs in plain torch, compiled on a GPU."""

from typing import Any

from ..config import ModelConfig
from .params import Params


def beyond(params: Params[Any], config: ModelConfig) -> str:
    """What a model has that no fast form knows; empty where there is nothing. `params` may be the table.

    Experts are beyond the C of a CPU alone (`cpu.py`).
    """
    if not params.layers:
        return "layers that transformers runs"
    like, layer = params.embed.dtype, params.layers[0]
    if params.positions is not None or layer.input_norm_bias is not None:
        return "layer norms with biases"
    if layer.input_norm.dtype != like:
        return "norms that are rounded behind their gain"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act}"
    if layer.o_norm is not None or layer.down_norm is not None:
        return "norms of what attention and MLP add"
    return ""
