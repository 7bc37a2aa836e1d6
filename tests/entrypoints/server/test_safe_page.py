"""The page docs/how-to/serve-safely.md: its configuration of nginx works, and its bounds are the code's."""

import contextlib
import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.entrypoints.server.settings import MOST_CHOICES, MOST_CONTAINERS, MOST_DEPTH, MOST_ROWS, MOST_TOKENS, Limits
from nanovllm.sampling.params import MAX_STOP_LEN, MAX_STOPS
from tests.entrypoints.server.certificates import self_signed
from tests.entrypoints.server.live import LIMIT, Live

PAGE = (Path(__file__).parents[3] / "docs/how-to/serve-safely.md").read_text(encoding="utf-8")
(NGINX,) = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.M | re.S)
FRAME = """
daemon off;
pid {folder}/pid;
error_log stderr;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    {servers}
}}
"""


def free_ports() -> tuple[int, int]:
    """Two of them: both are taken before either is given back."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def proxy(live: Live, tmp_path: Path) -> Iterator[tuple[int, int, ssl.SSLContext]]:
    """nginx as the page has it, before the live server: its ports without and with TLS, and what trusts its certificate."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    chain, key = self_signed(tmp_path)
    (plain, secure), servers = free_ports(), NGINX
    for told, here in (
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{secure} ssl;"),
        ("/etc/letsencrypt/live/llm.example/fullchain.pem", chain),
        ("/etc/letsencrypt/live/llm.example/privkey.pem", key),
        ("http://127.0.0.1:8000", f"http://127.0.0.1:{live.port}"),
    ):
        assert told in servers, told
        servers = servers.replace(told, here)
    config, user = tmp_path / "nginx.conf", "user root;" if Path("/root").owner() == Path(tmp_path).owner() else ""
    config.write_text(FRAME.format(folder=tmp_path, user=user, servers=servers))
    process = subprocess.Popen([nginx, "-p", str(tmp_path), "-c", str(config)], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", secure), timeout=1.0):
                break
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.02)
        yield plain, secure, ssl.create_default_context(cafile=chain)
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)


@pytest.mark.unhooked
def test_clients_behind_nginx(live: Live, proxy: tuple[int, int, ssl.SSLContext]):
    plain, secure, trusting = proxy
    away = http.client.HTTPConnection("127.0.0.1", plain, timeout=LIMIT)
    away.request("GET", "/v1/models", headers={"host": "llm.example"})
    answer = away.getresponse()
    assert answer.status == 308 and answer.headers["location"] == "https://llm.example/v1/models"
    away.close()

    connection = http.client.HTTPSConnection("localhost", secure, timeout=LIMIT, context=trusting)
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json", "host": "llm.example"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200 and re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    first = answer.readline()
    assert first.startswith(b"data: {") and live.engine.state.running  # the event came while the reply runs
    events = [first, *answer]
    assert events[-2:] == [b"data: [DONE]\n", b"\n"]
    connection.request("POST", "/v1/completions", b" " * (17 << 20), headers)
    with contextlib.suppress(OSError, http.client.HTTPException):  # nginx may close before it has all
        assert connection.getresponse().status == 413
    connection.close()

    before = live.engine.state.stats.decode_tokens
    leaving = http.client.HTTPSConnection("localhost", secure, timeout=LIMIT, context=trusting)
    leaving.request("POST", "/v1/completions", json.dumps(body | {"max_tokens": 1900}), headers)
    assert leaving.getresponse().readline()
    leaving.close()
    live.wait_until_idle()
    assert live.engine.state.stats.decode_tokens - before < 1800  # nginx closed the server's connection too


@pytest.mark.unhooked
def test_the_chat_page_behind_nginx_does_not_wait_for_the_rate(proxy: tuple[int, int, ssl.SSLContext]):
    _, secure, trusting = proxy
    connection, began = http.client.HTTPSConnection("localhost", secure, timeout=LIMIT, context=trusting), time.monotonic()
    for _ in range(40):  # more than the page has files
        connection.request("GET", "/", headers={"host": "llm.example"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
    assert time.monotonic() - began < 7.5  # 8 s at the rate of the page's zone
    connection.close()


def test_bounds_are_those_of_the_code():
    limits = Limits()
    for told in (
        f"{limits.head_bytes >> 10} KiB, {limits.headers} headers, {limits.head_seconds:g} s",
        f"{limits.body_bytes >> 20} MiB, {limits.body_seconds:g} s; all bodies",
        f"at the same time: {limits.held_bytes >> 20} MiB",
        f"{MOST_DEPTH} levels, {MOST_CONTAINERS:,} lists and objects",
        f"`n` and `best_of` {MOST_CHOICES}, prompts times these {MOST_ROWS:,}",
        f"{MAX_STOPS} strings of {MAX_STOP_LEN:,} characters, {MOST_TOKENS:,} tokens, {MOST_TOKENS:,} entries",
        f"{limits.connections:,}; {limits.keep_alive_seconds:g} s between requests",
        f"{limits.stall_seconds:g} s; meanwhile its tokens are kept",
        f"gets a comment every {limits.ping_seconds:g} seconds",
    ):
        assert told in PAGE, told
