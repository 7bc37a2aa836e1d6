"""What `test_schemathesis.py` changes of requests before schemathesis sends them, so that more of them reach an answer, and soon."""

import os
from typing import Any

import requests
import schemathesis

CHUNK = {"name": "story", "text": "Once upon a time, a fox", "replace": True}
MOST_TOKENS = 2  # of a reply
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Shorten replies, and name a chunk that is there."""
    if case.path.startswith("/v1/chunks/{name}"):
        for path, body in (("/v1/chunks", CHUNK), ("/v1/chunks/story/save", {})):
            assert requests.post(f"{os.environ['SERVED']}{path}", json=body, timeout=240).status_code == 200
        if case.meta is None or case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE:
            case.path_parameters["name"] = CHUNK["name"]
    if isinstance(body := case.body, dict):
        limits = {name: MOST_TOKENS for name in LIMITS if name in body and (body[name] is None or isinstance(body[name], int))}
        case.body = {**body, **limits}
