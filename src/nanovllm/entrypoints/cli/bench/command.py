"""`nanovllm bench`: the workloads that engines are compared by, on random weights at real shapes or on a model of yours."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import ModelConfig, for_length
from nanovllm.entrypoints.arguments import TUNING, positive, positives, require_folder, tuning
from nanovllm.entrypoints.cli.bench import report, scaling
from nanovllm.entrypoints.cli.bench.journal import Journal
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.entrypoints.cli.bench.peers import PEERS, find_peers
from nanovllm.entrypoints.cli.bench.plot import draw
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, measure_ceiling
from nanovllm.entrypoints.cli.bench.startup import StartError, measure_start, too_large
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, host_time
from nanovllm.entrypoints.cli.bench.workloads import LONGEST, TIMED, WORKLOADS, Generate, Measured, measure
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.process import freeze
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.executor import runtime_of
from nanovllm.loading.hub import resolve_folder
from nanovllm.loading.load_model import load_model, read_config, resolve_device
from nanovllm.models.model import Model

GPU_MODEL = "qwen3-0.6b"  # unless told otherwise
CPU_WORKLOADS = ("b1", "b8", "host", "start")
MODEL_LEN = 20480  # tokens that `prefix` needs, and some
PEER_MEMORY = 0.5  # of a GPU's, where peers want the rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm bench`."""
    add_model_arguments(parser)
    parser.add_argument("--tuning", type=tuning, default=None, metavar="FILE", help=TUNING)
    which = f"comma-separated: {', '.join(WORKLOADS)} (default: all; on a CPU {','.join(CPU_WORKLOADS)})"
    parser.add_argument("--which", default=None, help=which)
    repeats = "runs of each workload but offline, of which the median counts (default: %(default)s)"
    parser.add_argument("--repeats", type=positive, default=3, help=repeats)
    many = "numbers, comma-separated, at which growth is measured (default: %s; on a CPU %s)"
    for name in ("batches", "contexts"):
        on = (scaling.Settings(), scaling.ON_CPU)
        parser.add_argument(f"--{name}", type=positives, default=None, help=many % tuple(",".join(map(str, getattr(s, name))) for s in on))
    peer = f"another engine to run the same workloads after ours, slowly: {', '.join(PEERS)}; may be given several times"
    parser.add_argument("--peer", action="append", default=[], metavar="NAME", help=peer)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    parser.add_argument(
        "--output", type=Path, default=None, metavar="FILE.json", help="also write that object to this file, after every workload"
    )
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.svg", help="draw the figures (default: beside --output)")
    parser.add_argument("--commit", default=None, help="the commit to record where the source tree is not a checkout")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured, and where."""
    where = f"tiny, a folder, a repository, or random weights of one of {', '.join(SHAPES)} (default: {GPU_MODEL} on a GPU, tiny on a CPU)"
    parser.add_argument("--model", default=None, help=where)
    parser.add_argument("--device", default=None, help="cuda or cpu (default: a GPU where there is one)")
    parser.add_argument("--dtype", default=None, help="float32, bfloat16, ... (default: bfloat16 on a GPU, float32 on a CPU)")


def model_name(options: argparse.Namespace) -> str:
    """The model that is measured."""
    return options.model or (GPU_MODEL if resolve_device(options.device).type == "cuda" else "tiny")


def find_model(options: argparse.Namespace) -> tuple[Model, str]:
    """The model that the options name, and its name."""
    device, name = resolve_device(options.device), model_name(options)
    return (random_weights(name, device=device, dtype=options.dtype) if name in SHAPES else load_model(name, device, options.dtype)), name


def find_workloads(which: str | None, name: str, *, cuda: bool) -> tuple[list[str], list[dict[str, str]]]:
    """The workloads to run, and those of the default ones that this model cannot run, with the reasons; no weights are needed to tell.

    Raises `InvalidRequestError` for a name that there is no workload of, and for one that was asked for and cannot be run.
    """
    names = which.split(",") if which is not None else list(WORKLOADS if cuda else CPU_WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        raise InvalidRequestError(f"unknown workload {', '.join(map(repr, sorted(unknown)))}; there are {', '.join(WORKLOADS)}")
    config = _config(name)
    left = {one: why for one in names if (why := _obstacle(one, name, config)) is not None}
    if which and left:
        raise InvalidRequestError("; ".join(f"the workload {one!r} cannot be run: {why}" for one, why in left.items()))
    return [one for one in names if one not in left], [{"workload": one, "why": why} for one, why in left.items()]


def main(options: argparse.Namespace, arguments: Sequence[str] = ()) -> int:
    """Run the chosen workloads, print tables or one JSON object, write the files that were asked for. Returns 0."""
    device = resolve_device(options.device)
    cuda = device.type == "cuda"
    which, left_out = find_workloads(options.which, model_name(options), cuda=cuda)
    peers = find_peers(options.peer)
    require_folder(options.output)
    plot = _plot_path(options)
    require_folder(plot)
    for line in report.left_out({"left_out": left_out}):
        note(line)
    model, name = find_model(options)
    if model.foreign:
        raise InvalidRequestError(f"{name} runs through transformers: what memory and arithmetic allow it, which bench tells, is not known")
    settings = _settings(options, cuda)
    journal = Journal(model, " ".join(("nanovllm bench", *arguments)), options.commit, options.output)
    if "start" in which:  # while the device has memory for another engine
        left_out += _start(model, name, options.tuning, journal)
    if left_out:
        journal.set({"left_out": left_out})
    ceiling = measure_ceiling(device, model.dtype)
    limits: dict[str, Any] = {"max_model_len": min(model.config.max_position_embeddings, MODEL_LEN), "tuning": options.tuning}
    if "growth" in which:
        limits["max_model_len"] = max(limits["max_model_len"], scaling.model_len(settings, model.config))
    if peers and cuda:
        limits["memory_fraction"] = PEER_MEMORY
    start = time.perf_counter()
    engine = Engine(model, **limits)
    cuts = runtime_of(engine.state).cuts  # the file whose cuts the kernels had; none: the defaults
    tuned = {"tuning": None if cuts is None else Path(cuts.source).name}
    journal.set({"init_s": round(time.perf_counter() - start, 2), "roofline": report.ceiling_json(ceiling)} | tuned)
    freeze()
    rows = []
    for one in _measured(engine.generate, engine.name, which, model, options.repeats, engine):
        rows.append(report.row(one, model.config, model.dtype, ceiling))
        journal.add({one.key: one.figure, "workloads": rows})
        journal.tell(f"{engine.name}: {one.key} {one.figure:,}")
    if "host" in which:
        for size in (1, 64):
            engine.state, host = host_time(model, engine.state, size)
            journal.add(host)
            journal.tell(", ".join(f"{key} {value:,}" for key, value in host.items()))
    if "growth" in which:
        _grow(engine, ceiling, settings, journal)
    theirs: dict[str, dict[str, float]] = {}
    for make in peers:
        peer = make(model, name)
        for one in _measured(peer.generate, peer.name, which, model, options.repeats):
            theirs.setdefault(peer.name, {})[one.key] = one.figure
            journal.add({"peers": theirs})
            journal.tell(f"{peer.name}: {one.key} {one.figure:,}")
    result = journal.end()
    print(json.dumps(result, indent=2) if options.json else report.text(result))
    if plot:
        plot.write_text(draw(result), encoding="utf-8")
    return 0


def _config(name: str) -> ModelConfig:
    return SHAPES[name] if name in SHAPES else for_length(read_config(resolve_folder(name)[0])[1], None)


def _obstacle(workload: str, name: str, config: ModelConfig) -> str | None:
    longest, most = LONGEST.get(workload, 0), config.max_position_embeddings
    if longest > most:
        return f"its requests take {longest:,} tokens, the context of {name} has {most:,}"
    return too_large(name, config) if workload == "start" else None


def _start(model: Model, name: str, tuning: Path | bool | None, journal: Journal) -> list[dict[str, str]]:
    """The start of a process, or what is to be said of it where that fails."""
    try:
        found = measure_start(model, name, tuning)
    except StartError as error:
        left = [{"workload": "start", "why": str(error)}]
        note(*report.left_out({"left_out": left}))
        return left
    journal.add({"start_s": found.start_s, "start": asdict(found)})
    journal.tell(f"start: {found.start_s:,} s")
    return []


def _grow(engine: Engine, ceiling: Ceiling, settings: scaling.Settings, journal: Journal) -> None:
    for curve, found in scaling.grow(engine, ceiling, settings):
        journal.add({"growth": found.as_json()})
        journal.tell(f"growth with the {curve}: {len(getattr(found, curve))} points")
        left = [asdict(one) for one in found.left_out if one.curve == curve]
        for line in report.left_out({"growth": {"left_out": left}}):
            note(line)


def _measured(
    generate: Generate, name: str, which: Sequence[str], model: Model, repeats: int, engine: Engine | None = None
) -> Iterator[Measured]:
    """The workloads that any engine can run, as they end. Where the memory of a peer runs out, what it had measured before counts."""
    if not set(TIMED) & set(which):
        return
    try:
        yield from measure(generate, which, model.config.vocab_size, repeats, None if engine is None else lambda: engine.spent)
    except torch.OutOfMemoryError:
        if engine is not None:
            raise
        note(f"{name}: out of memory; what it ran before counts")


def _settings(options: argparse.Namespace, cuda: bool) -> scaling.Settings:
    chosen = scaling.Settings() if cuda else scaling.ON_CPU
    return replace(chosen, **{name: getattr(options, name) for name in ("batches", "contexts") if getattr(options, name)})


def _plot_path(options: argparse.Namespace) -> Path | None:
    path = options.plot or (options.output.with_suffix(".svg") if options.output else None)
    if options.output and options.output.suffix != ".json":
        raise InvalidRequestError(f"--output {options.output}: the result is a JSON file; give a name that ends with .json")
    if path is not None and path.suffix != ".svg":
        raise InvalidRequestError(f"--plot {path}: the picture is an SVG file; give a name that ends with .svg")
    return path
