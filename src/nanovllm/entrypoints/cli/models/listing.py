"""The list of built-in architectures and the list of cached models. The facts are read from the code, so that they cannot go stale."""

import ast
import inspect
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.models.features import features
from nanovllm.errors import CheckpointError
from nanovllm.loading.hub import cached_repositories, find_snapshot, read_json, require_whole
from nanovllm.loading.load_model import find_spec
from nanovllm.loading.safetensors_headers import weight_files
from nanovllm.models.common import decoder as decoder_module
from nanovllm.models.common import layers, params, tables
from nanovllm.models.fast import cpu, fused
from nanovllm.models.init_params import without_memory
from nanovllm.models.registry import REGISTRY
from nanovllm.models.spec import ModelSpec

SHARED = (decoder_module, layers, params, tables)  # the modules that the architectures' files use
# A config that sets sizes only. Everything else has the architecture's default.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "n_embd": 64, "n_layer": 6, "n_head": 4,
}  # fmt: skip
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One built-in architecture, with a config that sets sizes only.

    Attributes:
        architecture: The name in `architectures` of a `config.json`.
        known: Well-known models of the architecture.
        file: The file in the package.
        lines: Lines of code in the file.
        about: The first paragraph of the file's docstring.
        features: Differences from a plain Llama.
        gpu: The feature that the fused kernels do not support, in bfloat16; empty if they run the architecture.
        cpu: The feature that the C kernels do not support, in float32; empty if they run the architecture.
        composes: Whether the KV of a chunk can be moved to other positions.
    """

    architecture: str
    known: str
    file: str
    lines: int
    about: str
    features: tuple[str, ...]
    gpu: str
    cpu: str
    composes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """A repository of the Hugging Face cache.

    Attributes:
        name: The name of the repository.
        architecture: The architecture, or empty if the config names none.
        size: Bytes of the files of the snapshot.
        against: The reason why the model will not run; empty if no reason is known.
        built_in: Whether the architecture is built in.
    """

    name: str
    architecture: str
    size: int
    against: str
    built_in: bool


def usual_config(architecture: str) -> ModelConfig:
    """The config of an architecture from a `config.json` that sets sizes only."""
    return REGISTRY[architecture].config_from_hf({**SIZES, "text_config": SIZES})


def listed(architecture: str) -> Listed:
    """The entry of one architecture of `REGISTRY`."""
    spec, config = REGISTRY[architecture], usual_config(architecture)
    module = _module(spec)
    return Listed(
        architecture=architecture,
        known=spec.known,
        file=file_of(spec),
        lines=lines_of_code(inspect.getsource(module)),
        about=" ".join((module.__doc__ or "").partition("\n\n")[0].split()),
        features=features(config),
        gpu=fused.unknown(without_memory(config, torch.bfloat16), config),
        cpu=cpu.unknown(without_memory(config, torch.float32), config),
        composes=config.keys_turn,
    )


def file_of(spec: ModelSpec) -> str:
    """The file of a built-in architecture, relative to the package."""
    return f"models/{Path(_module(spec).__file__ or '').name}"


def _module(spec: ModelSpec) -> ModuleType:
    return sys.modules[spec.config_from_hf.__module__]


def shared_lines() -> int:
    """Lines of code of the modules that all architectures share."""
    return sum(lines_of_code(inspect.getsource(module)) for module in SHARED)


def lines_of_code(source: str) -> int:
    """The number of lines without empty lines, comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in BLANK:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def cached() -> list[Cached]:
    """The repositories of the local Hugging Face cache that have a `config.json`. Reads no weights and runs no code of a checkpoint."""
    return [entry for name, repo in cached_repositories() if (entry := _look(name, repo)) is not None]


def _look(name: str, repo: Path) -> Cached | None:
    try:
        folder = find_snapshot(repo, None)
        hf = read_json(folder / "config.json")
    except CheckpointError as error:
        return Cached(name=name, architecture="", size=0, against=str(error), built_in=False)
    if not hf:
        return None
    names = hf.get("architectures")
    named = [each for each in names if isinstance(each, str)] if isinstance(names, list) else []
    built_in = [each for each in named if each in REGISTRY]
    against = ""
    try:
        require_whole(folder)
        weight_files(folder)
        if built_in:
            find_spec(hf, folder).config_from_hf(hf)
        elif hf.get("auto_map"):
            against = "brings its own code: give --trust-remote-code to run it"
    except CheckpointError as error:
        against = str(error)
    return Cached(
        name=name,
        architecture=next(iter([*built_in, *named]), ""),
        size=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        against=against,
        built_in=bool(built_in),
    )
