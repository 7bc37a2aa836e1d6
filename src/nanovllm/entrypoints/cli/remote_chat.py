"""`nanovllm chat --server URL`: a conversation with a running server, ours or another one with OpenAI's interface.

The server keeps the KV of what was said in its prefix index, so a message runs only its new tokens there too.
"""

import argparse
import http.client
import json
import os
import socket
import ssl
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from nanovllm.entrypoints.arguments import chosen_model_options
from nanovllm.entrypoints.cli.chat_loop import RETAIN, talk
from nanovllm.entrypoints.cli.serve import KEYS
from nanovllm.entrypoints.display.terminal import CLOSE, OPEN, View, clean, note
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.sampling.params import SamplingParams

SECONDS = 600.0  # without a byte from the server
SAMPLING = tuple(SamplingParams.__dataclass_fields__)
FORMS = (ValueError, KeyError, TypeError, AttributeError, IndexError)  # from reading JSON of another form


class ServerError(NanoVLLMError):
    """A server could not be reached, refused a request, or broke off its answer."""


class Client:
    """The calls of a chat to a server. Each has a connection of its own, so that closing it ends the reply."""

    def __init__(self, address: str, key: str | None) -> None:
        """Note where the server is. Raises `InvalidRequestError` for an address that is none."""
        try:
            parts = urlsplit(address if "//" in address else f"http://{address}")
            port = parts.port
        except ValueError as error:
            raise InvalidRequestError(f"--server {address}: {error}") from None
        if "@" in address:
            raise InvalidRequestError(f"--server: give an address without a name and a password; a key is the variable {KEYS}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"--server {address}: give an address such as http://127.0.0.1:8000")
        key = (key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise InvalidRequestError(f"the key in {KEYS} has characters that a header cannot have: give printable ASCII")
        self.address, self._host, self._port, self._tls = address, parts.hostname, port, parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def models(self) -> list[str]:
        """The names of the server's models."""
        with closing(self._connection()) as connection:
            answer = self._call(connection, "GET", "/v1/models")
            with self._as_ours():
                return [str(each["id"]) for each in json.loads(answer.read())["data"]]

    def events(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed chat completion."""
        with closing(self._connection()) as connection:
            answer = self._call(connection, "POST", "/v1/chat/completions", json.dumps(body).encode())
            with self._as_ours():
                for line in answer:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield json.loads(data)
        raise ServerError(f"{self.address} broke off its answer")

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        """Turn the errors of reading an answer that breaks off, or has another form, into a `ServerError`."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.address} broke off its answer: {error}") from None
        except FORMS as error:
            raise self.strange(error) from None

    def strange(self, error: Exception) -> ServerError:
        """The error for an answer of another form, whose reading raised `error`."""
        return ServerError(f"{self.address} gave an answer of another form: {clean(str(error))[:200]}")

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(self._host, self._port, timeout=SECONDS, context=ssl.create_default_context())
        return http.client.HTTPConnection(self._host, self._port, timeout=SECONDS)

    def _call(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status == http.client.OK:
                return answer
            text = answer.read().decode(errors="replace")
        except (socket.gaierror, UnicodeError):  # no host has such a name, or it cannot be one
            told = f"{self.address} cannot be reached: its host is not known: give a URL such as http://127.0.0.1:8000"
            raise ServerError(told) from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.address} cannot be reached: {error}") from None
        raise ServerError(f"{self.address} answers with status {answer.status}: {_message(text)}")


def _message(text: str) -> str:
    """The message of OpenAI's error object, or the first words of another answer."""
    try:
        return clean(str(json.loads(text)["error"]["message"]))
    except FORMS:
        return clean(text.strip()[:200]) or "no reason was given"


class RemoteTalk:
    """A conversation with a server.

    Attributes:
        messages: What was said, without the reasoning of the answers.
    """

    def __init__(self, client: Client, model: str, system: str | None, thinking: bool | None, options: dict[str, Any]) -> None:
        """Begin a conversation. `options` are fields of every request; `thinking` None leaves that to the model."""
        self._client, self._model, self._thinking, self._options = client, model, thinking, options
        self._opening: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.messages, self._usage, self._run, self._reused = list(self._opening), "", 0, 0

    def about(self) -> str:
        """The name of the model, and where it is."""
        return f"{clean(self._model)} at {self._client.address}. /help shows the commands."

    def say(self, text: str) -> None:
        """Send the conversation with a message, and print the answer as it comes."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {
            "model": self._model, "messages": asked, "stream": True, "stream_options": {"include_usage": True}, **self._options,
        }  # fmt: skip
        if self._thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._thinking}
        answer, view, thinking, began = "", View.of(sys.stdout, chat_prompt=""), False, False
        events = self._client.events(body)
        try:
            for event in events:
                if "error" in event:
                    raise ServerError(_message(json.dumps(event)))
                self._note_usage(event.get("usage"))
                for choice in event.get("choices", ())[:1]:
                    reasoning = choice["delta"].get("reasoning_content") or choice["delta"].get("reasoning") or ""
                    content = choice["delta"].get("content") or ""
                    answer += content
                    piece = OPEN + "\n" if reasoning and not thinking else ""
                    piece += reasoning + ("\n" + CLOSE + "\n\n" if content and thinking else "") + content
                    thinking = bool(reasoning) or (thinking and not content)
                    view, shown = view.push(piece)
                    began = began or bool(piece)
                    print(shown, end="", flush=bool(shown))
        except KeyboardInterrupt:
            events.close()
            print(view.end(), flush=True)
            note("[stopped]")
        except (ServerError, *FORMS) as error:
            if began:
                print(view.end(), flush=True)
            if isinstance(error, ServerError):
                raise
            raise self._client.strange(error) from None
        else:
            print(view.end(), flush=True)
        if answer:  # without one, the message is forgotten
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _note_usage(self, usage: dict[str, Any] | None) -> None:
        if not usage:
            return
        prompt, reused = usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._run, self._reused = self._run + prompt - reused, self._reused + reused
        self._usage = f"{prompt - reused} prompt tokens run, {reused} reused, {usage['completion_tokens']} reply tokens"

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages, self._usage = list(self._opening), ""

    def think(self, on: bool) -> None:
        """Ask the model to think, or not to."""
        self._thinking = on

    def stats(self) -> list[str]:
        """What the server's answers say about tokens."""
        last = f"last turn: {self._usage}" if self._usage else "no turn yet"
        return [last, f"since the start: {self._run} prompt tokens run, {self._reused} reused"]

    def memory(self) -> str:
        """The pages are the server's."""
        return f"/memory shows the pages of an engine in this process; the chat page at {self._client.address}/ shows those of the server"


def run_remote_chat(options: argparse.Namespace) -> int:
    """Run `nanovllm chat --server URL`. Returns the exit code.

    Raises:
        InvalidRequestError: An option is for an engine in this process.
        ServerError: The server cannot be reached, or it has no model.
    """
    given = vars(options)
    own = [name for name in chosen_model_options(options) if name != "model"] + ["retain"] * (options.retain != RETAIN)
    if own:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in own)
        raise InvalidRequestError(f"{flags}: with --server the model and its engine are the server's: leave it out")
    client = Client(options.server, os.environ.get(KEYS))
    known = client.models()
    name = options.model if options.model in known else None
    if name is None and (options.model != "tiny" or not known):
        raise ServerError(f"{client.address} has no model {options.model!r}; it serves {clean(', '.join(known)) or 'none'}")
    fields = {each: given[each] for each in SAMPLING if given.get(each) is not None}
    thinking = False if options.no_think else None
    return talk(RemoteTalk(client, name or known[0], options.system, thinking, fields))
