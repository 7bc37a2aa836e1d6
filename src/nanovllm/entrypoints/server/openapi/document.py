"""The OpenAPI document: https://spec.openapis.org/oas/v3.1.0."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.entrypoints.server.api.chunk_reuse import NAME
from nanovllm.entrypoints.server.openapi.answers import ANSWERS, STRING, const, either, obj, ref
from nanovllm.entrypoints.server.openapi.operations import OPERATIONS, Operation
from nanovllm.entrypoints.server.openapi.requests import request_schemas

PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
ERRORS = {
    "400": "A field of the request is wrong, or the prompt is too long",
    "401": "A key is needed",
    "403": "The host is not served",
    "404": "There is no such path or model",
    "405": "Another method is needed",
    "408": "The body came too slowly",
    "409": "The name is taken, or the file is of another model or KV dtype",
    "413": "The body is too long",
    "415": "The body is not JSON",
    "429": "Too many requests wait: try again later",
    "500": "An error of the server",
    "503": "The engine is starting, has failed, or has no memory left: try again later",
    "504": "The request took longer than the server allows",
}
WITHOUT_BODY = ("400", "401", "403", "404", "500", "503", "504")
ABOUT = "OpenAI's interface for a language model. Unknown fields of requests are ignored, unless they are similar to a known one."


def document(routes: Iterable[tuple[str, tuple[str, ...], Any]], model_name: str, version: str) -> dict[str, Any]:
    """The document of all routes.

    Args:
        routes: Paths in Starlette's form, their methods and their functions.
        model_name: The model in the examples.
        version: The version of the server.
    """
    paths: dict[str, dict[str, Any]] = {}
    known = {path for path, _, _ in routes}
    for path, methods, _ in routes:
        bare = path.removeprefix("/v1")
        for method in methods:
            operation = OPERATIONS.get((method, bare), Operation(summary=""))
            shown = path if operation.path is None else path.replace(bare, operation.path)
            alias = {"x-alias-of": f"/v1{_plain(shown)}"} if f"/v1{path}" in known else {}
            paths.setdefault(_plain(shown), {})[method.lower()] = {**_entry(operation, method, shown, model_name), **alias}
    structs = {operation.takes for operation in OPERATIONS.values() if operation.takes is not None}
    schemas = request_schemas(sorted(structs, key=lambda struct: struct.__name__))
    content = {"application/json": {"schema": ref("Error")}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanovllm", "version": version, "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"header": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, **ANSWERS},
            "responses": {f"Error{status}": {"description": text, "content": content} for status, text in ERRORS.items()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Needed if the server was started with keys."},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _entry(operation: Operation, method: str, path: str, model_name: str) -> dict[str, Any]:
    """The operation object of one method of one path."""
    words = re.findall(r"\w+", f"{method.lower()}/{_plain(path)}")
    entry: dict[str, Any] = {"operationId": "_".join(words), "summary": operation.summary}
    if names := PARAMETER.findall(path):
        named = {"type": "string", "pattern": f"^{NAME.pattern}$"} if "/chunks/" in path else {"type": "string"}
        entry["parameters"] = [{"name": name, "in": "path", "required": True, "schema": named} for name in names]
    if operation.takes is not None:
        body: dict[str, Any] = {"schema": ref(operation.takes.__name__)}
        if operation.example is not None:
            named = {"model": model_name} if "model" in operation.takes.__struct_fields__ else {}
            body["examples"] = {"example": {"value": {**named, **operation.example}}}
        entry["requestBody"] = {"required": True, "content": {"application/json": body}}
    entry["responses"] = {"200": _answer(operation)} | {
        status: {"$ref": f"#/components/responses/Error{status}"} for status in (ERRORS if operation.takes else WITHOUT_BODY)
    }
    return {**entry, "security": []} if operation.open else entry


def _answer(operation: Operation) -> Mapping[str, Any]:
    content: dict[str, Any] = {operation.kind: {"schema": {} if operation.answers is None else ref(operation.answers)}}
    if operation.events is not None:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(operation.events)}
        data = either(data, const("[DONE]")) if operation.done else either(data)
        content["text/event-stream"] = {"schema": obj({"data": data}, {"event": STRING})}  # of each event, as OpenAPI 3.2 means it
    return {"description": "The answer", "content": content}


def _plain(path: str) -> str:
    """A path without the types of its parameters."""
    return PARAMETER.sub(r"{\1}", path)
