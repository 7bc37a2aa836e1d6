"""A batch is run by a server of its own, so that its requests are those of every other client: the same routes, checks and formats."""

import argparse
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from nanovllm.entrypoints.arguments import chosen_model_options
from nanovllm.entrypoints.cli.batch.batch_file import BUSY, SERVER_FAULT, BatchRequest, ResultFile, read_requests
from nanovllm.entrypoints.cli.serve import KEYS, require_server
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.outputs import require_output
from nanovllm.entrypoints.process import ended_in_order
from nanovllm.errors import InvalidRequestError, NanoVLLMError

SERVES = re.compile(r"serves .* at (http://\S+)")
AT_ONCE = 320  # requests that the server has: as many as it runs, and some that wait
ROWS = 2048  # replies of a request, at most: texts of a list, times `n`
TRIES = 4  # of a request that fails by no fault of its own; a busy server is asked again for as long as it is busy
MOST_WAIT = 30.0  # seconds between two tries


class BatchServerError(NanoVLLMError):
    """The server of a batch did not start."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer: its status, its header `x-request-id`, the seconds of its `Retry-After`, and its body."""

    status: int
    request_id: str | None
    retry_after: float | None
    body: Any


def run_batch(options: argparse.Namespace) -> int:
    """Run `nanovllm generate --input FILE --output FILE`. Returns 0 if all requests were answered, otherwise 2."""
    require_server()
    if options.output.exists() and options.input.exists() and options.output.samefile(options.input):
        raise InvalidRequestError(f"--output {options.output} is the input: give another file")
    requests = read_requests(options.input)
    require_output(options.output)
    with ResultFile(options.output, requests) as results:
        todo = [request for request in requests if request.custom_id not in results.done]
        if results.done:
            note(f"{len(results.done)} of {len(requests)} requests are in {options.output} already; {len(todo)} are left")
        if todo:
            with ended_in_order(), _server(options) as (address, key):
                bar = tqdm(total=len(requests), initial=len(results.done), desc="requests", unit="request", disable=None)
                with bar:
                    for result in answered(todo, _sender(address, key)):
                        results.add(result)
                        bar.update()
        if results.num_failed:
            note(f"{results.num_failed} of {len(requests)} requests ended with an error, which {options.output} has")
        return 2 if results.num_failed else 0


def answered(requests: list[BatchRequest], send: Callable[[BatchRequest], Answer]) -> Iterator[dict[str, Any]]:
    """Send requests, several at a time, and yield their results in the order in which they end."""
    left, stopping = iter(requests), threading.Event()
    threads = ThreadPoolExecutor(min(AT_ONCE, len(requests)))
    try:
        running: set[Future[dict[str, Any]]] = {threads.submit(_result, request, send, stopping) for request in islice(left, AT_ONCE)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {threads.submit(_result, request, send, stopping) for request in islice(left, len(ended))}
            for one in ended:
                yield one.result()
    finally:
        stopping.set()
        threads.shutdown(wait=False, cancel_futures=True)


def _result(request: BatchRequest, send: Callable[[BatchRequest], Answer], stopping: threading.Event) -> dict[str, Any]:
    """The result of a request, in the form of OpenAI's batches, with the request's digest."""
    response, error, faults, pause = None, None, 0, 1.0
    while faults < TRIES and not stopping.is_set():
        wanted = 0.0
        try:
            answer = send(request)
        except (OSError, http.client.HTTPException, ValueError) as fault:
            response, error = None, {"code": "connection_error", "message": str(fault) or type(fault).__name__}
            faults += 1
        else:
            response, error = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}, None
            if answer.status < SERVER_FAULT and answer.status not in BUSY:
                break
            faults += answer.status not in BUSY
            wanted = answer.retry_after or 0.0
        if faults < TRIES:
            stopping.wait(min(MOST_WAIT, max(pause, wanted)))
            pause = min(MOST_WAIT, 2 * pause)
    told = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": request.custom_id, "response": response, "error": error}
    return told | {"request": request.digest}


def _sender(address: str, key: str) -> Callable[[BatchRequest], Answer]:
    """A function that sends a request to a server. Each thread keeps a connection."""
    netloc, local = urlsplit(address).netloc, threading.local()

    def send(request: BatchRequest) -> Answer:
        kept = vars(local).get("connection")
        connection = http.client.HTTPConnection(netloc) if kept is None else kept
        local.connection = None  # it is kept only after a whole answer
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        try:
            connection.request("POST", request.route, request.body, headers)
            found = connection.getresponse()
            body = json.loads(found.read())
        except BaseException:
            connection.close()
            raise
        local.connection = connection
        return Answer(found.status, found.headers.get("x-request-id"), _seconds(found.headers.get("retry-after")), body)

    return send


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None


def serve_arguments(options: argparse.Namespace) -> list[str]:
    """The options of the model and the engine, as words of a command line of `nanovllm serve`."""
    chosen = {"max_step_ms": inf, **chosen_model_options(options)}  # no bound on a step: nobody waits for single tokens
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={_word(value)}") for name, value in chosen.items()]


def _word(value: Any) -> str:
    return "off" if value is False else str(value)


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """A server with the options of the command, as a process of its own. Yields its address and its only key."""
    key = secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "nanovllm", "serve", *serve_arguments(options)]
    command += ["--port", "0", "--any-model-name", f"--max-waiting={AT_ONCE * ROWS}", "--shutdown-seconds=1"]
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {KEYS: key},
        preexec_fn=lambda: _end_with(parent),  # noqa: PLW1509  # no other threads exist yet
    )
    try:
        assert process.stdout is not None
        address = next((found[1] for line in process.stdout if (found := SERVES.search(line))), None)
        if address is None:
            raise BatchServerError(f"the server of the batch ended with status {process.wait()} before it served: see the lines above")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the server
        yield address, key
    finally:
        process.terminate()
        process.wait()


def _end_with(parent: int) -> None:
    """Ask Linux to end this process when its parent ends, however that ends. Elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
