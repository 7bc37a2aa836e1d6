"""`nanovllm chat --server URL`: a conversation with a running server."""

import hashlib
import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli import remote_chat
from nanovllm.entrypoints.cli.remote_chat import Client, RemoteTalk, ServerError
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import InvalidRequestError
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked  # servers in threads
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with Live() as live:
        yield live


@pytest.fixture
def run(server: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a chat with these lines on stdin. Returns the exit code, what it printed, and what it noted."""

    def run(text: str, *arguments: str, address: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = cli.main(["chat", "--server", address or f"http://127.0.0.1:{server.port}", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_conversation_goes_on_and_reuses_its_tokens(run: Run) -> None:
    asked = "What is 3 + 4?\nWhat is 5 + 2?\n/stats\n/memory\n/reset\n/stats\n/exit\n"
    code, out, told = run(asked, "--no-think", "--temperature", "0", "--max-tokens", "40")
    assert code == 0 and out.count("7") >= 2
    assert "A new conversation." in told and told.endswith("no turn yet\n" + told.splitlines()[-1] + "\n")
    last, since = (line for line in told.splitlines() if line.startswith(("last turn", "since"))), told.splitlines()[-1]
    assert next(last).endswith("reply tokens") and since.startswith("since the start: ") and not since.endswith(" 0 reused")
    assert "the chat page at http://" in told


def test_thinking_is_shown_in_a_block_and_turned_off(run: Run) -> None:
    code, out, told = run("What is 3 + 4?\n/no_think\nWhat is 3 + 4?\n", "--temperature", "0", "--max-tokens", "200")
    assert code == 0 and out.count("<think>") == out.count("</think>") == 1 and out.rstrip().endswith("3 + 4 = 7.")
    assert "Thinking is off." in told


def test_the_system_message_and_the_options_reach_the_server() -> None:
    bodies: list[dict[str, Any]] = []

    class Noting(Client):
        def events(self, body: dict[str, Any]) -> Any:
            bodies.append(json.loads(json.dumps(body)))
            yield {"choices": [{"delta": {"content": "Yes."}}]}

    talk = RemoteTalk(Noting("http://127.0.0.1:1", None), "m", "Be brief.", False, {"top_k": 3})
    talk.say("Really?")
    talk.think(True)
    talk.say("And?")
    first, second = bodies
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Really?"}]
    assert second["messages"][2:] == [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    assert (first["top_k"], first["stream"]) == (3, True)
    assert [each["chat_template_kwargs"]["enable_thinking"] for each in bodies] == [False, True]
    talk.reset()
    assert talk.messages == first["messages"][:1]


def test_ctrl_c_ends_the_reply_and_the_pages_come_back(
    server: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client(f"127.0.0.1:{server.port}", None)
    plain = client.events

    def interrupted(body: dict[str, Any]) -> Any:
        for number, event in enumerate(plain(body)):
            if number == 12:
                signal.raise_signal(signal.SIGINT)
            yield event

    monkeypatch.setattr(client, "events", interrupted)
    talk = RemoteTalk(client, "tiny", None, False, {"max_tokens": 400, "ignore_eos": True, "temperature": 0})
    talk.say("Tell me a story.")
    assert "[stopped]" in capsys.readouterr().err
    assert [each["role"] for each in talk.messages] == ["user", "assistant"] and talk.messages[-1]["content"]
    server.wait_until_idle()
    assert server.engine.state.pool.num_available == server.engine.state.config.num_pages


def test_a_key_is_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with Live(settings=Settings(api_keys=(hashlib.sha256(b"secret").digest(),), shutdown_seconds=1.0)) as live:
        address = f"http://127.0.0.1:{live.port}/v1/"
        monkeypatch.delenv("NANOVLLM_API_KEY", raising=False)
        code, _, told = run("Hello\n", address=address)
        assert code == 2 and "answers with status 401" in told and "secret" not in told
        monkeypatch.setenv("NANOVLLM_API_KEY", "secret\n")  # as in a mounted file
        code, out, told = run("What is 3 + 4?\n", "--no-think", "--temperature", "0", address=address)
        assert code == 0 and "7" in out, told


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--model", "other"], "has no model 'other'; it serves tiny"),
        (["--device", "cpu", "--num-pages", "9"], "--device, --num-pages: with --server the model and its engine are the server's"),
        (["--eager", "--memory-fraction", "0.1", "--retain", "gap"], "--memory-fraction, --eager, --retain: with --server"),
    ],
)
def test_options_that_a_server_cannot_follow(run: Run, arguments: list[str], match: str) -> None:
    code, _, told = run("Hello\n", *arguments)
    assert code == 2 and match in told


@pytest.mark.parametrize("address", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_named(run: Run, address: str) -> None:
    code, _, told = run("Hello\n", address=address)
    assert code == 2 and f"--server {address}: " in told


@pytest.mark.parametrize("key", ["s\u20acret", "two\nlines"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(run: Run, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_API_KEY", key)
    code, _, told = run("Hello\n")
    assert code == 2 and "NANOVLLM_API_KEY has characters" in told and "ret" not in told.replace("printable", "") and "lines" not in told


def test_a_password_in_an_address_is_refused_and_not_shown(run: Run) -> None:
    code, _, told = run("Hello\n", address="http://me:PASSWORD@127.0.0.1:1")
    assert code == 2 and "without a name and a password" in told and "PASSWORD" not in told


def test_a_server_that_is_not_there_is_named(run: Run) -> None:
    code, _, told = run("Hello\n", address="http://127.0.0.1:1")
    assert code == 2 and "http://127.0.0.1:1 cannot be reached" in told
    code, _, told = run("Hello\n", address="no-such-host.invalid")
    assert code == 2 and "no-such-host.invalid cannot be reached" in told and "give a URL such as http://127.0.0.1:8000" in told


def test_a_refused_message_is_forgotten_and_the_chat_goes_on(run: Run) -> None:
    code, out, told = run("Hello\nWhat is 3 + 4?\n", "--no-think", "--max-tokens", "99999")
    assert code == 0 and told.count("error: ") == 2 and "answers with status 400" in told and out == ""


class Breaking(BaseHTTPRequestHandler):
    """A server that breaks its answer off."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "Once"}}]}\n\n' + type(self).rest)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    rest = b""


@pytest.mark.parametrize(
    ("rest", "match"),
    [
        (b"", "broke off its answer"),
        (b"data: {no json\n\n", "gave an answer of another form: Expecting"),
        (b"data: []\n\n", "gave an answer of another form"),
        (b'data: {"choices": null}\n\n', "gave an answer of another form"),
        (b'data: {"choices": [{"text": "x"}]}\n\n', "gave an answer of another form: 'delta'"),
        (b'data: {"usage": {"completion_tokens": 1}}\n\n', "gave an answer of another form: 'prompt_tokens'"),
        (b'data: {"error": {"message": "the engine died"}}\n\n', "the engine died"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(rest: bytes, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    handler = type("Own", (Breaking,), {"rest": rest})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as live:
        threading.Thread(target=live.serve_forever, daemon=True).start()
        talk = RemoteTalk(Client(f"http://127.0.0.1:{live.server_port}", None), "m", None, None, {})
        with pytest.raises(ServerError, match=match):
            talk.say("Go on.")
        live.shutdown()
    assert capsys.readouterr().out == "Once\n" and talk.messages == []


@pytest.mark.parametrize("page", [b"<html>hello</html>", b"[]", b'{"data": [1]}', b'{"data": null}'])
def test_a_server_of_another_kind_is_an_error_and_controls_no_terminal(page: bytes, run: Run) -> None:
    class Other(Breaking):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

    class Coloured(Breaking):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "\\u001b[31mred"}]}')

        def do_POST(self) -> None:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"\x1b]0;OWNED\x07")

    for handler, match in ((Other, "gave an answer of another form"), (Coloured, "answers with status 400")):
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as live:
            threading.Thread(target=live.serve_forever, daemon=True).start()
            _, _, told = run("Hello\n", address=f"http://127.0.0.1:{live.server_port}")
            live.shutdown()
        assert match in told and "\x1b" not in told and "\x07" not in told


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_chat, "SECONDS", 0.2)

    class Silent(Breaking):
        def do_GET(self) -> None:
            time.sleep(2)

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as live:
        threading.Thread(target=live.serve_forever, daemon=True).start()
        with pytest.raises(ServerError, match="cannot be reached: timed out"):
            Client(f"http://127.0.0.1:{live.server_port}", None).models()
        live.shutdown()


def test_an_address_may_lack_its_scheme_and_have_a_path() -> None:
    assert Client("localhost:8000", None)._host == "localhost"
    assert Client("https://host/nano/v1/", None)._path == "/nano"
    with pytest.raises(InvalidRequestError, match="give an address such as"):
        Client("file:///x", None)
