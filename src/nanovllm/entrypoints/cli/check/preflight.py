"""The outlook of a model before any weight is read: whether it will run, in how much memory, and with which kernels."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import Mesh, ModelConfig, for_length
from nanovllm.entrypoints.cli.check.kernel_choice import Kernels, kernels
from nanovllm.entrypoints.cli.check.kv_memory import Memory, kv_memory
from nanovllm.entrypoints.cli.models.features import features
from nanovllm.entrypoints.cli.models.listing import file_of
from nanovllm.entrypoints.display.tables import shortened, size
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.executor.kv_budget import GRAPHS
from nanovllm.loading.hub import read_json, require_whole, resolve_folder
from nanovllm.loading.load_model import read_config, read_generation_config, require_vocabulary, resolve_dtype, with_ends
from nanovllm.loading.quantisation.activations import require_fp8_products, require_fp8_weights
from nanovllm.loading.quantisation.config import Quantisation, read_quantisation
from nanovllm.loading.quantisation.on_ranks import require_shares
from nanovllm.loading.quantisation.rounding import Rounding, quantisable, quantised_already, require_rounding
from nanovllm.loading.quantisation.stored import StoredMatrices, module_of, stored_matrices
from nanovllm.loading.safetensors_headers import TensorHeader, read_headers
from nanovllm.loading.tokenizer_files import load_tokenizer
from nanovllm.loading.transformers.spec import TransformersSpec
from nanovllm.loading.weights import header_faults, stored_head, wanted
from nanovllm.models.check.report import device_name
from nanovllm.models.common.params import ParamInfo, Params
from nanovllm.models.common.sharding import sharded_config, sharded_table
from nanovllm.models.init_params import num_params, without_memory
from nanovllm.models.registry import REGISTRY, fitted
from nanovllm.models.spec import ModelSpec
from nanovllm.ops.kv_cache.fp8 import FP8
from nanovllm.ops.linear.code_layouts import fill
from nanovllm.ops.linear.quantise import Kind, quantise
from nanovllm.ops.linear.quantised import gpu_layout
from nanovllm.state.kv_cache import require_kv_dtype
from nanovllm.tokenizer.tokenizer import Tokenizer
from nanovllm.types import FLOATS, dtype_of

LOADING = 32 << 20  # bytes of host memory that loading needs at most, without the weights
MESSAGE = ({"role": "user", "content": "Hello"},)  # to try the chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The size of a model's weights.

    Attributes:
        parameters: The number of parameters; None if it is not known before loading.
        stored: Bytes in the checkpoint; None without a checkpoint.
        stored_dtypes: The dtypes in the checkpoint.
        tensors: The number of tensors in the checkpoint; None without a checkpoint.
        held: Bytes on the device.
        host: The most bytes of host memory during loading.
        quantization: How matrices are quantised, in the words of `Model.quantization`; empty if they are not.
    """

    parameters: int | None
    stored: int | None
    stored_dtypes: tuple[str, ...]
    tensors: int | None
    held: int
    host: int
    quantization: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The tokenizer of a model.

    Attributes:
        tokens: The number of token ids; None without a tokenizer.
        chat_template: The error of the chat template, or empty if it works; None without a tokenizer.
        end_tokens: Id and text of each token that ends a reply.
    """

    tokens: int | None
    chat_template: str | None
    end_tokens: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The facts about a model before it is loaded. Facts that could not be found because of a problem are None.

    Attributes:
        model: The name of the model.
        architecture: The name of the architecture.
        file: The file of the architecture in the package; empty for the transformers fallback.
        features: Differences from a plain Llama.
        code: Whether the checkpoint brings Python code.
        dtype: The dtype on the device.
        device: The name of the device.
        config: The config.
        weights: The size of the weights.
        memory: The memory of the device, and the KV memory that fits.
        kernels: The kernels that will run the model.
        texts: The tokenizer.
        problems: The reasons why the model cannot run here.
        notes: Facts that a user should know.
        ranks: The number of ranks that share the model. Weights, memory and kernels are those of one.
    """

    model: str
    architecture: str
    file: str
    features: tuple[str, ...]
    code: bool
    dtype: str
    device: str
    config: ModelConfig | None
    weights: Weights | None
    memory: Memory | None
    kernels: Kernels | None
    texts: Texts | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    ranks: int = 1

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"runs": not self.problems, **asdict(self)}


def outlook(
    name: str,
    device: torch.device,
    dtype: torch.dtype | str | None,
    *,
    shapes: Mapping[str, ModelConfig],
    memory_fraction: float = 0.9,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    quantization: Kind | None = None,
    quantize_head: bool = False,
    fp8_activations: bool = False,
    kv_dtype: str | None = None,
    ranks: int = 1,
    **where: Any,
) -> Outlook:
    """Find out whether and how a model will run, from the headers of its weight files.

    No weights are read, with one exception. If embeddings are said to be tied and a head is stored as well, the two are compared.

    Args:
        name: A folder, a repository, or a key of `shapes`.
        device: The device to run on.
        dtype: The dtype to run in; None for the default.
        shapes: Configs of models with random weights, by name.
        memory_fraction: The fraction of the GPU's memory to use.
        max_model_len: The maximum length of a request in tokens; None for the model's.
        trust_remote_code: Whether code of the checkpoint may run, if its architecture is known to nobody else.
        quantization: How matrices are rounded while they are loaded; None: they are not.
        quantize_head: Whether the output matrix is rounded, too.
        fp8_activations: Whether long prompts round activations to FP8. It is a problem where nothing multiplies FP8, or no weights are
            in FP8.
        kv_dtype: The dtype of keys and values, as in `init_state`.
        ranks: The number of ranks that share the model, of which each runs on a device like this one.
        **where: Further arguments of `resolve_folder`.

    Raises:
        CheckpointError: The folder or repository was not found.
        InvalidRequestError: The dtype does not exist, or `quantize_head` needs `quantization`, or `quantization` is for a checkpoint that
            is quantised already.
    """
    rounding = require_rounding(quantization, quantize_head)
    if name in shapes:
        spec, config = REGISTRY[shapes[name].architecture], shapes[name]
        called = f"{name} (random weights)"
        found = _outlook(called, None, False, spec, config, device, dtype, memory_fraction, max_model_len, rounding, kv_dtype, ranks)
        return _with_products(found, device, rounding, False, fp8_activations)
    folder, called = resolve_folder(name, with_code=trust_remote_code, **where)
    hf: dict[str, Any] = {}
    try:
        require_whole(folder)
        hf = read_json(folder / "config.json", required=True)
        spec, config = read_config(folder, trust_remote_code=trust_remote_code)
        config = _with_stored_head(folder, spec, config)
    except CheckpointError as error:
        names = hf.get("architectures")
        architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "unknown architecture"
        return Outlook(
            model=called, architecture=architecture, file="", features=(), code=bool(hf.get("auto_map")), dtype="",
            device=device_name(device), config=None, weights=None, memory=None, kernels=None, texts=None, problems=(str(error),), notes=(),
        )  # fmt: skip
    code = bool(hf.get("auto_map"))
    found = _outlook(called, folder, code, spec, config, device, dtype, memory_fraction, max_model_len, rounding, kv_dtype, ranks)
    stored = read_quantisation(hf, folder) is not None
    return _with_products(found, device, rounding, stored, fp8_activations)


def _with_products(found: Outlook, device: torch.device, rounding: Rounding | None, stored: bool, fp8_activations: bool) -> Outlook:
    """Add a problem if activations are to be rounded to FP8 where nothing multiplies FP8, or where no weights are in FP8."""
    try:
        require_fp8_products(fp8_activations, device, dtype_of(found.dtype or "float32"))
        if fp8_activations:
            require_fp8_weights(rounding, stored=stored)
    except InvalidRequestError as error:
        return replace(found, problems=(*found.problems, str(error)))
    return found


def _with_stored_head(folder: Path, spec: ModelSpec, config: ModelConfig) -> ModelConfig:
    try:
        return config if isinstance(spec, TransformersSpec) else stored_head(folder, config)
    except CheckpointError:
        return config  # `_weights` reports the fault in the headers


def _outlook(
    name: str,
    folder: Path | None,
    code: bool,
    spec: ModelSpec,
    read: ModelConfig,
    device: torch.device,
    dtype: torch.dtype | str | None,
    memory_fraction: float,
    max_model_len: int | None,
    rounding: Rounding | None,
    kv_dtype: str | None,
    ranks: int,
) -> Outlook:
    config, problems, notes = for_length(read, max_model_len), list[str](), list[str]()
    chosen, foreign = resolve_dtype(dtype, config, device), isinstance(spec, TransformersSpec)
    config = fitted(config, device, chosen)
    quantisation = None if folder is None else read_quantisation(read_json(folder / "config.json"), folder)
    if rounding is not None and quantisation is not None:
        raise quantised_already(rounding, quantisation.method)
    if rounding is not None and foreign:
        problems.append(f"quantization={rounding.kind!r} is not possible: the architecture is not built in")
        rounding = None
    part = config
    if ranks > 1 and foreign:
        problems.append(f"{ranks} ranks need a built-in architecture, {config.architecture} has none")
    elif ranks > 1:
        try:
            part = sharded_config(config, Mesh(size=ranks, rank=0, group=0))
            notes.append(f"weights, KV and free memory are those of one of {ranks} ranks")
        except InvalidRequestError as error:
            problems.append(str(error))
            notes.append("weights, KV and free memory are those of one rank that has the whole model")
    weights = _weights(folder, spec, config, device, chosen, quantisation, rounding, problems, part.mesh)
    how = kernels(part, device, chosen, foreign=foreign, kv_dtype=kv_dtype)
    stored = chosen if kv_dtype is None else FP8
    memory = kv_memory(part, weights.held, device, stored, memory_fraction, GRAPHS if how.captured else 0)
    try:
        require_kv_dtype(config, kv_dtype, device)
    except InvalidRequestError as error:
        problems.append(str(error))
    _judge(config, weights, memory, device, problems, notes)
    if how.captured:
        notes.append("at its start, an engine measures the memory of its largest steps, so less memory is left for KV")
    if read.long_rope is not None and config.max_position_embeddings < read.max_position_embeddings:
        most = f"{read.max_position_embeddings:,} tokens, give --max-model-len: the long factors of its rotary embedding apply then"
        notes.append(f"it is loaded for {config.max_position_embeddings:,} tokens; for up to {most}, and KV of the two is not compatible")
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        problems.append(f"max_model_len={max_model_len} exceeds the model's {config.max_position_embeddings} positions")
    return Outlook(
        model=name,
        architecture=config.architecture,
        file="" if foreign else file_of(spec),
        features=() if foreign else features(config),
        code=code,
        dtype=str(chosen).removeprefix("torch."),
        device=device_name(device),
        config=config,
        weights=weights,
        memory=memory,
        kernels=how,
        texts=None if folder is None else _texts(folder, config, problems, notes),
        problems=tuple(problems),
        notes=tuple(notes),
        ranks=ranks,
    )


def _weights(
    folder: Path | None,
    spec: ModelSpec,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantisation: Quantisation | None,
    rounding: Rounding | None,
    problems: list[str],
    mesh: Mesh | None = None,
) -> Weights:
    headers: Mapping[str, TensorHeader] = {}
    if folder is not None:
        try:
            headers = wanted(read_headers(folder), spec)
        except CheckpointError as error:
            problems.append(str(error))
    foreign, moved, how = isinstance(spec, TransformersSpec), 0, "" if rounding is None else rounding.summary
    if isinstance(spec, TransformersSpec):
        held = sum((h.stop - h.start) * dtype.itemsize // FLOATS[h.dtype].itemsize for h in headers.values() if h.dtype in FLOATS)
        problems += shortened(spec.tensor_faults(headers) if headers else ())
    else:
        table, empty = spec.param_table(config), without_memory(config, dtype)
        pairs = list(zip(pytree.tree_leaves(table), pytree.tree_leaves(empty), strict=True))
        stored = stored_matrices(headers, table, quantisation)
        gpu = device.type == "cuda"
        own = table
        if mesh is not None:
            own = sharded_table(table, config, mesh)
            try:
                require_shares(own, stored, rounding, mesh)
            except CheckpointError as error:
                problems.append(str(error))
        held = sum(
            _held(info, leaf.nbytes, stored, headers, gpu) * math.prod(part.shape) // max(1, math.prod(info.shape))
            for (info, leaf), part in zip(pairs, pytree.tree_leaves(own), strict=True)
            if info is not None and leaf is not None
        )
        if rounding is None:
            how = stored.summary
        else:
            held += _saved(own, rounding, dtype, gpu)
        moved = max((leaf.nbytes for info, leaf in pairs if info is not None and (info.transposed or info.channels)), default=0)
        if headers:
            problems += shortened(header_faults(headers, table, config, stored))
    return Weights(
        parameters=None if foreign else num_params(config),
        stored=None if folder is None else sum(h.stop - h.start for h in headers.values()),
        stored_dtypes=tuple(sorted({h.dtype for h in headers.values()})),
        tensors=None if folder is None else len(headers),
        held=held,
        host=LOADING + (held + moved if foreign or device.type == "cpu" else 0),  # reordering a parameter needs a second copy of it
        quantization=how,
    )


def _saved(table: Params[ParamInfo], rounding: Rounding, dtype: torch.dtype, gpu: bool) -> int:
    """The bytes that rounding adds to the weights: less than 0, except for a head that becomes a matrix of its own."""

    def rounded(info: ParamInfo) -> int:
        matrix = quantise(torch.empty(info.shape, device="meta"), rounding.kind)
        return (gpu_layout(matrix) if gpu else matrix).nbytes

    added = sum(rounded(info) - math.prod(info.shape) * (info.dtype or dtype).itemsize for info in quantisable(table, head=rounding.head))
    return added + (rounded(table.embed) if rounding.head and table.head is None else 0)


def _held(info: ParamInfo, whole: int, stored: StoredMatrices, headers: Mapping[str, TensorHeader], gpu: bool) -> int:
    """The bytes that a parameter takes: those of its quantised tensors in the checkpoint and the fill of their last blocks, or `whole`."""
    if not info.sources or not all(name in stored.formats for name in info.sources):
        return whole
    names = [f"{module_of(name)}.{suffix}" for name in info.sources for suffix in stored.parts(name)]
    filled = 0
    for name in info.sources:
        bits, (rows, columns) = stored.formats[name].bits, stored.shapes[name]
        filled += rows * fill(bits, columns, gpu) * bits // 8
    return filled + sum(headers[name].stop - headers[name].start for name in names if name in headers)


def _judge(config: ModelConfig, weights: Weights, memory: Memory, device: torch.device, problems: list[str], notes: list[str]) -> None:
    """Add a problem if the weights or any KV do not fit, and a note if a request of full length does not."""
    if memory.room is None or memory.left is None or memory.tokens is None:
        notes.append("this system does not report its free memory")
    elif weights.held > memory.room.free:
        problems.append(f"the weights take {size(weights.held)}, and {device} has {size(memory.room.free)} free")
    elif not memory.tokens:
        problems.append(f"the weights take {size(weights.held)}, which leaves {size(max(0, memory.left))} on {device}: no room for KV")
    elif memory.tokens < config.max_position_embeddings and not config.all_windowed:
        notes.append(f"a request of full length does not fit: the longest that fits has {memory.tokens:,} tokens")


def _texts(folder: Path, config: ModelConfig, problems: list[str], notes: list[str]) -> Texts:
    tokenizer = None
    try:
        config = with_ends(config, read_generation_config(folder)[1])
    except CheckpointError as error:
        problems.append(str(error))
    try:
        tokenizer = load_tokenizer(folder, config.vocab_size)
        require_vocabulary(tokenizer, config, folder)
    except CheckpointError as error:
        problems.append(f"{error}{'' if tokenizer else '; load_model(..., tokenizer=False) loads the model without a tokenizer'}")
    if not (ends := config.eos_token_ids):
        notes.append("the checkpoint names no end token: every reply ends at max_tokens")
    return Texts(
        tokens=None if tokenizer is None else tokenizer.max_token_id + 1,
        chat_template=None if tokenizer is None else _template_fails(tokenizer),
        end_tokens=tuple((end, "" if tokenizer is None else tokenizer.decode([end], skip_special_tokens=False)) for end in ends),
    )


def _template_fails(tokenizer: Tokenizer) -> str:
    try:
        tokenizer.apply_chat_template(MESSAGE)
    except InvalidRequestError as error:
        return str(error)
    return ""
