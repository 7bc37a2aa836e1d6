"""Which requests several replicas can share: those that need nothing but what they bring along."""

from collections.abc import Mapping
from typing import Any

import msgspec

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.settings import Limits

SHARED = frozenset(
    {"/models", "/completions", "/chat/completions", "/responses", "/responses/input_tokens"}
    | {"/health", "/ping", "/version", "/tokenize", "/detokenize", "/tokenizer_info", "/openapi.json", "/docs"}
)
OF_ONE_ENGINE = ("chunks", "keep")


def require_shared(path: str, size: int, fields: Mapping[str, Any], limits: Limits) -> None:
    """Require that any replica can answer a request.

    Args:
        path: Its path.
        size: The bytes of its body.
        fields: The fields of its body.
        limits: What a front end bears with.

    Raises:
        ApiError: The path is not one of theirs, the body is too long, or the request names or keeps a chunk, which one engine alone has.
    """
    route = path.removeprefix("/v1")
    if route not in SHARED and not route.startswith("/models/"):
        raise ApiError(404, f"there is nothing at {path[:200]!r} of several replicas", code="not_found")
    if size > limits.body_bytes:
        raise ApiError(413, f"a body may have {limits.body_bytes} bytes")
    for name in OF_ONE_ENGINE:
        if fields.get(name):
            raise ApiError(
                400, f"{name} is not supported by several replicas: a chunk is in one engine", param=name, code="unsupported_parameter"
            )


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a body; none if it is no JSON object, which the replica then says."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
