"""What forces the form of a reply: `response_format`, `tool_choice`, and the fields of other servers for the same."""

import asyncio
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.entrypoints.server.app import Server, require_engine
from nanovllm.entrypoints.server.errors import ApiError, unsupported
from nanovllm.entrypoints.server.fields import InvalidParamError, mapping
from nanovllm.entrypoints.server.messages import ChatPrompt
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.request_fields import CONSTRAINTS
from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.tools.grammar import call_grammar, thoughtful
from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.compiled_grammar import compile_for
from nanovllm.sampling.grammar import Grammar
from nanovllm.tokenizer.tokenizer import Tokenizer

FORMATS = ("text", "json_object", "json_schema")
FORMS = ("json", "regex", "choice", "grammar", "json_object")  # of vLLM's `structured_outputs`
GUIDED: Mapping[str, str] = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",  # vLLM's older names
    "json_schema": "json", "regex": "regex",  # of llama.cpp and of SGLang
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """A form that a request asks for: its grammar, and the field that asked."""

    grammar: Grammar
    param: str


def form_of(body: Mapping[str, Any], param: str = "response_format") -> Form | None:
    """The form that a request asks for, or None.

    Args:
        body: The request.
        param: The name of `response_format` in errors.

    Raises:
        ApiError: Two fields ask for a form, or one asks for something that this server does not have.
        InvalidParamError: A field is malformed.
    """
    found = [(name, body[name]) for name in CONSTRAINTS if body.get(name) is not None]
    forms = [form for name, value in found if (form := _form(name, value, param)) is not None]
    if len(forms) > 1:
        raise ApiError(400, f"{forms[0].param} and {forms[1].param} both ask for a form: give one of them", param=forms[1].param)
    return forms[0] if forms else None


def _form(name: str, value: Any, param: str) -> Form | None:
    if name == "response_format":
        return _format(mapping(value, param), param)
    if name in GUIDED:
        return Form(_grammar(GUIDED[name], value, name), name)
    if name != "structured_outputs":
        raise unsupported(name)
    given = [(key, one) for key, one in mapping(value, name).items() if one not in (None, False)]
    if len(given) != 1 or given[0][0] not in FORMS:
        raise InvalidParamError(name, f"is {reprlib.repr(value)}; it must have one of {', '.join(FORMS)}")
    return Form(_grammar(*given[0], f"{name}.{given[0][0]}"), name)


def _format(value: Mapping[str, Any], param: str) -> Form | None:
    """OpenAI's field, as chat completions have it or, without the inner `json_schema`, as responses have it."""
    kind = value.get("type")
    if kind not in FORMATS:
        raise InvalidParamError(f"{param}.type", f"is {reprlib.repr(kind)}; it must be one of {', '.join(FORMATS)}")
    if kind == "text":
        return None
    if kind == "json_object" and value.get("schema") is None:
        return Form(Grammar.json_object(), param)
    if kind == "json_schema" and param == "response_format" and value.get("json_schema") is None and value.get("schema") is None:
        raise InvalidParamError(f"{param}.json_schema", "is missing")
    if kind == "json_object" or value.get("json_schema") is None:
        return Form(_grammar("json", value.get("schema"), f"{param}.schema"), param)
    inner = mapping(value["json_schema"], f"{param}.json_schema")
    return Form(_grammar("json", inner.get("schema"), f"{param}.json_schema.schema"), param)


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    try:
        match kind, value:
            case "json", Mapping() | bool() | str():
                return Grammar.json_schema(value)
            case "regex", str():
                return Grammar.regex(value)
            case "choice", list() if all(isinstance(one, str) for one in value):
                return Grammar.choice(value)
            case "grammar", str():
                return Grammar.lark(value)
            case "json_object", True:
                return Grammar.json_object()
    except InvalidRequestError as error:
        raise InvalidParamError(param, f"cannot be enforced: {error}") from None
    raise InvalidParamError(param, f"is {reprlib.repr(value)}, which is no {kind}")


def chat_form(
    formats: ReplyFormats, tokenizer: Tokenizer | None, form: Form | None, prompt: ChatPrompt, parser: ReplyParser
) -> Form | None:
    """The form of a chat's replies, with a think block before it where the model may write one.

    Args:
        formats: How replies are read.
        tokenizer: The model's, for marks that are tokens.
        form: What `form_of` found.
        prompt: The conversation.
        parser: What divides the replies; it knows whether the prompt has opened a think block.

    Raises:
        ApiError: The request asks for a tool call and for another form, or the model has no known format of tool calls.
    """
    choice = prompt.tool_choice
    opened = parser.splitter is not None and parser.splitter.state == "opened"
    reasoning = formats.reasoning if opened or prompt.enable_thinking else None
    if choice.mode == "required":
        if form is not None:
            raise ApiError(400, f"tool_choice requires a call, and {form.param} another form: give one of them", param=form.param)
        if formats.tools is None or tokenizer is None:
            message = "tool_choice requires a call, and this model's format of calls is unknown: start the server with --tool-parser NAME"
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
        rules = call_grammar(
            formats.tools.name, prompt.tools, choice, tokenizer, most=prompt.most_calls, reasoning=reasoning, opened=opened
        )
        return None if rules is None else Form(Grammar.lark(rules), "tools")
    if form is None or reasoning is None or tokenizer is None:
        return form
    rules = thoughtful(form.grammar, tokenizer, reasoning, opened=opened)
    if rules is None and opened:
        raise unsupported(form.param, "a grammar in Lark, for a reply that begins within a think block,")
    return form if rules is None else Form(Grammar.lark(rules), form.param)


async def forced(server: Server, form: Form | None) -> dict[str, Any]:
    """The options of `SamplingParams` that force a form. The grammar is compiled in a thread, so that the engine gets none that fails.

    Raises:
        ApiError: It cannot be enforced.
    """
    if form is None:
        return {}
    hello = require_engine(server)
    try:
        await asyncio.to_thread(compile_for, server.tokenizer, form.grammar, hello.vocab_size, hello.end_ids)
    except InvalidRequestError as error:
        raise ApiError(400, f"{form.param} cannot be enforced: {error}", param=form.param) from None
    return {"grammar": form.grammar}
