"""Log-probabilities of tokens: as arrays while a reply grows, and as the values that a caller gets."""

from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from nanovllm.types import Float32, Int32, brief_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """The log-probabilities of one token of a reply, under the model's own distribution, before any sampling option.

    Attributes:
        token_id: The sampled token.
        logprob: The natural logarithm of its probability.
        top: Pairs of token id and log-probability of the most probable tokens, highest first. Their number is `SamplingParams.logprobs`.

    Examples:
        >>> params = nv.SamplingParams(temperature=0, max_tokens=1, logprobs=2)
        >>> (output,) = nv.LLM(model, num_pages=64).generate("Once upon a time, there was a little", params)
        >>> first = output.logprobs[0]
        >>> first.token_id == first.top[0][0], len(first.top)
        (True, 2)
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def __repr__(self) -> str:
        return brief_fields(self)


class Scores(NamedTuple):
    """The log-probabilities of n tokens as arrays, until the reply ends.

    Attributes:
        num_tokens: n.
        logprobs: Those of the tokens, float32 `[n]`, or None if nobody computed them.
        top_ids: The k most probable tokens, int32 `[n, k]`, or None.
        top_logprobs: The log-probabilities of `top_ids`, float32 `[n, k]`, or None.
    """

    num_tokens: int
    logprobs: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None

    def entries(self, token_ids: list[int]) -> list[TokenLogprobs]:
        """The values that the caller gets, for these tokens."""
        values = [float("nan")] * len(token_ids) if self.logprobs is None else self.logprobs.tolist()
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
        if self.top_ids is not None and self.top_logprobs is not None:
            tops = [tuple(zip(*top, strict=True)) for top in zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)]
        each = zip(token_ids, values, tops, strict=True)
        return [TokenLogprobs(token_id=token, logprob=value, top=top) for token, value, top in each]

    def last(self, count: int) -> "Scores":
        """The log-probabilities of the last `count` tokens, or of all if they are fewer."""
        if count >= self.num_tokens:
            return self
        return Scores(count, *[None if each is None else each[-count:] for each in self[1:]])


Linked = tuple[Any, Scores] | None  # the log-probabilities of a reply as a linked list, newest first: (older, newest), or None


def last_entries(scores: Linked, token_ids: list[int]) -> list[TokenLogprobs]:
    """The values that the caller gets for the last tokens of a reply. The time depends on their number, not on the length of the reply."""
    parts, left = list[Scores](), len(token_ids)
    while left > 0 and scores is not None:
        scores, part = scores
        parts.append(part.last(left))
        left -= part.num_tokens
    entries, tokens = list[TokenLogprobs](), iter(token_ids)
    for part in reversed(parts):
        entries += part.entries(list(islice(tokens, part.num_tokens)))
    return entries


@dataclass(frozen=True, slots=True, eq=False)
class StepScores:
    """The log-probabilities of one step as arrays, which the outputs of its rows share.

    Attributes:
        logprobs: Those of the sampled tokens, float32 `[R]`, or None if nobody computed them.
        top_ids: The k most probable tokens, int32 `[R, k]`, or None.
        top_logprobs: The log-probabilities of `top_ids`, float32 `[R, k]`, or None.
    """

    logprobs: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None

    def of(self, row: int, num_top: int) -> Scores:
        """Those of one row, with `num_top` of the most probable tokens."""
        arrays = (self.logprobs, self.top_ids, self.top_logprobs)
        return scores_of(1, num_top, *[None if each is None else each[row : row + 1] for each in arrays])

    def entry(self, row: int, num_top: int, token_id: int) -> TokenLogprobs:
        """The value that the caller gets for the token of one row."""
        value, top = float("nan") if self.logprobs is None else self.logprobs.item(row), ()
        if self.top_ids is not None and self.top_logprobs is not None:
            top = tuple(zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True))
        return TokenLogprobs(token_id=token_id, logprob=value, top=top)


# The log-probabilities of a step, the first of the rows of a request, which has one per token, and how many of the most probable tokens it
# asked for. A plain tuple, because a step makes one per row.
RowScores = tuple[StepScores, int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """The log-probabilities of one continuation, under the model's own distribution, before any sampling option.

    Attributes:
        token_ids: The tokens of the continuation.
        logprobs: For each token the natural logarithm of its probability after all tokens before it; float32 `[n]`, read-only.
        top_ids: The most probable tokens in the place of each token, highest first, int32 `[n, k]`, read-only. k is `top_logprobs` of
            `score`, or the size of the vocabulary if that is smaller.
        top_logprobs: Their log-probabilities, float32 `[n, k]`, read-only.
        total: The sum of `logprobs`, a float.
        entries: The same as a list of `TokenLogprobs`, which a reply has.

    Examples:
        >>> state, (score,) = nv.score(model, state, ["Once upon a time"], [", a boy"], top_logprobs=2)
        >>> score.token_ids, score.logprobs.shape, score.top_ids.shape, score.total < 0
        ([11, 258, 1060], (3,), (3, 2), True)
        >>> score.entries[0].token_id, score.entries[0].top[0][0]
        (11, 11)
    """

    token_ids: list[int]
    logprobs: Float32[np.ndarray, "n"]
    top_ids: Int32[np.ndarray, "n k"]
    top_logprobs: Float32[np.ndarray, "n k"]

    def __repr__(self) -> str:
        return brief_fields(self)

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation: the sum of `logprobs`."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def entries(self) -> list[TokenLogprobs]:
        """The log-probabilities as a list with one value per token, which is made anew at each use."""
        return Scores(len(self.token_ids), self.logprobs, self.top_ids, self.top_logprobs).entries(self.token_ids)


def scores_of(
    num_tokens: int, num_top: int, logprobs: np.ndarray | None, top_ids: np.ndarray | None = None, top_logprobs: np.ndarray | None = None
) -> Scores:
    """`Scores` with `num_top` of the most probable tokens. They are copies, because a step's arrays also hold the results of other rows."""
    tops = [None if each is None or not num_top else each[:, :num_top].copy() for each in (top_ids, top_logprobs)]
    return Scores(num_tokens, None if logprobs is None else logprobs.copy(), *tops)
