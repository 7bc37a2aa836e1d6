"""Words that a reply cannot have: as sequences of tokens, and the tokens that would complete one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanovllm.errors import InvalidRequestError
from nanovllm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BadWords:
    """Sequences of tokens that a reply cannot have.

    Attributes:
        single: The sequences of one token.
        longer: The others by their last token but one: all tokens but the last, and the last.
        reach: How many tokens before the next one matter at most.
    """

    single: tuple[int, ...]
    longer: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]
    reach: int

    def completing(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that would complete a sequence after the newest tokens of a reply, of which `reach` are enough."""
        longer = self.longer.get(tokens[-1], ()) if tokens else ()
        return [*self.single, *(last for before, last in longer if tuple(tokens[-len(before) :]) == before)]


def bad_words_of(tokenizer: Tokenizer | None, words: tuple[str, ...], vocab_size: int) -> BadWords | None:
    """The tokens of words as vLLM has them: of the word, and of the word after a space if that has as many tokens and another first one.

    White space at the beginning of a word is ignored.

    Raises:
        InvalidRequestError: There is no tokenizer, or a word has a token that the model does not have, or none.
    """
    if not words:
        return None
    if tokenizer is None:
        raise InvalidRequestError(f"bad_words={list(words)} needs a tokenizer, but this model has none: use logit_bias")
    return tokenizer.memo.get(("bad_words", words, vocab_size), lambda: _spelled(tokenizer, words, vocab_size))


def _spelled(tokenizer: Tokenizer, words: tuple[str, ...], vocab_size: int) -> BadWords:
    found = dict[tuple[int, ...], None]()
    for word in words:
        alone, spaced = (tuple(tokenizer.encode(before + word.lstrip(), add_special_tokens=False)) for before in ("", " "))
        if not alone or max(alone) >= vocab_size:
            raise InvalidRequestError(f"bad_words holds {word!r}, which the tokens of this model cannot spell")
        found[alone] = None
        if len(spaced) == len(alone) and spaced[0] != alone[0] and max(spaced) < vocab_size:
            found[spaced] = None
    longer = dict[int, list[tuple[tuple[int, ...], int]]]()
    for *before, last in found:
        if before:
            longer.setdefault(before[-1], []).append((tuple(before), last))
    single = tuple(ids[0] for ids in found if len(ids) == 1)
    return BadWords(single=single, longer=longer, reach=max(map(len, found)) - 1)
