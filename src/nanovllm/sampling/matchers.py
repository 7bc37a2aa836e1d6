"""Where running replies stand in their grammars.

The truth is the grammar and the tokens of a reply. A matcher is derived from them: it is rolled back if a step is run again, and made anew
by replaying the tokens if it was dropped. So a preempted request, or an older state after a step that failed, needs nothing else.

Shapes: W words of 32 tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from nanovllm.sampling.compiled_grammar import CompiledGrammar, told
from nanovllm.types import Bool, Int32

MOST = 1024  # matchers that are kept
FEW = 4  # masks that are finished one by one, because arrays over them take as long
FIRST = 64  # words of a mask in which a token is looked for at first: of most tokenizers they have the single bytes


class NotAllowedError(ValueError):
    """A token that the grammar does not allow, or a grammar that ran into a limit of llguidance."""


class Matcher:
    """Where one reply stands in its grammar. Mutable.

    Attributes:
        compiled: The grammar.
        token_ids: The tokens of the reply that it has read.
    """

    __slots__ = ("_native", "compiled", "token_ids")

    def __init__(self, compiled: CompiledGrammar) -> None:
        """Begin before the first token."""
        self.compiled, self.token_ids, self._native = compiled, list[int](), compiled.matcher.deep_copy()

    def follow(self, length: int, reply: Callable[[int], list[int]]) -> None:
        """Move to the end of a reply, forwards or backwards.

        Args:
            length: The number of tokens of the reply.
            reply: Its tokens from a place on.

        Raises:
            NotAllowedError: The grammar does not allow one of its tokens.
        """
        if length < len(self.token_ids):
            self._back(len(self.token_ids) - length)
        newest = max(0, len(self.token_ids) - 1)
        tokens = reply(newest)
        if self.token_ids and tokens[0] != self.token_ids[-1]:  # another reply of the same request
            self._native, self.token_ids = self.compiled.matcher.deep_copy(), []
            tokens, newest = reply(0), 0
        for token in tokens[len(self.token_ids) - newest :]:
            self.read(token)

    def read(self, token: int) -> bool:
        """Read one more token. Returns whether no token may follow, except for one that ends the reply.

        Raises:
            NotAllowedError: The grammar does not allow the token. The matcher must not be used again.
        """
        self.token_ids.append(token)
        if not self._native.consume_token(token):
            raise NotAllowedError(f"token {token} is not allowed as number {len(self.token_ids)} of the reply: {told(self._native)}")
        if not self._native.is_stopped():
            return False
        if self._native.is_error():
            raise NotAllowedError(told(self._native))
        return True

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says, in the tokenizer's own spelling. Often none."""
        return self._native.compute_ff_tokens()

    @property
    def native(self) -> Any:
        """What llguidance needs to write the mask of the next token."""
        return self._native

    @property
    def failed(self) -> bool:
        """Whether it ran into a limit, or read a token that is not allowed."""
        return self._native.is_error()

    def finish(self, words: Int32[np.ndarray, "W"], *, may_end: bool) -> None:
        """Check a mask that was written, and remove the end tokens unless the reply may end by them or nothing else is allowed.

        Raises:
            NotAllowedError: The mask could not be computed, or allows nothing.
        """
        if self.failed:
            raise NotAllowedError(told(self._native))
        if not may_end:
            where, ends = self.compiled.ends
            before = words[where]
            words[where] = before & ~ends
            if words.any():
                return
            words[where] = before
        if not words.any():
            raise NotAllowedError("no token of the vocabulary continues the reply")

    def _back(self, count: int) -> None:
        if self._native.rollback(count):
            del self.token_ids[len(self.token_ids) - count :]
        else:
            self._native, self.token_ids = self.compiled.matcher.deep_copy(), []


class Matchers:
    """The matchers of one engine, by their owners, which are compared by identity and not kept alive.

    Attributes:
        turn: How often a matcher was asked for or dropped. While it stays the same, nobody moves a matcher but who asked last.
    """

    __slots__ = ("_known", "turn")

    def __init__(self) -> None:
        """No matchers yet."""
        self._known: WeakKeyDictionary[Any, Matcher] = WeakKeyDictionary()
        self.turn = 0

    def of(self, owner: Any, compiled: CompiledGrammar) -> Matcher:
        """The matcher of an owner. It may be behind or ahead of the owner's reply: see `Matcher.follow`."""
        self.turn += 1
        if len(self._known) < MOST // 2 and (known := self._known.get(owner)) is not None:
            return known
        matcher = self._known.pop(owner, None) or Matcher(compiled)
        self._known[owner] = matcher  # the last one of the order in which they were used
        if len(self._known) > MOST:
            del self._known[next(iter(self._known.keys()))]
        return matcher

    def forget(self, owner: Any) -> None:
        """Drop the matcher of an owner, because it has failed."""
        self.turn += 1
        self._known.pop(owner, None)

    def fill(self, matchers: Sequence[Matcher], words: Int32[np.ndarray, "L W"], lines: Sequence[int]) -> None:
        """Write the masks of the next tokens into lines of an array. Errors are left to `Matcher.finish`.

        No threads share them: a mask takes some 5 to 20 us, and to wake a thread takes longer. With 2, 4 and 8 threads, 64 replies in JSON
        were 1 to 26% slower on a host of 32 cores.
        """
        from llguidance.numpy import fill_next_token_bitmask

        for matcher, line in zip(matchers, lines, strict=True):
            fill_next_token_bitmask(matcher.native, words, line)


def finish_together(
    matchers: Sequence[Matcher], words: Int32[np.ndarray, "L W"], lines: Sequence[int], may_end: Bool[np.ndarray, "n"]
) -> list[int]:
    """Do what `Matcher.finish` does for matchers of one vocabulary, whose masks were written into lines of an array.

    Args:
        matchers: The matchers.
        words: The array.
        lines: The line of each matcher.
        may_end: For each whether its reply may end by an end token.

    Returns:
        The places, in order, of matchers whose masks are as they were, because `Matcher.finish` must say what they become: those that
        failed, and those that allow nothing or end tokens alone.
    """
    if len(matchers) <= FEW:
        return [*range(len(matchers))]
    where, ends = matchers[0].compiled.ends
    rows = np.array(lines)
    at = rows[:, None], where
    before = words[at]
    words[at] = np.where(may_end[:, None], before, before & ~ends)
    left = [place for place in np.flatnonzero(~np.any(words[rows, :FIRST], axis=1)).tolist() if not words[lines[place]].any()]
    left = sorted({*left, *[place for place, matcher in enumerate(matchers) if matcher.failed]})
    if left:
        words[rows[left, None], where] = before[left]
    return left
