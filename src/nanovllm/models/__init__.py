"""The built-in architectures, one file each. `REGISTRY` finds them by the name in `architectures` of a Hugging Face `config.json`."""

from nanovllm.models.common.params import Layer, ParamInfo, Params
from nanovllm.models.fast import fused
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.registry import REGISTRY, fitted, forward
from nanovllm.models.spec import ModelSpec

__all__ = ["REGISTRY", "FastChoice", "Layer", "ModelSpec", "ParamInfo", "Params", "fitted", "forward", "fused"]
