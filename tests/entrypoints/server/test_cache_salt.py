"""`cache_salt`: a request shares KV only with those of its key and salt."""

import hashlib
from typing import Any

import pytest

from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.server.live import Live

LONG = "Once upon a time, there was a little girl named Ada, who lived in a small village by the sea with an old owl. " * 2
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 2}),
]


def cached(answer: Any) -> int:
    usage = answer.json()["usage"]
    return (usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_kv_is_shared_within_a_salt(path: str, body: dict[str, Any]) -> None:
    keys = ("one", "two")
    digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    with Live(settings=Settings(shutdown_seconds=1.0, api_keys=digests), num_pages=256) as live:
        one, two = ({"authorization": f"Bearer {key}"} for key in keys)
        for salt in (None, "a", "b"):  # the first with a salt runs its prompt, later ones find it
            given = body if salt is None else body | {"cache_salt": salt}
            assert [cached(live.call("POST", path, given, one)) > 0 for _ in range(2)] == [False, True]
        assert cached(live.call("POST", path, body | {"cache_salt": "a"}, two)) == 0  # another key's salt
        assert cached(live.call("POST", path, body, one)) > 0


def test_streams_have_salts_too(live: Live) -> None:
    stream = {"prompt": [*range(1000, 1100)], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    counts = [live.events("/v1/completions", stream | {"cache_salt": salt})[-1]["usage"] for salt in ("a", "a", "b", None)]
    assert [count["prompt_tokens_details"]["cached_tokens"] > 0 for count in counts] == [False, True, False, False]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_salt_is_a_text(live: Live, path: str, body: dict[str, Any]) -> None:
    for salt in ("", 5, ["a"]):
        error = live.post(path, body | {"cache_salt": salt}).json()["error"]
        assert error["param"] == "cache_salt"
    assert live.post(path, body | {"cache_salt": "\u00e4 \U0001f419 " * 1000}).status == 200
    assert live.post(path, body | {"cache_salt": None}).status == 200
