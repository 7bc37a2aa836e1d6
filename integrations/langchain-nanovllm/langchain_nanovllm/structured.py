"""Structured output: a schema forces the reply, and a class of Pydantic reads it."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

# Where a schema has other schemas: by name, in a list, or one
NAMED, LISTED, ALONE = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems"), ("items", "additionalProperties")


def is_pydantic(schema: Any) -> bool:
    """Whether a schema is a class of Pydantic, of its first version too.

    Examples:
        >>> is_pydantic({"type": "object"})
        False
    """
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def closed(schema: Any) -> Any:
    """A JSON schema whose objects have no other keys than those that it names. Without this a model may invent keys.

    Examples:
        >>> closed({"type": "object", "properties": {"kind": {"type": "string"}}})["additionalProperties"]
        False
    """
    if not isinstance(schema, Mapping):
        return schema
    after: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            after[key] = {name: closed(each) for name, each in value.items()}
        elif key in LISTED and isinstance(value, list):
            after[key] = [closed(each) for each in value]
        else:
            after[key] = closed(value) if key in ALONE else value
    if "properties" in after and "allOf" not in after:
        after.setdefault("additionalProperties", False)
    return after


def response_format(schema: Any) -> dict[str, Any]:
    """The field `response_format` for a class of Pydantic, a TypedDict or a JSON schema.

    Examples:
        >>> from pydantic import BaseModel
        >>> class Animal(BaseModel):
        ...     kind: str
        >>> response_format(Animal)["json_schema"]["name"]
        'Animal'
    """
    form = convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": form.get("title", "reply"), "schema": closed(form)}}


def reading(model: BaseChatModel, schema: Any, *, include_raw: bool, **options: Any) -> Runnable[LanguageModelInput, Any]:
    """A model whose replies have the form of a schema.

    Args:
        model: The model.
        schema: A class of Pydantic, a TypedDict or a JSON schema.
        include_raw: Whether the result is a dict of the message (`raw`), what it says (`parsed`) and the error of reading it.
        **options: As in `bind`.

    Returns:
        A runnable that gives objects of the class, or dicts.
    """
    told = {"kwargs": {"method": "json_schema"}, "schema": convert_to_json_schema(schema)}
    bound = model.bind(response_format=response_format(schema), ls_structured_output_format=told, **options)
    parser = PydanticOutputParser(pydantic_object=schema) if is_pydantic(schema) else JsonOutputParser()
    if not include_raw:
        return bound | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | read.with_fallbacks([failed], exception_key="parsing_error")
