"""`Rounding`: matrices of a checkpoint that is not quantised, rounded to 4 or 8 bits while they are loaded."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.models.common.params import Layer, ParamInfo, Params, matrices
from nanovllm.ops.linear.quantise import GROUP, KINDS, Kind, quantise
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How matrices are quantised while they are loaded.

    Attributes:
        kind: `"fp8"`, `"int8"` or `"int4"`.
        head: Whether the output matrix is quantised, too. Tied embeddings keep their table, and the head becomes a matrix of its own.
    """

    kind: Kind
    head: bool = False

    @property
    def summary(self) -> str:
        """The kind in words."""
        groups = f" in groups of {GROUP}" if self.kind == "int4" else " with a scale per row"
        return f"{self.kind}{groups}, rounded while loading{', the head too' if self.head else ''}"

    def mark(self, fingerprint: str) -> str:
        """The fingerprint (hex) of the rounded weights, from that of the checkpoint."""
        return hashlib.sha256(f"{fingerprint} {self.kind} {self.head}".encode()).hexdigest()


def require_rounding(quantization: object, quantize_head: object) -> Rounding | None:
    """The rounding that two arguments of `load_model` ask for. Raises `InvalidRequestError`."""
    if not isinstance(quantize_head, bool):
        raise InvalidRequestError(f"quantize_head={quantize_head!r} must be True or False")
    if quantization is None:
        if quantize_head:
            stays = "in a checkpoint that is quantised already, the head stays as it is"
            raise InvalidRequestError(f"quantize_head=True needs quantization='fp8', 'int8' or 'int4'; {stays}")
        return None
    for kind in KINDS:
        if quantization == kind:
            return Rounding(kind=kind, head=quantize_head)
    other = "; w4a16 is called int4 here" if quantization == "w4a16" else ""
    raise InvalidRequestError(f"quantization={quantization!r} must be one of {', '.join(KINDS)}, or None{other}")


def quantised_already(rounding: Rounding, method: str) -> InvalidRequestError:
    """The error of `quantization` for a checkpoint that is quantised by `method`."""
    out = "leave it out, and quantize_head too: the head stays as it is" if rounding.head else "leave it out"
    return InvalidRequestError(f"quantization={rounding.kind!r}, but the checkpoint is quantised already ({method}): {out}")


def rounded_params(params: Params[Tensor], rounding: Rounding) -> Params[Tensor]:
    """Weights in memory with their matrices rounded, as `load_model` rounds those of a checkpoint."""

    def kept(matrix: Tensor | None) -> Any:
        return None if matrix is None else quantise(matrix, rounding.kind)

    def layer(w: Layer[Tensor]) -> Layer[Tensor]:
        experts = None if w.experts is None else replace(w.experts, gate_up=kept(w.experts.gate_up), down=kept(w.experts.down))
        return replace(w, qkv=kept(w.qkv), o=kept(w.o), gate_up=kept(w.gate_up), down=kept(w.down), experts=experts)

    return rounded_head(replace(params, layers=tuple(map(layer, params.layers))), rounding)


def rounded_head(params: Params[Tensor], rounding: Rounding) -> Params[Tensor]:
    """Weights with the head rounded if `rounding` asks for that. Tied embeddings keep their table."""
    if not rounding.head:
        return params
    head: Any = quantise(params.embed if params.head is None else params.head, rounding.kind)
    return replace(params, head=head)


def quantisable(table: Params[ParamInfo], *, head: bool) -> Iterator[ParamInfo]:
    """The matrices of a table that are quantised: those of attention, MLP and experts, and the head if `head`. Routers stay."""
    for layer in table.layers:
        yield from matrices(layer)
    if head and table.head is not None:
        yield table.head
