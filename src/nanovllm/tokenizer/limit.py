"""Whether a text has more tokens than a limit, from as much of the text as the limit makes necessary.

A token stands for a bounded number of characters, unless the tokenizer can drop characters or joins unknown ones. Within this bound, and
for tokenizers without it, the beginning of the text is encoded. Its tokens before a late space are those of the whole text, because a word
is encoded by itself.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

COMPOSED = 4  # the most characters that Unicode composes into one
FIRST = 8  # characters per token of the limit in the first beginning that is encoded
GROWTH = 4  # each further beginning is so many times as long
MARGIN = 256  # characters at the end of a beginning that could be encoded otherwise in the whole text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLimit:
    """What is known of a tokenizer's longest tokens.

    Attributes:
        backend: The tokenizer of the `tokenizers` library.
        widest: The most characters that a token stands for; None if there is no bound.
        strips: Whether a token may also stand for any number of spaces around it.
        margin: Characters at the end of a text whose tokens may depend on what follows.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    widest: int | None
    strips: bool
    margin: int

    @staticmethod
    def of(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> "TokenLimit":
        """The limit of a tokenizer with this vocabulary, in which added tokens are included."""
        added = backend.get_added_tokens_decoder().values()
        normalizer, pre_tokenizer = _parts(backend.normalizer, "normalizers"), _parts(backend.pre_tokenizer, "pretokenizers")
        shrinks = [_shrink(part) for part in normalizer]
        bounded = all(map(_keeps_all, pre_tokenizer)) and _knows_all(backend.model, vocab, pre_tokenizer)
        longest = max(map(len, vocab), default=1)
        return TokenLimit(
            backend=backend,
            widest=math.ceil(longest * math.prod(n for n in shrinks if n)) if bounded and all(shrinks) else None,
            strips=any(token.lstrip or token.rstrip for token in added),
            margin=max([MARGIN, *(len(token.content) for token in added)]),
        )

    def exceeded(self, text: str, most: int) -> bool:
        """Whether a text surely has more than `most` tokens, not counting tokens around it. False does not mean that it has fewer."""
        size = max(FIRST * most, 4 * self.margin)
        if len(text) <= size:
            return False
        if self.widest is not None:
            room = most * self.widest
            chars = sum(map(len, text[: 2 * room].split())) if self.strips else len(text)
            if chars > room:
                return True
        while size < len(text):
            try:
                if self._num_settled(text[:size]) > most:
                    return True
            except TypeError:  # the beginning is not valid Unicode
                return False
            size *= GROWTH
        return False

    def _num_settled(self, beginning: str) -> int:
        """The number of tokens of whole words before the last space that is not near the end."""
        stop = max(beginning.rfind(space, 0, len(beginning) - self.margin) for space in " \n")
        encoding = self.backend.encode(beginning, add_special_tokens=False)
        words, count = encoding.word_ids, bisect_right(encoding.offsets, stop, key=lambda span: span[1])
        while 0 < count < len(words) and words[count - 1] == words[count]:
            count -= 1
        return count


def _parts(component: Any, name: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, as in a `tokenizer.json`."""
    if component is None:
        return []
    flat, left = list[Mapping[str, Any]](), [json.loads(component.__getstate__())]
    while left:
        part = left.pop()
        left.extend(part[name]) if part["type"] == "Sequence" else flat.append(part)
    return flat


def _shrink(normalizer: Mapping[str, Any]) -> int | float | None:
    """By which factor a step may shorten a text; None if it may drop characters, or is not known."""
    match normalizer:
        case {"type": "NFC" | "NFKC"}:
            return COMPOSED
        case {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel"}:
            return 1.0
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old and new:
            return max(1.0, len(old) / len(new))
    return None


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether a step only divides a text, or writes its characters otherwise."""
    kind = pre_tokenizer["type"]
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return kind in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


def _knows_all(model: Any, vocab: Mapping[str, int], pre_tokenizer: list[Mapping[str, Any]]) -> bool:
    """Whether a model gives every character a token, and no token to several unknown ones."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in pre_tokenizer) and all(byte in vocab for byte in pre_tokenizers.ByteLevel.alphabet()):
        return True
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
