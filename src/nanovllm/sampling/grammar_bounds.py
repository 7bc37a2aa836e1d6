"""What a grammar may hold, checked before anything is compiled.

The bounds are sizes, not seconds, so that the same grammar is accepted on a fast machine and on a slow one. They cover what llguidance's
own limits leave open: it recurses over references and rules until its stack ends, follows long forced texts byte by byte, and builds an
automaton with a state for each remainder of a `multipleOf`.
"""

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn

from nanovllm.errors import InvalidRequestError

MAX_BYTES = 1 << 17  # of a schema, of a Lark grammar, and of all choices together
MAX_DEPTH = 64  # levels of a schema
MAX_LINKED_DEPTH = 512  # levels of a schema and of all that it refers to, which may stand one below the other
MAX_PROPERTIES = 2000
MAX_PATTERN_PROPERTIES = 100  # each is compared with every other
MAX_PATTERN = 8192  # characters of a regular expression
MAX_REPEAT = 10_000  # how often a part of a pattern may occur in a row, nested repetitions multiplied
MAX_MULTIPLE = 10_000  # the least common multiple of all `multipleOf`, without their powers of ten
MAX_CHOICES = 2000
MAX_RULES = 500  # of a Lark grammar

_COUNT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_LARK_COUNT = re.compile(r"[{~]\s*(\d+)\s*(?:(?:,|\.\.)\s*(\d*))?")


def refuse(what: str, why: str) -> NoReturn:
    """Raise the error of a grammar that cannot be served."""
    raise InvalidRequestError(f"grammar: {what} {why}")


def at_most(value: int, most: int, what: str) -> None:
    """Raise `InvalidRequestError` if there is more of something than a grammar may hold."""
    if value > most:
        refuse(what, f"of {value} exceeds the limit of {most}")


def check_schema(schema: Any) -> None:
    """Check the sizes of a JSON schema.

    Raises:
        InvalidRequestError: A size exceeds its bound, or the schema has options of llguidance.
    """
    if isinstance(schema, dict) and "x-guidance" in schema:
        refuse("the key 'x-guidance'", "is not accepted: options of the compiler are fixed")
    depth, targets, properties, patterns = _depth(schema), set[str](), 0, 0
    multiples = 1
    for node in _objects(schema):
        properties += len(node["properties"]) if isinstance(node.get("properties"), dict) else 0
        if isinstance(node.get("patternProperties"), dict):
            patterns += len(node["patternProperties"])
            for pattern in node["patternProperties"]:
                check_pattern(pattern)
        if isinstance(node.get("pattern"), str):
            check_pattern(node["pattern"])
        if isinstance(target := node.get("$ref"), str):
            targets.add(target)
        multiples = math.lcm(multiples, _digits(node.get("multipleOf")))
        at_most(multiples, MAX_MULTIPLE, "the least common multiple of all multipleOf (without powers of ten)")
    at_most(properties, MAX_PROPERTIES, "the number of properties")
    at_most(patterns, MAX_PATTERN_PROPERTIES, "the number of patternProperties")
    linked = depth + sum(_depth(_target(schema, name)) for name in targets)
    at_most(linked, MAX_LINKED_DEPTH, "the depth of the schema and of all that $ref refers to")


def check_pattern(pattern: str) -> None:
    """Check the length of a regular expression, and how often its parts may be repeated.

    Raises:
        InvalidRequestError: It is too long, or nested repetitions ask for too many copies of a part.
    """
    at_most(len(pattern), MAX_PATTERN, "the length of a pattern")
    at_most(_repeats(pattern), MAX_REPEAT, "the number of copies that the repetitions of a pattern ask for,")


def check_lark(text: str) -> None:
    """Check the sizes of a grammar in Lark's form.

    Raises:
        InvalidRequestError: It has too many lines, or a repetition asks for too many copies.
    """
    at_most(text.count("\n") + 1, MAX_RULES, "the number of lines of a Lark grammar")
    for low, high in _LARK_COUNT.findall(text):
        at_most(max(_number(low), _number(high)), MAX_REPEAT, "a repetition in a Lark grammar")


def parsed(text: str) -> Any:
    """The value of a JSON text of bounded depth.

    Raises:
        InvalidRequestError: The text is no JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=lambda name: refuse(f"the constant {name}", "is not JSON"))
    except RecursionError:
        refuse("the depth of the schema", f"exceeds the limit of {MAX_DEPTH}")
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        refuse("the schema", f"is not JSON: {error}")
    at_most(_depth(value), MAX_DEPTH, "the depth of the schema")
    return value


def _depth(value: Any) -> int:
    """The levels of a JSON value; 0 for a number or a text. No recursion, so that any depth is measured."""
    level, depth = [value], 0
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _target(schema: Any, name: str) -> Any:
    """What a reference such as `#/$defs/name` refers to; the whole schema for one that is written in another way."""
    found = schema
    for part in name.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return schema
        found = found[key]
    return found


def _digits(value: Any) -> int:
    """A number without its power of ten: 25 for 0.25. It is 1 for what is no positive number, which the compiler refuses."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return 1
    number = Fraction(str(value))
    whole = number.numerator * 10 ** (len(str(number.denominator)) * 4) // number.denominator
    while whole % 10 == 0:
        whole //= 10
    return whole


def _number(text: str) -> int:
    """A count; one with more digits than a count may have is as good as any other that is too large."""
    return int(text[:9] or 0)


def _repeats(pattern: str) -> int:
    """The most copies of one part that the counted repetitions of a pattern ask for: inside of two of them, their product."""
    most, groups = [1], list[int]()  # per open group the most inside of it; `last` is that of the part before
    last, place = 1, 0
    while place < len(pattern):
        letter = pattern[place]
        counts = _COUNT.match(pattern, place) if letter == "{" else None
        if letter == "\\":
            last, place = 1, place + 2
        elif letter == "[":
            last, place = 1, _after_class(pattern, place)
        elif letter == "(":
            groups.append(1)
            most.append(1)
            place += 1
        elif letter == ")" and groups:
            groups.pop()
            last, place = most.pop(), place + 1
        elif counts is not None:
            last, place = last * max(1, _number(counts[1]), _number(counts[3])), counts.end()
        else:
            last, place = last if letter in "*+?" else 1, place + 1
        most[-1] = max(most[-1], last)
    return max(most)


def _after_class(pattern: str, place: int) -> int:
    """The place after a class such as `[^]a-z]` that begins at `place`. Classes may be nested."""
    place, depth = place + 1, 1
    place += pattern[place : place + 1] == "^"
    place += pattern[place : place + 1] == "]"
    while place < len(pattern) and depth:
        depth += {"[": 1, "]": -1}.get(pattern[place], 0)
        place += 2 if pattern[place] == "\\" else 1
    return place
