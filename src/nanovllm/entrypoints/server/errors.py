"""Errors as OpenAI's clients know them: an object of four fields, a status, and what to try next."""

import re
from typing import Any

import msgspec

from nanovllm.entrypoints.server.fields import InvalidParamError
from nanovllm.errors import (
    ChunkExistsError,
    ChunkFileError,
    ChunkLimitError,
    ChunkMismatchError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    NanoVLLMError,
    OutOfPagesError,
    QueueFullError,
    ReleasedChunkError,
    UnknownChunkError,
)

RETRY_SECONDS = "1"
OPTION = re.compile(r"(?:a key of )?([a-z_]{1,40})(?:=|\[| holds )")


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: The HTTP status.
        message: What is wrong, in one sentence.
        type: OpenAI's kind of error.
        param: The field of the request that is at fault, or None.
        code: A word that programs can test, or None.
        headers: More headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code, self.headers = status, message, type, param, code, headers

    def value(self) -> dict[str, Any]:
        """The error object, in the form of OpenAI's API reference."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(self.value())


def unsupported(param: str, what: str | None = None) -> ApiError:
    """The answer to a field, or to `what` it asks for, that this server does not have."""
    return ApiError(400, f"{what or param} is not supported by this server", param=param, code="unsupported_parameter")


def too_late(seconds: float | None) -> ApiError:
    """The answer to a request that has taken as long as it may. Clients must not try it again by themselves: it would take as long."""
    told = f"the request was ended, because it took longer than the {seconds:g} seconds of --request-timeout: ask for fewer tokens"
    return ApiError(504, told, type="timeout_error", code="request_timeout", headers=(("x-should-retry", "false"),))


def api_error(error: NanoVLLMError, param: str | None = None) -> ApiError:
    """The answer for one of the library's errors."""
    message = str(error)
    match error:
        case QueueFullError():
            return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=(("retry-after", RETRY_SECONDS),))
        case EngineClosedError():
            return ApiError(503, message, type="server_error", code="shutting_down", headers=(("retry-after", RETRY_SECONDS),))
        case EngineDeadError():
            return ApiError(503, message, type="server_error", code="engine_unavailable", headers=(("retry-after", RETRY_SECONDS),))
        case OutOfPagesError():
            return ApiError(503, message, type="server_error", code="out_of_memory", headers=(("retry-after", RETRY_SECONDS),))
        case ReleasedChunkError() | UnknownChunkError():
            return ApiError(404, message, param=param, code="chunk_not_found")
        case ChunkExistsError():
            return ApiError(409, message, param=param, code="chunk_exists", headers=(("x-should-retry", "false"),))
        case ChunkLimitError():
            return ApiError(400, message, param=param, code="chunk_limit")
        case ChunkMismatchError():
            return ApiError(409, message, param=param, code="chunk_mismatch", headers=(("x-should-retry", "false"),))
        case ChunkFileError():
            return ApiError(500, message, type="server_error", code="chunk_file", headers=(("x-should-retry", "false"),))
        case InvalidParamError():
            return ApiError(400, message, param=error.param)
        case InvalidRequestError():
            return ApiError(400, message, param=param or named(message))
        case _:
            return ApiError(500, message, type="server_error", code="request_failed")


def named(message: str) -> str | None:
    """The option that an error of the library names at its beginning, as in `top_p=2: ...`, `logit_bias[7]=...` and `stop holds ...`."""
    found = OPTION.match(message)
    return None if found is None else found[1]
