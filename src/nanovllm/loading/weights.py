"""Weights: safetensors files -> `Params` through the model's table, matrix by matrix, and random weights from the same table.

Each parameter is read, cast and moved to its device before the next is touched: beyond the model itself, which on a GPU is not the host's,
the host holds a buffer of 4 MiB and what allocators keep, 32 MiB at most in tests.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from io import RawIOBase
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree
from tqdm import tqdm

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError
from nanovllm.loading.safetensors_headers import TensorHeader, read_headers
from nanovllm.models import REGISTRY, ModelSpec
from nanovllm.models.common.layers import inverse_frequencies
from nanovllm.models.common.params import ParamInfo, Params, as_kept, as_stored
from nanovllm.types import Tensor

FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
SHARD = 1 << 30  # bytes after which a file that is written ends
STAGE = 4 << 20  # bytes read at once; a multiple of every itemsize
DRAWN = 16 << 20  # random values drawn at once; a multiple of the 16 that a CPU's generator draws together
HOST = torch.device("cpu")
SAMPLE = 64  # bytes of a tensor's start, middle and end that the fingerprint reads


def wanted(headers: Mapping[str, TensorHeader], spec: ModelSpec) -> Mapping[str, TensorHeader]:
    """The tensors of a checkpoint by the names of the model's table, without those that it never asks for. Raises `CheckpointError` where
    two tensors have the same one."""
    named: dict[str, TensorHeader] = {}
    for stored, header in headers.items():
        name = spec.checkpoint_name(stored)
        if name in named:
            raise CheckpointError(f"{header.file}: holds {stored}, which is a second {name}")
        if name is not None:
            named[name] = header
    return MappingProxyType(named)


def check_headers(headers: Mapping[str, TensorHeader], table: Params[ParamInfo], config: ModelConfig) -> None:
    """Raises `CheckpointError` for the first of `header_faults`."""
    for fault in header_faults(headers, table, config):
        raise CheckpointError(fault)


def header_faults(headers: Mapping[str, TensorHeader], table: Params[ParamInfo], config: ModelConfig) -> Iterator[str]:
    """A sentence for each tensor that is missing, misshapen, not of a floating-point dtype, or unknown.

    Ignored: `lm_head.weight` where the head is tied, and stored rotary frequencies, which are computed.
    """
    wanted = {name: shape for info in _infos(table) for name, shape in zip(info.sources, info.source_shapes, strict=True)}
    for name, shape in wanted.items():
        if name not in headers:
            yield f"the checkpoint lacks the tensor {name} {list(shape)}"
        elif headers[name].shape != shape:
            yield f"{name} has shape {list(headers[name].shape)}, the config asks for {list(shape)}"
        elif headers[name].dtype not in FLOATS:
            yield f"{name} has dtype {headers[name].dtype}, expected one of {', '.join(FLOATS)}"
    for name in sorted(headers.keys() - wanted.keys()):
        tied_head = config.tie_word_embeddings and name == "lm_head.weight"
        if not tied_head and not name.endswith("rotary_emb.inv_freq"):
            yield f"the checkpoint holds the tensor {name}, which {config.architecture} does not have"


def stored_head(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config with a head of its own where it ties the head to the embedding table and the checkpoint holds another one all the same,
    which then counts, as in transformers. Raises `CheckpointError`."""
    if not config.tie_word_embeddings:
        return config
    spec = REGISTRY[config.architecture]
    headers, table = wanted(read_headers(folder), spec), spec.param_table(config)
    head, embed = headers.get("lm_head.weight"), headers.get(table.embed.sources[0])
    if head is None or embed is None or _same(head, embed):
        return config
    return replace(config, tie_word_embeddings=False)


def _same(one: TensorHeader, other: TensorHeader) -> bool:
    """Whether two tensors are equal byte by byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as a, other.file.open("rb") as b:
        a.seek(one.start)
        b.seek(other.start)
        left = one.stop - one.start
        while left > 0:
            size = min(STAGE, left)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True


def load_params(
    folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, progress: bool | None = None
) -> tuple[Params[Tensor], str]:
    """The weights of a checkpoint folder on `device` in `dtype`, and the checkpoint's fingerprint.

    `progress` shows a bar on stderr; None: where stderr is a terminal. Raises `CheckpointError`.
    """
    spec = REGISTRY[config.architecture]
    table, headers = spec.param_table(config), wanted(read_headers(folder), spec)
    check_headers(headers, table, config)
    with ExitStack() as stack:
        files = {file: stack.enter_context(file.open("rb", buffering=0)) for file in {h.file for h in headers.values()}}
        total = sum(headers[name].stop - headers[name].start for info in _infos(table) for name in info.sources)
        hide = not (sys.stderr.isatty() if progress is None else progress)
        look = {"desc": "weights", "unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
        bar = stack.enter_context(tqdm(total=total, disable=hide, **look))
        stage = torch.empty(STAGE, dtype=torch.uint8, pin_memory=device.type == "cuda")

        def read(info: ParamInfo) -> Tensor:
            flat, at = torch.empty(num_stored(info), dtype=dtype_for(info, dtype), device=device), 0
            for name in info.sources:
                header, size = headers[name], math.prod(headers[name].shape)
                _read_into(flat[at : at + size], header, files[header.file], stage)
                at += size
                bar.update(header.stop - header.start)
            return as_kept(info, flat)

        try:
            params = build_params(table, read, device)
        except OSError as error:
            raise CheckpointError(f"{folder}: could not be read: {error}") from error
    return params, fingerprint(config, headers)


def _read_into(flat: Tensor, header: TensorHeader, stream: RawIOBase, stage: Tensor) -> None:
    # Plain reads through one small buffer: pages of a memory map would count as this process's memory until the file is closed.
    dtype, view, done = FLOATS[header.dtype], stage.numpy().data, 0
    stream.seek(header.start)
    while header.start + done < header.stop:
        size, got = min(STAGE, header.stop - header.start - done), 0
        while got < size:
            count = stream.readinto(view[got:size])
            if not count:
                raise CheckpointError(f"{header.file}: ends while it is being read")
            got += count
        first = done // dtype.itemsize
        flat[first : first + size // dtype.itemsize].copy_(stage[:size].view(dtype))
        done += size


def save_params(params: Params[Tensor], config: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write weights into a folder as a checkpoint has them, in `dtype`; the host holds little more than one of the files at a time."""
    table = REGISTRY[config.architecture].param_table(config)
    part: dict[str, Tensor] = {}
    places: dict[str, str] = {}

    def write() -> None:
        if part:
            file = f"model-{len(set(places.values())) + 1:05}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(part, file))
            part.clear()

    for info, param in zip(pytree.tree_leaves(table), pytree.tree_leaves(params), strict=True):
        if info is not None and info.sources:
            pieces = zip(info.sources, as_stored(info, param), strict=True)
            part |= {name: piece.to("cpu", dtype, copy=True) for name, piece in pieces}
        if sum(tensor.nbytes for tensor in part.values()) >= SHARD:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")


def num_params(config: ModelConfig) -> int:
    """Elements of all parameters that a checkpoint holds."""
    return sum(num_stored(info) for info in _infos(REGISTRY[config.architecture].param_table(config)) if info.sources)


def random_params(
    config: ModelConfig, *, seed: int, device: torch.device, dtype: torch.dtype, std: float = 0.02, drawn_on: torch.device = HOST
) -> Params[Tensor]:
    """Random weights from the architecture's table: matrices and biases normal with deviation `std`, gains `1 + std * normal`.

    The same seed gives the same values on every device: they are drawn in float32 on the CPU, then cast. On `drawn_on`, another device,
    they are drawn by its own generator: faster, and other values, which may differ from one kind of GPU to the next (see
    `drawn_by`). Beyond the parameters themselves 64 MiB are held.
    """
    generator = torch.Generator(drawn_on).manual_seed(seed)

    def draw(info: ParamInfo) -> Tensor:
        flat, mean = torch.empty(num_stored(info), dtype=dtype_for(info, dtype), device=device), 1.0 if info.kind == "gain" else 0.0
        for part in flat.split(DRAWN):
            drawn = torch.empty(part.shape, device=drawn_on).normal_(mean - info.offset, std, generator=generator)
            part.copy_(drawn if part.dtype == dtype else drawn.to(dtype))  # what a checkpoint in this dtype could hold
        return as_kept(info, flat)

    return build_params(REGISTRY[config.architecture].param_table(config), draw, device)


def drawn_by(device: torch.device) -> str:
    """Whose generator draws on a device. How a GPU deals numbers to threads depends on the size of the GPU, so each kind has its name."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def num_stored(info: ParamInfo) -> int:
    """Elements of a parameter in a checkpoint."""
    return sum(math.prod(shape) for shape in info.source_shapes)


def dtype_for(info: ParamInfo, dtype: torch.dtype) -> torch.dtype:
    """The dtype of one parameter of a model in `dtype`."""
    return dtype if info.dtype is None else torch.promote_types(info.dtype, dtype)


def build_params(
    table: Params[ParamInfo], make: Callable[[ParamInfo], Tensor], device: torch.device
) -> Params[Tensor]:
    """Fill the table in its own order by `make`; the rotary frequencies are computed here."""

    def leaf(info: ParamInfo | None) -> Tensor | None:
        match info:
            case None:
                return None
            case ParamInfo(rope=RopeConfig() as rope):
                return inverse_frequencies(rope, 2 * info.shape[0]).to(device)
            case _:
                return make(info)

    return pytree.tree_map(leaf, table)


def fingerprint(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> str:
    """SHA-256 (hex) of the config, of every tensor's name, dtype and shape, and of bytes from its start, middle and end.

    It costs milliseconds and does not depend on how tensors are spread over files. It tells checkpoints apart; it is no integrity check.
    """
    digest = hashlib.sha256(repr(config).encode())
    with ExitStack() as stack:
        files = {file: stack.enter_context(file.open("rb")) for file in {h.file for h in headers.values()}}
        for name, header in sorted(headers.items()):
            digest.update(f"{name} {header.dtype} {header.shape}".encode())
            last = max(header.start, header.stop - SAMPLE)
            for at in (header.start, (header.start + last) // 2, last):
                files[header.file].seek(at)
                digest.update(files[header.file].read(min(SAMPLE, header.stop - at)))
    return digest.hexdigest()


def random_fingerprint(config: ModelConfig, seed: int, std: float = 0.02, by: str = "cpu") -> str:
    """The fingerprint (hex) of `random_params` of this config, seed and deviation; `by` is whose generator drew them (see `drawn_by`)."""
    where = "" if by == "cpu" else f" {by}"
    return hashlib.sha256(f"random {config!r} {seed} {std}{where}".encode()).hexdigest()


def _infos(table: Params[ParamInfo]) -> Iterable[ParamInfo]:
    return (leaf for leaf in pytree.tree_leaves(table) if leaf is not None)
