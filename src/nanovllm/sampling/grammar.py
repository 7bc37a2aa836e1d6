"""`Grammar`: a formal language that a reply must be in."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.grammar_bounds import (
    MAX_BYTES,
    MAX_CHOICES,
    at_most,
    check_lark,
    check_pattern,
    check_schema,
    parsed,
    refuse,
)
from nanovllm.types import brief

Form = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A formal language: replies of a request with `SamplingParams(grammar=...)` are in it.

    Make one by `json_schema`, `json_object`, `regex`, `choice` or `lark`. Grammars with equal sources are equal and have equal hashes, so
    that a compiled form serves all of them. Sizes are checked here; the rest is checked when the grammar is compiled for a model, by
    `compile_grammar` or by the call that takes the request.

    Attributes:
        form: The form in which the language is written.
        source: The text that defines it. For a schema and for choices it is JSON, without spaces.

    Raises:
        InvalidRequestError: The source is not a text of this form, or exceeds a bound. The message names the value.

    Examples:
        >>> yes_or_no = nv.Grammar.choice(["yes", "no"])
        >>> yes_or_no
        Grammar.choice('["yes","no"]')
        >>> params = nv.SamplingParams(temperature=0, max_tokens=8, grammar=yes_or_no)
        >>> state, reply = nv.generate(model, state, "Is the sky blue? Answer:", params)
        >>> reply.text in ("yes", "no"), reply.finish_reason
        (True, 'stop')
    """

    form: Form
    source: str

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            refuse(f"form={brief(self.form)}", f"must be one of {', '.join(get_args(Form))}")
        if not isinstance(self.source, str) or not self.source:
            refuse(f"{self.form}={brief(self.source)}", "must be a text that is not empty")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            refuse(self.form, f"has a lone surrogate at position {error.start}")
        at_most(size, MAX_BYTES, f"the size of a {self.form} in bytes")
        match self.form:
            case "json_schema":
                check_schema(parsed(self.source))
            case "choice":
                _check_choices(parsed(self.source))
            case "regex":
                check_pattern(self.source)
            case "lark":
                check_lark(self.source)

    def __repr__(self) -> str:
        return f"Grammar.{self.form}({brief(self.source)})"

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool | str) -> "Grammar":
        """JSON texts that a schema describes.

        Every keyword of the schema is enforced. A schema with a keyword that llguidance cannot enforce is refused when it is compiled; one
        that no version of JSON Schema knows says nothing. Between two tokens of JSON there may be a space, or a line break with up
        to 20 spaces or tabs: so a model cannot write white space for ever.

        Args:
            schema: The schema, as a mapping or as a JSON text.

        Returns:
            The grammar.

        Raises:
            InvalidRequestError: It is not JSON, or exceeds a bound.

        Examples:
            >>> nv.Grammar.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
            Grammar.json_schema('{"type":"object","properties":{"age":{"type":"integer"}},"required":["age"]}')
        """
        if isinstance(schema, str):
            at_most(len(schema), MAX_BYTES, "the size of a json_schema in characters")
            schema = parsed(schema)
        if not isinstance(schema, Mapping | bool):
            refuse(f"json_schema={brief(schema)}", "must be an object, true or false")
        return Grammar(form="json_schema", source=_dumped("the schema", schema))

    @staticmethod
    def json_object() -> "Grammar":
        """All JSON objects.

        Returns:
            The grammar.

        Examples:
            >>> nv.Grammar.json_object()
            Grammar.json_schema('{"type":"object"}')
        """
        return Grammar(form="json_schema", source='{"type":"object"}')

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """Texts that a regular expression matches as a whole.

        Args:
            pattern: The expression, in the syntax of Rust's crate `regex`: without look-around and without references to groups.

        Returns:
            The grammar.

        Raises:
            InvalidRequestError: It is no text, or exceeds a bound.

        Examples:
            >>> nv.Grammar.regex(r"[0-9]{4}-[0-9]{2}")
            Grammar.regex('[0-9]{4}-[0-9]{2}')
        """
        return Grammar(form="regex", source=pattern)

    @staticmethod
    def choice(texts: Collection[str]) -> "Grammar":
        """Some texts, of which a reply is one.

        Args:
            texts: The texts, none of them empty.

        Returns:
            The grammar.

        Raises:
            InvalidRequestError: They are not texts, or exceed a bound.

        Examples:
            >>> nv.Grammar.choice(["red", "green"]) == nv.Grammar.choice(("red", "green"))
            True
        """
        if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Collection):
            refuse(f"choice={brief(texts)}", "must be a sequence of texts")
        return Grammar(form="choice", source=_dumped("choice", list(texts)))

    @staticmethod
    def lark(text: str) -> "Grammar":
        """Texts of a context-free grammar in Lark's form, as llguidance reads it (its `docs/syntax.md`).

        Args:
            text: The grammar. Its rule `start` is the whole text.

        Returns:
            The grammar.

        Raises:
            InvalidRequestError: It is no text, or exceeds a bound.

        Examples:
            >>> sums = nv.Grammar.lark('start: NUMBER ("+" NUMBER)*\\nNUMBER: /[0-9]+/')
            >>> sums.form
            'lark'
        """
        return Grammar(form="lark", source=text)


def _dumped(what: str, value: Any) -> str:
    """A value as JSON without spaces, whose keys keep their order."""
    try:
        return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        refuse(what, "is nested too deeply")
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        refuse(what, f"is not JSON: {error}")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) and not isinstance(value, dict) else value


def _check_choices(texts: Any) -> None:
    if not isinstance(texts, list) or not texts:
        refuse(f"choice={brief(texts)}", "must be a sequence of at least one text")
    at_most(len(texts), MAX_CHOICES, "the number of choices")
    for text in texts:
        if not isinstance(text, str) or not text:
            refuse(f"the choice {brief(text)}", "must be a text that is not empty")
