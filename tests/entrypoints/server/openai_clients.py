"""OpenAI's own clients for live servers."""

from typing import Any

import openai

from tests.entrypoints.server.live import LIMIT, Live


def options_of(live: Live, **options: Any) -> dict[str, Any]:
    """The options of a client. Answers that differ from OpenAI's types are errors, and nothing is retried."""
    defaults = {"base_url": f"http://127.0.0.1:{live.port}/v1", "api_key": "any", "max_retries": 0, "timeout": LIMIT}
    return {**defaults, "_strict_response_validation": True, **options}


def client_of(live: Live, **options: Any) -> openai.OpenAI:
    """A client, which is closed with the server."""
    return live.clients.enter_context(openai.OpenAI(**options_of(live, **options)))


def async_client_of(live: Live, **options: Any) -> openai.AsyncOpenAI:
    """A client for coroutines."""
    return openai.AsyncOpenAI(**options_of(live, **options))
