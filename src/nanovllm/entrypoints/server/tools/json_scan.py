"""A JSON scanner that can stop after any character: it finds where the parts of an object begin and end, and the first wrong character.

The grammar is that of RFC 8259, with a bound on the depth, and the outermost value is an object. The state is two short strings, so a scan
can go on with the next piece of text.
"""

from enum import Enum, auto
from typing import NamedTuple

from nanovllm.entrypoints.server.chat_limits import MAX_DEPTH

SPACE = " \t\n\r"
DIGITS = "0123456789"
HEX = frozenset("0123456789abcdefABCDEF")
ESCAPED = frozenset('"\\/bfnrt')
LITERALS = {"t": "=rue", "f": "=alse", "n": "=ull"}
# From a state inside of a number and a character to the next state; "i" is an integer part, "f" a fraction, "x" an exponent.
NUMBER = {
    **{("-", digit): "i" for digit in DIGITS[1:]},
    ("-", "0"): "0",
    **{("i", digit): "i" for digit in DIGITS},
    **{(whole, "."): "." for whole in "0i"},
    **{(before, digit): "f" for before in ".f" for digit in DIGITS},
    **{(before, letter): "e" for before in "0if" for letter in "eE"},
    **{("e", sign): "+" for sign in "+-"},
    **{(before, digit): "x" for before in "e+x" for digit in DIGITS},
}
NUMBER_ENDS = "0ifx"


class Found(Enum):
    """Why a scan has stopped."""

    MORE = auto()  # the text is used up
    BAD = auto()  # the next character cannot follow
    KEY = auto()  # the next character opens a key of the outermost object
    VALUE = auto()  # the next character opens a value of the outermost object
    STRING = auto()  # a key, or a value that is a string, of the outermost object has ended
    CLOSED = auto()  # a value that is an object or array of the outermost object has ended
    END = auto()  # the outermost value has ended


class Scan(NamedTuple):
    """Where a scanner is.

    Attributes:
        mode: What comes next. "v": a value; "]": a value or the end of an array; "}": a key or the end of an object; ",": a key; ":": a
            colon; "a": what follows a value; "s" and "k": the rest of a string or of a key, with a backslash or the number of hexadecimal
            digits that are due; "=rest": the rest of a literal; states of `NUMBER` after "#"; "": nothing, because the value has ended.
        stack: The open objects and arrays, outermost first.
    """

    mode: str = "v"
    stack: str = ""

    def run(self, text: str, at: int, end: int, *, opened: bool = False) -> "tuple[Scan, int, Found]":
        """Scan `text[at:end]` up to the first thing that is `Found`.

        Args:
            opened: Whether the scan goes on after `Found.KEY` or `Found.VALUE`, with the character that it found.

        Returns:
            The scanner, the index of the first character that was not scanned, and why not.
        """
        mode, stack = self
        while at < end:
            char, kind = text[at], mode[:1]
            if kind in ("s", "k"):
                if len(mode) == 1:
                    while char not in ('"', "\\") and char >= " ":
                        at += 1
                        if at == end:
                            return Scan(mode, stack), at, Found.MORE
                        char = text[at]
                    if char < " ":
                        return Scan(mode, stack), at, Found.BAD
                    at += 1
                    if char == "\\":
                        mode += "\\"
                        continue
                    mode = "a" if kind == "s" else ":"
                    if stack == "{":
                        return Scan(mode, stack), at, Found.STRING
                elif mode[1] == "\\":
                    if char not in ESCAPED and char != "u":
                        return Scan(mode, stack), at, Found.BAD
                    mode = kind + "4" if char == "u" else kind
                    at += 1
                else:
                    if char not in HEX:
                        return Scan(mode, stack), at, Found.BAD
                    mode = kind if mode[1] == "1" else kind + str(int(mode[1]) - 1)
                    at += 1
                continue
            if kind == "#":
                following = NUMBER.get((mode[1], char))
                if following is not None:
                    mode = "#" + following
                    at += 1
                    continue
                if mode[1] not in NUMBER_ENDS:
                    return Scan(mode, stack), at, Found.BAD
                mode = "a"
            elif kind == "=":
                if char != mode[1]:
                    return Scan(mode, stack), at, Found.BAD
                mode = "=" + mode[2:] if len(mode) > 2 else "a"
                at += 1
                continue
            if char in SPACE:
                at += 1
                continue
            outermost = stack == "{"
            if mode == "a" or (mode in ("]", "}") and char == mode):
                if char == "," and mode == "a":
                    mode = "," if stack[-1] == "{" else "v"
                elif (char == "}" and stack[-1] == "{") or (char == "]" and stack[-1] == "["):
                    stack, mode = stack[:-1], "a"
                    if stack in ("", "{"):
                        return Scan(mode if stack else "", stack), at + 1, Found.CLOSED if stack else Found.END
                else:
                    return Scan(mode, stack), at, Found.BAD
            elif mode in (",", "}"):
                if char != '"':
                    return Scan(mode, stack), at, Found.BAD
                if outermost and not opened:
                    return Scan(mode, stack), at, Found.KEY
                mode, opened = "k", False
            elif mode == ":":
                if char != ":":
                    return Scan(mode, stack), at, Found.BAD
                mode = "v"
            else:
                if outermost and not opened:
                    return Scan(mode, stack), at, Found.VALUE
                opened = False
                if not stack and char != "{":
                    return Scan(mode, stack), at, Found.BAD
                if char in "{[":
                    if len(stack) == MAX_DEPTH:
                        return Scan(mode, stack), at, Found.BAD
                    stack, mode = stack + char, "}" if char == "{" else "]"
                elif char == '"':
                    mode = "s"
                elif char in LITERALS:
                    mode = LITERALS[char]
                elif char in "-0" or char in DIGITS:
                    mode = "#" + (char if char in "-0" else "i")
                else:
                    return Scan(mode, stack), at, Found.BAD
            at += 1
        return Scan(mode, stack), at, Found.MORE
