"""The options and the main function of `nanovllm tune`."""

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from immutables import Map

from nanovllm.entrypoints.arguments import positives
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.tune.measure import Recorder, measuring
from nanovllm.entrypoints.cli.tune.report import table, verdict
from nanovllm.entrypoints.cli.tune.sweep import Result, chosen, plan, run, told
from nanovllm.entrypoints.display.terminal import bar
from nanovllm.entrypoints.outputs import require_output
from nanovllm.entrypoints.process import freeze
from nanovllm.errors import InvalidRequestError, NanoVLLMError, TuningFileError
from nanovllm.executor.cuda_graphs import batch_sizes
from nanovllm.files import cache_folder, is_private
from nanovllm.loading.load_model import resolve_device
from nanovllm.models.fast import fused
from nanovllm.models.fast.cuts import StepCuts
from nanovllm.models.model import Model
from nanovllm.models.tuning.choose import machine_of
from nanovllm.models.tuning.file import default_path, key_of, read_run, write_cuts
from nanovllm.models.tuning.launches import Machine, alike, codes_of

BATCHES = tuple(batch_sizes(256))  # the batch sizes that an engine captures graphs for by default
NEEDS = "a CUDA GPU of compute capability 8.0 or newer, Triton, and a model in bfloat16 or float16 without biases of gate and up"
DESCRIPTION = """\
Measure the fastest tile configurations of the decode kernels on this GPU, for the shapes of a model. Keep them in a file, by default in the
user's cache, where engines find it. A tile configuration is timed in whole layers, together with the best ones so far of the other kernels.
It replaces the default if its results agree with the default's and it makes the layer at least 1% faster. The file is written after every
batch size. Results of an older run for other batch sizes are kept, if the GPU, the shapes and the versions are the same. Exit code 0: all
batch sizes were measured. Exit code 1: some could not be measured. Exit code 2: an error, or nothing could be measured.
"""


class NothingMeasuredError(NanoVLLMError):
    """No batch size could be measured, not even with the default tile configurations. The file is unchanged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm tune`."""
    add_model_arguments(parser)
    rows = "batch sizes to tune, separated by commas (default: the sizes from 1 to 256 that an engine captures graphs for)"
    parser.add_argument("--batches", type=positives, default=BATCHES, metavar="N,N,...", help=rows)
    where = "write this file in place of the file in the cache; pass it as tuning=FILE to init_state, or as --tuning FILE to a command"
    parser.add_argument("--output", type=Path, metavar="FILE.json", help=where)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")


def main(options: argparse.Namespace) -> int:
    """Tune, write the file, print the table.

    Returns:
        The exit code. 1: some kernels could not be measured. 0: otherwise.

    Raises:
        InvalidRequestError: The device or the model does not use the fused kernels, or a file cannot be written.
        NothingMeasuredError: Nothing could be measured.
    """
    device = resolve_device(options.device)
    if device.type != "cuda":
        hint = "omit --device, or give --device cuda" if torch.cuda.is_available() else "torch sees none here"
        raise InvalidRequestError(
            f"tune needs a CUDA GPU, and this device is {device}: {hint}; the kernels of a CPU, those of quantised weights too, "
            "have no tile configurations to choose"
        )
    require_output(options.output, replaced=True)
    model, _ = find_model(options)
    if model.config.moe is not None or not fused.serves(model.params, model.config):
        raise InvalidRequestError(f"tune needs {NEEDS}; {model.name} in {model.dtype} on {device} cannot be tuned")
    if not alike(model.params):
        raise InvalidRequestError(f"tune needs layers that are quantised alike, unlike those of {model.name}")
    key, machine = key_of(model), machine_of(model)
    path = options.output or _place(key)
    require_output(path, replaced=True)  # before minutes of measuring
    planned, results = plan(model.config, options.batches, machine, codes_of(model.params)), list[Result]()
    steps, lines = _older(path, model, machine)
    freeze()
    with bar(len(planned), "tune", "step") as shown:
        for result in run(
            planned,
            machine,
            partial(measuring, model, Recorder(model.device)),
            tell=lambda work: shown.set_postfix_str(f"{work.part}, {work.rows} rows"),
        ):
            results.append(result)
            shown.update()
            if any(each.found is not None for each in results):  # at once: a run takes long, and may be interrupted
                write_cuts(path, key, chosen(results, steps), told(results, lines))
    failed = [result for result in results if result.found is None]
    if len(failed) == len(results):
        raise NothingMeasuredError(f"nothing could be measured ({failed[0].why}); {path} is unchanged")
    if options.json:
        print(json.dumps({"file": str(path), "key": key, "measured": told(results)}, indent=1))
    else:
        print("\n".join([f"{model.name}, {key['dtype']}, {key['gpu']}", "", table(results), "", f"{verdict(results)} Written to {path}"]))
    return 1 if failed else 0


def _older(path: Path, model: Model, machine: Machine) -> tuple[Map[int, StepCuts], list[dict[str, Any]]]:
    """The results of an older run for the same key: tile configurations by batch size, and lines of measurements.

    Both are empty if the file is missing, damaged, for another key, or writable by other users.
    """
    try:
        if path.exists() and is_private(path):
            cuts, lines = read_run(path, model, machine)
            return cuts.steps, lines
    except (OSError, TuningFileError):
        pass
    return Map(), []


def _place(key: Mapping[str, Any]) -> Path:
    """The file for a key in the user's cache. Makes the folder. Raises `InvalidRequestError` if that fails."""
    try:
        cache_folder()
        return default_path(key)
    except OSError as error:
        raise InvalidRequestError(f"the user's cache cannot be written ({error.strerror or error}): give a file with --output") from None
