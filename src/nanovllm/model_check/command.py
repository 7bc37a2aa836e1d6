"""`nanovllm check`: the report on the command line."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..arguments import TUNING, add_source, positive, require_folder, source, tuning
from ..errors import InvalidRequestError
from ..model import Model, load_model
from ..tune.use import cuts_for
from .examine import examine
from .report import SCHEMA, table

DESCRIPTION = """\
Compare a model's fast decode path (fused kernels on a GPU, C on a CPU) with its plain layers, on the model's own weights: every layer by
itself beside float64, the extremes of its norms, and greedy agreement over a text. Batches of 1, 2, 8, 16 and 24 rows are compared, and of
up to 6 more numbers of rows, 256 at most, for which a tuning file has cuts. Exit code 0: all layers keep the bound, or there is no
fast path here, as where the model runs through transformers; 1: some fall back to plain torch; 2: an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm check`."""
    where = "tiny, the packaged model (default), a folder, a repository in the Hugging Face cache, or shapes that `bench --help` names"
    parser.add_argument("name", nargs="?", metavar="MODEL", help=where)
    parser.add_argument("--model", metavar="NAME", help="the same by an option, as for the other commands")
    add_source(parser)
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--dtype", metavar="T", help="float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)")
    parser.add_argument("--tokens", type=positive, default=256, metavar="N", help="tokens of the text (default %(default)s)")
    parser.add_argument("--tuning", type=tuning, metavar="FILE", help=TUNING)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write that object to this file")


def main(options: argparse.Namespace) -> int:
    """Check, print the table, write the file that was asked for. Returns 0 or, where a layer falls back, 1."""
    if options.name is not None and options.model is not None:
        raise InvalidRequestError(f"two models were named, {options.name!r} and {options.model!r}: give one")
    require_folder(options.output)
    model = loaded(options.name or options.model or "tiny", options.device, options.dtype, **source(options))
    if model.foreign:
        found = {"schema": SCHEMA, "model": model.name, "architecture": model.config.architecture, "path": "through transformers"}
        told = f"{model.name}, {model.config.architecture}: every layer runs through transformers, which leaves no fast path to compare."
        print(json.dumps(found, indent=1) if options.json else told)
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    report = examine(model, options.tokens, cuts=cuts_for(model, options.tuning))
    found = json.dumps(report.as_json(), indent=1)
    print(found if options.json else table(report))
    if options.output is not None:
        options.output.write_text(found + "\n", encoding="utf-8")
    return 1 if report.fallen else 0


def loaded(name: str, device: str | None, dtype: str | None, **where: Any) -> Model:
    """The model of this name, or random weights of shapes that `bench` knows. `where` is what `arguments.source` gives."""
    from ..bench import SHAPES, random_weights

    if name not in SHAPES:
        return load_model(name, device, dtype, **where)
    if where.get("revision") is not None:
        raise InvalidRequestError(f"--revision {where['revision']}: {name} is random weights, and only repositories have revisions")
    return random_weights(name, device=device, dtype=dtype)
