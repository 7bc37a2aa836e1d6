"""`nanovllm generate --input FILE --output FILE`: requests in the form of OpenAI's batches."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.entrypoints.arguments import chosen_model_options
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.batch import run_batch
from nanovllm.entrypoints.cli.batch.batch_file import BatchRequest, ResultFile, read_requests
from nanovllm.entrypoints.cli.batch.run_batch import TRIES, Answer, answered, serve_arguments
from nanovllm.errors import InvalidRequestError

COMPLETION: dict[str, Any] = {"model": "any", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": COMPLETION} | changes


def written(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return file


def result(custom_id: str, status: int | None) -> dict[str, Any]:
    response = None if status is None else {"status_code": status, "request_id": "r", "body": {}}
    (own,) = requests_of(custom_id)
    return {"id": "batch_req_0", "custom_id": custom_id, "response": response, "error": None, "request": own.digest}


def requests_of(*names: str) -> list[BatchRequest]:
    return [BatchRequest(custom_id=name, route="/v1/completions", body=b"{}") for name in names]


def test_requests_are_read_and_empty_lines_skipped(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("\n" + json.dumps(line("a")) + "\n\n" + json.dumps(line("ü", method=None, url="/v1/responses")))
    first, second = read_requests(file)
    assert (first.custom_id, first.route, json.loads(first.body)) == ("a", "/v1/completions", COMPLETION)
    assert (second.custom_id, second.route) == ("ü", "/v1/responses")


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ("[1]", "in.jsonl:2: this line is not a JSON object"),
        ("{", "in.jsonl:2: this line is not a JSON object: Expecting"),
        ("[" * 100_000, "in.jsonl:2: this line is not a JSON object"),
        (json.dumps(line("\ud800")), "in.jsonl:2: custom_id=.* must be a string of whole characters"),
        (json.dumps(line(7)), "in.jsonl:2: custom_id=7 must be a string of whole characters"),
        (json.dumps(line("")), "in.jsonl:2: custom_id='' must be a string of whole characters, and not empty"),
        (json.dumps(line("a")), "in.jsonl:2: custom_id 'a' is in line 1 too: each line needs another one"),
        (json.dumps(line("b", method="GET")), "in.jsonl:2: method='GET' must be 'POST'"),
        (json.dumps(line("b", url="/v1/embeddings")), "in.jsonl:2: url='/v1/embeddings' must be one of /v1/chat/completions"),
        (json.dumps(line("b", body=[])), r"in.jsonl:2: body=\[\] must be a JSON object"),
        (json.dumps(line("b", body=COMPLETION | {"stream": True})), "in.jsonl:2: body.stream is true: a batch has whole replies"),
    ],
)
def test_a_bad_line_is_named_before_a_model_is_loaded(
    bad: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_batch, "_server", lambda _: pytest.fail("a server was started"))
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(line("a")) + "\n" + bad + "\n")
    with pytest.raises(InvalidRequestError, match=match):
        read_requests(file)
    assert cli.main(["generate", "--input", str(file), "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "in.jsonl:2" in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"nowhere.jsonl: No such file"):
        read_requests(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--input", "in.jsonl"], "belong together"),
        (["--output", "out.jsonl"], "belong together"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "Once"], "cannot be combined with a prompt"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--chat"], "cannot be combined with"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--temperature", "1", "--top-p", "0.5"], "--temperature, --top-p: with --input"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "--max-tokens", "3"], "--max-tokens: with --input"),
        (["--input", "in.jsonl", "--output", "/proc/no/out.jsonl"], "/proc/no/out.jsonl cannot be written"),
    ],
)
def test_options_that_contradict_each_other(
    arguments: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written(tmp_path / "in.jsonl", line()).parent)
    assert cli.main(["generate", *arguments]) == 2
    assert match in capsys.readouterr().err


def test_an_unfinished_file_is_gone_on_from(tmp_path: Path) -> None:
    """Replies and the request's own faults stay, a server's faults and what was cut off are run again."""
    file = written(tmp_path / "out.jsonl", result("a", 200), result("b", 500), result("c", 400), result("d", None), result("f", 429))
    file.chmod(0o600)
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    kept = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(kept) + json.dumps(result("e", 200)).encode()[:-7])
    with ResultFile(link, requests_of(*"abcdef")) as results:
        assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o600
        assert results.done == {"a", "c"} and results.num_failed == 1
        assert file.read_bytes() == kept[0] + kept[2]
        results.add(result("e", 200))
        assert file.read_bytes().endswith(b"\n") and b'"e"' in file.read_bytes()
    assert results.done == {"a", "c", "e"}


def test_a_whole_last_line_without_its_end_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(json.dumps(result("a", 200)))
    with ResultFile(file, requests_of("a")) as results:
        assert results.done == set() and file.read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("no JSON\n" + json.dumps(result("a", 200)) + "\n", "out.jsonl:1: this line is not the result of a batch"),
        ('{"precious": true}\n', "out.jsonl:1: this line is not the result of a batch"),
        ('{"precious": true}', "out.jsonl:1: this line is not the result of a batch"),
        (json.dumps(result("other", 200)) + "\n", "out.jsonl:1: custom_id 'other': the batch has no such request"),
        (json.dumps(result("a", 200) | {"request": "0"}) + "\n", "out.jsonl:1: custom_id 'a': the batch asks something else under this"),
    ],
)
def test_the_results_of_another_batch_are_left_alone(text: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=match):
        ResultFile(file, requests_of("a"))
    assert file.read_text() == text


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    file = written(tmp_path / "out.jsonl", result("a", 500))
    with ResultFile(file, requests_of("a")) as first:
        first.add(result("a", 200))
        with pytest.raises(InvalidRequestError, match="another run writes to it"):
            ResultFile(file, requests_of("a"))
    with ResultFile(file, requests_of("a")) as second:
        assert second.done == {"a"}


def test_a_pipe_is_refused_and_half_a_character_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequestError, match="not a plain file"):
        ResultFile(tmp_path / "pipe", requests_of("a"))
    with ResultFile(tmp_path / "out.jsonl", requests_of("a")) as results:
        results.add(result("a", 200) | {"error": "\ud800"})
    assert json.loads((tmp_path / "out.jsonl").read_text())["error"] == "\ud800"


def test_the_input_is_not_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "in.jsonl", line())
    before = file.read_text()
    assert cli.main(["generate", "--input", str(file), "--output", str(file)]) == 2
    assert "is the input" in capsys.readouterr().err and file.read_text() == before


def test_who_stops_waits_for_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, waits, threads = threading.Event(), threading.Event.wait, {*threading.enumerate()}

    def wait(event: threading.Event, seconds: float | None = None) -> bool:
        return waits(event, None if seconds is None else 600 * seconds)  # the first pause is of a second

    def send(request: BatchRequest) -> Answer:
        if request.custom_id == "a":
            return Answer(200, None, None, {})
        stopped.set()
        raise ConnectionRefusedError("nobody")

    monkeypatch.setattr(run_batch, "threading", SimpleNamespace(Event=type("Event", (threading.Event,), {"wait": wait})))
    results = answered(requests_of("a", "b"), send)
    next(results)
    assert stopped.wait(120)
    results.close()
    end = time.monotonic() + 120
    while any("ThreadPoolExecutor" in thread.name for thread in {*threading.enumerate()} - threads):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_no_fault_of_a_request_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    noted = type("Event", (threading.Event,), {"wait": lambda self, seconds: pauses.append(seconds) or False})
    monkeypatch.setattr(run_batch, "threading", SimpleNamespace(Event=noted))  # other threads of this process wait as before
    busy = [Answer(429, "1", 7.0, {}), Answer(503, "2", 1e9, {}), *[Answer(429, "1", 1.0, {})] * (2 * TRIES)]
    ways: dict[str, Iterator[Any]] = {
        "busy": iter([*busy, Answer(200, "3", None, {"x": 1})]),
        "faulty": iter([Answer(500, "4", None, {})] * TRIES),
        "own": iter([Answer(400, "5", None, {})]),
        "cut": iter([ConnectionResetError("gone"), Answer(200, "6", None, {})]),
        "dead": iter([ConnectionRefusedError("nobody")] * TRIES),
    }

    def send(request: BatchRequest) -> Answer:
        found = next(ways[request.custom_id])
        if isinstance(found, Exception):
            raise found
        return found

    found = {each["custom_id"]: each for name in ways for each in answered(requests_of(name), send)}
    assert {name: each["response"] and each["response"]["status_code"] for name, each in found.items()} == {
        "busy": 200, "faulty": 500, "own": 400, "cut": 200, "dead": None,
    }  # fmt: skip
    assert found["dead"]["error"] == {"code": "connection_error", "message": "nobody"} and found["cut"]["error"] is None
    assert pauses[:4] == [7.0, run_batch.MOST_WAIT, 4.0, 8.0] and all(not list(way) for way in ways.values())


def test_all_requests_are_answered_once_however_many() -> None:
    names = [str(number) for number in range(3 * run_batch.AT_ONCE)]
    found = [each["custom_id"] for each in answered(requests_of(*names), lambda request: Answer(200, request.custom_id, None, {}))]
    assert sorted(found) == sorted(names)


def test_the_server_gets_the_options_of_the_model() -> None:
    parser = cli.build_parser()
    given = ["--model", "m", "--device", "cpu", "--num-pages", "64", "--tuning", "off", "--eager", "--memory-fraction", "0.5"]
    options = parser.parse_args(["generate", "--input", "i", "--output", "o", *given])
    served = parser.parse_args(["serve", *serve_arguments(options)])
    assert served.max_step_ms == float("inf")  # nobody waits for single tokens
    chosen = chosen_model_options(options)
    assert set(chosen) == {"model", "device", "num_pages", "tuning", "eager", "memory_fraction"}
    assert chosen == {name: vars(served)[name] for name in chosen}
    bounded = parser.parse_args(["generate", "--input", "i", "--output", "o", "--max-step-ms", "20"])
    assert parser.parse_args(["serve", *serve_arguments(bounded)]).max_step_ms == 20
    shared = parser.parse_args(["generate", "--input", "i", "--output", "o", "--tensor-parallel-size", "2"])
    assert parser.parse_args(["serve", *serve_arguments(shared)]).tensor_parallel_size == 2


@pytest.mark.unhooked  # servers as processes
def test_a_batch_is_answered_and_gone_on_from(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0, "max_tokens": 40}
    chat |= {"model": "m", "chat_template_kwargs": {"enable_thinking": False}}
    file = written(
        tmp_path / "in.jsonl",
        line("text"),
        line("chat", url="/v1/chat/completions", body=chat),
        line("answer", url="/v1/responses", body={"model": "m", "input": "What is 3 + 4?", "max_output_tokens": 16}),
        line("bad", body=COMPLETION | {"temperature": -3}),
    )
    out, command = tmp_path / "out.jsonl", [sys.executable, "-m", "nanovllm", "generate", "--device", "cpu", "--num-pages", "128"]
    command += ["--input", str(file), "--output", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 2 and "1 of 4 requests ended with an error" in ended.stderr, ended.stderr
    found = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert {name: each["response"]["status_code"] for name, each in found.items()} == {"text": 200, "chat": 200, "answer": 200, "bad": 400}
    assert all(each["id"].startswith("batch_req_") and each["response"]["request_id"] and each["error"] is None for each in found.values())
    assert found["text"]["response"]["body"]["choices"][0]["text"] and found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert "7" in found["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(each for each in lines if '"chat"' not in each))
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert again.returncode == 2 and "3 of 4 requests are in" in again.stderr
    assert sorted(json.loads(each)["custom_id"] for each in out.read_text().splitlines()) == ["answer", "bad", "chat", "text"]


@pytest.mark.unhooked
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_batch_that_is_killed_leaves_no_server(number: signal.Signals, tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", *(line(str(name), body=COMPLETION | {"max_tokens": 1500}) for name in range(64)))
    command = [sys.executable, "-m", "nanovllm", "generate", "--device", "cpu", "--num-pages", "256"]
    process = subprocess.Popen([*command, "--input", str(file), "--output", str(tmp_path / "out.jsonl")], stderr=subprocess.DEVNULL)
    try:
        children: list[int] = []
        end = time.monotonic() + 240
        while len(children) < 3 and time.monotonic() < end:  # the server, its engine, its front end
            time.sleep(0.1)
            children = descendants(process.pid)
        assert len(children) >= 3
        process.send_signal(number)
        process.wait(240)
        end = time.monotonic() + 240
        while any(map(alive, children)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(alive, children))
    finally:
        process.kill()
        process.wait()


def descendants(parent: int) -> list[int]:
    """The processes below one, by /proc."""
    found, todo = [], [parent]
    while todo:
        pid = todo.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found += children
            todo += children
    return found


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and is not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
