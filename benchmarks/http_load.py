"""Load an OpenAI-compatible server with streamed completions of random prompts.

    python benchmarks/http_load.py http://127.0.0.1:8000 MODEL [STREAMS,TOKENS ...] [--output FILE]

Each stream is a raw socket, because clients in Python are otherwise slower than the server. A row tells tokens a second over all streams,
and milliseconds to the first token and between events (median and 99th percentile). `tok_s` counts the time in which the processes of the
clients start; `busy_tok_s` counts from the first request to the last answer. `client_us` is the clients' own processor time per token, in
microseconds, which they take from the server where they share its cores. Each stream sends `--rounds` requests, one after the other,
over one connection.
"""

import argparse
import json
import multiprocessing
import random
import re
import selectors
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


Told = tuple[float, list[float], int, float, float]  # of a request: seconds to the first event and between events, tokens, begin, end


class Stream:
    """One connection, which sends one request after the other."""

    def __init__(self, address: tuple[str, int], bodies: list[bytes]) -> None:
        self.sock = socket.create_connection(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.bodies, self.host = bodies, address[0].encode()
        self.times: list[Told] = []
        self.send()

    def send(self) -> None:
        body = self.bodies.pop()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.sent = self.last = time.perf_counter()
        self.first, self.gaps, self.tail = 0.0, list[float](), b""
        self.sock.sendall(head % (self.host, len(body)) + body)

    def read(self) -> bool:
        """Read what has come. Returns whether the last request has ended."""
        data = self.sock.recv(1 << 16)
        now = time.perf_counter()
        if not data:
            raise ConnectionError(f"the server closed a connection after {self.tail!r}")
        events = data.count(b'"text":')
        if events:
            if not self.first:
                self.first = now - self.sent
            else:
                self.gaps.append(now - self.last)
            self.gaps += [0.0] * (events - 1)
            self.last = now
        self.tail = (self.tail + data)[-2048:]
        if not self.tail.endswith(b"0\r\n\r\n"):
            return False
        found = USAGE.findall(self.tail)
        if not found:
            raise ConnectionError(f"an answer without usage: {self.tail!r}")
        self.times.append((self.first, self.gaps, int(found[-1]), self.sent, now))
        if not self.bodies:
            return True
        self.send()
        return False


def client(address: tuple[str, int], bodies: list[list[bytes]], results: Any) -> None:
    """Run some of the streams in one process."""
    began = time.process_time()
    try:
        with selectors.DefaultSelector() as selector:
            streams = [Stream(address, each) for each in bodies]
            for stream in streams:
                selector.register(stream.sock, selectors.EVENT_READ, stream)
            left = len(streams)
            while left:
                for key, _ in selector.select():
                    if key.data.read():
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
                        left -= 1
        results.put((time.process_time() - began, [one for stream in streams for one in stream.times]))
    except Exception as error:
        results.put(error)


def body(model: str, num_prompt: int, num_reply: int, draw: random.Random, vocabulary: tuple[int, int]) -> bytes:
    """One request."""
    return json.dumps(
        {
            "model": model,
            "prompt": [draw.randint(*vocabulary) for _ in range(num_prompt)],
            "max_tokens": num_reply,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def load(url: str, model: str, streams: int, num_reply: int, options: argparse.Namespace, seed: int = 0) -> dict[str, Any]:
    """Measure one row. Prompts of other seeds are others."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    processes = min(options.processes, max(1, streams // 8))
    results: Any = multiprocessing.Queue()
    draw = random.Random(f"{streams} {seed}")
    bodies = [[body(model, options.prompt, num_reply, draw, options.ids) for _ in range(options.rounds)] for _ in range(streams)]
    started = time.perf_counter()
    for place in range(processes):
        multiprocessing.Process(target=client, args=(address, bodies[place::processes], results), daemon=True).start()
    found, took = list[Told](), 0.0
    for _ in range(processes):
        one = results.get()
        if isinstance(one, Exception):
            raise one
        took += one[0]
        found += one[1]
    wall = time.perf_counter() - started
    busy = max(one[4] for one in found) - min(one[3] for one in found)
    short = [one[2] for one in found if one[2] != num_reply]
    if short:
        raise ValueError(f"{len(short)} of {len(found)} replies have other than {num_reply} tokens, for example {short[0]}")
    first, gaps = [one[0] for one in found], [gap for one in found for gap in one[1]] or [0.0]
    tokens = sum(one[2] for one in found)
    return {
        "streams": streams,
        "tok_s": round(tokens / wall, 1),
        "busy_tok_s": round(tokens / busy, 1),
        "client_us": round(1e6 * took / tokens, 1),
        "ttft_ms": at(first, 0.5),
        "ttft_p99": at(first, 0.99),
        "gap_ms": at(gaps, 0.5),
        "gap_mean": round(1e3 * sum(gaps) / len(gaps), 2),
        "gap_p90": at(gaps, 0.9),
        "gap_p99": at(gaps, 0.99),
    }


def at(values: list[float], share: float) -> float:
    """A percentile in milliseconds."""
    return round(1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 2)


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("rows", nargs="*", default=["1,512", "8,256", "64,256", "256,256", "512,256"], metavar="STREAMS,TOKENS")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens of a prompt (default: 128)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="requests of each stream (default: 2)")
    parser.add_argument("--processes", type=int, default=8, metavar="N", help="processes of clients, at most (default: 8)")
    ids = "the lowest and the highest token id of prompts (default: 300,4000)"
    parser.add_argument("--ids", type=lambda text: tuple(map(int, text.split(","))), default=(300, 4000), metavar="LOW,HIGH", help=ids)
    parser.add_argument("--output", type=Path, metavar="FILE", help="a file for the result, besides stdout")
    options = parser.parse_args()
    load(options.url, options.model, 8, 32, argparse.Namespace(**{**vars(options), "rounds": 1}))
    rows = [load(options.url, options.model, *map(int, row.split(",")), options) for row in options.rows]  # pyright: ignore[reportCallIssue]
    text = json.dumps({"server": options.url, "model": options.model, "prompt_tokens": options.prompt, "rows": rows})
    print(text, flush=True)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
