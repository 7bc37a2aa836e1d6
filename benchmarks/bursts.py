"""Measure requests that come to a server's engine at about the same time, with and without a wait for the others.

    python -m benchmarks.bursts [--repeats 120] [BURST ...]

A burst is the number of requests and the milliseconds between two of them, such as 8,0.15. Frames go straight to the engine's process. No
model runs: passes sleep as on a GPU that runs ahead, 3 ms and 1 ms per 600 tokens for prompts, and 1.3 ms for a step. The choices of
`GATHER_SECONDS` take turns from burst to burst. The numbers are medians in milliseconds: from a request to its first token, from the first
request to the last first token, and to the last end.
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from benchmarks.host import Writing
from benchmarks.http_server import TEXT
from nanovllm.entrypoints.process import freeze
from nanovllm.entrypoints.server import engine_loop
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.engine_process import load_llm
from nanovllm.entrypoints.server.wire import Outward, Stepped, Submit, frame, take_frames

CHOICES = (0.0, 0.002, 0.004)
PROMPT, REPLY = 128, 4
PASS_SECONDS, TOKENS_PER_SECOND, STEP_SECONDS = 3e-3, 600e3, 1.3e-3


class Ahead(Writing):
    """An executor whose passes take as long as those of a GPU, which runs a step while the host works."""

    ready = 0.0

    def prefill(self, model: Any, kv: Any, rows: Any, **options: Any) -> Any:
        """Sleep, and return zeros for the rows whose prompt is complete."""
        time.sleep(max(0.0, self.ready - time.perf_counter()) + PASS_SECONDS + sum(count for _, count in rows) / TOKENS_PER_SECOND)
        self.ready = 0.0
        return super().prefill(model, kv, rows, **options)

    def decode(self, *args: Any, **options: Any) -> Any:
        """Sleep until the step is done that began after the last one, and return the next token of every row."""
        time.sleep(max(0.0, self.ready - time.perf_counter()) if self.ready else STEP_SECONDS)
        self.ready = time.perf_counter() + STEP_SECONDS
        return super().decode(*args, **options)


class Turns(EngineLoop):
    """An engine's loop that makes one choice after the other."""

    bursts = 0

    def _gather(self) -> None:
        engine_loop.GATHER_SECONDS = CHOICES[self.bursts % len(CHOICES)]
        self.bursts += 1
        super()._gather()


def engine(listener: socket.socket) -> None:
    """Serve until SIGTERM."""
    llm = load_llm("tiny", {"device": "cpu", "num_pages": 16384}, "none", "none")
    assert llm.model.tokenizer is not None
    llm.state.runtime.executor = cast(Any, Ahead(llm.model.tokenizer.encode(TEXT * 8), None))
    freeze()
    loop = Turns(llm.model, llm.state, listener)
    loop.stop_on(signal.SIGTERM)
    loop.run()


def burst(sock: socket.socket, first: int, count: int, apart: float, draw: random.Random) -> tuple[float, float, float]:
    """Send requests and read their tokens to the end. Returns the three times."""
    decode, inward = msgspec.msgpack.Decoder(Outward).decode, bytearray()
    options = {"temperature": 0.0, "max_tokens": REPLY, "ignore_eos": True}
    ids = [np.array([draw.randint(300, 4000) for _ in range(PROMPT)], np.int32).tobytes() for _ in range(count)]
    frames = [frame(Submit([first + i], [[ids[i]]], [options], True)) for i in range(count)]
    began, sent, firsts, left = time.perf_counter(), dict[int, float](), dict[int, float](), count
    while left:
        now = time.perf_counter()
        if frames and now >= began + len(sent) * apart:
            sock.sendall(frames.pop(0))
            sent[first + len(sent)] = now
            continue
        try:
            inward += sock.recv(1 << 20)
        except BlockingIOError:
            time.sleep(0 if frames else 2e-5)
            continue
        now = time.perf_counter()
        for message in map(decode, take_frames(inward)):
            if isinstance(message, Stepped):
                for number in np.frombuffer(message.ids, np.uint32).tolist():
                    firsts.setdefault(number, now)
                left -= len(message.ended)
    return statistics.median(firsts[i] - sent[i] for i in sent), max(firsts.values()) - began, time.perf_counter() - began


def measure(count: int, apart: float, repeats: int) -> dict[str, list[float]]:
    """The medians of each choice, with an engine of their own."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as sock:
        path, draw, times = str(Path(folder) / "engine"), random.Random(count), list[tuple[float, float, float]]()
        listener.bind(path)
        listener.listen()
        if not (pid := os.fork()):
            engine(listener)
            os._exit(0)
        sock.connect(path)
        sock.setblocking(False)
        for i in range(len(CHOICES) * (1 + repeats)):
            times.append(burst(sock, 1 + i * count, count, apart, draw))
            time.sleep(0.003)
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    turns = {choice: times[len(CHOICES) + place :: len(CHOICES)] for place, choice in enumerate(CHOICES)}
    return {
        f"{1e3 * choice:g} ms": [round(1e3 * statistics.median(each), 2) for each in zip(*of, strict=True)] for choice, of in turns.items()
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bursts", nargs="*", default=["1,0.15", "8,0.15", "8,0.3", "32,0.15", "64,0.1"], metavar="BURST")
    parser.add_argument("--repeats", type=int, default=120, help="bursts with each choice (default: %(default)s)")
    options = parser.parse_args()
    for each in options.bursts:
        count, apart = each.split(",")
        print(json.dumps({"burst": each, **measure(int(count), float(apart) / 1e3, options.repeats)}), flush=True)


if __name__ == "__main__":
    main()
