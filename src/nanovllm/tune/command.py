"""`nanovllm tune` on the command line."""

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import collector
from ..arguments import positives, require_folder
from ..bench.command import add_model_arguments, find_model
from ..cache import cache_folder
from ..cuda_graphs import batch_sizes
from ..errors import InvalidRequestError
from ..model import resolve_device
from ..models import fused
from ..progress import bar
from .device import Recorder, measuring
from .file import default_path, key_of, write_cuts
from .report import table, verdict
from .run import chosen, plan, run
from .use import machine_of

BATCHES = tuple(batch_sizes(256))  # those that an engine captures graphs for
NEEDS = "a CUDA GPU of compute capability 8.0 or newer, Triton, and a model in bfloat16 or float16 without biases of gate and up"
DESCRIPTION = """\
Measure how the kernels of decode steps are cut fastest on this GPU for a model's shapes, and keep the result in a file, by default in the
user's cache, where engines find it. Cuts are timed in whole layers, each beside those found for the other kernels; one replaces the
default where its results agree with the default's and it makes the layer 1% faster.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm tune`."""
    add_model_arguments(parser)
    rows = "numbers of rows, comma-separated; others keep the default cuts (default: those that an engine captures graphs for, 1 to 256)"
    parser.add_argument("--batches", type=positives, default=BATCHES, metavar="N,N,...", help=rows)
    where = "write this file in place of the one in the cache; engines take it by tuning=FILE, commands by --tuning FILE"
    parser.add_argument("--output", type=Path, metavar="FILE.json", help=where)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")


def main(options: argparse.Namespace) -> int:
    """Tune, print the table, write the file. Returns 0. Raises `InvalidRequestError` where there is nothing to tune."""
    device = resolve_device(options.device)
    if device.type != "cuda":
        raise InvalidRequestError(f"tune measures kernels, and needs {NEEDS}; the device here is {device}")
    require_folder(options.output)
    model, _ = find_model(options)
    if not fused.serves(model.params):
        raise InvalidRequestError(f"tune measures kernels, and needs {NEEDS}; {model.name} in {model.dtype} on {device} is not served")
    key, machine = key_of(model), machine_of(model)
    path = options.output or _place(key)  # before minutes of measuring
    planned, results = plan(model.config, options.batches, machine), []
    collector.freeze()
    with bar(len(planned), "tune", "step") as shown:
        for result in run(
            planned,
            machine,
            partial(measuring, model, Recorder(model.device)),
            tell=lambda work: shown.set_postfix_str(f"{work.part}, {work.rows} rows"),
        ):
            results.append(result)
            shown.update()
    measured = [line for result in results for line in result.as_json()]
    write_cuts(path, key, chosen(results), measured)
    if options.json:
        print(json.dumps({"file": str(path), "key": key, "measured": measured}, indent=1))
    else:
        print("\n".join([f"{model.name}, {key['dtype']}, {key['gpu']}", "", table(results), "", f"{verdict(results)} Written to {path}"]))
    return 0


def _place(key: Mapping[str, Any]) -> Path:
    """The file for a key in the user's cache, whose folder is there."""
    try:
        cache_folder()
        return default_path(key)
    except OSError as error:
        raise InvalidRequestError(f"the user's cache cannot be written ({error.strerror or error}): name a file with --output") from None
