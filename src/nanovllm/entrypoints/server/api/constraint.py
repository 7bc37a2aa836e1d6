"""The field that asks for output of a form: `text.format` of responses, `response_format` of chat completions."""

import reprlib
from typing import Any

from nanovllm.entrypoints.server.errors import ApiError

FORMS = ("text", "json_object", "json_schema")


def constraint_of(form: Any, param: str) -> None:
    """Check that a request asks for plain text, or for nothing: replies of another form are not supported yet.

    Raises:
        ApiError: It asks for something else.
    """
    if form is None:
        return
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in FORMS:
        raise ApiError(400, f"{param}.type is {reprlib.repr(kind)}; it must be one of {', '.join(FORMS)}", param=f"{param}.type")
    if kind != "text":
        raise ApiError(400, f"{param}.type is {kind!r}, which this server does not support", param=param, code="unsupported_parameter")
