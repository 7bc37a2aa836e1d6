"""Who may call: keys, hosts, pages of other sites; and what is logged of it."""

import hashlib
import logging
import os
import socket
import ssl
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.entrypoints.cli.serve import api_keys, certificate, is_loopback, origins
from nanovllm.entrypoints.server.admission import host_allowed
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.errors import InvalidRequestError
from nanovllm.state.pool import match
from tests.entrypoints.server.certificates import self_signed
from tests.entrypoints.server.live import Live, parsed

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

MODELS = "/v1/models"
PATH = "/v1/completions"
KEYS = ("key-one", "schlüssel-zwei")


def settings(**options: Any) -> Settings:
    return Settings(shutdown_seconds=1.0, **options)


def digests(*keys: str) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def test_each_key_opens_and_nothing_else_does(live: Live, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    with Live(live.model, settings(api_keys=digests(*KEYS), access_log=True)) as server:
        for key in KEYS:
            raw = key.encode().decode("latin-1")  # as bytes of UTF-8
            for headers in ({"authorization": f"Bearer {raw}"}, {"authorization": f"bearer  {raw}"}, {"x-api-key": raw}):
                assert server.call("GET", MODELS, headers=headers).status == 200
            assert server.call("GET", MODELS, headers={"authorization": "Basic eDp5", "x-api-key": raw}).status == 200
        wrong = [
            "",
            "Bearer",
            "Bearer ",
            "Bearer key-on",
            "Bearer key-one2",
            "Bearer KEY-ONE",
            "Basic key-one",
            "key-one",
            "Bearer key-one,key",
        ]
        for value in wrong:
            answer = server.call("GET", MODELS, headers={"authorization": value})
            assert answer.status == 401 and answer.json()["error"]["code"] == "invalid_api_key", value
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in (MODELS, PATH, "/tokenize", "/version", "/nothing", "/v1/models/x"):
            assert server.get(path).status == 401, path
        assert server.get("/health").status == 200 and server.get("/ping").status == 200
    assert caplog.records and not any(key in caplog.text for key in KEYS)


def test_a_key_is_told_nothing_of_what_others_asked(live: Live):
    """Neither the count of reused tokens nor the time of an answer tells whether another key sent the same prompt."""

    def reused(server: Live, key: str, stream: bool) -> int:
        options = {"include_usage": True} if stream else None
        body = {"prompt": list(range(300, 380)), "max_tokens": 1, "stream": stream, "stream_options": options}
        answer = server.call("POST", PATH, body, {"x-api-key": key, "content-type": "application/json"})
        assert answer.status == 200, answer
        last = list(parsed(answer.body))[-2] if stream else answer.json()
        return last["usage"]["prompt_tokens_details"]["cached_tokens"]

    with Live(live.model, settings(api_keys=digests("a", "b", "c"))) as server:
        assert [reused(server, key, False) for key in "abaabb"] == [0, 0, 79, 79, 79, 79]
        assert [reused(server, key, True) for key in "caac"] == [0, 79, 79, 79]


def scored(server: Live, prompt: list[int], headers: dict[str, str]) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    assert server.call("POST", PATH, body, headers).status == 200
    body["max_tokens"], body["temperature"] = 1, 0
    assert server.call("POST", PATH, body, headers).status == 200


def chunked(server: Live, prompt: list[int], headers: dict[str, str]) -> None:
    half = len(prompt) // 2
    calls: list[tuple[str, Any]] = [
        ("", {"name": "a", "token_ids": prompt}),
        ("", {"name": "b", "token_ids": prompt[half:]}),
        ("/compose", {"name": "ab", "names": ["a", "b"]}),
        ("/a/drop", {"spans": [[half, half + 1]], "mode": "gap", "to": "c"}),
        ("/a/drop", {"spans": [[half, half + 1]], "to": "d"}),
        ("/a/save", {}),
        ("/a/load", {"replace": True}),
    ]
    for path, body in calls:
        assert server.call("POST", f"/v1/chunks{path}", body, headers).status == 200, path
    body = {"prompt": prompt, "max_tokens": 8, "chunks": ["a", "b"], "keep": "e", "keep_thinking": False}
    assert server.call("POST", PATH, body, headers).status == 200


@pytest.mark.parametrize("called", [scored, chunked])
def test_all_that_a_key_asks_for_stays_in_its_namespace(live: Live, called: Any, tmp_path: Path):
    """The index of shared pages, which decides what is reused, has nothing of a key in the namespaces of others."""
    prompt = np.arange(300, 340, dtype=np.int32)
    with Live(live.model, settings(api_keys=digests("a", "b"), chunk_dir=tmp_path), page_size=1, num_pages=1024) as server:
        called(server, prompt.tolist(), {"x-api-key": "a"})
        server.wait_until_idle()
        pool = server.engine.state.pool
        assert len(match(pool, prompt, 1)) > 0
        assert not len(match(pool, prompt, 0)) and not len(match(pool, prompt[20:], 0))
        called(server, prompt.tolist(), {"x-api-key": "b"})
        server.wait_until_idle()
        own, others = match(server.engine.state.pool, prompt, 1), match(server.engine.state.pool, prompt, 2)
        assert len(own) == len(others) > 0 and not {*own.tolist()} & {*others.tolist()}


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.:80", True),
        ("127.0.0.1:1", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("192.168.1.7:8000", True),
        ("[fe80::1]:8000", True),
        ("mine.example:8000", True),
        ("MINE.example", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("mine.example.evil.example", False),
        ("[::1].evil.example", False),
        ("localhost:80@evil.example", False),
        ("evil.example:80:localhost", False),
        ("", False),
        (":", False),
        ("[", False),
        ("[::1", True),
        ("localhost:\u0663", False),
        ("127.1", False),
        ("0x7f000001", False),
        ("2130706433", False),
    ],
)
def test_names_of_other_sites_are_refused(host: str, allowed: bool):
    """IP addresses are let through: a page that rebinds its name sends its name."""
    assert host_allowed(host, Settings(allowed_hosts=("mine.example",))) == allowed
    assert host_allowed(host, Settings(allowed_hosts=("*",))) or ":" in host or host in ("[",)


def test_dns_rebinding_is_answered_with_403(live: Live):
    for path in (MODELS, "/health", PATH):
        answer = live.call("GET", path, headers={"host": "evil.example:8000"})
        assert answer.status == 403 and answer.json()["error"]["code"] == "host_not_allowed"


def test_pages_of_other_sites_may_not_call_without_being_named(live: Live):
    asks = {"origin": "https://chat.example", "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for method in ("OPTIONS", "GET", "POST"):
        answer = live.call(method, PATH, b"{}" if method == "POST" else None, asks)
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert live.call("OPTIONS", PATH, headers=asks).status == 405


def test_pages_of_named_origins_may_call(live: Live):
    body = {"prompt": "Once", "max_tokens": 2}
    with Live(live.model, settings(cors_origins=("https://chat.example",), api_keys=digests("k"))) as server:
        asks = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        wanted = "authorization,content-type,x-stainless-os"
        answer = server.call("OPTIONS", PATH, headers=asks | {"access-control-request-headers": wanted})
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert answer.headers["access-control-allow-headers"] == wanted and "POST" in answer.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in answer.headers and answer.headers["vary"] == "origin"
        odd = server.call("OPTIONS", PATH, headers=asks | {"access-control-request-headers": "x" * 5000})
        assert odd.headers["access-control-allow-headers"].startswith("authorization")
        key = {"authorization": "Bearer k", "origin": "https://chat.example", "content-type": "application/json"}
        for value in (body, body | {"stream": True}, body | {"n": 0}):
            answer = server.call("POST", PATH, value, key)
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert server.call("POST", PATH, body, key | {"authorization": ""}).headers["access-control-allow-origin"] == "https://chat.example"
        for origin in ("https://chat.example.evil.example", "http://chat.example", "null", "https://chat.example:1"):
            answer = server.call("OPTIONS", PATH, headers=asks | {"origin": origin})
            assert answer.status == 401 and not any(name.startswith("access-control") for name in answer.headers)
    with Live(live.model, settings(cors_origins=("*",))) as server:
        answer = server.call("GET", MODELS, headers={"origin": "https://a.example"})
        assert answer.headers["access-control-allow-origin"] == "*" and "access-control-allow-credentials" not in answer.headers


def test_the_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "keys"
    file.write_text("  one \n\n two\r\n", encoding="utf-8")
    file.chmod(0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert api_keys(file) == digests("one", "two")
    file.chmod(0o644)
    with pytest.warns(UserWarning, match="chmod 600"):
        assert api_keys(file) == digests("one", "two")
    monkeypatch.setenv("NANOVLLM_API_KEY", " three ")
    assert api_keys(None) == digests("three")
    file.chmod(0o600)
    assert api_keys(file) == digests("three", "one", "two")
    file.write_bytes(b"\n \n")
    for wrong in (file, tmp_path / "none", tmp_path):
        with pytest.raises(InvalidRequestError, match="--api-key-file"):
            api_keys(wrong)


def test_addresses_that_others_can_reach():
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1"))
    with pytest.raises(InvalidRequestError, match="--host"):
        is_loopback("no such host.invalid")


def test_origins_are_origins():
    assert origins(["https://Chat.example:8443", "*"]) == ("https://chat.example:8443", "*")
    for wrong in ("chat.example", "https://chat.example/", "https://", "null", "https://a.example/x?y", "", "https://*.example/"):
        with pytest.raises(InvalidRequestError, match="--cors-origin"):
            origins([wrong])


def test_the_access_log_is_one_line_a_request_whatever_it_holds(live: Live, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "nanovllm.access")
    live.get(MODELS)
    assert not caplog.records
    with Live(live.model, settings(access_log=True)) as server:
        caplog.clear()
        server.call("GET", "/%0aGET%20%1b[2J", headers={"x-request-id": "a 'b"})
        server.post(PATH, {"prompt": "Once", "max_tokens": 2, "stream": True})
        server.raw(b"nonsense\r\n\r\n")
    lines = [record.getMessage() for record in caplog.records if "'/health'" not in record.getMessage()]
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    assert lines[0].startswith("127.0.0.1 GET '/\\nGET \\x1b[2J' 404 ") and lines[0].endswith(' "a \'b"')
    assert lines[1].startswith(f"127.0.0.1 POST '{PATH}' 200 ") and " 400" in lines[2]


def test_an_error_of_the_server_is_logged_and_not_told(live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(live.server.engine, "submit", broken)
    answer = live.post(PATH, {"prompt": "x"}, x_request_id="r-7")
    assert answer.status == 500 and answer.json()["error"]["code"] == "internal_error" and b"secret" not in answer.body
    assert "'r-7'" in caplog.text and "secret" in caplog.text


def test_tls(live: Live, tmp_path: Path):
    chain, key = str(tmp_path / "chain.pem"), str(tmp_path / "key.pem")
    with pytest.raises(InvalidRequestError, match="together"):
        certificate(chain, None)
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        certificate(chain, key)
    chain, key = self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=chain)
    server = Live(live.model, settings(certificate=certificate(chain, key)))
    server.wait_until_healthy = lambda: None
    with server, socket.create_connection(("localhost", server.port), timeout=240) as sock:
        with trusting.wrap_socket(sock, server_hostname="localhost") as secured:
            secured.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert secured.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        for _ in range(2):
            assert b"HTTP" not in server.raw(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(100))
        with (
            socket.create_connection(("localhost", server.port), timeout=240) as other,
            trusting.wrap_socket(other, server_hostname="localhost") as secured,
        ):
            secured.sendall(b"nonsense\r\n\r\n")
            assert secured.recv(1 << 16).startswith(b"HTTP/1.1 400")
