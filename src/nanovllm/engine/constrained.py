"""Replies whose next tokens are not free: what these may be, before a step samples, and whether a grammar is complete, after it."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np

from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.compiled_grammar import CompiledGrammar, compile_for
from nanovllm.sampling.grammar import Grammar
from nanovllm.sampling.matchers import Matcher, Matchers, NotAllowedError
from nanovllm.sampling.process_logits import blame
from nanovllm.sampling.token_masks import all_tokens, leave_out
from nanovllm.state.request import Request, Sequence
from nanovllm.state.steady import Steady
from nanovllm.types import Int32

Reply = tuple[Request, int, Callable[[int], list[int]]]  # a request, the number of tokens of its reply, and these tokens from a place on


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
    """The rows of one pass whose next tokens are masked: by grammars, by `min_tokens` or by `bad_words`."""

    __slots__ = ("_matchers", "_replies", "_used", "_vocab_size")

    def __init__(self, vocab_size: int, matchers: Matchers, replies: dict[int, Reply]) -> None:
        """Say which rows are masked.

        Args:
            vocab_size: The width of the model's logits.
            matchers: The matchers of the engine.
            replies: The replies of these rows, by row.
        """
        self._vocab_size, self._matchers, self._replies, self._used = vocab_size, matchers, replies, dict[int, Matcher]()

    def fill(self, words: Int32[np.ndarray, "L W"], lines: Seq[int]) -> None:
        """Write the masks of the next tokens, one bit per token: that of row r into `words[lines[r]]`. Other lines stay as they are.

        An exception names the request to which it belongs in a note (`Culprit`).
        """
        every = all_tokens(self._vocab_size)
        for row, (request, length, reply) in self._replies.items():
            if request.grammar is None:
                words[lines[row]] = every
                continue
            matcher = self._matchers.of(request, request.grammar)
            try:
                matcher.follow(length, reply)
            except Exception as error:
                self._failed(request, error)
                raise
            self._used[row] = matcher
        if self._used:
            self._matchers.fill([*self._used.values()], words, [lines[row] for row in self._used])
        for row, matcher in self._used.items():
            request, length, _ = self._replies[row]
            may_end = length >= request.sampling.min_tokens and not matcher.compiled.end_ids.isdisjoint(request.stop_ids)
            try:
                matcher.finish(words[lines[row]], may_end=may_end)
            except Exception as error:
                self._failed(request, error)
                raise
        for row, (request, length, reply) in self._replies.items():
            if length < request.sampling.min_tokens:
                leave_out(words[lines[row]], request.stop_ids)
            if (bad := request.bad_words) is not None:
                leave_out(words[lines[row]], bad.completing(reply(max(0, length - bad.reach)) if bad.reach else ()))

    def _failed(self, request: Request, error: Exception) -> None:
        """Note that an exception belongs to a request, and drop its matcher."""
        self._matchers.forget(request)
        blame(error, f"in its grammar {request.sampling.grammar!r}", None, (request.request_id,))

    def read(self, token_ids: Seq[int]) -> dict[int, NotAllowedError | None]:
        """Read the sampled tokens of all rows, after `fill`.

        Returns:
            For each row that ends with its token None, because its reply is complete, or why the token cannot be in a reply.
        """
        ends = dict[int, NotAllowedError | None]()
        for row, matcher in self._used.items():
            try:
                if matcher.read(token_ids[row]):
                    ends[row] = None
            except NotAllowedError as error:
                self._matchers.forget(self._replies[row][0])
                ends[row] = error
        return ends


def constrained(model: Model, matchers: Matchers, rows: Seq[Sequence]) -> Constrained | None:
    """The rows of a batch whose next tokens are masked; None without such rows."""
    if isinstance(rows, Steady):
        replies = {row: _steady_reply(rows, row) for row in rows.masked}
    else:
        replies = {row: _reply(sequence) for row, sequence in enumerate(rows) if sequence.request.options.masked}
    return Constrained(model.config.vocab_size, matchers, replies) if replies else None


def _reply(sequence: Sequence) -> Reply:
    start = sequence.request.num_prompt
    return sequence.request, sequence.num_generated, lambda place: sequence.tokens.array(start + place).tolist()


def _steady_reply(running: Steady, row: int) -> Reply:
    sequence = running.base[row]
    return sequence.request, sequence.num_generated + running.age, partial(running.reply, row)
