"""What each token of a vocabulary stands for, looked up once: bytes or text, and which bytes it lacks.

The `tokenizers` library decodes whole lists of tokens only, and its `DecodeStream` decodes all tokens again that have not become text yet.
For the two ways in which nearly all models spell bytes, the text is a sum over the tokens, so it can be continued from any token.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import tokenizers

Spelling = Literal["bytes", "runs", "other"]
_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))  # `ByteLevel` writes these bytes as themselves, others from U+0100 on
BYTE_OF: Mapping[str, int] = MappingProxyType(
    {chr(byte): byte for byte in _PLAIN} | {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PLAIN}))}
)
BYTE_TOKEN = re.compile(r"<0x(\+[0-9a-fA-F]|[0-9a-fA-F]{2})>")  # what Rust reads as eight bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTexts:
    """The texts of single tokens, in the form that the decoder of a tokenizer needs.

    Attributes:
        spelling: `"bytes"`: the text is the UTF-8 of all tokens' bytes, a U+FFFD for each maximal part that is none (`ByteLevel`).
            `"runs"`: tokens are text, but byte tokens in a row are one UTF-8 text, or a U+FFFD each if that is none (`ByteFallback`).
            `"other"`: known only to the decoder, which must have the tokens before, too.
        strips: Whether the decoder drops one space at the beginning.
        by_bytes: Whether tokens may be bytes that together are one character.
        absent: For each token a bit for every byte value that its text does not have, uint64 `[max_token_id + 2, 4]`. All are 0 for tokens
            that were not looked up yet, for the last row, and if the spelling is `"other"`.
        known: Tokens that were looked up. It is a memo, filled when a token is first looked up; what it holds never changes.
    """

    spelling: Spelling
    strips: bool
    by_bytes: bool
    absent: np.ndarray = field(repr=False)
    backend: tokenizers.Tokenizer = field(repr=False)
    special: frozenset[str] = field(repr=False)
    replaced: tuple[tuple[str, str], ...] = field(repr=False)
    known: dict[int, bytes | str] = field(repr=False, default_factory=dict)

    @staticmethod
    def of(backend: tokenizers.Tokenizer, max_token_id: int) -> "tuple[TokenTexts, TokenTexts]":
        """The texts of a tokenizer's tokens with special tokens, and the same without them."""
        parts = _parts(_decoder(backend))
        kinds, replaced, spelling = [part["type"] for part in parts], (), "other"
        end = parts[-1] if kinds and kinds[-1] == "Strip" else None
        before = parts[: len(parts) - 2 - (end is not None)]
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):  # after `Fuse`, a letter that is no byte changes the whole text
            spelling = "bytes"
        elif (
            kinds[len(before) :][:2] == ["ByteFallback", "Fuse"]
            and all(part["type"] == "Replace" and part["pattern"].get("String") for part in before)
            and _drops_one_space(end)
        ):
            spelling, replaced = "runs", tuple((part["pattern"]["String"], part["content"]) for part in before)
        special = frozenset(token.content for token in backend.get_added_tokens_decoder().values() if token.special)
        made = [
            TokenTexts(
                spelling=spelling, strips=end is not None, by_bytes=any("Byte" in kind for kind in kinds), backend=backend,
                absent=np.zeros((max_token_id + 2, 4), np.uint64), special=skipped, replaced=replaced,
            )
            for skipped in (frozenset[str](), special)
        ]  # fmt: skip
        return made[0], made[1]

    def showing(self, token_ids: Collection[int]) -> "TokenTexts":
        """The same with these tokens not left out."""
        texts = {self.backend.id_to_token(i) for i in token_ids}
        return replace(self, special=self.special - texts, absent=np.zeros_like(self.absent), known={})

    def leaves_out(self, token_id: int) -> bool:
        """Whether a token is a special one that is left out."""
        return self.backend.id_to_token(token_id) in self.special

    def __getitem__(self, token_id: int) -> Any:
        """What a token stands for: bytes or text by the spelling. For a special token that is left out and for an unknown id, nothing.

        With `"runs"`, nothing is `b""`, which leaves a run of byte tokens as it is. A token with the text `""` ends the run.
        """
        found = self.known.get(token_id)
        return self._look_up(token_id) if found is None else found

    def _look_up(self, token_id: int) -> bytes | str:
        token = self.backend.id_to_token(token_id)
        if token is None or token in self.special:
            found = "" if self.spelling == "other" else b""
        elif self.spelling == "bytes":
            letters = [BYTE_OF.get(letter) for letter in token]
            found = token.encode() if None in letters else bytes(letter for letter in letters if letter is not None)
        elif self.spelling == "runs":
            for old, new in self.replaced:
                token = token.replace(old, new)
            byte = BYTE_TOKEN.fullmatch(token)
            found = bytes([int(byte[1], 16)]) if byte else token
        else:
            found = token or " "  # never empty: a decoder may write something even for an empty token
        if self.spelling != "other" and 0 <= token_id < len(self.absent) - 1:
            self.absent[token_id] = ~byte_set(found if isinstance(found, bytes) else found.encode())
        self.known[token_id] = found
        return found


def byte_set(values: bytes) -> np.ndarray:
    """Some byte values as bits, uint64 `[4]`."""
    flags = np.zeros(256, bool)
    flags[list(values)] = True
    return np.packbits(flags).view(np.uint64)


def _decoder(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    """The decoder of a tokenizer as in its `tokenizer.json`. One that was written in Python has no form there, and may join bytes."""
    if backend.decoder is None:
        return None
    try:
        return json.loads(backend.decoder.__getstate__())
    except Exception as error:  # the library raises this very class
        if "cannot be serialized" not in str(error):
            raise
        return {"type": "PythonBytes"}


def _parts(decoder: Mapping[str, Any] | None) -> list[Any]:
    """The decoders that a decoder applies, in order."""
    if decoder is None:
        return []
    return [part for inner in decoder["decoders"] for part in _parts(inner)] if decoder["type"] == "Sequence" else [decoder]


def _drops_one_space(strip: Mapping[str, Any] | None) -> bool:
    return strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
