"""Reads safetensors files into `Params` by the model's table, one matrix at a time, and writes them.

Each parameter is read, cast and moved to its device before the next one is read. In addition to the model itself, the host holds a buffer
of 4 MiB and memory that allocators keep: 32 MiB at most in tests. On a GPU the model takes no host memory.
"""

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from io import RawIOBase
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

from nanovllm.config import Mesh, ModelConfig
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.quantisation.arranging import arranged
from nanovllm.loading.quantisation.config import Quantisation
from nanovllm.loading.quantisation.formats import STORED, PartError
from nanovllm.loading.quantisation.on_ranks import quantised_part, require_shares
from nanovllm.loading.quantisation.rounding import Rounding, quantisable
from nanovllm.loading.quantisation.stored import UNQUANTISED, StoredMatrices, lost_config, module_of, stored_matrices
from nanovllm.loading.safetensors_headers import TensorHeader, read_headers
from nanovllm.loading.shards import Shards
from nanovllm.models.common.params import ParamInfo, Params, Part, Ranges, as_kept, as_stored
from nanovllm.models.common.sharding import cut, sharded_table
from nanovllm.models.init_params import build_params, dtype_for, infos, num_stored
from nanovllm.models.registry import REGISTRY
from nanovllm.models.spec import ModelSpec
from nanovllm.ops.distributed.collectives import all_gather
from nanovllm.ops.linear.quantise import quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.types import FLOATS, Tensor

STAGE = 4 << 20  # bytes read at once; a multiple of every itemsize
SAMPLE = 64  # bytes of a tensor's start, middle and end that the fingerprint reads


def wanted(headers: Mapping[str, TensorHeader], spec: ModelSpec) -> Mapping[str, TensorHeader]:
    """The tensors of a checkpoint by the names of the model's table, without tensors that the model never uses.

    Raises `CheckpointError` if two tensors map to the same name.
    """
    named: dict[str, TensorHeader] = {}
    for stored, header in headers.items():
        name = spec.checkpoint_name(stored)
        if name in named:
            raise CheckpointError(f"{header.file}: two tensors map to {name}; the second is {stored}")
        if name is not None:
            named[name] = header
    return MappingProxyType(named)


def header_faults(
    headers: Mapping[str, TensorHeader], table: Params[ParamInfo], config: ModelConfig, stored: StoredMatrices = UNQUANTISED
) -> Iterator[str]:
    """Yield a sentence for each tensor that is missing or unknown, or has a wrong shape or dtype.

    If the tensors look quantised and the config does not say so, this is the only sentence.
    Two kinds are ignored: `lm_head.weight` if the head is tied, and stored rotary frequencies, which are computed.
    """
    wanted = {name: shape for info in infos(table) for name, shape in zip(info.sources, info.source_shapes, strict=True)}
    if stored.quantisation is None and (lost := lost_config(headers)) is not None:
        yield lost
        return
    yield from stored.faults(headers)
    for name, shape in wanted.items():
        if name in stored.formats:
            continue
        if name not in headers:
            yield f"the checkpoint lacks the tensor {name} {list(shape)}"
        elif headers[name].shape != shape:
            yield f"{name} has shape {list(headers[name].shape)}, the config asks for {list(shape)}"
        elif headers[name].dtype not in FLOATS:
            yield f"{name} has dtype {headers[name].dtype}, expected one of {', '.join(FLOATS)}"
    for name in sorted(headers.keys() - wanted.keys() - stored.names):
        tied_head = config.tie_word_embeddings and name == "lm_head.weight"
        if stored.beside(name, headers[name]):
            continue
        if not tied_head and not name.endswith("rotary_emb.inv_freq"):
            yield f"the checkpoint holds the tensor {name}, which {config.architecture} does not have"


def stored_head(folder: Path, config: ModelConfig) -> ModelConfig:
    """Untie the head in the config if the checkpoint also holds a head that differs from the embedding table.

    The stored head then counts, as in transformers. Raises `CheckpointError`.
    """
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
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool | None = None,
    quantisation: Quantisation | None = None,
    rounding: Rounding | None = None,
    mesh: Mesh | None = None,
) -> tuple[Params[Tensor], str, str]:
    """Load the weights of a checkpoint folder on `device` in `dtype`.

    Args:
        folder: The checkpoint folder.
        config: Its config.
        device: Where the weights go.
        dtype: Their dtype.
        progress: Whether to show a progress bar on stderr. None: only if stderr is a terminal.
        quantisation: What the config says about quantised weights.
        rounding: How to quantise matrices while they are loaded; None: not.
        mesh: The ranks among which the weights are cut. A rank reads the bytes of its part alone, except for matrices that the checkpoint
            has quantised: these are read whole, one after another. None: one rank has all.

    Returns:
        The weights, the checkpoint's fingerprint, and how the weights are quantised, in words.

    Raises:
        CheckpointError: A file is unreadable, the tensors do not fit the config, or the ranks cannot share a quantised matrix.
    """
    spec = REGISTRY[config.architecture]
    table, headers = spec.param_table(config), wanted(read_headers(folder), spec)
    stored = stored_matrices(headers, table, quantisation)
    remedy = "" if quantisation is None else f"; {quantisation.remedy}"
    for fault in header_faults(headers, table, config, stored):
        raise CheckpointError(f"{folder}: {fault}{remedy}")
    if mesh is not None:
        table = sharded_table(table, config, mesh)
        require_shares(table, stored, rounding, mesh)
    rounded = set[int]() if rounding is None else {id(info) for info in quantisable(table, head=rounding.head)}
    with ExitStack() as stack:
        files = {file: stack.enter_context(file.open("rb", buffering=0)) for file in {h.file for h in headers.values()}}
        sources = [name for info in infos(table) for name in info.sources]
        parts = [part for name in sources for part in (stored.read(name, headers).values() if name in stored.formats else (name,))]
        taken = {name: each for info in infos(table) for name, each in zip(info.sources, info.taken, strict=bool(info.taken))}
        total = sum(_size(headers[name], *((), ()) if name in stored.names else taken.get(name, ((), ()))) for name in parts)
        hide = not (sys.stderr.isatty() if progress is None else progress)
        look = {"desc": "weights", "unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
        bar = stack.enter_context(tqdm(total=total, disable=hide, **look))
        stage = torch.empty(STAGE, dtype=torch.uint8, pin_memory=device.type == "cuda")
        wrong = list[str]()  # tensors with weights that have no codes

        def read_into(flat: Tensor, name: str, ranges: tuple[Ranges, Ranges] = ((), ())) -> None:
            header = headers[name]
            _read_into(flat, header, files[header.file], stage, *ranges)
            bar.update(_size(header, *ranges))

        def tensor(name: str) -> Tensor:
            header = headers[name]
            flat = torch.empty(math.prod(header.shape), dtype=STORED[header.dtype], device=device)
            read_into(flat, name)
            return flat.view(header.shape)

        def matrix(name: str) -> QuantisedMatrix | Tensor:
            if name not in stored.formats:
                return tensor(name)
            module = module_of(name)
            bias = f"{module}.bias"
            if bias in headers and bias not in sources and tensor(bias).any():
                raise CheckpointError(f"{bias} is not zero, and {config.architecture} does not have it")
            try:
                parts = {suffix: tensor(whole) for suffix, whole in stored.read(name, headers).items()}
                return stored.formats[name].matrix(*stored.shapes[name], parts, dtype)
            except PartError as error:
                whole = f"{module}.{error.suffix}"
                raise CheckpointError(f"{headers[whole].file}: {whole}: {error}{remedy}") from None

        def read(info: ParamInfo) -> Any:
            if any(name in stored.formats for name in info.sources):
                return arranged(
                    info, [_own_part(name, matrix(name), taken.get(name), mesh) for name in info.sources], dtype_for(info, dtype)
                )
            whole = max(num_stored(info), math.prod(info.shape) if info.part.missing else 0)
            flat, at = torch.empty(whole, dtype=dtype_for(info, dtype), device=device), 0
            for name, shape in zip(info.sources, info.source_shapes, strict=True):
                read_into(flat[at : (at := at + math.prod(shape))], name, taken.get(name, ((), ())))
            flat[at:] = 0  # rows that make all ranks equal
            kept = as_kept(info, flat.zero_() if info.part.zero else flat)
            if rounding is None or id(info) not in rounded:
                return kept
            made = quantised_part(info, kept, rounding.kind, mesh)
            if not made.scales.isfinite().all():
                sizes = [math.prod(shape) for shape in info.source_shapes]
                bad = [not piece.isfinite().all() for piece in flat[: sum(sizes)].split(sizes)]
                wrong.append(info.sources[bad.index(True)] if any(bad) else "")  # otherwise it is another rank's part
            return made

        try:
            params = build_params(table, read, device)
        except OSError as error:
            raise CheckpointError(f"{folder}: could not be read: {error}") from error
    if rounding is not None and rounding.head and params.head is None:
        head = quantise(params.embed, rounding.kind)
        if not head.scales.isfinite().all():
            wrong.append(table.embed.sources[0])
        params = replace(params, head=cast(Tensor, head))
    if rounding is not None:
        _require_finite(wrong, headers, mesh, dtype, device)
    mark = fingerprint(config, headers)
    return params, mark if rounding is None else rounding.mark(mark), stored.summary if rounding is None else rounding.summary


def _require_finite(
    wrong: list[str], headers: Mapping[str, TensorHeader], mesh: Mesh | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse weights that have no codes. All ranks call this together, so that none goes on alone.

    Args:
        wrong: The names of tensors with such weights; an empty name if they are another rank's part.
        headers: The tensors of the files.
        mesh: The ranks.
        dtype: The dtype in which the weights were read.
        device: The device of the rank.

    Raises:
        CheckpointError: A rank has found such weights.
    """
    anywhere = len(wrong) > 0
    if mesh is not None:
        anywhere = bool(all_gather(torch.tensor([float(anywhere)], device=device), mesh).any())
    if not anywhere:
        return
    what = f"weights that are infinite or NaN in {str(dtype).removeprefix('torch.')}, which have no codes"
    if name := next(filter(None, wrong), None):
        raise CheckpointError(f"{headers[name].file}: {name} has {what}")
    raise CheckpointError(f"another rank's part of the checkpoint has {what}")


def _size(header: TensorHeader, rows: Ranges, columns: Ranges) -> int:
    """The bytes of some rows and columns of a tensor; without ranges, of all."""
    if not columns:
        return header.stop - header.start
    height, width = (sum(last - first for first, last in ranges) for ranges in (rows, columns))
    return height * width * STORED[header.dtype].itemsize


def _own_part(
    name: str, matrix: QuantisedMatrix | Tensor, ranges: tuple[Ranges, Ranges] | None, mesh: Mesh | None
) -> QuantisedMatrix | Tensor:
    """The rows or the columns that a rank has of a matrix."""
    if ranges is None or mesh is None:
        return matrix
    (rows, columns), (_height, width) = ranges, matrix.shape
    try:
        return cut(Part(axis=-2, ranges=rows) if columns == ((0, width),) else Part(axis=-1, ranges=columns), matrix)
    except InvalidRequestError as error:
        raise CheckpointError(f"{module_of(name)} cannot be shared by {mesh.size} ranks: {error}; choose another number of ranks") from None


def _pieces(header: TensorHeader, rows: Ranges, columns: Ranges) -> Iterator[tuple[int, int]]:
    """The places in its file, first and last (exclusive), of some rows and columns of a tensor; without ranges, of all."""
    size, width = STORED[header.dtype].itemsize, math.prod(header.shape[1:])
    if not columns:
        yield header.start, header.stop
        return
    whole = columns == ((0, width),)
    for first, last in rows:
        for row, end in ((first, last),) if whole else ((row, row + 1) for row in range(first, last)):
            for left, right in columns:
                yield header.start + (row * width + left) * size, header.start + ((end - 1) * width + right) * size


def _read_into(flat: Tensor, header: TensorHeader, stream: RawIOBase, stage: Tensor, rows: Ranges = (), columns: Ranges = ()) -> None:
    # Plain reads through one small buffer: the pages of a memory map would count as this process's memory until the file is closed.
    dtype, view, at, got = STORED[header.dtype], stage.numpy().data, 0, 0
    for place, stop in _pieces(header, rows, columns):
        stream.seek(place)
        left = stop - place
        while left:
            count = stream.readinto(view[got : min(STAGE, got + left)])
            if not count:
                raise CheckpointError(f"{header.file}: the file ended before the whole tensor was read")
            got, left = got + count, left - count
            if got == STAGE:
                flat[at : at + STAGE // dtype.itemsize].copy_(stage.view(dtype))
                at, got = at + STAGE // dtype.itemsize, 0
    if got:
        flat[at : at + got // dtype.itemsize].copy_(stage[:got].view(dtype))


def save_params(params: Params[Tensor], config: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write weights into a folder in the form of a checkpoint, in `dtype`; quantised matrices are dequantised.

    The host holds little more than one file at a time.
    """
    table, shards = REGISTRY[config.architecture].param_table(config), Shards(folder)
    leaves = pytree.tree_leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    for info, param in zip(pytree.tree_leaves(table), leaves, strict=True):
        if info is not None and info.sources:
            whole = param.dequantised(dtype) if isinstance(param, QuantisedMatrix) else param
            pieces = zip(info.sources, as_stored(info, whole), strict=True)
            shards.add({name: piece.to("cpu", dtype, copy=True) for name, piece in pieces})
    shards.end()


def fingerprint(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> str:
    """SHA-256 (hex) of the config, of every tensor's name, dtype and shape, and of bytes from its start, middle and end.

    It takes milliseconds, and does not depend on how tensors are distributed over files. It distinguishes checkpoints; it does not prove
    that a file is undamaged.
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
