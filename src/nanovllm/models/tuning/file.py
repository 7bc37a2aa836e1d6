"""The tuning file: tile configurations for one GPU, model shape and set of versions. It is JSON, and written atomically.

A file is not trusted: a tile configuration that the kernels cannot run makes it a damaged file.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from immutables import Map

from nanovllm import ops
from nanovllm.errors import InvalidRequestError, TuningFileError
from nanovllm.files import cache_path, write_whole
from nanovllm.models.fast.cuts import PARTS, SHIPPED, Cuts, StepCuts
from nanovllm.models.model import Model
from nanovllm.models.tuning.candidates import valid
from nanovllm.models.tuning.launches import Machine, codes_of, works
from nanovllm.ops.cuts import Cut

FORMAT = 1
# If one of these sources changes, older tuning files no longer apply.
KERNELS = (
    "linear/norm_linear", "linear/linear_add_norm", "linear/tiles", "linear/triton_few_rows", "linear/triton_many_rows",
    "attention/rope_attend", "attention/fused_plan", "attention/triton_rope_attend", "triton_parts",
)  # fmt: skip
QUANTISED = (
    "linear/quantised_cuda", "linear/quantised_tiles", "linear/code_layouts", "linear/triton_codes", "linear/triton_code_loop",
    "linear/triton_quantised_few", "linear/triton_quantised_direct", "linear/triton_quantised_split", "linear/triton_quantised_many",
)  # fmt: skip
LARGEST = 1 << 20  # most bytes of a file


def key_of(model: Model) -> dict[str, Any]:
    """The key of a tuning file: what `target_of` names, the versions, and a hash of the kernels' sources.

    Raises `TuningFileError` if the sources cannot be read.
    """
    return {
        **target_of(model),
        "versions": {name: _version(name) for name in ("nanovllm", "torch", "triton")},
        "kernels": _sources(KERNELS + (QUANTISED if codes_of(model.params) else ())),
    }


def target_of(model: Model) -> dict[str, Any]:
    """What tile configurations are measured for: the GPU, the dtype, and the shapes of the model's kernels."""
    c = model.config
    shapes = {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_heads": c.num_heads,
        "num_kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "act": c.hidden_act,
        "qk_norm": model.params.layers[0].q_norm is not None,
        "norms_behind": model.params.layers[0].o_norm is not None,
        "gains": str(model.params.layers[0].input_norm.dtype).removeprefix("torch."),
        "biases": [name for name in ("qkv", "o", "down") if getattr(model.params.layers[0], f"{name}_bias") is not None],
    }
    codes = codes_of(model.params)
    if codes:
        shapes["quantised"] = {part: asdict(each) for part, each in sorted(codes.items())}
    return {
        "gpu": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "shapes": shapes,
    }


def default_path(key: Mapping[str, Any]) -> Path:
    """The path of the file for a key in the user's cache. The file may not exist."""
    return cache_path() / file_name(key)


def file_name(key: Mapping[str, Any]) -> str:
    """The name of the file for a key, or for what `target_of` returns."""
    gpu = re.sub(r"[^a-z0-9]+", "-", key["gpu"].lower()).strip("-")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return f"tuning-{gpu}-{key['dtype']}-{digest}.json"


def write_cuts(path: Path, key: Mapping[str, Any], steps: Map[int, StepCuts], measured: list[dict[str, Any]]) -> None:
    """Write a file, replacing an older one. If several processes write at the same time, the last one counts.

    Raises `InvalidRequestError` if the file cannot be written.
    """
    cuts = {str(rows): {part: list(cut) for part in PARTS if (cut := getattr(step, part))} for rows, step in sorted(steps.items())}
    document = {"format": FORMAT, "key": key, "cuts": cuts, "measured": measured}
    try:
        write_whole(path, json.dumps(document, indent=1).encode() + b"\n", mode=0o644)  # engines refuse a file that others can write
    except OSError as error:
        raise InvalidRequestError(f"{path}: could not be written: {error.strerror}") from error


def read_cuts(path: Path, model: Model, machine: Machine) -> Cuts:
    """The tile configurations in a file for this model on this machine. Raises `TuningFileError` with the file and the reason."""
    return _read(path, model, machine)[0]


def read_shipped(path: Path, model: Model, machine: Machine) -> Cuts:
    """The same from a file of the package, whose key is that of `target_of`. Its source says that it is shipped."""
    cuts = _read(path, model, machine, shipped=True)[0]
    return replace(cuts, source=f"{path}{SHIPPED}")


def read_run(path: Path, model: Model, machine: Machine) -> tuple[Cuts, list[dict[str, Any]]]:
    """The tile configurations and the measurements in a file. Raises `TuningFileError` with the file and the reason."""
    cuts, document = _read(path, model, machine)
    lines = document.get("measured")
    if not isinstance(lines, list) or not all(isinstance(line, dict) and _is_line(line) for line in lines):
        raise TuningFileError(f"{path}: the list `measured` is missing or damaged; run `nanovllm tune` again")
    return cuts, lines


def _read(path: Path, model: Model, machine: Machine, *, shipped: bool = False) -> tuple[Cuts, dict[str, Any]]:
    document = _document(path)
    if document.get("format") != FORMAT:
        raise TuningFileError(f"{path}: format {document.get('format')!r}, but this version reads format {FORMAT}")
    try:
        theirs, mine = document.get("key"), target_of(model) if shipped else key_of(model)
    except TuningFileError as error:
        raise TuningFileError(f"{path}: {error}") from error
    if not isinstance(theirs, dict):
        raise TuningFileError(f"{path}: the object `key` is missing or damaged; run `nanovllm tune` again")
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise TuningFileError(f"{path}: measured for another {name}: {_short(theirs.get(name))}, here it is {_short(value)}")
    cuts = document.get("cuts")
    if not isinstance(cuts, dict):
        raise TuningFileError(f"{path}: the object `cuts` is missing or damaged; run `nanovllm tune` again")
    steps = Map({_rows(path, rows): _step(path, model, machine, rows, step) for rows, step in cuts.items()})
    return Cuts(steps=steps, source=str(path)), document


def _document(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        raise TuningFileError(f"{path}: could not be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > LARGEST:
        raise TuningFileError(f"{path}: more than {LARGEST:,} bytes, larger than any tuning file")
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TuningFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TuningFileError(f"{path}: contains a {type(document).__name__}, so it is not a tuning file")
    return document


def _is_line(line: dict[str, Any]) -> bool:
    return type(line.get("part")) is str and type(line.get("rows")) is int


def _rows(path: Path, rows: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", rows):
        raise TuningFileError(f"{path}: {rows!r} is not a number of rows; run `nanovllm tune` again")
    return int(rows)


def _step(path: Path, model: Model, machine: Machine, rows: str, step: Any) -> StepCuts:
    kernels = {work.part: work for work in works(model.config, int(rows), machine, codes_of(model.params))}
    cuts: dict[str, Cut] = {}
    for part, cut in step.items() if isinstance(step, dict) else [("cuts", step)]:
        whole = isinstance(cut, list) and all(type(number) is int and 0 <= number <= 1 << 20 for number in cut)
        if part not in kernels or not whole or not valid(kernels[part], tuple(cut), machine):
            raise TuningFileError(f"{path}: {part} of {rows} rows cannot use the tile configuration {_short(cut)} on this GPU")
        cuts[part] = tuple(cut)
    return StepCuts(**cuts)


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 200 else shown[:197] + "..."


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _sources(names: tuple[str, ...]) -> str:
    folder, digest = Path(ops.__file__).parent, hashlib.sha256()
    for name in names:
        try:
            digest.update((folder / f"{name}.py").read_bytes())
        except OSError as error:
            raise TuningFileError(f"{folder / name}.py: the kernels' sources could not be read: {error.strerror or error}") from error
    return digest.hexdigest()[:16]
