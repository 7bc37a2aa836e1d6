"""What forces the form of a reply: `response_format`, `tool_choice`, and the fields of other servers for the same."""

import reprlib
from collections.abc import Mapping
from typing import Any

from nanovllm.entrypoints.server.errors import unsupported
from nanovllm.entrypoints.server.fields import InvalidParamError, mapping
from nanovllm.entrypoints.server.tools.definitions import ToolChoice

# Fields of other servers, each of which gives a schema, a pattern, choices or a grammar
OTHERS = frozenset(
    {
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
        "guided_whitespace_pattern", "json_schema", "regex", "ebnf", "grammar", "structural_tag",
    }
)  # fmt: skip
CONSTRAINTS = OTHERS | {"response_format"}
FORMATS = ("text", "json_object", "json_schema")


def constraint_of(body: Mapping[str, Any], choice: ToolChoice | None = None, param: str = "response_format") -> dict[str, Any]:
    """The options of `SamplingParams` that force the form of the replies to a request, for `sampling(..., **options)`.

    Args:
        body: The request.
        choice: Which tools the reply may call; None: the request can have no tools.
        param: The path of `response_format` for errors.

    Returns:
        No options: nothing is forced.

    Raises:
        ApiError: A form is forced, which this server cannot do.
        InvalidParamError: `response_format` is malformed.
    """
    if choice is not None and choice.mode == "required":
        raise unsupported("tool_choice", "a choice that requires a call")
    for name in OTHERS:
        if body.get(name) is not None:
            raise unsupported(name)
    if body.get("response_format") is not None:
        kind = mapping(body["response_format"], param).get("type")
        if kind not in FORMATS:
            raise InvalidParamError(f"{param}.type", f"is {reprlib.repr(kind)}; it must be one of {', '.join(FORMATS)}")
        if kind != "text":
            raise unsupported(param, f"{param} of type {kind!r}")
    return {}
