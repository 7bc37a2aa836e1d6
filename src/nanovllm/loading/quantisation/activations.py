"""`with_fp8_activations`: a model whose steps of many tokens round the activations of FP8 weights to FP8, too."""

import hashlib
from dataclasses import replace
from typing import Any

import torch

from nanovllm.errors import InvalidRequestError
from nanovllm.loading.quantisation.rounding import Rounding
from nanovllm.models.common.params import Layer
from nanovllm.models.model import Model
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.scaled_product import against, against_device
from nanovllm.types import Tensor

NEEDS = "fp8_activations=True needs FP8 weights with a scale per row, as quantization='fp8' makes them"


def require_fp8_products(fp8_activations: object, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `InvalidRequestError` if the option has a wrong value, or if it is True and the device has no products in FP8."""
    if not isinstance(fp8_activations, bool):
        raise InvalidRequestError(f"fp8_activations={fp8_activations!r} must be True or False")
    if fp8_activations and (why := against_device(device, dtype)):
        raise InvalidRequestError(f"fp8_activations=True needs a GPU that multiplies FP8, and a model in bfloat16: {why}")


def require_fp8_weights(rounding: Rounding | None, *, stored: bool) -> None:
    """Raise `InvalidRequestError` if no weights will be in FP8, before they are loaded.

    Weights that are quantised as they are `stored` may be in FP8. `with_fp8_activations` looks at them.
    """
    if not stored and (rounding is None or rounding.kind != "fp8"):
        why = "the checkpoint is not quantised" if rounding is None else f"quantization={rounding.kind!r} makes other codes"
        raise InvalidRequestError(f"{NEEDS}: {why}")


def with_fp8_activations(model: Model) -> Model:
    """The same weights, but products of attention and MLP with FP8 weights round their activations in steps of many rows.

    The head and experts keep their activations. So do matrices that are not in FP8. The fingerprint is another one, because KV of the two
    models differs.

    Raises:
        InvalidRequestError: No matrix is in FP8 with a scale per row.
    """
    layers: tuple[Layer[Tensor], ...] = () if model.foreign else model.params.layers
    found = [m for w in layers for m in (w.qkv, w.o, w.gate_up, w.down) if isinstance(m, QuantisedMatrix)]
    if not found or all(map(against, found)):
        why = against(found[0]) if found else "no matrix of attention or MLP is quantised"
        raise InvalidRequestError(f"{NEEDS}: {why}")

    def kept(matrix: Any) -> Any:
        return replace(matrix, fp8_activations=True) if isinstance(matrix, QuantisedMatrix) and not against(matrix) else matrix

    def layer(w: Layer[Tensor]) -> Layer[Tensor]:
        return replace(w, qkv=kept(w.qkv), o=kept(w.o), gate_up=kept(w.gate_up), down=kept(w.down))

    return replace(
        model,
        params=replace(model.params, layers=tuple(map(layer, layers))),
        fingerprint=hashlib.sha256(f"{model.fingerprint} fp8 activations".encode()).hexdigest(),
        quantization=f"{model.quantization}; activations of long prompts in FP8",
    )
