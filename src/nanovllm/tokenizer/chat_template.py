"""Chat templates: Jinja programs that come with a checkpoint. They run in Jinja's immutable sandbox, with additional bounds."""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanovllm.errors import InvalidRequestError

MAX_OUTPUT = 16 << 20  # characters of a rendered prompt, and elements of any string or list made by repetition
MAX_POWER = 1 << 16  # bits of an integer power

Render = Callable[[Mapping[str, Any]], str]


def compile_templates(sources: Mapping[str, str]) -> Render:
    """Compile a model's templates to one function from the variables to the prompt text: `tool_use` if tools are given, else `default`.

    The function raises as that of `compile_template`. It also raises `InvalidRequestError` if the model has no template, or no default one.
    """
    if not sources:
        return _refuse("the model has no chat template; pass text or token ids, or add chat_template.jinja to its folder")
    usual = compile_template(sources["default"]) if "default" in sources else None
    with_tools = compile_template(sources["tool_use"]) if "tool_use" in sources else usual
    names = ", ".join(sorted(sources))
    other = _refuse(f"none of the model's chat templates ({names}) is the default one; add chat_template.jinja to its folder")

    def render(variables: Mapping[str, Any]) -> str:
        return ((usual if variables.get("tools") is None else with_tools) or other)(variables)

    return render


def compile_template(source: str) -> Render:
    """Compile a template to a function from its variables to the prompt text.

    Compiling never fails. Calling the function raises `InvalidRequestError` if the template does not compile, if it raises, or if it leaves
    the sandbox or a bound. The message quotes the template's own.

    Bounded are attributes (no private ones, no mutation), `range` (100,000 elements per call), repetition, powers, and the length of the
    output. The running time is not bounded: nested loops, and `~` or `join` inside a loop, may take long.
    """
    try:
        template = _Environment().from_string(source)
    except (TemplateError, RecursionError) as error:
        return _refuse(f"the model's chat template does not compile: {error}")

    def render(variables: Mapping[str, Any]) -> str:
        pieces, length = [], 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                if length > MAX_OUTPUT:
                    raise SecurityError(f"the output exceeds {MAX_OUTPUT} characters")
                pieces.append(piece)
        except Exception as error:  # a template may raise anything; it is the request that fails
            raise InvalidRequestError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(pieces)

    return render


def _refuse(message: str) -> Render:
    def refuse(variables: Mapping[str, Any]) -> str:
        raise InvalidRequestError(message)

    return refuse


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The settings, filters and functions that transformers gives to chat templates, with bounds on the results of operators."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER:
            raise SecurityError(f"{left} ** {right} is too large")
        for times, repeated in ((left, right), (right, left)):
            if operator != "*" or not isinstance(times, int) or isinstance(repeated, int | float):
                continue
            if times * len(repeated) > MAX_OUTPUT:
                raise SecurityError(f"a repetition exceeds {MAX_OUTPUT} elements")
        return super().call_binop(context, operator, left, right)


# Jinja's own filter escapes HTML, which a prompt must not.
def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
