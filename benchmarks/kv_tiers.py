"""Measure the time to the first token of a long prompt, and of users who come back, with KV in host memory and without.

    python benchmarks/kv_tiers.py --model qwen3-8b --prompt 16384 --host-kv-gib 32 --output benchmarks/results/kv-tiers.json
    python benchmarks/kv_tiers.py --model tiny --device cpu --prompt 1024 --users 6 --history 256 --visits 24 --host-kv-gib 1

`first_token_ms` is about one prompt of `--prompt` tokens, alone on an engine whose pages hold it and half of another one. Each number is
the median of `--repeats` times in milliseconds:

- `cold`: the prompt is new, and all of it runs;
- `device`: it came right before, and its pages are on the device;
- `host`: other prompts have pushed its pages out since, and they are loaded from host memory;
- `lost`: the same without host memory, so it runs again;
- `pushing`: a new prompt whose pages push others out to host memory;
- `disk`, with `--kv-dir` or `--ways disk`: an engine that was just made reads its pages from files, of which the system keeps nothing in
  memory.

`users` is about `--users` users with histories of `--history` tokens. `--visits` times one of them, drawn at random, comes back with
`--turn` new tokens and gets a reply of `--reply` tokens, which both become part of the history. `--at-once` users come at the same time,
and the next ones when all have their replies. The pages of the device hold a quarter of all histories. There are the milliseconds to the
first token, the visits per second, and the prompt tokens that ran, that were reused, that were loaded from host memory and that were read
from the disk. The ways are the device alone, with host memory, and with `--kv-dir` also with files; `--ways` chooses.

Before the visits each history runs once. With files, the engine then waits where the disk is late, for `--settle` seconds at most
in all: histories come over hours elsewhere. Nothing is flushed, because this would replace the files of what host memory has no room for
by copies of what it has. `disk` has the bytes that were written before the visits and during them, and the rate before. The system may have
files in memory that it reads for the visits; `measured_read_bytes_per_second` is the rate of files that it has not.

`--which` leaves one of the two out. The file of `--output` is written after each measurement, and at least every ten seconds with what
is being done, so that a run that was ended tells where it was.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import nanovllm as nv
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.command import add_model_arguments, find_model
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.entrypoints.process import freeze
from nanovllm.executor.disk_counts import DiskCounts
from nanovllm.executor.executor import runtime_of
from nanovllm.state.kv_cache import pages_for

PAGE = 16
WAYS = ("device_only", "host_memory", "disk")
WHICH = ("first_tokens", "users")
NOTED = 10.0  # seconds between two notes of what is being done
SIZES = ("prompt", "repeats", "users", "history", "turn", "reply", "visits", "at_once")


def served(model: nv.Model, state: nv.EngineState, tokens: list[int], reply: int = 1) -> tuple[nv.EngineState, float, list[int]]:
    """Donates `state`. Run one request to its end. Returns the state, the milliseconds to its first token, and its reply."""
    state, ((first, drawn),) = served_together(model, state, [tokens], reply)
    return state, first, drawn


def served_together(
    model: nv.Model, state: nv.EngineState, prompts: list[list[int]], reply: int
) -> tuple[nv.EngineState, list[tuple[float, list[int]]]]:
    """Donates `state`. Run requests to their ends. Returns the state, and for each the milliseconds to its first token and its reply."""
    start, first, drawn = time.perf_counter(), dict[int, float](), dict[int, list[int]]()
    for tokens in prompts:
        state, rid = nv.submit(model, state, tokens, nv.SamplingParams(temperature=0, max_tokens=reply, ignore_eos=True))
        drawn[rid] = []
    while state.running or state.waiting:
        state, outputs = nv.step(model, state)
        now = 1e3 * (time.perf_counter() - start)
        for out in outputs:
            first.setdefault(out.request_id, now)
            drawn[out.request_id] += out.token_ids
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # copies to host memory are not part of the next request's time
    return state, [(first[rid], tokens) for rid, tokens in drawn.items()]


def engine(
    model: nv.Model, num_tokens: int, longest: int, options: argparse.Namespace, host_kv_gib: float, kv_dir: Path | None = None
) -> nv.EngineState:
    """An engine whose pages hold so many tokens, for one request at a time."""
    return nv.init_state(
        model, num_pages=pages_for(num_tokens, PAGE) + 1, page_size=PAGE, max_model_len=longest, max_num_seqs=max(4, options.at_once),
        kv_dtype=options.kv_dtype, host_kv_gib=host_kv_gib, kv_dir=kv_dir, kv_dir_gib=options.kv_dir_gib,
    )  # fmt: skip


def first_tokens(model: nv.Model, options: argparse.Namespace) -> dict[str, Any]:
    """The times to the first token of one long prompt."""
    random, vocab, length = Random(0), model.config.vocab_size, options.prompt
    times: dict[str, list[float]] = {name: [] for name in ("cold", "device", "host", "lost", "pushing")}
    loaded = 0
    for gib in (options.host_kv_gib, 0.0):
        state = engine(model, length * 3 // 2, length + PAGE, options, gib)
        for repeat in range(options.repeats + 1):  # the first is a warm-up
            prompt, other, third = (random_tokens(random, length, vocab) for _ in range(3))
            state, cold, expected = served(model, state, prompt)
            state, device, again = served(model, state, prompt)
            state, pushing, _ = served(model, state, other)
            state, _, _ = served(model, state, third)
            before = state.stats.loaded_tokens
            state, back, last = served(model, state, prompt)
            loaded = max(loaded, state.stats.loaded_tokens - before)
            if model.device.type == "cpu" and not expected == again == last:
                raise SystemExit(f"the replies differ: {expected}, {again}, {last}")
            found = {"device": device, "host": back, "pushing": pushing} if gib else {"cold": cold, "lost": back}
            for name, taken in found.items() if repeat else ():
                times[name].append(taken)
        if gib:
            host = state.pool.host
            assert host is not None
            rates = {name: float(f"{value:.6g}") for name, value in asdict(host.rates).items() if math.isfinite(value)}
            told = {"rates": rates, "page_bytes": host.page_bytes, "host_pages": host.num_pages}
        del state
    return {name: round(float(np.median(taken)), 2) for name, taken in times.items()} | {"loaded_tokens": loaded, **told}


def from_disk(model: nv.Model, options: argparse.Namespace) -> dict[str, Any]:
    """The time to the first token of a long prompt that a new engine reads from the disk, and what was read and written."""
    random, length, times, read = Random(2), options.prompt, list[float](), 0
    for repeat in range(options.repeats + 1):  # the first is a warm-up
        prompt = random_tokens(random, length, model.config.vocab_size)
        state = engine(model, length * 3 // 2, length + PAGE, options, options.host_kv_gib, options.kv_dir)
        state, _, expected = served(model, state, prompt)
        start = time.perf_counter()
        nv.flush_kv(state)
        flushed, page_bytes = time.perf_counter() - start, nv.memory(state).page_bytes
        written = nv.memory(state).disk.counts.pages_written
        del state
        for path in options.kv_dir.rglob("*.kv"):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # what is not on the disk stays in memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        state = engine(model, length * 3 // 2, length + PAGE, options, options.host_kv_gib, options.kv_dir)
        state, back, again = served(model, state, prompt)
        if model.device.type == "cpu" and expected != again:
            raise SystemExit(f"the replies differ: {expected}, {again}")
        read, times = max(read, state.stats.read_tokens), [*times, back] if repeat else times
        rate = state.pool.host.disk.bytes_per_second
        del state
    told = {"read_tokens": read, "read_bytes_per_second": round(rate), "write_bytes_per_second": round(written * page_bytes / flushed)}
    return {"disk": round(float(np.median(times)), 2), **told}


class Progress:
    """Tells what is being done, when a phase begins and every few seconds after that."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        self._note, self._phase, self._start, self._last = note, "", time.perf_counter(), 0.0

    def tell(self, phase: str, done: int, of: int) -> None:
        """Note that `done` parts of a phase are done."""
        now = time.perf_counter()
        if phase != self._phase or now - self._last >= NOTED:
            self._phase, self._last = phase, now
            self._note({"phase": phase, "done": done, "of": of, "seconds": round(now - self._start, 1)})


def settled(state: nv.EngineState, seconds: float) -> float:
    """Wait for a disk that is late with its writes, for so many seconds at most. Returns the seconds that are left."""
    disk, start = runtime_of(state).disk, time.perf_counter()
    while disk is not None and disk.num_late and time.perf_counter() - start < seconds:
        time.sleep(0.005)
    return max(0.0, seconds - (time.perf_counter() - start))


def on_disk(state: nv.EngineState) -> DiskCounts:
    """What was read from the disk and written to it."""
    disk = nv.memory(state).disk
    return DiskCounts() if disk is None else disk.counts


def users(
    model: nv.Model, options: argparse.Namespace, host_kv_gib: float, kv_dir: Path | None, note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The visits of users who come back at random. `note` is given what is being done."""
    random, vocab, progress = Random(1), model.config.vocab_size, Progress(note)
    most = model.config.max_position_embeddings if model.device.type == "cpu" else 1 << 30
    longest = min(most, options.history + options.visits * (options.turn + options.reply))
    histories = [random_tokens(random, options.history, vocab) for _ in range(options.users)]
    room = max(options.users * options.history // 4, options.at_once * longest) + PAGE
    progress.tell("start", 0, 1)
    state, times = engine(model, room, longest, options, host_kv_gib, kv_dir), list[float]()
    begun, patience = time.perf_counter(), options.settle
    for place, tokens in enumerate(histories):
        progress.tell("histories", place, options.users)
        state, _, _ = served(model, state, tokens)
        patience = settled(state, patience)
    filled = on_disk(state)
    before, start = state.stats, time.perf_counter()
    for first in range(0, options.visits, options.at_once):
        progress.tell("visits", first, options.visits)
        coming = random.sample(range(options.users), min(options.at_once, options.visits - first))
        prompts = [histories[who] + random_tokens(random, options.turn, vocab) for who in coming]
        prompts = [tokens if len(tokens) + options.reply <= longest else tokens[: options.history] for tokens in prompts]
        state, visits = served_together(model, state, prompts, options.reply)
        for who, tokens, (taken, drawn) in zip(coming, prompts, visits, strict=True):
            histories[who] = tokens + drawn
            times.append(taken)
    took, after = time.perf_counter() - start, state.stats
    kinds = ("prefill_tokens", "reused_tokens", "loaded_tokens", "read_tokens")
    spread = {f"p{part}": round(float(np.percentile(times, part)), 2) for part in (50, 90, 99)}
    found = {
        "first_token_ms": {"mean": round(float(np.mean(times)), 2), **spread},
        "seconds": round(took, 3),
        "visits_per_second": round(options.visits / took, 2),
        **{name: getattr(after, name) - getattr(before, name) for name in kinds},
        "seconds_before": round(start - begun, 1),
    }
    host = state.pool.host
    if host is None or host.disk is None:
        return found
    counts = on_disk(state)
    return found | {
        "disk": {
            "waited_before": round(options.settle - patience, 1),
            "bytes_written_before": filled.bytes_written,
            "write_bytes_per_second_before": round(filled.bytes_written / (start - begun)),
            "bytes_written": counts.bytes_written - filled.bytes_written,
            "bytes_read": counts.bytes_read - filled.bytes_read,
            "measured_read_bytes_per_second": round(host.disk.bytes_per_second),
            "pages_dropped": counts.pages_dropped,
            "errors": counts.errors,
        }
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--prompt", type=positive, default=16384, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="measurements of each kind (default: %(default)s)")
    parser.add_argument("--users", type=positive, default=16, help="users (default: %(default)s)")
    parser.add_argument("--history", type=positive, default=8192, help="tokens of each user's history (default: %(default)s)")
    parser.add_argument("--turn", type=positive, default=64, help="new tokens of a visit (default: %(default)s)")
    parser.add_argument("--reply", type=positive, default=16, help="tokens of a reply (default: %(default)s)")
    parser.add_argument("--visits", type=positive, default=64, help="visits of all users together (default: %(default)s)")
    parser.add_argument("--at-once", type=positive, default=1, help="users who come at the same time (default: %(default)s)")
    parser.add_argument("--host-kv-gib", type=float, default=16.0, help="GiB of host memory (default: %(default)s)")
    folder = "an empty folder on the disk to measure (default: a temporary one if --ways names the disk, else none is measured)"
    parser.add_argument("--kv-dir", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--kv-dir-gib", type=float, default=64.0, help="size limit of the files in it in GiB (default: %(default)s)")
    waits = "seconds that the histories wait for a disk that is late, at most in all (default: %(default)s)"
    parser.add_argument("--settle", type=float, default=30.0, help=waits)
    parser.add_argument("--ways", metavar="WAY,...", help=f"of {', '.join(WAYS)} (default: all, the disk only with --kv-dir)")
    parser.add_argument("--which", default=",".join(WHICH), metavar="NAME,...", help="what to measure (default: %(default)s)")
    parser.add_argument("--kv-dtype", choices=["fp8"], help="the dtype of keys and values (default: the model's)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    if options.at_once > options.users:
        parser.error(f"--at-once {options.at_once} is more than --users {options.users}")
    ways = options.ways.split(",") if options.ways else [way for way in WAYS if way != "disk" or options.kv_dir is not None]
    if unknown := set(ways) - set(WAYS):
        parser.error(f"unknown way {', '.join(sorted(unknown))}; choose from {', '.join(WAYS)}")
    which = options.which.split(",")
    if unknown := set(which) - set(WHICH):
        parser.error(f"cannot measure {', '.join(sorted(unknown))}; choose from {', '.join(WHICH)}")
    model, name = find_model(options)
    freeze()
    settings = " ".join(f"--{each.replace('_', '-')} {getattr(options, each)}" for each in SIZES)
    kv = f" --kv-dtype {options.kv_dtype}" if options.kv_dtype else ""
    kv += f" --kv-dir {options.kv_dir.name}" if options.kv_dir else ""
    kv += f" --kv-dir-gib {options.kv_dir_gib} --settle {options.settle}" if "disk" in ways else ""
    command = f"python benchmarks/kv_tiers.py --model {name} {settings} --host-kv-gib {options.host_kv_gib}{kv}"
    command += f" --ways {options.ways}" if options.ways else ""
    command += f" --which {options.which}" if set(which) != set(WHICH) else ""
    results = dict[str, Any]()

    def note(name: str, found: dict[str, Any], *, ended: bool = True) -> None:
        """Print and write what there is so far: a run may be ended."""
        print(name, json.dumps(found), flush=True)
        if options.output:
            told = results if ended else results | {"unfinished": {name: found}}
            result = record(model, {"kv_tiers": told}, command, options.commit)
            options.output.write_text(json.dumps(result, indent=2) + "\n")

    with ExitStack() as stack:
        if "disk" in ways and options.kv_dir is None:
            options.kv_dir = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        if "first_tokens" in which:
            found = first_tokens(model, options)
            results["first_token_ms"] = found | (from_disk(model, options) if "disk" in ways else {})
            note("first_token_ms", results["first_token_ms"])
        for way in ways if "users" in which else ():
            gib, folder = 0.0 if way == "device_only" else options.host_kv_gib, options.kv_dir if way == "disk" else None
            unfinished = partial(note, way, ended=False)
            found = users(model, options, gib, folder, unfinished)
            results.setdefault("users", {})[way] = found
            note(way, results["users"][way])


if __name__ == "__main__":
    main()
