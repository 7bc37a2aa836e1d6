"""`Model`: a config, its weights and its tokenizer as one frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.models.common.params import Params, brief_count
from nanovllm.models.spec import ModelSpec
from nanovllm.models.transformers import ForeignParams
from nanovllm.tokenizer.tokenizer import Tokenizer
from nanovllm.types import Tensor, register_value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A loaded model: config, weights and tokenizer as one frozen value. `nanovllm.load_model` makes it.

    As a pytree, its leaves are the weights. All other fields belong to the tree's structure.

    Attributes:
        name: The name or the folder that `load_model` was given.
        config: Sizes and settings of the architecture.
        params: The weights, on `device`.
        tokenizer: The checkpoint's tokenizer; None if the checkpoint has no tokenizer.
        spec: The functions of the architecture.
        generation_config: The content of the checkpoint's `generation_config.json`, unchanged.
        fingerprint: A hash of the weights (hex). A chunk file records it, so that a file of another model is refused.
        device: The device of the weights.
        dtype: The dtype of the weights. `config.dtype` is the dtype that the checkpoint was saved in.
        quantization: How the matrices are quantised, in words; empty if they are not.

    Examples:
        >>> model
        Model('tiny', Qwen3ForCausalLM, 5,772,544 parameters, float32 on cpu)
        >>> model.config.num_layers, model.config.dtype
        (8, 'bfloat16')
    """

    name: str
    config: ModelConfig
    params: Params[Tensor]
    tokenizer: Tokenizer | None
    spec: ModelSpec
    generation_config: Mapping[str, Any]
    fingerprint: str
    device: torch.device
    dtype: torch.dtype
    quantization: str = ""

    @property
    def foreign(self) -> bool:
        """Whether the model runs through the transformers fallback, because its architecture has no file in `models/`.

        Returns:
            True for a model of the transformers fallback, False for a built-in architecture.

        Examples:
            >>> model.foreign
            False
        """
        return isinstance(self.params, ForeignParams)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        how = f", {self.quantization}," if self.quantization else ""
        return f"Model({self.name!r}, {self.config.architecture}, {brief_count(self.params)}, {dtype}{how} on {self.device})"


register_value(Model, static=tuple(name for name in Model.__dataclass_fields__ if name != "params"))
