"""Hurt the ranks of an engine, and measure how soon it says so and how soon a new engine is right.

    python -m benchmarks.rank_faults --model qwen3-0.6b --tensor-parallel-size 2 --output benchmarks/results/h200x2-rank-faults.json
    python -m benchmarks.rank_faults --model tiny --device cpu --tensor-parallel-size 2

The last rank is killed (SIGKILL) while the engine is idle, runs a long prompt, decodes, or captures a CUDA graph (on a GPU). It is stopped
for good, or for two seconds only. Two engines run at once on different devices if there are enough, and one of them is hurt. For each
fault: what the call raises, the seconds from the fault to that, and the seconds until a new engine has given the reply of the first one.
A second reply to the same prompt finds KV of the first, so in bfloat16 it may differ from it; it is compared with that of an unhurt engine.
`--faults` chooses some.
"""

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.ranked import ranked_engine
from nanovllm.models.model import Model

PROMPT, LIMIT = [300 + 7 * at for at in range(24)], 60.0
SHORT = nv.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SILENT = 5.0  # seconds that a rank may be silent
PAUSE = 2.0  # seconds for which a rank is slow
FAULTS = ("idle", "prefill", "decode", "stopped", "slow", "capture", "two_engines")
Act = Callable[["Hurt"], None]


class Hurt:
    """An engine, and the processes of its other ranks."""

    def __init__(self, model: Model, state: nv.EngineState, pids: list[int]) -> None:
        self.model, self.state, self.pids, self.since = model, state, pids, 0.0

    def reply(self, prompt: list[int] = PROMPT, params: nv.SamplingParams = SHORT) -> list[int]:
        """The tokens of a reply."""
        self.state, found = nv.generate(self.model, self.state, prompt, params)
        return list(found.token_ids)

    def send(self, what: signal.Signals) -> None:
        """Send a signal to the last rank, and note the time."""
        os.kill(self.pids[-1], what)
        self.since = time.perf_counter()

    def later(self, seconds: float, what: signal.Signals = signal.SIGKILL) -> None:
        """The same after some seconds, while the caller goes on."""
        threading.Timer(seconds, self.send, (what,)).start()


def children() -> set[int]:
    """The processes that this one has started."""
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # of a thread that has ended meanwhile
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


@contextmanager
def started(options: argparse.Namespace, devices: tuple[str, ...], **limits: Any) -> Iterator[Hurt]:
    """An engine on these devices."""
    loading = {
        "dtype": options.dtype, "quantization": None, "quantize_head": False, "fp8_activations": False, "revision": None,
        "download": False, "trust_remote_code": False,
    }  # fmt: skip
    size = {"num_pages": options.pages, "max_num_seqs": 8, "max_model_len": options.longest + 64, "check": False, **limits}
    before = children()
    with ranked_engine(options.model, devices, loading, size, SILENT) as (model, state):
        yield Hurt(model, state, sorted(children() - before)[-(len(devices) - 1) :])


def idle(engine: Hurt) -> None:
    """Kill a rank while nothing runs."""
    engine.send(signal.SIGKILL)
    while time.perf_counter() - engine.since < LIMIT:
        engine.reply()


def prefill(engine: Hurt) -> None:
    """Kill a rank while long prompts run."""
    engine.later(0.1)
    begin = time.perf_counter()
    while time.perf_counter() - begin < LIMIT:
        at = int(1000 * (time.perf_counter() - begin))
        engine.reply([(7 * step + at) % 4000 for step in range(engine.state.config.max_model_len - 32)])


def decode(engine: Hurt) -> None:
    """Kill a rank in the middle of a reply."""
    engine.later(0.3)
    begin = time.perf_counter()
    while time.perf_counter() - begin < LIMIT:
        engine.reply(params=nv.SamplingParams(temperature=0, max_tokens=engine.state.config.max_model_len - 32, ignore_eos=True))


def stopped(engine: Hurt) -> None:
    """Stop a rank for good."""
    engine.send(signal.SIGSTOP)
    while time.perf_counter() - engine.since < LIMIT:
        engine.reply()


def told(act: Callable[[], None], since: Callable[[], float]) -> dict[str, Any]:
    """What an act raises, and after how many seconds."""
    try:
        act()
    except nv.EngineDeadError as error:
        return {"raised": type(error).__name__, "says": str(error)[:160], "seconds": round(time.perf_counter() - since(), 3)}
    return {"raised": None, "seconds": round(time.perf_counter() - since(), 3)}


def hurt(options: argparse.Namespace, devices: tuple[str, ...], act: Act, right: list[int]) -> dict[str, Any]:
    """Hurt an engine, then start a new one."""
    with started(options, devices) as engine:
        assert engine.reply() == right
        found = told(lambda: act(engine), lambda: engine.since)
    return found | renewed(options, devices, right)


def renewed(options: argparse.Namespace, devices: tuple[str, ...], right: list[int]) -> dict[str, Any]:
    """Start a new engine, and compare its reply."""
    begin = time.perf_counter()
    with started(options, devices) as engine:
        return {"right_again": engine.reply() == right, "after_s": round(time.perf_counter() - begin, 2)}


def capture(options: argparse.Namespace, devices: tuple[str, ...], right: list[int]) -> dict[str, Any]:
    """Kill a rank while graphs are captured at the start."""
    real, before, killed = torch.cuda.CUDAGraph.capture_begin, children(), list[float]()

    def begin(self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        if not killed:
            os.kill(max(children() - before), signal.SIGKILL)
            killed.append(time.perf_counter())

    def start() -> None:
        with started(options, devices) as engine:
            for _ in range(8):
                engine.reply()

    torch.cuda.CUDAGraph.capture_begin = begin  # pyright: ignore[reportAttributeAccessIssue]
    try:
        found = told(start, lambda: killed[0] if killed else time.perf_counter())
    finally:
        torch.cuda.CUDAGraph.capture_begin = real  # pyright: ignore[reportAttributeAccessIssue]
    return found | {"captured": bool(killed)} | renewed(options, devices, right)


def slow(options: argparse.Namespace, devices: tuple[str, ...], again: list[int]) -> dict[str, Any]:
    """Stop a rank for `PAUSE` seconds: the others wait for it, and nothing is lost."""
    with started(options, devices) as engine:
        engine.reply()
        engine.send(signal.SIGSTOP)
        begin = engine.since
        engine.later(PAUSE, signal.SIGCONT)
        reply = engine.reply()
        return {"raised": None, "right": reply == again, "seconds": round(time.perf_counter() - begin, 3)}


def two_engines(
    options: argparse.Namespace, first: tuple[str, ...], second: tuple[str, ...], right: list[int], again: list[int]
) -> dict[str, Any]:
    """Two engines at once: both are right, and one that loses a rank leaves the other as it is."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(started(options, devices)) for devices in (first, second))
        both = [engine.reply() == wanted for wanted in (right, again, again) for engine in (one, other)]
        found = told(lambda: idle(one), lambda: one.since)
        return found | {"both_right": all(both), "other_right": other.reply() == again}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of nanovllm bench, or a model (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what the ranks run on (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="the dtype (default: %(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="ranks of an engine (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a long prompt (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=2048, help="pages of 16 tokens (default: %(default)s)")
    parser.add_argument("--faults", default=",".join(FAULTS), metavar="NAME,...", help="which faults (default: %(default)s)")
    parser.add_argument("--commit", help="the commit to record (default: the one that git reports)")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    chosen = options.faults.split(",")
    if unknown := set(chosen) - set(FAULTS):
        parser.error(f"unknown fault {', '.join(sorted(unknown))}; choose from {', '.join(FAULTS)}")
    size, on_gpu = options.tensor_parallel_size, options.device == "cuda"
    count = torch.cuda.device_count() if on_gpu else 2 * size
    every = tuple(f"cuda:{at}" if on_gpu else "cpu" for at in range(count))
    devices, faults = every[:size], dict[str, Any]()
    begin = time.perf_counter()
    with started(options, devices) as engine:
        right, again, model = engine.reply(), engine.reply(), engine.model
        print(f"first start and reply: {time.perf_counter() - begin:.1f} s", flush=True)

    def note(name: str, find: Callable[[], dict[str, Any]]) -> None:
        if name not in chosen:
            return
        faults[name] = find()
        print(name, json.dumps(faults[name]), flush=True)
        if options.output is not None:
            command = f"python -m benchmarks.rank_faults --model {options.model} --tensor-parallel-size {size}"
            command += "" if len(chosen) == len(FAULTS) else f" --faults {options.faults}"
            figures = {"gpus": size, "faults": faults}
            options.output.write_text(json.dumps(record(model, figures, command, options.commit), indent=1) + "\n")

    for act in (idle, prefill, decode, stopped):
        note(act.__name__, lambda act=act: hurt(options, devices, act, right))
    note("slow", lambda: slow(options, devices, again))
    if on_gpu:
        note("capture", lambda: capture(options, devices, right))
    if count >= 2 * size:
        note("two_engines", lambda: two_engines(options, devices, every[size : 2 * size], right, again))


if __name__ == "__main__":
    main()
