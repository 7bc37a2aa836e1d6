"""Kill a server that has named chunks, start it again, and measure when it serves with all of them.

    python -m benchmarks.restart --output benchmarks/results/restart.json
    python -m benchmarks.restart --model qwen3-8b --device cuda --tokens 2048 --output benchmarks/results/h200-restart.json

`--chunks` chunks of `--tokens` random tokens are named. When their files are complete, all processes of the server are killed at once.
`start_s` is how long the next start takes until the server answers and lists all chunks. `bare_start_s` is the same without a folder. With
host memory the start of both measures how fast prompts run. Both are medians of `--repeats`. The files are read after that:
`all_loaded_s` is the time from the start until all of them were read, while no requests come; with `--repeats 1` they come. After the first
start a request begins with each chunk in turn. `first_use_ms` is the time to a token of the `first_uses` requests whose chunk was not read
before, `use_ms` that of the same requests once all files were read, and `cached` how many of the chunks' tokens the requests did not run,
of all.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.http_bench import served, shape_folder
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.loading.load_model import load_model, resolve_device

LIMIT = 120.0  # seconds


class Client:
    """Calls of one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname or "", parts.port or 0

    def call(self, path: str, body: Any = None) -> Any:
        """The answer to a call.

        Raises:
            SystemExit: The server has refused it.
        """
        connection = http.client.HTTPConnection(*self.address, timeout=LIMIT)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if data is None else "POST", path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            told = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {told[:500]!r}")
        return json.loads(told)


def begun(model: str, arguments: list[str]) -> tuple[contextlib.ExitStack, Client, int, float]:
    """A server, its first process, and the seconds of its start."""
    stack, start = contextlib.ExitStack(), time.perf_counter()
    url, pid = stack.enter_context(served(model, arguments))
    client = Client(url)
    client.call("/v1/models")
    return stack, client, pid, time.perf_counter() - start


def killed(pid: int) -> None:
    """Kill the processes of a server."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for each in (pid, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def chunks_of(client: Client) -> dict[str, bool]:
    """The names of the chunks, and whether each was read from its file."""
    return {each["name"]: each["loaded"] for each in client.call("/v1/chunks")["data"]}


def all_loaded(client: Client) -> None:
    """Wait until all chunks were read from their files."""
    start = time.perf_counter()
    while not all(chunks_of(client).values()):
        if time.perf_counter() - start > LIMIT:
            raise SystemExit(f"not all chunks were read after {LIMIT:.0f} seconds")
        time.sleep(0.02)


def used(client: Client, name: str) -> tuple[float, int]:
    """The milliseconds to a token of a request that begins with a chunk, and how many tokens it did not run."""
    begin = time.perf_counter()
    body = {"model": "model", "chunks": [name], "prompt": "Once", "max_tokens": 1, "temperature": 0}
    usage = client.call("/v1/completions", body)["usage"]
    return 1e3 * (time.perf_counter() - begin), usage["prompt_tokens_details"]["cached_tokens"]


def files_of(client: Client, count: int) -> float:
    """Wait until the chunks have files. Returns the seconds."""
    start = time.perf_counter()
    while len(client.call("/v1/saved_chunks?limit=100")["data"]) < count:
        if time.perf_counter() - start > LIMIT:
            raise SystemExit(f"the chunks have no files after {LIMIT:.0f} seconds")
        time.sleep(0.05)
    return time.perf_counter() - start


def restarted(model: str, options: argparse.Namespace, folder: Path, vocab: int) -> dict[str, Any]:
    """The figures of one model."""
    draw = random.Random(0)
    pages = options.chunks * (options.tokens // 16 + 2) * 2
    bare = ["--num-pages", str(pages), *(["--device", options.device] if options.device else []), "--host-kv-gib", str(options.host_kv_gib)]
    arguments = [*bare, "--kv-dir", str(folder / "kv"), "--kv-dir-gib", "64"]
    arguments += ["--max-chunks", str(options.chunks), "--chunk-share", "0.9"]
    chunks = {f"c{number}": [draw.randrange(vocab) for _ in range(options.tokens)] for number in range(options.chunks)}
    stack, client, pid, _ = begun(model, arguments)
    with stack:
        for name, tokens in chunks.items():
            client.call("/v1/chunks", {"name": name, "token_ids": tokens})
        saving = files_of(client, len(chunks))
        killed(pid)
    starts, bares, reads, firsts, uses, cached = list[float](), list[float](), list[float](), list[float](), list[float](), 0
    for repeat in range(options.repeats):
        stack, client, pid, took = begun(model, arguments)
        with stack:
            begin, there = time.perf_counter(), chunks_of(client).keys()
            starts.append(took + time.perf_counter() - begin)
            if there != chunks.keys():
                raise SystemExit(f"after the restart {len(there)} of {len(chunks)} chunks are there")
            if not repeat:
                for name in chunks:
                    unread = not chunks_of(client)[name]
                    milliseconds, reused = used(client, name)
                    cached += reused
                    firsts += [milliseconds] * unread
            all_loaded(client)
            if repeat or options.repeats == 1:
                reads.append(took + time.perf_counter() - begin)
            if not repeat:
                uses += [used(client, name)[0] for name in chunks]
            killed(pid)
        stack, _, _, took = begun(model, bare)
        bares.append(took)
        stack.close()
    return {
        "start_s": round(statistics.median(starts), 2), "bare_start_s": round(statistics.median(bares), 2), "saving_s": round(saving, 2),
        "all_loaded_s": round(statistics.median(reads), 2), "first_use_ms": round(statistics.median(firsts), 1) if firsts else None,
        "first_uses": len(firsts), "use_ms": round(statistics.median(uses), 1), "cached": cached, "of": options.chunks * options.tokens,
        "bytes": sum(file.stat().st_size for file in (folder / "kv").rglob("*.safetensors")),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a shape of `nanovllm bench` (default: tiny)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda")
    parser.add_argument("--chunks", type=positive, default=50, help="named chunks (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=1024, help="tokens of each (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="restarts (default: %(default)s)")
    parser.add_argument("--host-kv-gib", type=float, default=1.0, help="GiB of host memory (default: %(default)s)")
    parser.add_argument("--commit", help="commit to record (default: the commit that git reports)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = str(shape_folder(options.model, folder / "model")) if options.model in SHAPES else options.model
        on_gpu = resolve_device(options.device).type == "cuda"
        loaded = load_model(model, device="cpu", dtype="bfloat16" if on_gpu else None)
        vocab = loaded.config.vocab_size
        command = f"python -m benchmarks.restart --model {options.model} --chunks {options.chunks} --tokens {options.tokens}"
        result = record(loaded, {}, command, options.commit)
        result |= {"model": f"{options.model} (random weights)"} if options.model in SHAPES else {}
        if on_gpu:  # which the server needs for itself, so the model was loaded on the CPU
            result |= {"gpu": torch.cuda.get_device_name(), "cpu": None}
        del loaded
        result["restart"] = restarted(model, options, folder, vocab)
    print(json.dumps(result["restart"]))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
