"""Serve a model, load it with `http_load.py`, and compare it with the library on the same work.

    python -m benchmarks.http_bench --model qwen3-0.6b --output benchmarks/results/h200-http.json
    python -m benchmarks.http_bench --model tiny --device cpu --rows 1,256 8,256
    python -m benchmarks.http_bench --model tiny --device cpu --engine thread --rows 8,256

A shape's name stands for random weights in a folder that this program makes, with a tokenizer of as many tokens. A row of the result
has the figures of the clients, the share of a core that the engine and the front ends took, and their processor time per token in
microseconds. With `--engine thread` both are threads of one process (`http_server.py`), whose figures stand for the engine's. `library` is
the tokens a second of `LLM.generate` on the same prompts, in a process of its own, and `library_us` its processor time per token. It is
measured after the server's end. With `--repeats N` both live beside each other, which takes memory for two engines. Each row is then
measured N times, server and library in turn: the figures are medians, and `of_library_each` has the N ratios, which shows how far other
work on the machine moves them.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import http_load
from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights
from nanovllm.loading.weights import save_params
from nanovllm.models.registry import REGISTRY

TINY = Path(__file__).parents[1] / "src/nanovllm/assets/tiny"
SERVES = re.compile(r"serves .* at (http://\S+)")
START_SECONDS = 300.0
TICKS = os.sysconf("SC_CLK_TCK")


def shape_folder(name: str, folder: Path) -> Path:
    """A checkpoint folder of random weights at the sizes of a shape. They are made on the CPU: the server needs the device alone."""
    model = random_weights(name, device="cpu", dtype="bfloat16")
    folder.mkdir(parents=True, exist_ok=True)
    save_params(model.params, model.config, folder, model.dtype)
    config: ModelConfig = SHAPES[name]
    (folder / "config.json").write_text(json.dumps(REGISTRY[config.architecture].config_to_hf(config)))
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    known = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    tokenizer["model"]["vocab"] |= {f"\u0120t{i}": i for i in range(known, config.vocab_size)}  # no text becomes these tokens
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_text((TINY / file).read_text())
    return folder


@contextlib.contextmanager
def served(model: str, arguments: list[str], *, program: tuple[str, ...] = ("nanovllm", "serve")) -> Iterator[tuple[str, int]]:
    """A server as a process of its own. Yields its address and the id of its first process."""
    command = [sys.executable, "-m", *program, "--model", model, "--model-name", "model", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        end = time.monotonic() + START_SECONDS
        while (found := SERVES.search(line := process.stdout.readline())) is None:
            if not line or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
        yield found[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def cpu_seconds(parent: int) -> list[float]:
    """The processor time of the children of a process, in the order of their ids: the engine's, then the front ends'; or its own."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split() or [str(parent)]
    fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in sorted(children, key=int)]
    return [(int(each[11]) + int(each[12])) / TICKS for each in fields]


def library(model: str, options: argparse.Namespace) -> None:
    """Be the library's process: print the environment, and then for each line with streams, tokens and a seed the tokens a second of
    `LLM.generate` on as many prompts, and the microseconds of processor time per token.
    """
    import nanovllm as nv
    from benchmarks.http_server import engine_of

    llm = engine_of(model, {"device": options.device, "num_pages": options.num_pages}, options.step_ms)
    command = " ".join(["python -m benchmarks.http_bench", *sys.argv[3:]])
    print(json.dumps(record(llm.model, {}, command, options.commit)), flush=True)
    for line in chain(("8 32 -1",), sys.stdin):
        streams, num_reply, seed = map(int, line.split())
        draw = random.Random(f"{streams} {seed}")
        rounds = [[[draw.randint(*options.ids) for _ in range(options.prompt)] for _ in range(streams)] for _ in range(options.rounds)]
        params = nv.SamplingParams(temperature=0, max_tokens=num_reply, ignore_eos=True)
        started, took, tokens = time.perf_counter(), time.process_time(), streams * num_reply * options.rounds
        for prompts in rounds:
            llm.generate(prompts, params)
        wall, took = time.perf_counter() - started, time.process_time() - took
        if seed >= 0:
            print(json.dumps({"library": round(tokens / wall, 1), "library_us": round(1e6 * took / tokens, 1)}), flush=True)


class Library:
    """The library in a process of its own.

    Attributes:
        known: The environment.
    """

    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "benchmarks.http_bench", "--library-of", model, *sys.argv[1:]]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.known = self._read()

    def measure(self, streams: int, num_reply: int, seed: int) -> dict[str, Any]:
        """The library's figures of one row."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{streams} {num_reply} {seed}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError("the library's process has ended")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def measured(url: str, pid: int, row: tuple[int, int], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one row from a server."""
    (streams, num_reply), before, started = row, cpu_seconds(pid), time.perf_counter()
    found = http_load.load(url, "model", streams, num_reply, options, seed)
    wall = time.perf_counter() - started
    took, tokens = [b - a for a, b in zip(before, cpu_seconds(pid), strict=True)], streams * num_reply * options.rounds
    shares, each = [round(one / wall, 3) for one in took], [round(1e6 * one / tokens, 1) for one in took]
    found |= {"engine_cores": shares[0], "front_end_cores": shares[1:], "engine_us": each[0], "front_end_us": each[1:]}
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def compared(row: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """A row beside the library's figures."""
    return {**row, **figures, "of_library": round(row["tok_s"] / figures["library"], 3)}


def merged(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of one row's figures."""
    if len(repeats) == 1:
        return repeats[0]
    ratios = {"of_library_each": [row["of_library"] for row in repeats]}
    return {name: middle([row[name] for row in repeats]) for name in repeats[0]} | ratios


def middle(values: list[Any]) -> Any:
    """The median of numbers, or the medians of lists of numbers, place by place."""
    return [middle([*one]) for one in zip(*values, strict=True)] if isinstance(values[0], list) else round(statistics.median(values), 3)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", metavar="NAME", help="tiny, a folder, or a shape for random weights (default: tiny)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda")
    parser.add_argument("--num-pages", type=int, metavar="N", help="pages of KV memory")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="front ends (default: 1)")
    parser.add_argument("--engine", choices=("process", "thread"), default="process", help="where the engine is (default: process)")
    parser.add_argument("--step-ms", type=float, metavar="X", help="run no model: a pass over the device sleeps for X milliseconds")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="requests that run at the same time (default: 256)")
    parser.add_argument(
        "--rows", nargs="*", default=["1,512", "8,256", "64,256", "256,256", "512,256", "1000,128"], metavar="STREAMS,TOKENS"
    )
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens of a prompt (default: 128)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="requests of each stream (default: 2)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="how often all is measured (default: 1)")
    parser.add_argument("--processes", type=int, default=8, metavar="N", help="processes of clients, at most (default: 8)")
    parser.add_argument("--ids", type=lambda text: tuple(map(int, text.split(","))), default=(300, 4000), metavar="LOW,HIGH")
    parser.add_argument("--commit", metavar="C", help="the commit that is recorded")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file for the result, besides stdout")
    parser.add_argument("--library-of", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows: list[tuple[int, int]] = [tuple(map(int, row.split(","))) for row in options.rows]  # pyright: ignore[reportAssignmentType]
    if options.library_of is not None:
        library(options.library_of, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = str(shape_folder(options.model, Path(folder))) if options.model in SHAPES else options.model
        given = ["--workers", str(options.workers), "--max-num-seqs", str(options.max_num_seqs)]
        given += ["--device", options.device] if options.device else []
        given += ["--num-pages", str(options.num_pages)] if options.num_pages else []
        program = ("nanovllm", "serve")
        if options.engine == "thread" or options.step_ms is not None:
            program = ("benchmarks.http_server", "--engine", options.engine)
            given += ["--step-ms", str(options.step_ms)] if options.step_ms is not None else []
        with contextlib.ExitStack() as opened:
            url, pid = opened.enter_context(served(model, given, program=program))
            http_load.load(url, "model", 8, 32, argparse.Namespace(**{**vars(options), "rounds": 1}), -1)
            if options.repeats == 1:
                alone = [measured(url, pid, row, 0, options) for row in rows]
                opened.close()
                other = Library(model)
                found = [compared(one, other.measure(*row, 0)) for one, row in zip(alone, rows, strict=True)]
            else:
                other = Library(model)
                turns = range(options.repeats)
                found = [
                    merged([compared(measured(url, pid, row, seed, options), other.measure(*row, seed)) for seed in turns]) for row in rows
                ]
            other.close()
    command = " ".join(["python -m benchmarks.http_bench", *sys.argv[1:]])
    shown = {"model": options.model, "command": command, "workers": options.workers, "prompt_tokens": options.prompt, "rows": found}
    text = json.dumps({**other.known, **shown}, indent=1)
    print(text, flush=True)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
