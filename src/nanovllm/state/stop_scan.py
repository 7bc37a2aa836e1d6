"""`StopScan`: the search for stop strings in a reply."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from nanovllm.tokenizer.detokenizer import REPLACEMENT, Detokenizer
from nanovllm.tokenizer.token_texts import byte_set
from nanovllm.tokenizer.tokenizer import Tokenizer
from nanovllm.types import brief_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StopScan:
    """The search for stop strings in a reply, kept only for requests that have some.

    It may be some tokens behind the sequence, because most tokens cannot be the end of a stop string.

    Attributes:
        detokenizer: Turns the reply's tokens into text.
        ends: The byte values with which the stop strings end, as `byte_set` has them; all values if one has U+FFFD.
        strings: The stop strings in UTF-8; empty if every token has to be searched.
        num_read: The number of tokens of the reply that were searched.
        tail: The end of the text, in which a stop string could still begin.
        start: The index of the tail's first character in the reply.
        barred: A stop string that ends among so many first characters of the reply does not count: `min_tokens` tokens give them.
        found: The index at which a stop string begins, or None.
    """

    detokenizer: Detokenizer
    ends: np.ndarray
    strings: tuple[bytes, ...] = ()
    num_read: int = 0
    tail: str = ""
    start: int = 0
    barred: int = 0
    found: int | None = None

    def __repr__(self) -> str:
        return brief_fields(self)

    @staticmethod
    def of(tokenizer: Tokenizer, strings: Seq[str], skip_special_tokens: bool = True) -> "StopScan":
        """A search that has read no token."""
        detokenizer, each = Detokenizer.of(tokenizer, skip_special_tokens), tuple([string.encode() for string in strings])
        if any(REPLACEMENT in string for string in strings) or detokenizer.texts.spelling == "other":
            return StopScan(detokenizer=detokenizer, ends=byte_set(bytes(range(256))))
        return StopScan(detokenizer=detokenizer, ends=byte_set(bytes([string[-1] for string in each])), strings=each)

    @property
    def absent(self) -> np.ndarray:
        """The bytes that each token lacks (`TokenTexts`), as this search reads special tokens."""
        return self.detokenizer.texts.absent

    def may_end_with(self, token: int) -> bool:
        """Whether a token can complete a stop string: it has one, or begins with the end of one. This looks at the token alone."""
        if not self.strings:
            return True
        text = self.detokenizer.texts[token]
        text = text.encode() if isinstance(text, str) else text
        for string in self.strings:
            end = text.find(string[-1:]) + 1
            while end:
                if text.endswith(string, 0, end) or string.endswith(text[:end]):
                    return True
                end = text.find(string[-1:], end) + 1
        return False
