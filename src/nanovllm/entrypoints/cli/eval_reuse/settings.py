"""The settings of `eval-reuse`, checked before anything runs."""

import operator
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.chunks.compose import recompute_amount
from nanovllm.entrypoints.cli.eval_reuse.facts import MAX_FACTS, PARAGRAPH
from nanovllm.errors import InvalidRequestError

Recompute = int | float | Literal["all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of `eval-reuse`.

    Attributes:
        chunks: Numbers of chunks to compose, each a group of questions.
        facts: Facts per chunk. Chats have at least two facts per subject.
        separator: The text before every chunk, and before every question after a chunk. Chats do not use it.
        separators: The separators to compare.
        questions: Questions per group.
        recompute: Values of the argument `recompute` of `compose`.
        turns: Numbers of chat turns after which facts are asked for.
        reply_len: Most tokens of a reply.
        thought_len: Most tokens of a chat reply with its thinking.
        seed: The seed of the random texts.

    Raises:
        InvalidRequestError: A value is invalid.
    """

    chunks: tuple[int, ...] = (2, 4, 8)
    facts: int = 3
    separator: str = PARAGRAPH
    separators: tuple[str, ...] = (" ", "\n", PARAGRAPH)
    questions: int = 48
    recompute: tuple[Recompute, ...] = (0, 8, 16, 0.1, "all")
    turns: tuple[int, ...] = (1, 4)
    reply_len: int = 32
    thought_len: int = 192
    seed: int = 0

    def __post_init__(self) -> None:
        _require_in("facts", self.facts, 1, MAX_FACTS)
        for name, texts in (("separator", (self.separator,)), ("separators", _different("separators", self.separators))):
            if not all(isinstance(text, str) for text in texts):
                raise InvalidRequestError(f"{name}={getattr(self, name)!r} must be text")
        _require_in("seed", self.seed, 0, (1 << 63) - 1)
        for name in ("questions", "reply_len", "thought_len"):
            _require_in(name, getattr(self, name), 1, 1 << 20)
        for name, low, high in (("chunks", 2, 1 << 10), ("turns", 1, 1 << 10)):
            for value in _different(name, getattr(self, name)):
                _require_in(name, value, low, high)
        for value in _different("recompute", self.recompute):
            recompute_amount(value)


def _different(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, tuple) or not values or any(values.count(value) > 1 for value in values):
        raise InvalidRequestError(f"{name}={values!r} must be a tuple of different values, at least one")
    return values


def _require_in(name: str, value: Any, low: int, high: int) -> None:
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise InvalidRequestError(f"{name}={value!r} must be an integer in [{low}, {high}]")
