"""Which layers the fast forms know (`fused.py`, `cpu.py`): what is beyond one of them runs in plain torch there, on a GPU compiled."""

from typing import Any

from nanovllm.config import ModelConfig
from nanovllm.models.common.params import Params


def beyond(params: Params[Any], config: ModelConfig) -> str:
    """What a model has that no fast form knows; empty where there is nothing. `params` may be the table.

    What is beyond one of them alone its own `unknown` says.
    """
    if not params.layers:
        return "layers that transformers runs"
    with_biases = params.positions is not None or params.layers[0].input_norm_bias is not None
    return "layer norms with biases" if with_biases else ""
