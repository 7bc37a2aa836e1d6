"""`nanovllm bench`: standard workloads, run on random weights of a published model's shape or on a checkpoint."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import ModelConfig, for_length
from nanovllm.entrypoints.arguments import (
    DEVICE,
    DTYPE,
    TUNING,
    add_kv_dtype,
    add_quantization,
    add_ranks,
    add_source,
    positive,
    positives,
    rounding,
    source,
    tuning,
)
from nanovllm.entrypoints.cli.bench import report, scaling
from nanovllm.entrypoints.cli.bench.journal import Journal
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights, require_no_revision
from nanovllm.entrypoints.cli.bench.peers import PEERS, find_peers
from nanovllm.entrypoints.cli.bench.plot import draw
from nanovllm.entrypoints.cli.bench.ranked import ONE_DEVICE, ranked_engine
from nanovllm.entrypoints.cli.bench.roofline import Ceiling, held_bytes, measure_ceiling
from nanovllm.entrypoints.cli.bench.startup import StartError, measure_start, too_large
from nanovllm.entrypoints.cli.bench.stopwatch import Engine, host_time
from nanovllm.entrypoints.cli.bench.workloads import LONGEST, TIMED, WORKLOADS, Generate, Measured, measure
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.outputs import require_output, write
from nanovllm.entrypoints.process import freeze
from nanovllm.entrypoints.ranks.settings import chosen_devices
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.executor import runtime_of
from nanovllm.loading.hub import resolve_folder
from nanovllm.loading.load_model import load_model, read_config, resolve_device, resolve_dtype
from nanovllm.loading.quantisation.rounding import require_rounding
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import require_kv_dtype, stored_dtype

DESCRIPTION = """\
Measure the speed of a model on this machine with standard workloads, and show each figure next to the limit that the device's memory
bandwidth and arithmetic set. With several GPUs the bytes and the limit of a step are those of one of them, which has a part of the model.
"""
GPU_MODEL = "qwen3-0.6b"  # the default model on a GPU
CPU_WORKLOADS = ("b1", "b8", "host", "start")
MODEL_LEN = 20480  # max_model_len: more tokens than a request of `prefix` has
PEER_MEMORY = 0.5  # fraction of the GPU's memory for our engine if another engine runs in the same process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm bench`."""
    add_model_arguments(parser)
    add_ranks(parser)
    add_kv_dtype(parser)
    parser.add_argument("--tuning", type=tuning, default=None, metavar="FILE", help=TUNING)
    which = f"workloads, separated by commas: {', '.join(WORKLOADS)} (default: all; on a CPU: {','.join(CPU_WORKLOADS)})"
    parser.add_argument("--which", default=None, help=which)
    repeats = "runs of each workload, of which the median is reported; offline runs once (default: %(default)s)"
    parser.add_argument("--repeats", type=positive, default=3, help=repeats)
    many = "%s of the growth workload, separated by commas (default: %s; on a CPU: %s)"
    for name, axis in (("batches", "numbers of rows"), ("contexts", "numbers of tokens of context")):
        on = (scaling.Settings(), scaling.ON_CPU)
        defaults = tuple(",".join(map(str, getattr(s, name))) for s in on)
        parser.add_argument(f"--{name}", type=positives, default=None, help=many % (axis, *defaults))
    peer = f"run the same workloads on another engine afterwards: {', '.join(PEERS)}; may be repeated"
    parser.add_argument("--peer", action="append", default=[], metavar="NAME", help=peer)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    parser.add_argument(
        "--output", type=Path, default=None, metavar="FILE.json", help="also write the JSON object to this file, after every workload"
    )
    plot = "also draw the figures as an SVG picture (default with --output: the same name with .svg)"
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.svg", help=plot)
    parser.add_argument("--commit", default=None, help="the commit to record (default: the commit of the git checkout)")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`, `profile` and `tune` for the model: its name, where it is loaded from, device, dtype, and rounding."""
    where = (
        f"tiny, a folder, a repository in the Hugging Face cache, or random weights of one of these shapes: {', '.join(SHAPES)} "
        f"(default: {GPU_MODEL} on a GPU, tiny on a CPU)"
    )
    parser.add_argument("--model", metavar="NAME", help=where)
    add_source(parser)
    parser.add_argument("--device", metavar="D", help=DEVICE)
    parser.add_argument("--dtype", metavar="T", help=DTYPE)
    add_quantization(parser)


def model_name(options: argparse.Namespace) -> str:
    """The name of the model to measure."""
    return options.model or (GPU_MODEL if resolve_device(options.device).type == "cuda" else "tiny")


def find_model(options: argparse.Namespace) -> tuple[Model, str]:
    """Load the model that the options name, or make random weights. Returns the model and its name."""
    device, name = resolve_device(options.device), model_name(options)
    if name in SHAPES:
        require_no_revision(name, options.revision)
        return random_weights(name, device=device, dtype=options.dtype, **rounding(options)), name
    return load_model(name, device, options.dtype, **source(options), **rounding(options)), name


def find_workloads(which: str | None, name: str, *, cuda: bool, ranks: int = 1, **where: Any) -> tuple[list[str], list[dict[str, str]]]:
    """The workloads to run, decided before any weight is loaded.

    Args:
        which: The names that the user gave, separated by commas; None for the default workloads.
        name: The name of the model.
        cuda: Whether the device is a GPU.
        ranks: The number of ranks that run the model.
        **where: The values of `arguments.source`.

    Returns:
        The names of the workloads to run, and a name and a reason for each default workload that this model cannot run.

    Raises:
        InvalidRequestError: A name is unknown, or the model cannot run a workload that the user named.
    """
    names = which.split(",") if which is not None else list(WORKLOADS if cuda else CPU_WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        raise InvalidRequestError(f"unknown workload {', '.join(map(repr, sorted(unknown)))}; choose from {', '.join(WORKLOADS)}")
    config = _config(name, **where)
    left = {one: why for one in names if (why := _obstacle(one, name, config, ranks)) is not None}
    if which and left:
        raise InvalidRequestError("; ".join(f"the workload {one!r} cannot be run: {why}" for one, why in left.items()))
    return [one for one in names if one not in left], [{"workload": one, "why": why} for one, why in left.items()]


def main(options: argparse.Namespace, arguments: Sequence[str] = ()) -> int:
    """Run the chosen workloads, print tables or one JSON object, and write the files that were asked for. Returns 0."""
    device = resolve_device(options.device)
    cuda = device.type == "cuda"
    require_rounding(options.quantization, options.quantize_head)
    peers = find_peers(options.peer)
    if peers and (options.quantization or options.fp8_activations):
        raise InvalidRequestError(f"--peer {options.peer[0]}: it rounds nothing; omit --quantization and --fp8-activations, or --peer")
    if peers and options.tensor_parallel_size > 1:
        raise InvalidRequestError(f"--peer {options.peer[0]}: it runs on one device; omit --tensor-parallel-size, or --peer")
    require_output(options.output, replaced=True)
    plot = _plot_path(options)
    require_output(plot)
    size = options.tensor_parallel_size
    which, left_out = find_workloads(options.which, model_name(options), cuda=cuda, ranks=size, **source(options))
    devices = chosen_devices(size, options.device, None) if size > 1 else ()
    options = argparse.Namespace(**{**vars(options), "download": False, "settings": _settings(options, cuda)})  # it is in the cache now
    for line in report.left_out({"left_out": left_out}):
        note(line)
    with ExitStack() as ranks:
        if devices:
            engine, ceiling, journal = _on_ranks(options, arguments, devices, which, ranks)
        else:
            memory = {"memory_fraction": PEER_MEMORY} if peers and cuda else {}
            engine, ceiling, journal = _on_one_device(options, arguments, device, which, left_out, memory)
        cuts, limits = runtime_of(engine.state).cuts, engine.state.config  # no cuts: default tile configurations
        made = {"tuning": None if cuts is None else Path(cuts.source).name, "num_pages": limits.num_pages}
        journal.set({"roofline": report.ceiling_json(ceiling), **made})
        if left_out:
            journal.set({"left_out": left_out})
        freeze()
        _run(engine, which, options, ceiling, journal)
        _run_peers(peers, engine.model, which, options, journal)
    result = journal.end()
    print(json.dumps(result, indent=2) if options.json else report.text(result))
    if plot:
        write(plot, draw(result))
    return 0


def _on_one_device(
    options: argparse.Namespace,
    arguments: Sequence[str],
    device: torch.device,
    which: Sequence[str],
    left_out: list[dict[str, str]],
    memory: Mapping[str, Any],
) -> tuple[Engine, Ceiling, Journal]:
    """Load the model, measure starts and the device, and start an engine. A start that fails is added to `left_out`."""
    model, name = find_model(options)
    require_kv_dtype(model.config, options.kv_dtype, device)
    if model.foreign:
        raise InvalidRequestError(f"{name} runs through the transformers fallback: bench cannot compute its roofline; use a built-in model")
    journal = _journal(model, options, arguments)
    if "start" in which:  # before our engine takes the device's memory: a second process starts an engine
        left_out += _start(model, _place(name, options.revision), options, journal)
    if "bare" in which:
        left_out += _start(model, _place(name, options.revision), options, journal, bare=True)
    ceiling = measure_ceiling(device, model.dtype)
    limits = _limits(model.config, which, options)
    start = time.perf_counter()
    engine = Engine(model, **limits, **memory)
    journal.set({"init_s": round(time.perf_counter() - start, 2)})
    return engine, ceiling, journal


def _on_ranks(
    options: argparse.Namespace,
    arguments: Sequence[str],
    devices: tuple[str, ...],
    which: Sequence[str],
    ends: ExitStack,
) -> tuple[Engine, Ceiling, Journal]:
    """Measure the first device, and start an engine of several ranks, which `ends` ends. Its start is that of processes and weights too."""
    name, first = model_name(options), torch.device(devices[0])
    config = _config(name, **source(options))
    ceiling = measure_ceiling(first, resolve_dtype(options.dtype, config, first))  # before the engine takes the memory
    limits, loading = _limits(config, which, options), {"dtype": options.dtype, **source(options), **rounding(options)}
    start = time.perf_counter()
    model, state = ends.enter_context(ranked_engine(name, devices, loading, limits))
    journal = _journal(model, options, arguments)
    journal.set({"ranks": len(devices), "ranks_init_s": round(time.perf_counter() - start, 2)})
    return Engine(model, state), ceiling, journal


def _journal(model: Model, options: argparse.Namespace, arguments: Sequence[str]) -> Journal:
    journal = Journal(model, " ".join(("nanovllm bench", *arguments)), options.commit, options.output)
    journal.set({"kv_dtype": options.kv_dtype})
    return journal


def _limits(config: ModelConfig, which: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The options of `init_state` for the engine that is measured."""
    longest = min(config.max_position_embeddings, MODEL_LEN)
    if "growth" in which:
        longest = max(longest, scaling.model_len(options.settings, config))
    return {"max_model_len": longest, **_engine_options(options)}


def _run(engine: Engine, which: Sequence[str], options: argparse.Namespace, ceiling: Ceiling, journal: Journal) -> None:
    """Run the workloads on our engine."""
    model = engine.model
    rows, held = [], held_bytes(model.params, model.config, stored_dtype(engine.state.config, model.dtype))
    for one in _measured(engine.generate, engine.name, which, model, options.repeats, engine):
        rows.append(report.row(one, model.config, model.dtype, ceiling, held))
        journal.add({one.key: one.figure, "workloads": rows})
        journal.tell(f"{engine.name}: {one.key} {one.figure:,}")
    if "host" in which:
        for size in (1, 64):
            engine.state, host = host_time(model, engine.state, size)
            journal.add(host)
            journal.tell(", ".join(f"{key} {value:,}" for key, value in host.items()))
    if "growth" in which:
        _grow(engine, ceiling, options.settings, journal)


def _run_peers(peers: Sequence[Any], model: Model, which: Sequence[str], options: argparse.Namespace, journal: Journal) -> None:
    """Run the workloads on other engines."""
    theirs: dict[str, dict[str, float]] = {}
    for make in peers:
        peer = make(model, _place(model_name(options), options.revision))
        for one in _measured(peer.generate, peer.name, which, model, options.repeats):
            theirs.setdefault(peer.name, {})[one.key] = one.figure
            journal.add({"peers": theirs})
            journal.tell(f"{peer.name}: {one.key} {one.figure:,}")


def _place(name: str, revision: str | None) -> str:
    """Where the weights are: the folder of a checkpoint, or the name of a shape for random weights."""
    return name if name in SHAPES else str(resolve_folder(name, revision=revision)[0])


def _config(name: str, *, trust_remote_code: bool = False, **where: Any) -> ModelConfig:
    if name in SHAPES:
        return SHAPES[name]
    folder, _ = resolve_folder(name, with_code=trust_remote_code, **where)
    return for_length(read_config(folder, trust_remote_code=trust_remote_code)[1], None)


def _obstacle(workload: str, name: str, config: ModelConfig, ranks: int) -> str | None:
    if ranks > 1 and workload in ("start", "bare"):
        return ONE_DEVICE
    longest, most = LONGEST.get(workload, 0), config.max_position_embeddings
    if longest > most:
        return f"its requests take {longest:,} tokens, the context of {name} has {most:,}"
    return too_large(name, config) if workload in ("start", "bare") else None


def _start(model: Model, place: str, options: argparse.Namespace, journal: Journal, *, bare: bool = False) -> list[dict[str, str]]:
    """Measure the start of a process. Returns the workload and the error in a list if that fails."""
    name = "bare" if bare else "start"
    try:
        start = measure_start(model, place, _engine_options(options), rounding(options), bare=bare)
    except StartError as error:
        left = [{"workload": name, "why": str(error)}]
        note(*report.left_out({"left_out": left}))
        return left
    journal.add({f"{'bare_' * bare}start_s": start.start_s, f"{'bare_' * bare}start": asdict(start)})
    journal.tell(f"{name}: {start.start_s:,} s")
    return []


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `init_state` that every engine of a run has."""
    return {"tuning": options.tuning, "kv_dtype": options.kv_dtype}


def _grow(engine: Engine, ceiling: Ceiling, settings: scaling.Settings, journal: Journal) -> None:
    for curve, growth in scaling.grow(engine, ceiling, settings):
        journal.add({"growth": growth.as_json()})
        journal.tell(f"growth with the {curve}: {len(getattr(growth, curve))} points")
        left = [asdict(one) for one in growth.left_out if one.curve == curve]
        for line in report.left_out({"growth": {"left_out": left}}):
            note(line)


def _measured(
    generate: Generate, name: str, which: Sequence[str], model: Model, repeats: int, engine: Engine | None = None
) -> Iterator[Measured]:
    """Run the workloads that any engine can run, and yield each figure. If a peer runs out of memory, its earlier figures count."""
    if not set(TIMED) & set(which):
        return
    try:
        yield from measure(generate, which, model.config.vocab_size, repeats, None if engine is None else lambda: engine.spent)
    except torch.OutOfMemoryError:
        if engine is not None:
            raise
        note(f"{name}: out of memory; its earlier figures are kept")


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
