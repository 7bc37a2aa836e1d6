"""Weights from a table of parameters: random weights, and weights without memory."""

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import Mesh, ModelConfig, RopeConfig
from nanovllm.models.common.layers import inverse_frequencies
from nanovllm.models.common.params import ParamInfo, Params, as_kept, matrices
from nanovllm.models.common.sharding import cut, sharded_table
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import Tensor

DRAWN = 16 << 20  # random values that are generated at once; a multiple of 16, the block size of the CPU's generator
HOST = torch.device("cpu")


def without_memory(config: ModelConfig, dtype: torch.dtype) -> Params[Tensor]:
    """The weights of a built-in architecture as meta tensors, which have shapes and dtypes but no memory."""
    meta = torch.device("meta")

    def empty(info: ParamInfo) -> Tensor:
        return torch.empty(info.shape, dtype=dtype_for(info, dtype), device=meta)

    return build_params(REGISTRY[config.architecture].param_table(config), empty, meta)


def num_params(config: ModelConfig) -> int:
    """The number of elements of all parameters in a checkpoint."""
    return sum(num_stored(info) for info in infos(REGISTRY[config.architecture].param_table(config)) if info.sources)


def random_params(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    std: float = 0.02,
    drawn_on: torch.device = HOST,
    mesh: Mesh | None = None,
    rounded: Callable[[Tensor], QuantisedMatrix] | None = None,
) -> Params[Tensor]:
    """Random weights from the architecture's table: normal with deviation `std`; norm weights are `1 + std * normal`.

    By default the values are generated in float32 on the CPU, then cast, so the same seed gives the same values on every device. It needs
    64 MiB of memory in addition to the weights.

    Args:
        config: The model's config.
        seed: The seed.
        device: The device of the weights.
        dtype: The dtype of the weights.
        std: The standard deviation.
        drawn_on: The device whose generator is used. A GPU is faster, but its values depend on the kind of GPU (see `drawn_by`).
        mesh: The ranks among which the weights are cut: each gets its part of the same values. None: one rank has all.
        rounded: Quantises a matrix of a layer. It is called as soon as the matrix is drawn, before it is cut, so that the memory holds one
            matrix at a time that is not quantised. None: matrices are kept as they are.
    """
    generator = torch.Generator(drawn_on).manual_seed(seed)

    def draw(info: ParamInfo) -> Tensor:
        flat, mean = torch.empty(num_stored(info), dtype=dtype_for(info, dtype), device=device), 1.0 if info.kind == "gain" else 0.0
        for part in flat.split(DRAWN):
            drawn = torch.empty(part.shape, device=drawn_on).normal_(mean - info.offset, std, generator=generator)
            part.copy_(drawn if part.dtype == dtype else drawn.to(dtype))  # rounded as in a checkpoint of this dtype
        return as_kept(info, flat)

    table = REGISTRY[config.architecture].param_table(config)
    own = table if mesh is None else sharded_table(table, config, mesh)
    parts = iter([info.part for info in infos(own) if info.rope is None])
    rounds = set[int]() if rounded is None else {id(info) for layer in table.layers for info in matrices(layer)}

    def make(info: ParamInfo) -> Any:
        drawn = draw(info)
        return cut(next(parts), rounded(drawn) if rounded is not None and id(info) in rounds else drawn)

    return build_params(table, make, device)


def drawn_by(device: torch.device) -> str:
    """The name of a device's random generator. The values of a GPU's generator depend on the size of the GPU, so each GPU model differs."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def num_stored(info: ParamInfo) -> int:
    """The number of elements of a parameter in a checkpoint."""
    return sum(math.prod(shape) for shape in info.source_shapes)


def dtype_for(info: ParamInfo, dtype: torch.dtype) -> torch.dtype:
    """The dtype of one parameter of a model in `dtype`."""
    return dtype if info.dtype is None else torch.promote_types(info.dtype, dtype)


def build_params(table: Params[ParamInfo], make: Callable[[ParamInfo], Any], device: torch.device) -> Params[Tensor]:
    """Fill the table with `make`, a tensor or a `QuantisedMatrix` each, in its order. The rotation speeds are computed here."""

    def leaf(info: ParamInfo | None) -> Any:
        match info:
            case None:
                return None
            case ParamInfo(rope=RopeConfig() as rope):
                return inverse_frequencies(rope, 2 * info.shape[0]).to(device)
            case _:
                return make(info)

    return pytree.tree_map(leaf, table)


def random_fingerprint(config: ModelConfig, seed: int, std: float = 0.02, by: str = "cpu") -> str:
    """The fingerprint (hex) of `random_params` with this config, seed and deviation. `by` is the name of the generator (`drawn_by`)."""
    where = "" if by == "cpu" else f" {by}"
    return hashlib.sha256(f"random {config!r} {seed} {std}{where}".encode()).hexdigest()


def infos(table: Params[ParamInfo]) -> Iterable[ParamInfo]:
    """All descriptions in a table."""
    return (leaf for leaf in pytree.tree_leaves(table) if leaf is not None)
