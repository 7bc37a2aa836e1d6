"""The report of the comparison: a value with every figure, also as JSON."""

import math
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanovllm.models.check.agree import Agreement
from nanovllm.models.check.compare import Compared, Errors, error_bound, keeps
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.fast.path import FastPath
from nanovllm.models.model import Model
from nanovllm.types import Tensor

SCHEMA = 1
PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """The figures of one layer.

    Attributes:
        index: The index of the layer.
        path: The path that runs it in decode steps: the name of the fast path, or `plain`.
        input_gain: The largest absolute weight of the norm before attention.
        post_gain: The largest absolute weight of the norm before the MLP.
        q_gain: The largest absolute weight of the norm of query heads; None without such a norm.
        k_gain: The largest absolute weight of the norm of key heads; None without such a norm.
        plain: Worst relative errors of the plain layer.
        fast: Worst relative errors of the fast layer; None if the model has no fast path.
        bound: The largest allowed errors of the fast layer.
    """

    index: int
    path: str
    input_gain: float
    post_gain: float
    q_gain: float | None
    k_gain: float | None
    plain: Errors
    fast: Errors | None
    bound: Errors


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """The figures of the head: the final norm and the logits. The fields are as in `LayerReport`."""

    path: str
    gain: float
    plain: float
    fast: float | None
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The comparison of a model's fast decode path with its plain layers.

    Attributes:
        model: The name of the model.
        architecture: The architecture.
        dtype: The dtype of the weights.
        device: The name of the device.
        fast: The name of the fast path; None if the model has none on this device.
        num_tokens: Tokens of the text.
        rows: The sizes of the compared decode batches.
        layers: The figures of each layer.
        head: The figures of the head.
        agreement: The greedy agreement; None without a fast path.
        tuning: The tuning file of the kernels; None for the default tile configurations.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    fast: str | None
    num_tokens: int
    rows: tuple[int, ...]
    layers: tuple[LayerReport, ...]
    head: HeadReport
    agreement: Agreement | None
    tuning: str | None = None

    @property
    def fallen(self) -> tuple[str, ...]:
        """The indices of the layers, and `head`, that have a fast form but fall back to plain PyTorch."""
        head = ("head",) if self.head.fast is not None and self.head.path == PLAIN else ()
        return (*(str(layer.index) for layer in self.layers if layer.fast is not None and layer.path == PLAIN), *head)

    def as_json(self) -> dict[str, Any]:
        """A JSON object. NaN and infinite figures become null."""
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return _finite({"schema": SCHEMA, **asdict(self), "falls_back": list(self.fallen), "versions": versions})


def chosen(compared: Compared, dtype: torch.dtype) -> FastChoice:
    """The choice of the layers, and of the head, whose fast form keeps its error bound."""
    fast_head = compared.fast_head
    return FastChoice(
        layers=tuple(keeps(fast, plain, dtype) for fast, plain in zip(compared.fast or (), compared.plain, strict=True)),
        head=fast_head is not None and fast_head <= error_bound(compared.plain_head, dtype),
    )


def reported(
    model: Model,
    fast: FastPath | None,
    choice: FastChoice | None,
    rows: tuple[int, ...],
    compared: Compared,
    agreement: Agreement | None,
    cuts: Cuts | None = None,
) -> CheckReport:
    """The report from the comparison of all layers, `compared`, and the greedy agreement."""
    none, device = [None] * len(compared.plain), model.device
    layers = tuple(
        LayerReport(
            index=index,
            path=fast.name if fast is not None and choice is not None and choice.layers[index] else PLAIN,
            input_gain=_largest(w.input_norm),
            post_gain=_largest(w.post_norm),
            q_gain=None if w.q_norm is None else _largest(w.q_norm),
            k_gain=None if w.k_norm is None else _largest(w.k_norm),
            plain=plain,
            fast=quick,
            bound=Errors(output=error_bound(plain.output, model.dtype), kv=error_bound(plain.kv, model.dtype)),
        )
        for index, (w, plain, quick) in enumerate(zip(model.params.layers, compared.plain, compared.fast or none, strict=True))
    )
    return CheckReport(
        model=model.name,
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(device),
        fast=None if fast is None else fast.name,
        num_tokens=len(compared.final),
        rows=rows,
        layers=layers,
        head=HeadReport(
            path=fast.name if fast is not None and choice is not None and choice.head else PLAIN,
            gain=_largest(model.params.final_norm),
            plain=compared.plain_head,
            fast=compared.fast_head,
            bound=error_bound(compared.plain_head, model.dtype),
        ),
        agreement=agreement,
        tuning=None if cuts is None else cuts.source,
    )


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the processor architecture of the machine."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _largest(gain: Tensor) -> float:
    return float(gain.abs().amax())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
