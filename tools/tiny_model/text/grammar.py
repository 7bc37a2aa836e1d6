"""The template language of the generated text: `[a|b]` chooses, `{x}` fills, `{a x}` adds an article, `{^x}` capitalises."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")


class Rng(random.Random):
    """A seeded source of choices; the same seed gives the same text on every machine."""

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`, each as likely."""
        return options[int(self.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self.random() < probability

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different ones of `options`, in random order."""
        return self.sample(options, count)


def with_article(noun: str) -> str:
    """`noun` after its indefinite article."""
    return ("an " if noun[:1].lower() in "aeio" or noun.startswith(("um", "un", "ur", "honest", "hour")) else "a ") + noun


def capital(text: str) -> str:
    """`text` with a capital first letter."""
    return text[:1].upper() + text[1:]


# A parsed template: plain strings, slots ("{", form, name), and choices ("[", alternatives).
_Part = str | tuple


def _parse_until(text: str, at: int, stops: str) -> tuple[tuple[_Part, ...], int]:
    parts: list[_Part] = []
    plain = at
    while at < len(text) and text[at] not in stops:
        if text[at] == "{":
            if plain < at:
                parts.append(text[plain:at])
            end = text.index("}", at)
            name = text[at + 1 : end]
            form = ""
            if name.startswith("^"):
                form, name = "^", name[1:]
            if name.startswith("a "):
                form, name = form + "a", name[2:]
            parts.append(("{", form, name))
            at = plain = end + 1
        elif text[at] == "[":
            if plain < at:
                parts.append(text[plain:at])
            alternatives = []
            while text[at] != "]":
                alternative, at = _parse_until(text, at + 1, "|]")
                alternatives.append(alternative)
            parts.append(("[", tuple(alternatives)))
            at = plain = at + 1
        else:
            at += 1
    if plain < at:
        parts.append(text[plain:at])
    return tuple(parts), at


@cache
def _parse(template: str) -> tuple[_Part, ...]:
    return _parse_until(template, 0, "")[0]


def _fill(rng: Rng, parts: tuple[_Part, ...], slots: Mapping[str, str], out: list[str]) -> None:
    for part in parts:
        if isinstance(part, str):
            out.append(part)
        elif part[0] == "[":
            _fill(rng, rng.pick(part[1]), slots, out)
        else:
            text = slots[part[2]]
            if "a" in part[1]:
                text = with_article(text)
            out.append(capital(text) if "^" in part[1] else text)


def render(rng: Rng, template: str, slots: Mapping[str, str]) -> str:
    """The template with its choices made and its slots filled; raises KeyError for a slot that is missing."""
    out: list[str] = []
    _fill(rng, _parse(template), slots, out)
    return "".join(out)
