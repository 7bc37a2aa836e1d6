"""How many prompt tokens a step may run, so that replies that go on do not wait long for their next tokens."""

from dataclasses import dataclass, replace
from math import isqrt

from nanovllm.config import EngineConfig
from nanovllm.state.request import Sequence

LEAST = 256  # tokens of a piece of a prompt where context counts, because smaller pieces are inefficient
GRANULE = 64  # larger pieces are a multiple of this many tokens, unless the prompt ends with them
SHARE = 4  # a long prompt leaves the bound divided by this to a short one after it


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    """What is left of a step for prompts.

    Attributes:
        tokens: Tokens of the step's budget.
        work: Tokens of the bound that holds while replies go on, counted as tokens without context. None: no bound.
        bound: The whole bound. None: no bound.
        doubling: Tokens of context with which a prompt token counts twice; 0: context does not count.
    """

    tokens: int
    work: int | None
    bound: int | None
    doubling: int

    @staticmethod
    def of(config: EngineConfig, num_decoding: int) -> "PromptRoom":
        """The room of a step in which so many sequences decode. If none do, nobody waits for the step, and there is no bound."""
        bound = config.max_prefill_tokens if num_decoding else None
        return PromptRoom(tokens=config.max_num_batched_tokens - num_decoding, work=bound, bound=bound, doubling=config.context_doubling)

    def __bool__(self) -> bool:
        return self.tokens > 0 and self.work != 0

    def most(self, sequence: Sequence) -> int:
        """The most of its tokens that a sequence may run: at least one if there is room."""
        most = min(self.tokens, sequence.todo)
        if self.work is None or most <= 0:
            return most
        if not self.doubling:
            return min(most, self.work)
        # The tokens from f to f + n count n + n * (f + n / 2) / doubling; the largest n is the root of a quadratic equation.
        start = self.doubling + sequence.num_filled
        count = isqrt(start * start + 2 * self.doubling * self.work) - start
        if count >= most:
            return most
        count = max(count - count % GRANULE, min(LEAST, self.work))
        return min(most, count)

    def after(self, sequence: Sequence, count: int) -> "PromptRoom":
        """The room that is left after so many tokens of a sequence, which are not filled in it yet. A rest of a few tokens is none."""
        if self.work is None:
            return replace(self, tokens=self.tokens - count)
        context = count * (2 * sequence.num_filled + count) // (2 * self.doubling) if self.doubling else 0
        left = self.work - count - context
        return replace(self, tokens=self.tokens - count, work=left if left >= (GRANULE if self.doubling else 1) else 0)

    def is_short(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens left is short: the bound has room for all of them."""
        return self.bound is not None and num_tokens <= self.bound

    def without_share(self) -> "PromptRoom":
        """The room that a long prompt may use while a short one comes after it."""
        if self.work is None or self.bound is None:
            return self
        return replace(self, work=max(0, self.work - self.bound // SHARE))
