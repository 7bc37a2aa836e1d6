"""Log-probabilities of tokens: as arrays while a reply grows, and as the values that a caller gets."""

from dataclasses import dataclass
from typing import NamedTuple

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
