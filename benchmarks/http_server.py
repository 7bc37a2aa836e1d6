"""Servers for measurements, which `nanovllm serve` does not offer.

    python -m benchmarks.http_server --engine thread --model tiny --device cpu
    python -m benchmarks.http_server --step-ms 1.4 --max-num-seqs 64

With `--engine thread` one process has the engine in one thread and the front end in another, over the same Unix socket. With `--step-ms`
the model runs nothing: a pass over the device sleeps for that time, as a process waits for its GPU, and the tokens are those of a text.
What processors then do is the host's part. `http_bench.py` starts these servers with its options of the same names.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.host import Writing
from nanovllm.entrypoints.llm import LLM
from nanovllm.entrypoints.process import freeze
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.engine_process import load_llm
from nanovllm.entrypoints.server.front import FrontEnd
from nanovllm.entrypoints.server.front_model import load_front
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.starting import READY
from nanovllm.entrypoints.server.supervisor import Supervisor, bound, url

TEXT = "Once upon a time, in a small village by the sea, a fox told a story of the king of Aistonia. "


class Sleeping(Writing):
    """An executor whose passes take a given time, in which the process has nothing to do."""

    def __init__(self, text: list[int], seconds: float) -> None:
        super().__init__(text, None)
        self.seconds = seconds

    def prefill(self, *args: Any, **options: Any) -> Any:
        """Sleep, and return zeros for the rows whose prompt is complete."""
        time.sleep(self.seconds)
        return super().prefill(*args, **options)

    def decode(self, *args: Any, **options: Any) -> Any:
        """Sleep, and return the next token of every row."""
        time.sleep(self.seconds)
        return super().decode(*args, **options)


def engine_of(model: str, options: dict[str, Any], step_ms: float | None) -> LLM:
    """An engine, with the model's own executor or with one that sleeps."""
    llm = load_llm(model, options, "auto", "auto")
    if step_ms is not None:
        assert llm.model.tokenizer is not None
        llm.state.runtime.executor = cast(Any, Sleeping(llm.model.tokenizer.encode(TEXT * 8), step_ms / 1e3))
    return llm


class Sleeper(Supervisor):
    """The processes of `nanovllm serve`, with an engine that sleeps."""

    step_ms: float | None = None

    def _engine(self, again: bool = False) -> int:
        self.http.close()
        llm = engine_of(self.model, self.options, self.step_ms)
        freeze()
        loop = EngineLoop(llm.model, llm.state, self.listener)
        loop.stop_on(signal.SIGTERM)
        os.write(self._telling, READY)
        loop.run()
        return 0


def serve_in_one_process(settings: Settings, model: str, options: dict[str, Any], step_ms: float | None) -> None:
    """Serve until SIGTERM with an engine in a thread."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        path = Path(folder) / "engine"
        listener.bind(str(path))
        listener.listen()
        sock = bound(settings)
        llm = engine_of(model, options, step_ms)
        server = load_front(settings, model, options)
        freeze()
        loop = EngineLoop(llm.model, llm.state, listener.dup())
        thread = threading.Thread(target=loop.run)
        thread.start()

        async def serve() -> None:
            telling = asyncio.create_task(server.engine.greeted.wait())
            telling.add_done_callback(lambda _: print(f"nanovllm serves {settings.model_name} at {url(sock)}", flush=True))
            await FrontEnd(server, sock, path).run(signals=True)

        uvloop.run(serve())
        loop.stop()
        with socket.socket(socket.AF_UNIX) as waking:
            waking.connect(str(path))
            thread.join()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("process", "thread"), default="process", help="where the engine is (default: process)")
    parser.add_argument("--step-ms", type=float, metavar="X", help="how long a pass over the device sleeps (default: the model runs)")
    parser.add_argument("--model", default="tiny", metavar="NAME", help="tiny or a folder (default: tiny)")
    parser.add_argument("--model-name", default="model", metavar="NAME", help="the model's name for clients (default: model)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda")
    parser.add_argument("--num-pages", type=int, metavar="N", help="pages of KV memory")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="requests that run at the same time (default: 256)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="front ends (default: 1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="the port; 0: any free one (default: 8000)")
    given = parser.parse_args()
    options = {name: getattr(given, name) for name in ("device", "num_pages", "max_num_seqs")}
    settings = Settings(port=given.port, model_name=given.model_name, shutdown_seconds=1.0)
    if given.engine == "thread":
        serve_in_one_process(settings, given.model, options, given.step_ms)
        return
    supervisor = (Supervisor if given.step_ms is None else Sleeper)(settings, given.model, options, workers=given.workers)
    if isinstance(supervisor, Sleeper):
        supervisor.step_ms = given.step_ms
    raise SystemExit(supervisor.run(lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
