"""The OpenAPI document as one HTML page for people. It has no scripts and asks no other host for anything."""

import json
import re
import shlex
from collections.abc import Iterable
from html import escape
from typing import Any

POLICY = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
STREAM = "text/event-stream"
STYLE = """\
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;border-bottom:1px solid #8884}
code,pre{font:.9em ui-monospace,monospace}pre{overflow-x:auto;padding:.6rem;border:1px solid #8884}h2{margin-top:2.5rem}
"""


def page(document: dict[str, Any], base: str) -> str:
    """The page.

    Args:
        document: An OpenAPI document.
        base: The address of the server in examples, such as `http://127.0.0.1:8000`.
    """
    info, schemas = document["info"], document["components"]["schemas"]
    everything = [(method, path, entry) for path, methods in document["paths"].items() for method, entry in methods.items()]
    operations = [one for one in everything if "x-alias-of" not in one[2]]
    aliases = {entry["x-alias-of"]: path for _, path, entry in everything if "x-alias-of" in entry}
    head = f"<title>{escape(info['title'])} {escape(info['version'])}</title><style>{STYLE}</style>"
    parts = [f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}</head><body>']
    parts.append(f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{_marked(info['description'])}</p>")
    key = "If the server was started with keys, each request but those for its health needs the header"
    parts.append(f'<p>{key} <code>Authorization: Bearer KEY</code>. The <a href="openapi.json">OpenAPI document</a> is for programs.</p>')
    rows = [(f"<code>{_link(entry['operationId'], f'{m.upper()} {p}')}</code>", _marked(entry["summary"])) for m, p, entry in operations]
    parts.append(_table(("route", "what it does"), rows))
    for method, path, entry in operations:
        parts += _section(method, path, entry, aliases.get(path), base)
    responses = document["components"]["responses"].items()
    parts.append(f'<h2 id="errors">Errors</h2><p>Each has a body of the type {_link("Error", "Error")}.</p>')
    parts.append(_table(("status", "reason"), [(name.removeprefix("Error"), escape(value["description"])) for name, value in responses]))
    parts.append('<h2 id="types">Types</h2>')
    for name, schema in schemas.items():
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{_marked(schema.get("description", ""))}</p>{_fields(schema)}')
    return "".join([*parts, "</body></html>"])


def _section(method: str, path: str, entry: dict[str, Any], alias: str | None, base: str) -> Iterable[str]:
    """The section of one operation."""
    also = f" Also at <code>{escape(alias)}</code>." if alias else ""
    yield f'<h2 id="{escape(entry["operationId"])}">{method.upper()} {escape(path)}</h2><p>{_marked(entry["summary"])}.{also}</p>'
    words = ["curl", f"{base}{path}"] if method == "get" else ["curl", "-X", method.upper(), f"{base}{path}"]
    if "requestBody" in entry:
        body = entry["requestBody"]["content"]["application/json"]
        yield f"<p>Body: {_type(body['schema'])}</p>"
        for example in body.get("examples", {}).values():
            words = ["curl", f"{base}{path}", "-H", "Content-Type: application/json", "-d", json.dumps(example["value"])]
    content = entry["responses"]["200"]["content"]
    answers = [f"{_type(value['schema'])} (<code>{escape(kind)}</code>)" for kind, value in content.items() if kind != STREAM]
    if STREAM in content:
        event = content[STREAM]["schema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
        answers.append(f"with <code>stream</code>, events of {_type(event)} (<code>{STREAM}</code>)")
    yield f"<p>Answer: {'; '.join(answers)}</p><pre>{escape(shlex.join(words))}</pre>"


def _fields(schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return f"<p>{_type(schema)}</p>"
    needed = schema.get("required", ())
    rows = []
    for name, value in schema["properties"].items():
        note = [_marked(value["description"])] if "description" in value else []
        note += [f"Default: <code>{escape(json.dumps(value['default']))}</code>."] if value.get("default") is not None else []
        rows.append((f"<code>{escape(name)}</code>{'' if name in needed else ' (optional)'}", _type(value), " ".join(note)))
    return _table(("field", "type", ""), rows)


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _link(name, name)
    if "anyOf" in schema:
        return " or ".join([_type(one) for one in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return ", ".join([f"<code>{escape(json.dumps(value))}</code>" for value in values])
    kind = schema.get("type", "any")
    if kind == "array":
        items = [*schema.get("prefixItems", ()), schema.get("items")]
        return f"array of ({', '.join([_type(one) for one in items if isinstance(one, dict)]) or 'any'})"
    if "properties" in schema:
        return f"object of {', '.join([f'<code>{escape(name)}</code>' for name in schema['properties']])}"
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["".join([f"<td>{cell}</td>" for cell in row]) for row in rows]
    return f"<table><tr>{''.join([f'<th>{cell}</th>' for cell in head])}</tr>{''.join([f'<tr>{line}</tr>' for line in lines])}</table>"


def _link(name: str, text: str) -> str:
    return f'<a href="#{escape(name)}">{escape(text)}</a>'


def _marked(text: str) -> str:
    """A text with its code in code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
