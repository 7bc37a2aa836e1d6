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
    """A loaded model. `dtype` is that of the weights on `device`; `config.dtype` is what the checkpoint was saved in.

    `generation_config` is the checkpoint's file as it stands. `fingerprint` tells whose KV a chunk holds (see `weights.fingerprint`).
    As a pytree its leaves are the weights; the rest is structure.
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

    @property
    def foreign(self) -> bool:
        """Whether transformers' module runs the model, for there is no file in `models/` for its architecture."""
        return isinstance(self.params, ForeignParams)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Model({self.name!r}, {self.config.architecture}, {brief_count(self.params)}, {dtype} on {self.device})"


register_value(Model, static=tuple(name for name in Model.__dataclass_fields__ if name != "params"))
