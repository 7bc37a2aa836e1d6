"""`nanovllm serve` with its real processes: starts that fail, orderly ends, and what happens when a process is killed."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm.entrypoints.cli import main as cli

pytestmark = [pytest.mark.unhooked, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

LIMIT = 300.0  # seconds, of which a busy machine may take most
PATH = "/v1/completions"
GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
LONG = GREEDY | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
TINY = Path(nanovllm.__file__).parent / "assets" / "tiny"
RIGHT = ", a boy named Jonas lived in a"


class Served:
    """A server in processes of its own."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="nv")
        command = [sys.executable, "-m", "nanovllm", "serve", "--device", "cpu", "--num-pages", "512", "--port", "0", *options]
        more = {"TMPDIR": self.folder.name, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        self.opened = contextlib.ExitStack()
        self.files = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | more)

    @property
    def lines(self) -> list[str]:
        return self.files[0].read_text().splitlines()

    @property
    def errors(self) -> list[str]:
        return self.files[1].read_text().splitlines()

    def ready(self) -> "Served":
        """Wait until it says that it serves: then every front end answers."""
        self.wait(lambda: len(self.lines) == 2)
        assert self.lines[0].startswith("nanovllm serves tiny at http"), self.lines
        self.port = int(self.lines[0].rpartition(":")[2])
        assert self.lines[1] == f"the chat page: {self.lines[0].rpartition(' ')[2]}/"
        assert self.get("/health") == 200 and len(self.children()) >= 2
        return self

    def wait(self, met: Any, seconds: float = LIMIT) -> None:
        end = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < end and self.process.poll() is None, (self.process.returncode, self.lines, self.errors)
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        return self.process.wait(LIMIT)

    def children(self) -> list[int]:
        """The engine, and after it the front ends in the order of their starts."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text(encoding="ascii").split()]

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is closed with the server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        self.opened.callback(connection.close)
        return connection

    def get(self, path: str) -> int:
        """The status; 0 if there is no answer."""
        try:
            with contextlib.closing(self.connect()) as connection:
                connection.request("GET", path)
                return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0

    def post(self, body: dict[str, Any], path: str = PATH) -> http.client.HTTPResponse:
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        self.opened.callback(answer.close)
        return answer

    def right(self) -> bool:
        """Whether a request is answered rightly."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = self.post(GREEDY)
            if answer.status == 200:
                return json.loads(answer.read())["choices"][0]["text"] == RIGHT
        return False


@pytest.fixture
def served() -> Iterator[Any]:
    """Starts servers, and at the end looks that nothing of them is left."""
    started: list[Served] = []

    def start(*options: str, **environment: str) -> Served:
        started.append(Served(*options, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.end()
        one.opened.close()
        one.folder.cleanup()


def gone(pids: list[int], seconds: float = LIMIT) -> bool:
    """Whether the processes end within a time."""
    end = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except (FileNotFoundError, ProcessLookupError):  # it may go at any time
        return False


def empty(server: Served) -> bool:
    """Whether the server's temporary folder was removed."""
    return not [one for one in Path(server.folder.name).iterdir() if one.name.startswith("nanovllm-")]


def stream(server: Served, body: dict[str, Any] = LONG) -> tuple[threading.Thread, list[bytes]]:
    """Begin a stream. Returns a thread that reads it to its end, and what it has read."""
    answer = server.post(body)
    assert answer.status == 200
    found = [answer.readline()]

    def read() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while part := answer.readline():
                found.append(part)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, found


def test_starts_that_fail_say_why_in_one_line(served: Any, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("NANOVLLM_API_KEY", raising=False)
    for options, message in (  # told before there is any process
        (("--model", "no/such-model"), "no/such-model"),
        (("no/such-model",), "no/such-model"),
        (("tiny", "--model", "no/such-model"), "two models were named, 'tiny' and --model 'no/such-model'"),
        (("--model", "tiny", "no/such-model"), "two models were named, 'no/such-model' and --model 'tiny'"),
        (("--chunk-dir", "nochunks"), "--chunk-dir nochunks does not exist: make the folder first"),
        (("--chunk-dir", __file__), "test_serve_processes.py is not a folder"),
        (("--request-timeout", "0"), "request_timeout=0.0"),
        (("--keep-chunks",), "--chunk-dir, or --kv-dir"),
        (("--host", "0.0.0.0"), "a key is needed"),
        (("--cors-origin", "chat"), "--cors-origin"),
    ):
        assert cli.main(["serve", "--device", "cpu", *options]) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("nanovllm: error: ") and message in err and err.count("\n") == 1
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    for weights in tmp_path.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:100_000])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        starts = [
            (served("--port", port), f"--port {port} cannot be used: Address already in use"),
            (served("--model", str(tmp_path)), str(tmp_path)),  # found by the engine
        ]
        for server, message in starts:
            assert server.end() == 2 and not server.lines, server.errors
            assert len(server.errors) == 1 and message in server.errors[0] and server.errors[0].startswith("nanovllm: error: ")
            assert empty(server)


def test_an_orderly_end_lets_requests_end(served: Any):
    server = served("tiny", "--shutdown-seconds", "60", "--request-timeout", "60", "--access-log").ready()
    pids = server.children()
    kept = server.connect()
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    thread, found = stream(server)
    server.process.send_signal(signal.SIGTERM)
    server.wait(lambda: server.get("/health") == 503)
    kept.request("POST", PATH, json.dumps(GREEDY), {"content-type": "application/json"})
    refused = kept.getresponse()
    assert refused.status == 503 and refused.headers["connection"] == "close" and b"shutting_down" in refused.read()
    thread.join(LIMIT)
    assert found[-2:] == [b"data: [DONE]\n", b"\n"] and b'"length"' in b"".join(found)
    assert server.end() == 0 and gone(pids) and empty(server)
    assert any(" POST '/v1/completions' 200 " in line for line in server.errors) and not any("Traceback" in line for line in server.errors)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_kept_chunks_are_those_of_the_next_server(served: Any, tmp_path: Path, number: int):
    options = ("--chunk-dir", str(tmp_path), "--keep-chunks")
    server = served(*options).ready()
    assert server.post({"name": "kept", "text": "Once upon"}, "/v1/chunks").status == 200
    reply = server.post(GREEDY | {"prompt": " a time", "chunks": ["kept"]}).read()
    server.process.send_signal(number)
    assert server.end() == 0 and not server.errors
    server = served(*options).ready()
    assert json.loads(server.post(GREEDY | {"prompt": " a time", "chunks": ["kept"]}).read())["choices"] == json.loads(reply)["choices"]
    server.process.send_signal(number)
    assert server.end() == 0 and not server.errors


def test_a_second_server_does_not_keep_chunks_in_the_same_folder(served: Any, tmp_path: Path):
    options = ("--host-kv-gib", "0.1", "--kv-dir", str(tmp_path / "kv"), "--kv-dir-gib", "1")
    first = served(*options).ready()
    second = served(*options)
    (own := tmp_path / "own").mkdir()
    other = served(*options, "--chunk-dir", str(own)).ready()  # only pages are shared
    assert second.end() == 2 and not second.lines
    assert "waiting" in second.errors[0] and second.errors[1] == (
        f"nanovllm: error: another server has its chunks in the folder {tmp_path / 'kv' / 'chunks'}: give each server a --chunk-dir of "
        "its own (the pages of --kv-dir may be shared)"
    )
    forgetful = served("--chunk-dir", str(tmp_path / "kv" / "chunks"))  # it would forget which chunks are in memory
    assert forgetful.end() == 2 and "another server has its chunks in the folder" in forgetful.errors[-1]
    assert first.post({"name": "kept", "text": "Once upon"}, "/v1/chunks").status == 200
    assert other.get("/v1/chunks/kept") == 404
    first.process.send_signal(signal.SIGTERM)
    third = served(*options).ready()  # started while the first one ends
    assert first.end() == 0 and third.get("/v1/chunks/kept") == 200
    third.process.kill()  # alone: its engine and front end end by themselves
    fourth = served(*options).ready()
    assert fourth.get("/v1/chunks/kept") == 200 and not fourth.errors


def test_a_server_that_cannot_start_leaves_no_folders(served: Any, tmp_path: Path):
    server = served("--host-kv-gib", "0.1", "--kv-dir", str(tmp_path / "kv"), "--num-pages", "0")
    assert server.end() == 2
    assert server.errors == ["nanovllm: error: --num-pages 0 must be an integer of at least 1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("killed", [True, False])
def test_the_next_server_has_the_kv_and_the_named_chunks_of_one_that_was_killed(served: Any, tmp_path: Path, killed: bool):
    options = ("--host-kv-gib", "0.1", "--kv-dir", str(tmp_path / "kv"), "--kv-dir-gib", "1")
    asked = GREEDY | {"prompt": "Once upon a time, there was a cat. " * 120}  # so long that reading pays on any disk
    server = served(*options).ready()
    assert server.post({"name": "kept", "text": "Once upon"}, "/v1/chunks").status == 200
    reply = json.loads(server.post(asked).read())
    num_pages = reply["usage"]["prompt_tokens"] // 16
    if killed:
        server.wait(lambda: len([*tmp_path.rglob("*.kv")]) >= num_pages and [*tmp_path.rglob("*.name")])  # it has had nothing to do
        for _ in range(2):  # the second one at once, before anything is written
            pids = server.children()
            for pid in (server.process.pid, *pids):
                os.kill(pid, signal.SIGKILL)
            server.end()
            assert gone(pids)
            server = served(*options).ready()
    else:
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0 and not server.errors
        server = served(*options).ready()
    assert server.get("/v1/chunks/kept") == 200
    again = json.loads(server.post(asked).read())
    assert again["choices"] == reply["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 * num_pages // 2  # on a slow disk it runs the front meanwhile
    connection = server.connect()
    connection.request("GET", "/metrics")
    metrics = connection.getresponse().read().decode()
    (told,) = re.findall(r'nanovllm_disk_read_tokens_total\{model_name="tiny"\} (\S+)', metrics)
    assert 16 * num_pages // 2 <= float(told) <= 16 * num_pages
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0 and not server.errors


def test_files_that_no_client_has_asked_for_go_with_their_chunks(served: Any, tmp_path: Path):
    def files() -> int:
        return len([*(tmp_path / "chunks").rglob("*.safetensors")])

    server = served("--host-kv-gib", "0.1", "--kv-dir", str(tmp_path), "--max-chunks", "1").ready()
    for name in ("one", "two"):
        assert server.post({"name": name, "text": "Once upon"}, "/v1/chunks").status == 200
        server.wait(lambda: [*tmp_path.rglob("*.name")])
        assert files() == 1
        connection = server.connect()
        connection.request("DELETE", f"/v1/chunks/{name}")
        assert connection.getresponse().status < 300 and not files()
    assert server.post({"name": "asked", "text": "Once upon"}, "/v1/chunks").status == 200
    server.wait(lambda: [*tmp_path.rglob("*.name")])
    assert server.post({}, "/v1/chunks/asked/save").status == 200
    connection = server.connect()
    connection.request("DELETE", "/v1/chunks/asked")
    assert connection.getresponse().status < 300 and files() == 1, "a client has asked for this one"
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0 and not server.errors


@pytest.mark.long
@pytest.mark.parametrize("second", [False, True])
def test_requests_that_do_not_end_in_time_are_told_so(served: Any, second: bool):
    server = served("--shutdown-seconds", "60" if second else "0.3").ready()
    pids = server.children()
    thread, found = stream(server)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    if second:
        server.wait(lambda: server.get("/health") == 503)
        server.process.send_signal(signal.SIGINT)
    assert server.end() == second and time.monotonic() - began < 50.0
    thread.join(LIMIT)
    told = b"".join(found)
    assert b"the server has shut down" in told and b'"code":"shutting_down"' in told and gone(pids) and empty(server)
    assert not any("Traceback" in line for line in server.errors), server.errors


def test_a_killed_engine_is_told_of_and_started_again(served: Any, tmp_path: Path):
    server = served("--chunk-dir", str(tmp_path)).ready()
    engine, front = server.children()
    assert server.post({"name": "kept", "text": "Once upon"}, "/v1/chunks").status == 200
    assert server.post({}, "/v1/chunks/kept/save").status == 200
    thread, found = stream(server)
    os.kill(engine, signal.SIGKILL)
    thread.join(LIMIT)
    assert b'"code":"engine_unavailable"' in b"".join(found) and found[-2] == b"data: [DONE]\n"
    assert server.get("/health") in (0, 200, 503) and server.right() in (False, True)
    server.wait(server.right)
    assert front in server.children() and engine not in server.children()
    assert server.get("/v1/chunks/kept") == 200
    assert any("it is started again" in line for line in server.lines)
    pids = server.children()
    server.process.kill()
    server.end()
    assert gone(pids)  # nothing outlives a killed supervisor


def test_two_front_ends_one_of_which_is_killed_and_then_both(served: Any):
    server = served("--workers", "2", "--max-num-seqs", "8").ready()
    engine, *fronts = server.children()
    assert len(fronts) == 2 and all(answers_alone(server, other) for other in fronts)
    streams = list[tuple[threading.Thread, list[bytes]]]()
    for other in fronts:
        with stopped(other):  # else chance says which of them takes a connection
            streams += [stream(server, LONG | {"max_tokens": 300}) for _ in range(3)]
    os.kill(fronts[0], signal.SIGKILL)
    for thread, _ in streams:
        thread.join(LIMIT)
    assert all(b"[DONE]" in b"".join(found) for _, found in streams[:3])  # those of the other
    server.wait(lambda: len(server.children()) == 3 and fronts[0] not in server.children())
    assert {engine, fronts[1]} <= set(server.children())
    streams = [stream(server) for _ in range(6)]
    for pid in server.children():
        if pid != engine:
            os.kill(pid, signal.SIGKILL)
    for thread, found in streams:
        thread.join(LIMIT)
        assert b"[DONE]" not in b"".join(found)
    server.wait(server.right)
    before = seconds_of(engine)
    time.sleep(0.5)
    assert seconds_of(engine) - before < 0.2 and engine in server.children()  # it runs none of the streams' 11,000 tokens


def seconds_of(pid: int) -> float:
    """The time that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def answers_alone(server: Served, other: int) -> bool:
    with stopped(other):
        return server.right()


@pytest.mark.long
def test_an_engine_that_is_not_started_again(served: Any):
    server = served("--no-restart").ready()
    engine, front = server.children()
    os.kill(engine, signal.SIGKILL)
    server.wait(lambda: server.get("/health") == 503)
    server.wait(lambda: any("is not started again" in line for line in server.lines))
    assert server.children() == [front] and server.post(GREEDY).status == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


@pytest.mark.long
def test_an_engine_that_fails_again_and_again_stays_down(served: Any):
    server = served().ready()
    _, front = server.children()
    for count in range(1, 7):
        server.wait(lambda: len(server.children()) == 2 and server.get("/health") == 200)
        os.kill(next(pid for pid in server.children() if pid != front), signal.SIGKILL)
        server.wait(lambda count=count: len(server.lines) > count + 1)
    assert ["is not started again" in line for line in server.lines[2:]] == [False] * 5 + [True]
    assert server.get("/health") == 503 and server.children() == [front]


def test_an_engine_of_two_ranks(served: Any, tmp_path: Path) -> None:
    """Replies, chunks and their files are those of one rank; a rank that dies ends the engine, which is started again."""
    server = served("--tensor-parallel-size", "2", "--chunk-dir", str(tmp_path)).ready()
    assert server.right()
    made = server.post({"name": "king", "text": "The king of Aistonia is Oswin."}, "/v1/chunks")
    assert made.status == 200, made.read()
    for path in ("/v1/chunks/king/save", "/v1/chunks/king/load"):
        answer = server.post({"replace": True} if path.endswith("load") else {}, path)
        assert answer.status == 200, answer.read()
    asked = {"model": "tiny", "prompt": " Who is the king?", "max_tokens": 8, "temperature": 0, "chunks": ["king"]}
    first = json.loads(server.post(asked).read())["choices"][0]["text"]
    ranks = followers()
    assert len(ranks) == 1
    reader, _ = stream(server)
    os.kill(ranks[0], signal.SIGKILL)
    reader.join(LIMIT)
    assert not reader.is_alive(), "the stream ends"
    end = time.monotonic() + LIMIT
    while not server.right():
        assert time.monotonic() < end, "the engine is started again"
        time.sleep(0.2)
    assert json.loads(server.post(asked).read())["choices"][0]["text"] == first, "with its chunk"
    again = followers()
    assert len(again) == 1 and again != ranks
    server.process.terminate()
    assert server.end() == 0
    assert gone(again)


def followers() -> list[int]:
    """The processes of ranks other than 0 that descend from this one."""
    parents, found = dict[int, int](), list[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"ranks.follower" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))

    def own(pid: int) -> bool:
        return pid == os.getpid() or (pid > 1 and own(parents.get(pid, 0)))

    return [pid for pid in found if own(pid)]
