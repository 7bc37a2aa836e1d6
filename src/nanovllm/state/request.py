"""A request, the sequence it has grown to, the queue it waits in, and what comes out of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from immutables import Map

from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import EXACT, Gaps, Provenance, offset_after
from nanovllm.state.vector import IntVector
from nanovllm.tokenizer.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What was asked for. `max_len` bounds prompt and reply together, in tokens; `seed` is the request's half of the generator's key."""

    request_id: int
    num_prompt: int
    sampling: SamplingParams
    seed: int
    max_len: int
    stop_ids: frozenset[int]
    arrival: float
    keep: bool = False  # its pages stay, in `EngineState.kept`, when it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class StopScan:
    """The end of a reply's text, kept only for requests that stop at strings.

    `tail` is what a stop string could still begin in, and begins itself at character `start`; `found` is where a stop string begins.
    """

    detokenizer: Detokenizer
    tail: str = ""
    start: int = 0
    found: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """A request under way: its tokens, the pages that hold the KV of the first `num_filled` of them, and counters.

    Every token but the newest is filled once it decodes. `most_filled` is the highest `num_filled` ever reached: what is run again below
    it was lost to preemption. `logprobs` is a linked list, newest first: (older, entry). `provenance` is that of the KV, of which at
    least the first `exact_len` tokens are exact; `gaps` are those of the chunk that it began with. Of the first `retired` pages it does
    not need the KV of layers with a window.
    """

    request: Request
    tokens: IntVector
    pages: IntVector
    num_filled: int = 0
    most_filled: int = 0
    num_cached: int = 0
    first_token: float = 0.0
    logprobs: tuple[Any, Any] | None = None
    stops: StopScan | None = None
    provenance: Provenance = EXACT
    exact_len: int = 0
    gaps: Gaps = ()
    retired: int = 0

    @property
    def offset(self) -> int:
        """The position of the next token less its index."""
        return offset_after(self.gaps)

    @property
    def num_exact(self) -> int:
        """Leading tokens whose KV is filled and exact: what may enter the prefix index."""
        filled = min(self.num_filled, self.tokens.length)
        return filled if self.provenance.exact else min(filled, self.exact_len)

    @property
    def todo(self) -> int:
        """Tokens whose KV is missing; 0 for a filled context that has no logits yet."""
        return self.tokens.length - self.num_filled

    @property
    def num_generated(self) -> int:
        """Tokens of the reply."""
        return self.tokens.length - self.request.num_prompt

    def with_pages(self, pages: IntVector, num_filled: int) -> "Sequence":
        """The sequence over other pages that hold the same KV of `num_filled` tokens."""
        return Sequence(
            request=self.request, tokens=self.tokens, pages=pages, num_filled=num_filled, most_filled=self.most_filled,
            num_cached=self.num_cached, first_token=self.first_token, logprobs=self.logprobs, stops=self.stops,
            provenance=self.provenance, exact_len=self.exact_len, gaps=self.gaps, retired=self.retired,
        )  # fmt: skip

    def restart(self, pages: IntVector, num_filled: int, retired: int = 0) -> "Sequence":
        """The sequence over pages of the prefix index, or none: what it was made of is forgotten, all its KV is exact."""
        return replace(self, pages=pages, num_filled=num_filled, provenance=EXACT, exact_len=0, gaps=(), retired=retired)

    def advance(self, count: int) -> "Sequence":
        """The sequence with `count` more tokens filled."""
        filled = self.num_filled + count
        return Sequence(
            request=self.request, tokens=self.tokens, pages=self.pages, num_filled=filled, most_filled=max(self.most_filled, filled),
            num_cached=self.num_cached, first_token=self.first_token, logprobs=self.logprobs, stops=self.stops,
            provenance=self.provenance, exact_len=self.exact_len, gaps=self.gaps, retired=self.retired,
        )  # fmt: skip

    def drew(self, token_ids: np.ndarray) -> "Sequence":
        """The sequence after as many steps as there are tokens, the last of which is not filled; it had drawn one before."""
        tokens = self.tokens.extend(token_ids)
        return Sequence(
            request=self.request, tokens=tokens, pages=self.pages, num_filled=tokens.length - 1, most_filled=tokens.length - 1,
            num_cached=self.num_cached, first_token=self.first_token, logprobs=self.logprobs, stops=self.stops,
            provenance=self.provenance, exact_len=self.exact_len, gaps=self.gaps, retired=self.retired,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queue:
    """Waiting sequences in order of arrival, which is the order of their request ids. Persistent."""

    items: Map[int, Sequence] = field(default_factory=Map)
    head: int = 0  # the smallest id in `items`, where there is one

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return (self.items[i] for i in sorted(self.items))

    def push(self, sequence: Sequence) -> "Queue":
        """The queue with one more; a preempted sequence, being older, stands before all that were never admitted."""
        rid = sequence.request.request_id
        return Queue(items=self.items.set(rid, sequence), head=min(self.head, rid) if self.items else rid)

    def first(self) -> Sequence | None:
        """The oldest, or None."""
        return self.items[self.head] if self.items else None

    def pop(self, request_id: int) -> "Queue":
        """The queue without one. Finding the next head passes the ids between the two: once, not at every look."""
        items, head = self.items.delete(request_id), self.head
        while items and head not in items:
            head += 1
        return Queue(items=items, head=head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Seconds: from submission to the first token, and to the last; tokens a second in between."""

    time_to_first_token: float
    total_time: float
    decode_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Log-probabilities at one place of the reply, of the model's own distribution: of the token drawn, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestOutput:
    """A finished request. `text` ends before a stop string and leaves special tokens out; `token_ids` has all that were drawn."""

    request_id: int
    prompt_token_ids: np.ndarray
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" or "length"
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] | None
    metrics: Metrics


class StepOutput(NamedTuple):
    """What one step did for one request: the token it drew, and the whole result when that was the last."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    output: RequestOutput | None = None
