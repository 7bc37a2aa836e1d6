"""Grammars compiled for the tokens of a model, by llguidance (github.com/guidance-ai/llguidance), which the extra `grammar` installs.

llguidance keeps an Earley parser over a lexer of lazily built automata, and walks a tree of all tokens for each mask. Its objects never
raise: after an error they allow the end token alone, so each use asks for the error.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanovllm.errors import InvalidRequestError
from nanovllm.sampling.grammar import Grammar
from nanovllm.tokenizer.tokenizer import Tokenizer

WHITESPACE = r"[ \t]|\r?\n[ \t]{0,20}"  # between two tokens of JSON: a space, or a line break with an indentation
# Steps of llguidance's parser and lexer, of which 20 to 50 thousand take a millisecond; and states of a lexer, of one or two kB.
LIMITS = {"initial_lexer_fuel": 500_000, "max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False}
# Sets of tokens that llguidance allows at once where any text of the set may come next, instead of asking for each token. Most tokens are
# texts without quotes. In a text of bounded length the longest set that still fits counts, so there is one for each short length.
TEXT = r'[^"\\\x00-\x1F\x7F]'
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 20, 30)
SLICES = (r"[\x20\x0A\x0D\x09]+", *(f"{TEXT}{{1,{length}}}" for length in LENGTHS), f"{TEXT}+")
MOST_ADDED = 1 << 14  # added tokens of a tokenizer: 20,000 take llguidance 3 s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledGrammar:
    """A grammar for one vocabulary. It never changes: replies copy the matcher.

    Attributes:
        grammar: The grammar.
        vocab_size: V, the width of the model's logits.
        end_ids: The tokens that end a reply where the grammar accepts.
        ends: The same as bits of a mask: the words that have some, and their bits, int32.
        matcher: The matcher before the first token.
    """

    grammar: Grammar
    vocab_size: int
    end_ids: frozenset[int]
    ends: tuple[np.ndarray, np.ndarray] = field(repr=False)
    matcher: Any = field(repr=False)


def compile_for(tokenizer: Tokenizer | None, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> CompiledGrammar:
    """Compile a grammar, or find it in the tokenizer's memo. It waits for no device, and other threads run meanwhile.

    Args:
        tokenizer: The model's tokenizer.
        grammar: The grammar.
        vocab_size: The width of the model's logits. Ids that the tokenizer does not have are never allowed.
        end_ids: The model's end-of-sequence tokens. If there are none, a token that llguidance finds in the tokenizer stands for the end.

    Raises:
        InvalidRequestError: The grammar is invalid, or has no text; or llguidance cannot enforce it, does not know the tokenizer, or is
            not installed.
    """
    if tokenizer is None:
        raise InvalidRequestError(f"grammar={grammar!r} needs a tokenizer, but this model has none")
    key = vocab_size, tuple(end_ids)
    return tokenizer.memo.get((grammar, *key), lambda: _compiled(tokenizer, grammar, *key))


def is_compiled(tokenizer: Tokenizer | None, grammar: Grammar, vocab_size: int, end_ids: Sequence[int]) -> bool:
    """Whether `compile_for` returns at once, with a compiled grammar or with the error of a model without a tokenizer."""
    return tokenizer is None or (grammar, vocab_size, tuple(end_ids)) in tokenizer.memo


def prepare_grammars(tokenizer: Tokenizer | None, vocab_size: int, end_ids: Sequence[int]) -> None:
    """Build what all grammars of a tokenizer share, so that no request waits for it. Does nothing where no grammar can be followed.

    The arguments are those of `compile_for`.
    """
    with suppress(InvalidRequestError):  # requests are told
        compile_for(tokenizer, Grammar.json_object(), vocab_size, end_ids)


def _compiled(tokenizer: Tokenizer, grammar: Grammar, vocab_size: int, end_ids: tuple[int, ...]) -> CompiledGrammar:
    native = _llguidance()
    vocabulary = tokenizer.memo.get(("llguidance", vocab_size, end_ids), lambda: _vocabulary(native, tokenizer, vocab_size, end_ids))
    matcher = native.LLMatcher(vocabulary, _source(native, grammar), log_level=0, limits=native.LLParserLimits(**LIMITS))
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequestError(f"grammar={grammar!r} cannot be enforced: {told(matcher)}")
    if matcher.is_stopped() and not matcher.is_accepting():
        raise InvalidRequestError(f"grammar={grammar!r} has no text")
    if not np.frombuffer(mask, np.uint8).any():
        raise InvalidRequestError(f"grammar={grammar!r} has no text that the model's tokens can spell")
    ends = np.zeros(num_words(vocab_size), np.uint32)
    for token in vocabulary.eos_tokens:
        ends[token // 32] |= np.uint32(1 << token % 32)
    ids, where = frozenset(vocabulary.eos_tokens), np.flatnonzero(ends)
    return CompiledGrammar(grammar=grammar, vocab_size=vocab_size, end_ids=ids, ends=(where, ends.view(np.int32)[where]), matcher=matcher)


def num_words(vocab_size: int) -> int:
    """The int32 words of a mask, which has one bit per token."""
    return -(-vocab_size // 32)


def told(matcher: Any) -> str:
    """The error of a matcher in one line."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").split()
    return " ".join(lines)[:300] or str(matcher.stop_reason())


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequestError("a grammar needs llguidance: pip install 'nanovllm[grammar]'") from error
    return llguidance


def _vocabulary(native: Any, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]) -> Any:
    """The tree of all tokens. It takes about a second and 150 MB for 150,000 tokens. No other thread runs meanwhile.

    The time for added tokens is quadratic in their number, so that it is bounded.
    """
    if (added := len(tokenizer.backend.get_added_tokens_decoder())) > MOST_ADDED:
        raise InvalidRequestError(f"this model's tokenizer cannot follow a grammar: it has {added} added tokens, over {MOST_ADDED}")
    try:
        return native.LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(end_ids) or None, slices=list(SLICES))
    except Exception as error:  # of the tokenizers library this very class, if a part is written in Python
        raise InvalidRequestError(f"this model's tokenizer cannot follow a grammar: {error}") from error


def _source(native: Any, grammar: Grammar) -> str:
    match grammar.form:
        case "json_schema":
            space = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
            source = {"true": "{}", "false": '{"enum":[]}'}.get(grammar.source, grammar.source)  # options need an object
            return native.LLMatcher.grammar_from_json_schema(source, overrides=space)
        case "regex":
            return native.LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source))
            return native.LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case "lark":
            return native.LLMatcher.grammar_from_lark(grammar.source)
