"""`nanovllm check`: say whether a model will run, then compare its fast decode path with its plain layers."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm.entrypoints.arguments import (
    DEVICE,
    DTYPE,
    TUNING,
    add_kv_dtype,
    add_quantization,
    add_ranks,
    add_source,
    positive,
    rounding,
    source,
    tuning,
)
from nanovllm.entrypoints.cli.check.cost_text import cost_text
from nanovllm.entrypoints.cli.check.preflight import Outlook, outlook
from nanovllm.entrypoints.cli.check.preflight_text import text
from nanovllm.entrypoints.cli.check.ranked import examine_ranks, parts_text, whole_model
from nanovllm.entrypoints.cli.check.report_text import table
from nanovllm.entrypoints.outputs import require_output, write
from nanovllm.entrypoints.ranks.settings import chosen_devices
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.loading.hub import resolve_folder
from nanovllm.loading.load_model import load_model, resolve_device
from nanovllm.models.check.cost import cost
from nanovllm.models.check.examine import examine
from nanovllm.models.check.parts import PartsReport, compare_parts
from nanovllm.models.check.report import SCHEMA, CheckReport
from nanovllm.models.check.sample_text import sample_tokens
from nanovllm.models.model import Model
from nanovllm.models.tuning.choose import cuts_for

DESCRIPTION = """\
First say whether a model will run on this machine, before any weight is read. Say how much memory it needs, how many tokens of KV fit, and
which kernels will run it. With --dry-run, stop there. Then load the model, and compare its fast decode path (fused kernels on a GPU, C on a
CPU) with its plain PyTorch layers. Each layer is compared with float64 on its own weights. The report also shows the largest norm weights,
and how often greedy decoding agrees over a text. Decode batches have 1, 2, 8, 16 and 24 rows. With a tuning file, up to 6 more batch sizes
that it tunes are compared, at most 256 rows. Exit code 0: the model will run, and every layer of a fast path keeps its error bound. Exit
code 1: the model will not run, or some layers fall back to plain PyTorch. Exit code 2: an error. With --tensor-parallel-size the layers of
all ranks are compared, and in float64 what they compute together with what the whole model computes, which runs before on one GPU, or on
the CPU if it does not fit there. Exit code 1 is then also given if the two differ.
"""

KV_NOT_ROUNDED = (
    "These comparisons do not round keys and values as --kv-dtype {0} does: `nanovllm eval-reuse --kv-dtype {0}` measures what that costs."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm check`."""
    where = (
        "a folder, a repository in the Hugging Face cache, random weights of a shape that `nanovllm bench --help` names, or tiny, the "
        "packaged model (default: tiny)"
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help=where)
    parser.add_argument("--model", metavar="NAME", help="the same as MODEL, spelled as in the other commands")
    add_source(parser)
    parser.add_argument("--device", metavar="D", help=DEVICE)
    parser.add_argument("--dtype", metavar="T", help=DTYPE)
    add_quantization(parser)
    add_ranks(parser)
    add_kv_dtype(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say whether and how the model will run; load no weights")
    length = "the maximum length of a request, prompt and reply, in tokens (default: the model's)"
    parser.add_argument("--max-model-len", type=positive, metavar="N", help=length)
    fraction = "the fraction of the GPU's memory to use (default: 0.9)"
    parser.add_argument("--memory-fraction", type=float, default=0.9, metavar="X", help=fraction)
    parser.add_argument("--tokens", type=positive, default=256, metavar="N", help="tokens of the compared text (default: %(default)s)")
    parser.add_argument("--tuning", type=tuning, metavar="FILE", help=TUNING)
    beside = (
        "another checkpoint of the same model: also say what other weights cost, layer by layer and in the next tokens' probabilities "
        "(default with --quantization on one GPU: the same one, not rounded)"
    )
    parser.add_argument("--against", metavar="NAME", help=beside)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the JSON object to this file")


def main(options: argparse.Namespace) -> int:
    """Run `nanovllm check`: print the outlook, compare the layers, print the table, write the file.

    Returns:
        The exit code. 1: the model will not run, or a layer falls back to plain PyTorch. 0: otherwise.

    Raises:
        InvalidRequestError: Two models were named, or an option has an invalid value, or the model of `--against` has other shapes.
        CheckpointError: The model cannot be found or loaded.
        TuningFileError: The file of `--tuning` cannot be used.
    """
    if options.name is not None and options.model is not None:
        raise InvalidRequestError(f"two models were named, {options.name!r} and --model {options.model!r}: give one of them")
    if not 0 < options.memory_fraction <= 1:
        raise InvalidRequestError(f"memory_fraction={options.memory_fraction!r} must be above 0 and at most 1")
    if options.dry_run and options.against is not None:
        raise InvalidRequestError(f"--against {options.against}: --dry-run loads no weights to compare: omit one of the two")
    require_output(options.output)
    name, device = options.name or options.model or "tiny", resolve_device(options.device)
    ranks = options.tensor_parallel_size
    if ranks > 1 and options.against is not None:
        raise InvalidRequestError(f"--against {options.against}: it compares on one device; omit --tensor-parallel-size, or --against")
    devices = chosen_devices(ranks, options.device, None) if ranks > 1 else ()
    where, limits = {**source(options), **rounding(options)}, {"max_model_len": options.max_model_len}
    if options.against is not None:
        _require(options.against, **source(options))  # before minutes of work
    kept = {"memory_fraction": options.memory_fraction, "kv_dtype": options.kv_dtype}
    look = _outlook(name, device, options.dtype, **kept, **limits, **where, ranks=ranks)
    if not options.json:
        print(text(look), flush=True)
    figures: dict[str, Any] = {"schema": SCHEMA, "model": look.model, "architecture": look.architecture}
    shown, fallen = "", False
    if ranks > 1 and not (look.problems or options.dry_run):
        how = {**limits, **where, "download": False}
        report, found, why = _on_ranks(name, devices, options, look.dtype, how)
        figures, fallen = {**report.as_json(), "ranks": ranks}, bool(report.fallen) or (found is not None and not found.holds)
        figures |= {"parts": None if found is None else found.as_json()}
        shown = f"{table(report)}\n\n{parts_text(ranks, found, why)}"
    elif not (look.problems or options.dry_run):
        model = loaded(name, options.device, options.dtype, **limits, **{**where, "download": False})
        if model.foreign:
            figures["path"] = "through transformers"
            who = f"{model.name}, {model.config.architecture}"
            shown = f"{who}: every layer runs through the transformers fallback, which has no fast path to compare."
        else:
            report = examine(model, options.tokens, cuts=cuts_for(model, options.tuning))
            figures, shown, fallen = report.as_json(), table(report), bool(report.fallen)
        unrounded = name if options.quantization else None
        if (other := options.against or unrounded) is not None and not model.foreign:
            reference = loaded(other, options.device, options.dtype, **limits, **source(options))
            found = cost(model, reference, sample_tokens(model, options.tokens))
            figures["cost"], shown = found.as_json(), f"{shown}\n\n{cost_text(found)}"
    if shown and options.kv_dtype is not None:
        shown = f"{shown}\n\n{KV_NOT_ROUNDED.format(options.kv_dtype)}"
    written = json.dumps({**figures, "outlook": look.as_json()}, indent=1)
    if options.json or shown:
        print(written if options.json else f"\n{shown}")
    if options.output is not None:
        write(options.output, written + "\n")
    return 1 if look.problems or fallen else 0


def _on_ranks(
    name: str, devices: tuple[str, ...], options: argparse.Namespace, dtype: str, how: dict[str, Any]
) -> tuple[CheckReport, PartsReport | None, str]:
    """The report of the ranks, and how far they are from the whole model; or None, and why the whole model could not run.

    Random weights depend on the device that draws them, so those of a GPU are not compared with those of a CPU.
    """
    from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES

    def load(device: str) -> Model:
        exact = {**how, "fp8_activations": False}  # nothing is rounded in float64, and KV is not kept
        if problems := _outlook(name, torch.device(device), dtype, memory_fraction=options.memory_fraction, **exact).problems:
            raise OutOfPagesError(f"on {device}: {problems[0]}")
        return loaded(name, device, dtype, **exact)

    places = dict.fromkeys((devices[0],) if name in SHAPES else (devices[0], "cpu"))
    whole, why = whole_model([partial(load, place) for place in places], options.tokens)
    report, parts = examine_ranks(name, devices, {"dtype": options.dtype, **how}, options.tokens, options.tuning)
    return report, None if whole is None else compare_parts(parts, whole), why


def _require(name: str, *, trust_remote_code: bool, **where: Any) -> None:
    """Raise `CheckpointError` if there is no model of this name."""
    from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES

    if name not in SHAPES:
        resolve_folder(name, with_code=trust_remote_code, **where)


def _outlook(name: str, device: torch.device, dtype: str | None, **how: Any) -> Outlook:
    from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, require_no_revision

    require_no_revision(name, how["revision"])
    return outlook(name, device, dtype, shapes=SHAPES, **how)


def loaded(name: str, device: str | None, dtype: str | None, **where: Any) -> Model:
    """Load the model of this name, or make random weights of a shape that `bench` knows.

    `where` comes from `arguments.source` and `arguments.rounding`.
    """
    from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights

    if name not in SHAPES:
        return load_model(name, device, dtype, **where)
    how = {key: where[key] for key in ("quantization", "quantize_head", "fp8_activations") if key in where}
    return random_weights(name, device=device, dtype=dtype, **how)
