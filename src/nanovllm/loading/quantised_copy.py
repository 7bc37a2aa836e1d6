"""Writes a quantised copy of a checkpoint folder, in the form of compressed-tensors, which transformers and vLLM read too.

Matrices are read, rounded and written one after the other: the host holds one matrix and one file of the copy at a time.
"""

import json
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.hub import TINY, read_json
from nanovllm.loading.load_model import read_config
from nanovllm.loading.quantisation.config import read_quantisation
from nanovllm.loading.quantisation.rounding import quantisable
from nanovllm.loading.quantisation.stored import lost_config
from nanovllm.loading.safetensors_headers import PICKLED, TensorHeader, read_headers
from nanovllm.loading.shards import Shards
from nanovllm.loading.transformers.spec import TransformersSpec
from nanovllm.ops.linear.code_layouts import unpacked
from nanovllm.ops.linear.quantise import GROUP, Kind, quantise
from nanovllm.ops.linear.quantised import cpu_layout
from nanovllm.types import FLOATS, Tensor

Format = Literal["fp8", "int8", "w4a16"]
WORD = 32  # bits of compressed-tensors' words of packed codes
OTHER_WEIGHTS = (".safetensors", *PICKLED, ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")  # suffixes of files that are not copied
SUFFIX = ".weight"
README, METADATA = "README.md", re.compile(rb"---\r?\n.*?^---[ \t]*\r?\n", re.S | re.M)  # a model card, and its front matter
TEMPLATES = "additional_chat_templates"  # the folder of a checkpoint's chat templates that have names


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A scheme of compressed-tensors.

    Attributes:
        kind: How `quantise` rounds.
        stored: The `format` of the config.
        weights: `num_bits`, `type`, `strategy` and `group_size` of the config.
        activations: `num_bits` and `type` of activations in engines that quantise them; None if no engine does.
    """

    kind: Kind
    stored: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None


# Named FP8_DYNAMIC, W8A8 and W4A16 by compressed-tensors (`quantization/quant_scheme.py`).
_SCHEMES: dict[Format, Scheme] = {
    "fp8": Scheme(
        kind="fp8",
        stored="float-quantized",
        weights={"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None},
        activations={"num_bits": 8, "type": "float"},
    ),
    "int8": Scheme(
        kind="int8",
        stored="int-quantized",
        weights={"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None},
        activations={"num_bits": 8, "type": "int"},
    ),
    "w4a16": Scheme(kind="int4", stored="pack-quantized", weights={"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
}
SCHEMES: Mapping[Format, Scheme] = MappingProxyType(_SCHEMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What `write_quantised` wrote.

    Attributes:
        matrices: How many matrices are quantised.
        kept: Modules whose matrices are as before.
        uneven: Those of `kept` that would be quantised if their widths were multiples of the group.
        before: Bytes of the checkpoint's tensors.
        after: Bytes of the copy's tensors.
    """

    matrices: int
    kept: tuple[str, ...]
    uneven: tuple[str, ...]
    before: int
    after: int


def write_quantised(
    folder: Path,
    out: Path,
    form: Format,
    *,
    progress: bool | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Written:
    """Write a copy of a checkpoint whose matrices of attention, MLP and experts are rounded to the nearest codes, without calibration.

    Embeddings, norms, routers and the head stay as they are, and so do matrices whose width is no multiple of 128 if `form` is `"w4a16"`.
    Files that hold no weights are copied, and so are chat templates in a folder of their own. `README.md` gets a note that says what
    made the copy.

    Args:
        folder: The checkpoint.
        out: The folder to make. It appears only when it is complete.
        form: `"fp8"` (e4m3, a scale per row), `"int8"` (a scale per row) or `"w4a16"` (4 bits, a scale for each 128 columns;
            `"int4"` while loading).
        progress: Whether to show a progress bar on stderr. None: only if stderr is a terminal.
        device: Where matrices are rounded.
        trust_remote_code: Whether Python code in the checkpoint may be executed to find out what it is.

    Raises:
        InvalidRequestError: `form` is unknown, or fits the width of no matrix, or `out` exists or cannot be written.
        CheckpointError: The checkpoint is unreadable or quantised already, or the architecture has no file in `models/`, or stores its
            matrices in a way that compressed-tensors has not.
    """
    if form not in SCHEMES:
        other = "; int4 is called w4a16 here" if form == "int4" else ""
        raise InvalidRequestError(f"format={form!r} must be one of {', '.join(SCHEMES)}{other}")
    scheme, hf = SCHEMES[form], read_json(folder / "config.json", required=True)
    if (found := read_quantisation(hf, folder)) is not None:
        raise CheckpointError(f"{folder}: is quantised already ({found.method}): give the unquantised checkpoint")
    headers = read_headers(folder)
    if (lost := lost_config(headers)) is not None:
        raise CheckpointError(f"{folder}: {lost}")
    chosen, uneven = _chosen(folder, headers, scheme, trust_remote_code)
    if not chosen:
        others = " or ".join(other for other, each in SCHEMES.items() if each.weights["group_size"] is None)
        raise InvalidRequestError(
            f"{folder}: no matrix has a width that is a multiple of {scheme.weights['group_size']}, which {form} needs: use {others}"
        )
    kept = tuple(sorted({_module(name) for name, header in headers.items() if _is_linear(name, header)} - chosen | {"lm_head"}))
    hide = not (sys.stderr.isatty() if progress is None else progress)
    before = sum(header.stop - header.start for header in headers.values())
    with _complete(out) as made, tqdm(total=before, disable=hide, desc="matrices", unit="B", unit_scale=True, unit_divisor=1024) as bar:
        shards = Shards(made)
        for name, header in headers.items():
            module, tensor = _module(name), _tensor(header, name)
            shards.add(_encoded(module, tensor.to(device), scheme, name) if module in chosen else {name: tensor})
            bar.update(header.stop - header.start)
        shards.end()
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.suffix not in OTHER_WEIGHTS and file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, made / file.name)
        if (made / README).is_file():
            (made / README).write_bytes(_with_note((folder / README).read_bytes(), form))
        if (folder / TEMPLATES).is_dir():
            shutil.copytree(folder / TEMPLATES, made / TEMPLATES)
        (made / "config.json").write_text(json.dumps({**hf, "quantization_config": _config(scheme, kept)}, indent=2) + "\n")
        return Written(matrices=len(chosen), kept=kept, uneven=uneven, before=before, after=shards.size)


def _with_note(readme: bytes, form: Format) -> bytes:
    """The model card of a checkpoint as that of its copy: a note after the metadata says what made the copy."""
    made = (
        f"> `nanovllm quantize --format {form}` made this copy, without calibration. What follows describes the unquantised original.\n\n"
    )
    start = metadata.end() if (metadata := METADATA.match(readme)) is not None else 0
    return readme[:start] + made.encode() + readme[start:]


def _chosen(folder: Path, headers: Mapping[str, TensorHeader], scheme: Scheme, trust_remote_code: bool) -> tuple[set[str], tuple[str, ...]]:
    """The modules to quantise, and those whose width is no multiple of the scheme's group, by their names in the checkpoint."""
    spec, config = read_config(folder, trust_remote_code=trust_remote_code)
    if isinstance(spec, TransformersSpec):
        raise CheckpointError(f"{folder}: {config.architecture} runs through transformers; only built-in architectures can be quantised")
    shapes: dict[str, tuple[int, ...]] = {}
    for info in quantisable(spec.param_table(config), head=False):
        if info.transposed or any(len(shape) != 2 for shape in info.source_shapes):
            raise CheckpointError(
                f"{folder}: {config.architecture} stores {info.sources[0]} in a form that compressed-tensors has not; "
                "load it with quantization= instead"
            )
        shapes |= dict(zip(info.sources, info.source_shapes, strict=True))
    group = scheme.weights["group_size"] or 1
    wanted = {name for name, shape in shapes.items() if shape[1] % group == 0}
    found = {name: header.dtype for name, header in headers.items() if spec.checkpoint_name(name) in wanted}
    if missing := wanted - {spec.checkpoint_name(name) for name in found}:
        raise CheckpointError(f"{folder}: the checkpoint lacks the tensor {min(missing)}")
    if odd := sorted(name for name, dtype in found.items() if dtype not in FLOATS):
        raise CheckpointError(f"{folder}: {odd[0]} has dtype {found[odd[0]]}, expected one of {', '.join(FLOATS)}")
    uneven = sorted(_module(name) for name in headers if (whole := spec.checkpoint_name(name)) in shapes and whole not in wanted)
    return {_module(name) for name in found}, tuple(uneven)


def _is_linear(name: str, header: TensorHeader) -> bool:
    """Whether a tensor may be the weight of a `torch.nn.Linear`."""
    return name.endswith(SUFFIX) and len(header.shape) == 2


def _module(name: str) -> str:
    return name.removesuffix(SUFFIX)


def _tensor(header: TensorHeader, name: str) -> Tensor:
    try:
        with safe_open(header.file, framework="pt") as file:
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{header.file}: {name} could not be read: {error}") from error


def _encoded(module: str, weight: Tensor, scheme: Scheme, name: str) -> dict[str, Tensor]:
    """The tensors of a quantised matrix as compressed-tensors stores them."""
    if not weight.isfinite().all():
        raise CheckpointError(f"{name} has weights that are infinite or NaN")
    matrix = cpu_layout(quantise(weight, scheme.kind))
    parts = {"weight_scale": matrix.scales}
    if scheme.kind == "int4":
        parts |= {"weight_packed": packed_words(unpacked(matrix.codes, matrix.columns)), "weight_shape": torch.tensor(weight.shape)}
    else:
        parts["weight"] = matrix.codes
    return {f"{module}.{suffix}": part.cpu().contiguous() for suffix, part in parts.items()}


def packed_words(codes: Tensor) -> Tensor:
    """4-bit codes between -8 and 7, int8 `[N, K]`, as `weight_packed` int32 `[N, K / 8]`: column k is field k, lowest first, plus 8.

    Source: compressed-tensors, `compressors/pack_quantized`.
    """
    fields = (codes.to(torch.int64) + 8).unflatten(1, (-1, WORD // 4))
    words = (fields << torch.arange(0, WORD, 4, device=codes.device)).sum(2)
    return words.to(torch.int32)  # keeps the lowest 32 bits


def _config(scheme: Scheme, kept: tuple[str, ...]) -> dict[str, Any]:
    activations = None
    if scheme.activations is not None:
        activations = {**scheme.activations, "strategy": "token", "dynamic": True, "symmetric": True}
    weights = {**scheme.weights, "symmetric": True, "dynamic": False, "actorder": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


@contextmanager
def _complete(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` at the end of the block, and is removed if the block fails."""
    if out.is_symlink() or out.resolve() == Path.cwd() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise InvalidRequestError(f"{out} exists: give the name of a new folder")
    if out.absolute() == Path.cwd() / TINY.name:
        raise InvalidRequestError(f"{out} would hide the packaged model, which has this name: choose another name")
    made = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = out.parent / f".{out.name}-{secrets.token_hex(4)}"
        made.mkdir()
        yield made
        made.replace(out)
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError(f"{out} cannot be written: {error}") from error
    finally:
        if made is not None and made.exists():
            shutil.rmtree(made, ignore_errors=True)
