"""Detokenizers: the text of a reply, token by token.

If the decoder spells `"bytes"` or `"runs"` (`TokenTexts.spelling`), a token takes amortised constant time, whatever the tokens are. With
other decoders each token decodes all tokens again that have given no piece yet: a row of n tokens without a piece takes time in n². Such a
row has byte tokens, text that ends with U+FFFD where tokens may be bytes, or tokens that the decoder gives no text. Their pieces need not
add up to the text of all tokens if new tokens change the text of old ones, as with `Fuse` before `ByteLevel`, or if the decoder changes
more than the first token of a text, as a `Strip` of two spaces may.
"""

from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from nanovllm.tokenizer.token_texts import BYTE_TOKEN, TokenTexts
from nanovllm.tokenizer.tokenizer import Tokenizer
from nanovllm.types import brief_fields

REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not, or not yet, a character
Rope = tuple[Any, str] | None  # parts of a text as a linked list, newest first: (older, part)


class Detokenizer(ABC):
    """Turns a stream of token ids into pieces of text. No piece ends inside a character, so that text with a U+FFFD at its end waits.

    The pieces and `rest()` together equal `decode` of all ids, but for the decoders named above. A value never changes: `push` returns the
    next one.
    """

    __slots__ = ()
    texts: TokenTexts

    def __repr__(self) -> str:
        return brief_fields(self)

    @staticmethod
    def of(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> "Detokenizer":
        """A detokenizer without any ids yet."""
        texts = tokenizer.texts[skip_special_tokens]
        if texts.spelling == "bytes":
            return _ByteDetokenizer(texts=texts)
        if texts.spelling == "runs":
            return _RunDetokenizer(texts=texts, begun=not texts.strips)
        return _WindowDetokenizer(texts=texts, tokenizer=tokenizer)

    @abstractmethod
    def push(self, ids: Iterable[int]) -> "tuple[Detokenizer, str]":
        """Add ids. Returns the detokenizer, and the text that is now certain; an unfinished character waits for its other bytes."""

    @abstractmethod
    def rest(self, last: int | None = None) -> str:
        """The text that no piece has shown yet, or at least its `last` characters. At the end, unfinished characters become U+FFFD."""

    def most_new(self, ids: list[int]) -> int:
        """At most so many characters of the text after these newest ids were not in the text before them."""
        return 3 + sum([len(self.texts[i]) for i in ids])  # at most three bytes were unfinished


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _ByteDetokenizer(Detokenizer):
    """For `"bytes"`.

    Attributes:
        texts: The tokens' bytes.
        held: Text that no piece has shown, because it ended with U+FFFD or in a character.
        unfinished: The last bytes, which may become a character.
    """

    texts: TokenTexts
    held: Rope = None
    unfinished: bytes = b""

    def push(self, ids: Iterable[int]) -> "tuple[Detokenizer, str]":
        given = self.unfinished + b"".join(map(self.texts.__getitem__, ids))
        text, used = utf_8_decode(given, "replace", False)
        certain = used == len(given)
        if certain and text and self.held is None and not self.unfinished and not text.endswith(REPLACEMENT):
            return self, text
        held, piece = _settled(self.held, text, certain=certain)
        return _ByteDetokenizer(texts=self.texts, held=held, unfinished=given[used:]), piece

    def rest(self, last: int | None = None) -> str:
        return _ended(_joined(self.held, last) + self.unfinished.decode(errors="replace"), last)


class _Run(NamedTuple):
    """Byte tokens in a row: their characters, their number, the last bytes, which may become a character, and whether no more can come."""

    text: Rope = None
    num_bytes: int = 0
    unfinished: bytes = b""
    broken: bool = False

    def longer(self, more: bytes, *, strip: bool) -> "_Run":
        """The run with more bytes. With `strip` its text begins the reply, so that one space is dropped."""
        num_bytes, given = self.num_bytes + len(more), self.unfinished + more
        if self.broken:
            return _Run(num_bytes=num_bytes, broken=True)
        try:
            text, used = utf_8_decode(given, "strict", False)
        except UnicodeDecodeError:
            return _Run(num_bytes=num_bytes, broken=True)
        if strip and self.text is None:
            text = text.removeprefix(" ")
        return _Run((self.text, text) if used else self.text, num_bytes, given[used:])

    def ended(self, last: int | None = None) -> str:
        """The text if the run ends here, or its `last` characters."""
        if self.broken or self.unfinished:
            return REPLACEMENT * (self.num_bytes if last is None else min(self.num_bytes, last))
        return _joined(self.text, last)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _RunDetokenizer(Detokenizer):
    """For `"runs"`. One bad byte changes the text of its whole run, which is therefore held until another token ends it.

    Attributes:
        texts: The tokens' text; bytes for a byte token, none of them for a token that is left out.
        begun: Whether there is text before the run, or no space is dropped anyway.
        held: Text before the run that no piece has shown.
        run: The byte tokens since the last other token.
    """

    texts: TokenTexts
    begun: bool
    held: Rope = None
    run: _Run = field(default_factory=_Run)

    def push(self, ids: Iterable[int]) -> "tuple[Detokenizer, str]":
        parts, begun, run = list[str](), self.begun, self.run
        for kind, group in groupby(map(self.texts.__getitem__, ids), type):
            if kind is bytes:
                run = run.longer(b"".join(group), strip=not begun)
                continue
            text = "".join(group)
            parts += [run.ended(), text if begun or run.num_bytes else text.removeprefix(" ")]
            begun, run = begun or bool(text or run.num_bytes), _Run()
        held, piece = _settled(self.held, "".join(parts), certain=not run.num_bytes)
        return _RunDetokenizer(texts=self.texts, begun=begun, held=held, run=run), piece

    def rest(self, last: int | None = None) -> str:
        return _ended(_joined(self.held, last) + self.run.ended(last), last)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _WindowDetokenizer(Detokenizer):
    """For other decoders: new ids are decoded after old ones, because a decoder may treat the first token in a way of its own.

    Text that ends with U+FFFD waits, if tokens may be bytes.

    Attributes:
        texts: Which tokens are left out.
        tokenizer: The tokenizer.
        window: The ids since the last piece but one.
        num_shown: How many ids of the window were already shown.
    """

    texts: TokenTexts
    tokenizer: Tokenizer
    window: tuple[int, ...] = ()
    num_shown: int = 0

    def push(self, ids: Iterable[int]) -> "tuple[Detokenizer, str]":
        window = (*self.window, *(i for i in ids if self.texts[i]))
        after = replace(self, window=window)
        if len(window) == len(self.window) or (self.texts.by_bytes and BYTE_TOKEN.fullmatch(self.texts[window[-1]])):
            return after, ""
        piece = after.rest()
        if not piece or (self.texts.by_bytes and piece.endswith(REPLACEMENT)):
            return after, ""
        return replace(self, window=window[self.num_shown :], num_shown=len(window) - self.num_shown), piece

    def rest(self, last: int | None = None) -> str:
        shown = self._decode(self.window[: self.num_shown])
        return _ended(self._decode(self.window)[len(shown) :], last)

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)  # they are left out already


def _settled(held: Rope, text: str, *, certain: bool) -> tuple[Rope, str]:
    """Text after `held` text: what is held now, and the piece that can be shown."""
    if certain and text and not text.endswith(REPLACEMENT):
        return None, _joined(held) + text
    return ((held, text) if text else held), ""


def _joined(rope: Rope, last: int | None = None) -> str:
    """The text of a rope; of a long one only the end, if its `last` characters are enough."""
    parts, count = [], 0
    while rope is not None and (last is None or count < last):
        rope, part = rope
        part = _ended(part, last)
        parts.append(part)
        count += len(part)
    return "".join(reversed(parts))


def _ended(text: str, last: int | None) -> str:
    return text if last is None else text[max(0, len(text) - last) :]
