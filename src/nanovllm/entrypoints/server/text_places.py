"""Where in a reply's text the text of each token begins."""

from codecs import getincrementaldecoder

from nanovllm.tokenizer.detokenizer import Detokenizer
from nanovllm.tokenizer.tokenizer import Tokenizer

_Utf8 = getincrementaldecoder("utf-8")


class TextPlaces:
    """Counts characters of a text while its tokens come, in constant time for a token, whatever the tokens are.

    A token that continues a character begins where the character begins. If bytes of a run of byte tokens turn out to be no characters,
    the places in that run are too low. If the spelling (`TokenTexts.spelling`) is "other", places are those of a `Detokenizer`'s pieces.

    Args:
        tokenizer: Spells the tokens. None: all places are 0.
        skip_special_tokens: Whether the text leaves special tokens out.
    """

    __slots__ = ("_at", "_begun", "_detokenizer", "_inside", "_run", "_texts", "_utf8")

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True) -> None:
        self._texts = None if tokenizer is None else tokenizer.texts[skip_special_tokens]
        other = self._texts is not None and self._texts.spelling == "other"
        self._detokenizer = Detokenizer.of(tokenizer, skip_special_tokens) if other and tokenizer is not None else None
        self._at = self._inside = 0  # characters before the run of byte tokens, and complete ones in it
        self._begun = self._texts is None or not self._texts.strips
        self._run, self._utf8 = bytearray(), _Utf8("replace")

    def push(self, token_id: int) -> int:
        """Add a token. Returns its place."""
        if self._texts is None:
            return 0
        if self._detokenizer is not None:
            place = self._at
            self._detokenizer, piece = self._detokenizer.push([token_id])
            self._at += len(piece)
            return place
        text = self._texts[token_id]
        if isinstance(text, bytes):
            dropped = self._inside > 0 and not self._begun and self._run.startswith(b" ")
            place = self._at + self._inside - dropped
            self._inside += len(self._utf8.decode(text))
            if self._texts.spelling == "runs":
                self._run += text
            return place
        if self._run:
            self._end_run()
        place = self._at
        self._at += len(text if self._begun else text.removeprefix(" "))
        self._begun = self._begun or bool(text)
        return place

    def _end_run(self) -> None:
        """Count the characters of a run of byte tokens, which is text as a whole, or a U+FFFD for each byte."""
        try:
            text = self._run.decode()
            self._at += len(text if self._begun else text.removeprefix(" "))
        except UnicodeDecodeError:
            self._at += len(self._run)
        self._begun, self._inside = True, 0
        self._run.clear()
        self._utf8.reset()
