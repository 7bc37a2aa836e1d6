"""`nanovllm check`: the report on the command line."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanovllm.entrypoints.arguments import TUNING, add_source, positive, require_folder, source, tuning
from nanovllm.entrypoints.cli.check.preflight import Outlook, outlook
from nanovllm.entrypoints.cli.check.preflight_text import text
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.load_model import load_model, resolve_device
from nanovllm.models.check.examine import examine
from nanovllm.models.check.report import SCHEMA, table
from nanovllm.models.model import Model
from nanovllm.models.tuning.choose import cuts_for

DESCRIPTION = """\
First say, before any weight is read, whether a model will run here, in how much memory, how many tokens of KV fit beside it, and by which
kernels; with --dry-run say no more. Then load it and compare its fast decode path (fused kernels on a GPU, C on a CPU) with its plain
layers, on its own weights: every layer by itself beside float64, the extremes of its norms, and greedy agreement over a text. Batches of 1,
2, 8, 16 and 24 rows are compared, and of up to 6 more numbers of rows, 256 at most, for which a tuning file has cuts. Exit code 0: it will
run, and all layers keep the bound, or there is no fast path here, as where the model runs through transformers; 1: it will not run, and
nothing was loaded, or some layers fall back to plain torch; 2: an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm check`."""
    where = "tiny, the packaged model (default), a folder, a repository in the Hugging Face cache, or shapes that `bench --help` names"
    parser.add_argument("name", nargs="?", metavar="MODEL", help=where)
    parser.add_argument("--model", metavar="NAME", help="the same by an option, as for the other commands")
    add_source(parser)
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--dtype", metavar="T", help="float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)")
    parser.add_argument("--dry-run", action="store_true", help="load nothing: only say what would happen")
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="the most tokens of a request (default: the model's)")
    parser.add_argument("--memory-fraction", type=float, default=0.9, metavar="X", help="the share of a GPU's memory to use (default 0.9)")
    parser.add_argument("--tokens", type=positive, default=256, metavar="N", help="tokens of the text (default %(default)s)")
    parser.add_argument("--tuning", type=tuning, metavar="FILE", help=TUNING)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write that object to this file")


def main(options: argparse.Namespace) -> int:
    """Say what will happen, check, print the table, write the file that was asked for. Returns 0 or, where the model will not run or a
    layer falls back, 1."""
    if options.name is not None and options.model is not None:
        raise InvalidRequestError(f"two models were named, {options.name!r} and {options.model!r}: give one")
    if not 0 < options.memory_fraction <= 1:
        raise InvalidRequestError(f"memory_fraction={options.memory_fraction!r} must be in (0, 1]")
    require_folder(options.output)
    name, device = options.name or options.model or "tiny", resolve_device(options.device)
    where, limits = source(options), {"max_model_len": options.max_model_len}
    look = _outlook(name, device, options.dtype, memory_fraction=options.memory_fraction, **limits, **where)
    if not options.json:
        print(text(look), flush=True)
    found: dict[str, Any] = {"schema": SCHEMA, "model": look.model, "architecture": look.architecture}
    told, fallen = "", False
    if not (look.problems or options.dry_run):
        model = loaded(name, options.device, options.dtype, **limits, **{**where, "download": False})
        if model.foreign:
            found["path"] = "through transformers"
            who = f"{model.name}, {model.config.architecture}"
            told = f"{who}: every layer runs through transformers, which leaves no fast path to compare."
        else:
            report = examine(model, options.tokens, cuts=cuts_for(model, options.tuning))
            found, told, fallen = report.as_json(), table(report), bool(report.fallen)
    written = json.dumps({**found, "outlook": look.as_json()}, indent=1)
    if options.json or told:
        print(written if options.json else f"\n{told}")
    if options.output is not None:
        options.output.write_text(written + "\n", encoding="utf-8")
    return 1 if look.problems or fallen else 0


def _outlook(name: str, device: torch.device, dtype: str | None, **how: Any) -> Outlook:
    from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES

    _require_no_revision(name, how)
    return outlook(name, device, dtype, shapes=SHAPES, **how)


def loaded(name: str, device: str | None, dtype: str | None, **where: Any) -> Model:
    """The model of this name, or random weights of shapes that `bench` knows. `where` is what `arguments.source` gives."""
    from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights

    return random_weights(name, device=device, dtype=dtype) if name in SHAPES else load_model(name, device, dtype, **where)


def _require_no_revision(name: str, where: Mapping[str, Any]) -> None:
    from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES

    if name in SHAPES and where.get("revision") is not None:
        raise InvalidRequestError(f"--revision {where['revision']}: {name} is random weights, and only repositories have revisions")
