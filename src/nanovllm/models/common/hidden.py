"""What a caller may ask of the residual stream: other embeddings, tensors to add after layers, and the outputs of layers."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.models.common.params import Params
from nanovllm.types import Float, Tensor

Added = Mapping[int, Float[Tensor, "..."]]


def require_hidden(
    params: Params[Tensor],
    num_tokens: int,
    inputs_embeds: Float[Tensor, "..."] | None,
    add_hidden: Added | None,
    capture_hidden: Sequence[int] | None,
    *,
    differentiable: bool,
) -> None:
    """Raise `InvalidRequestError` for a layer that the model lacks, a tensor of another shape, or a gradient that is not computed."""
    width = params.embed.shape[1]
    added = {} if add_hidden is None else add_hidden
    for name, layers in (("add_hidden", added), ("capture_hidden", () if capture_hidden is None else capture_hidden)):
        for layer in layers:
            require_layer(name, layer, len(params.layers))
    if inputs_embeds is not None and inputs_embeds.shape != (num_tokens, width):
        raise InvalidRequestError(f"inputs_embeds has the shape {list(inputs_embeds.shape)}, but this batch needs {[num_tokens, width]}")
    for layer, tensor in added.items():
        if tensor.shape not in ((width,), (num_tokens, width)):
            raise InvalidRequestError(
                f"add_hidden[{layer}] has the shape {list(tensor.shape)}, but this batch needs {[width]} or {[num_tokens, width]}"
            )
    if not differentiable and torch.is_grad_enabled():
        given = {"inputs_embeds": inputs_embeds, **{f"add_hidden[{layer}]": tensor for layer, tensor in added.items()}}
        for name, tensor in given.items():
            if tensor is not None and tensor.requires_grad:
                raise InvalidRequestError(f"{name} requires a gradient, which attention over pages does not compute: pass kv=None")


def require_layer(name: str, layer: Any, num_layers: int) -> None:
    """Raise `InvalidRequestError` if `layer` is not the index of one of the layers; `name` is the argument that has it."""
    try:
        known = not isinstance(layer, bool) and 0 <= operator.index(layer) < num_layers
    except TypeError:
        known = False
    if not known:
        raise InvalidRequestError(f"{name} has the layer {layer!r}, but layers are integers from 0 to {num_layers - 1}")


def added(x_TM: Float[Tensor, "T M"], more: Float[Tensor, "..."] | None) -> Float[Tensor, "T M"]:
    """The sum in the dtype of `x_TM`, rounded once; `x_TM` itself if there is nothing to add."""
    return x_TM if more is None else (x_TM + more).to(x_TM.dtype)
