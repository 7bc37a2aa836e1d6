"""The text of a reply, piece by piece. The pieces together are the reply's text."""

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.tokenizer.detokenizer import Detokenizer
from nanovllm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextStream:
    """Turns tokens into pieces of text, and holds back text that could be the beginning of a stop string.

    Attributes:
        detokenizer: Turns tokens into text. None for a model without a tokenizer, whose pieces have no text.
        stops: The stop strings.
        num_shown: The number of characters given out.
        held: Text that could still become the beginning of a stop string.
    """

    detokenizer: Detokenizer | None
    stops: tuple[str, ...]
    num_shown: int = 0
    held: str = ""

    @staticmethod
    def of(tokenizer: Tokenizer | None, stops: Iterable[str] = (), skip_special_tokens: bool = True) -> "TextStream":
        """A stream without any tokens yet."""
        detokenizer = None if tokenizer is None else Detokenizer.of(tokenizer, skip_special_tokens)
        return TextStream(detokenizer=detokenizer, stops=tuple(stops))

    def push(self, token_ids: Iterable[int]) -> "tuple[TextStream, str]":
        """Add tokens that do not end the reply. Returns the stream, and the text that is now certain."""
        if self.detokenizer is None:
            return self, ""
        detokenizer, piece = self.detokenizer.push(token_ids)
        if not self.stops:
            return TextStream(detokenizer=detokenizer, stops=(), num_shown=self.num_shown + len(piece)), piece
        text = self.held + piece
        keep = len(text) - held_back(text, self.stops)
        after = TextStream(detokenizer=detokenizer, stops=self.stops, num_shown=self.num_shown + keep, held=text[keep:])
        return after, text[:keep]

    def end(self, text: str) -> str:
        """The rest of the reply's whole text."""
        return text[self.num_shown :]


def held_back(text: str, strings: Iterable[str]) -> int:
    """The length of the longest end of `text` that is a beginning, but not the whole, of one of the strings."""
    longest = 0
    for string in strings:
        at = text.find(string[0], max(0, len(text) - len(string) + 1))
        while at >= 0 and not string.startswith(text[at:]):
            at = text.find(string[0], at + 1)
        longest = max(longest, len(text) - at if at >= 0 else 0)
    return longest
