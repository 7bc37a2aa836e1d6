"""Replies whose next tokens are not free: what these may be, before a step samples, and whether a grammar is complete, after it."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.engine.masked_rows import MaskedRows
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.compiled_grammar import CompiledGrammar, compile_for
from nanovllm.sampling.grammar import Grammar
from nanovllm.sampling.matchers import Matchers, NotAllowedError, finish_together
from nanovllm.sampling.token_masks import all_tokens, leave_out
from nanovllm.state.request import Sequence
from nanovllm.state.steady import Steady
from nanovllm.types import Int32, Int64


def compile_grammar(model: Model, grammar: Grammar) -> None:
    """Compile a grammar for a model now, so that a request with it starts at once.

    Call it in a thread of its own: a large schema takes some hundred milliseconds, in which other threads run. The call that takes a
    request does the same for a grammar that is not compiled yet. A tokenizer keeps the 128 grammars that were used last. The time is
    bounded by the sizes that a `Grammar` may have, and by limits of llguidance in steps, not in seconds. Very deep grammars need a stack of
    2 MB: give the thread at least that (`threading.stack_size`) where the system's default is less.

    Args:
        model: The model.
        grammar: The grammar.

    Raises:
        InvalidRequestError: The grammar is invalid, or no text is in it, or the compiler cannot enforce a part of it, which the message
            names. Or the model has no tokenizer, or one that llguidance does not know. Or llguidance is not installed.

    Examples:
        >>> nv.compile_grammar(model, nv.Grammar.json_object())
        >>> nv.compile_grammar(model, nv.Grammar.json_schema({"type": "array", "uniqueItems": True}))
        Traceback (most recent call last):
            ...
        nanovllm.errors.InvalidRequestError: grammar=... cannot be enforced: Unimplemented keys: ["uniqueItems"]
    """
    if not isinstance(grammar, Grammar):
        raise InvalidRequestError(f"grammar must be a Grammar, not {type(grammar).__name__}")
    compiled_for(model, grammar)


def compiled_for(model: Model, grammar: Grammar) -> CompiledGrammar:
    """The compiled form of a grammar for the tokens of a model."""
    return compile_for(model.tokenizer, grammar, model.config.vocab_size, model.config.eos_token_ids)


class Constrained:
    """The masked rows of one pass, and their replies so far."""

    __slots__ = ("_lengths", "_matchers", "_newest", "_reply", "_rows", "_vocab_size")

    def __init__(
        self,
        vocab_size: int,
        matchers: Matchers,
        rows: MaskedRows,
        lengths: Int64[np.ndarray, "n"],
        newest: Int32[np.ndarray, "n"],
        reply: Callable[[int, int], list[int]],
    ) -> None:
        """Say which rows are masked.

        Args:
            vocab_size: The width of the model's logits.
            matchers: The matchers of the engine.
            rows: The rows.
            lengths: The number of tokens of each reply.
            newest: The newest token of each row.
            reply: The tokens of the reply of the row with an index, from a place on.
        """
        self._vocab_size, self._matchers, self._rows = vocab_size, matchers, rows
        self._lengths, self._newest, self._reply = lengths, newest, reply

    def fill(self, words: Int32[np.ndarray, "L W"], lines: Seq[int]) -> None:
        """Write the masks of the next tokens, one bit per token: that of row r into `words[lines[r]]`. Other lines stay as they are.

        An exception names the request to which it belongs in a note (`Culprit`).
        """
        rows, every = self._rows, None
        at = [lines[row] for row in rows.rows]
        for place in rows.free:
            every = all_tokens(self._vocab_size) if every is None else every
            words[at[place]] = every
        used = rows.follow(self._matchers, self._lengths, self._newest, self._reply)
        if used:
            bound = [at[place] for place in rows.bound]
            self._matchers.fill(used, words, bound)
            may_end = self._lengths[rows.bound] >= rows.least
            for each in finish_together(used, words, bound, may_end):
                try:
                    used[each].finish(words[bound[each]], may_end=bool(may_end[each]))
                except Exception as error:
                    rows.failed(self._matchers, rows.bound[each], error)
                    raise
        for place in rows.picky:
            request, length = rows.requests[place], int(self._lengths[place])
            if length < request.sampling.min_tokens:
                leave_out(words[at[place]], request.stop_ids)
            if (bad := request.bad_words) is not None:
                before = self._reply(rows.rows[place], max(0, length - bad.reach)) if bad.reach else ()
                leave_out(words[at[place]], bad.completing(before))

    def read(self, token_ids: Seq[int]) -> dict[int, NotAllowedError | None]:
        """Read the sampled tokens of all rows, after `fill`.

        Returns:
            For each row that ends with its token None, because its reply is complete, or why the token cannot be in a reply.
        """
        return self._rows.read(self._matchers, token_ids)


def constrained(model: Model, matchers: Matchers, rows: Seq[Sequence]) -> Constrained | None:
    """The rows of a batch whose next tokens are masked; None without such rows."""
    vocab_size = model.config.vocab_size
    if isinstance(rows, Steady):
        if not rows.masked:
            return None
        if not rows.kept:
            rows.kept.append(MaskedRows(rows.masked, [rows.base[row].request for row in rows.masked]))
        masked: MaskedRows = rows.kept[0]
        lengths = masked.most - rows.left[masked.index] + rows.age
        return Constrained(vocab_size, matchers, masked, lengths, rows.newest(masked.index), rows.reply)
    found = [row for row, sequence in enumerate(rows) if sequence.request.options.masked]
    if not found:
        return None
    lengths, newest = (
        np.array([rows[row].num_generated for row in found], np.int64),
        np.array([rows[row].tokens[-1] for row in found], np.int32),
    )

    def reply(row: int, start: int) -> list[int]:
        return rows[row].tokens.array(rows[row].request.num_prompt + start).tolist()

    return Constrained(vocab_size, matchers, MaskedRows(found, [rows[row].request for row in found]), lengths, newest, reply)
