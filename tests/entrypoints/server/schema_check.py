"""A check of values against JSON schemas, of the few words that the server's document uses.

Fields that a schema does not name are faults.
"""

from collections.abc import Iterator
from typing import Any

TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "object": dict, "array": list
}  # fmt: skip
WORDS = {
    "$ref", "anyOf", "const", "enum", "type", "properties", "required", "items", "additionalProperties", "minItems", "maxItems", "title",
    "description", "default", "prefixItems",
}  # fmt: skip


def is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a type. Booleans are no numbers."""
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def faults(value: Any, schema: dict[str, Any], document: dict[str, Any], path: str = "$") -> Iterator[str]:
    """What is wrong with a value."""
    assert schema.keys() <= WORDS, f"{path}: this check does not know {schema.keys() - WORDS}"
    if "$ref" in schema:
        yield from faults(value, resolved(schema["$ref"], document), document, path)
        return
    if "anyOf" in schema and all([*faults(value, one, document, path)] for one in schema["anyOf"]):
        yield f"{path}: {value!r} is none of {schema['anyOf']}"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not in {schema['enum']}"
    kinds = schema.get("type", [])
    if kinds and not any(is_of(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{path}: {value!r} is not of type {kinds}"
    elif isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, one in value.items():
            if name in properties:
                yield from faults(one, properties[name], document, f"{path}.{name}")
            elif more is not None:
                yield from faults(one, more, document, f"{path}.{name}")
            elif properties:
                yield f"{path}.{name} is not in the schema"
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{path}: {len(value)} elements"
        first = schema.get("prefixItems", [])
        for place, one in enumerate(value):
            inner = first[place] if place < len(first) else schema.get("items", {})
            yield from [f"{path} has too many"] if inner is False else faults(one, inner, document, f"{path}[{place}]")


def resolved(reference: str, document: dict[str, Any]) -> Any:
    """What a reference within the document leads to."""
    value: Any = document
    assert reference.startswith("#/")
    for step in reference.removeprefix("#/").split("/"):
        value = value[step]
    return value


def references(value: Any) -> Iterator[str]:
    """All references of a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from references(one)
