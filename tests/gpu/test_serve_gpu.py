"""`nanovllm serve` on a GPU: the engine's process is forked from one that has imported torch."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

pytestmark = pytest.mark.gpu
for needed in ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client"):
    pytest.importorskip(needed)


def test_a_server_answers_and_ends() -> None:
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", "--num-pages", "512"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"serves tiny at (http://\S+)", server.stdout.readline())
            assert found is not None, "the server did not start"
            body = json.dumps({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}).encode()
            request = urllib.request.Request(f"{found[1]}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as reply:
                told = json.load(reply)
            assert told["usage"]["completion_tokens"] == 8 and told["choices"][0]["text"]
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
