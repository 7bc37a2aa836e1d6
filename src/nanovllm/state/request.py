"""A request, the sequence that grows from it, the queue in which it waits, and its results."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from immutables import Map

from nanovllm.errors import NanoVLLMError
from nanovllm.sampling.bad_words import BadWords
from nanovllm.sampling.compiled_grammar import CompiledGrammar
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.sampling.row_options import PackedOptions, packed_options
from nanovllm.state.chunk import EXACT, Gaps, Provenance, offset_after
from nanovllm.state.heap import Heap, popped, pushed
from nanovllm.state.html import card
from nanovllm.state.logprobs import RowScores, Scores, TokenLogprobs
from nanovllm.state.stop_scan import StopScan
from nanovllm.state.vector import IntVector
from nanovllm.types import brief_fields

AGEING = 1024  # steps in which a request that waits gains one level of priority
STALE = 64  # entries of a queue's heap without a request, beyond as many as requests wait, before the heap is made again


def rank_of(priority: int, num_steps: int) -> int:
    """The rank of a request: requests run in order of rank, the lowest first, and among equals in order of arrival.

    A request that waits gains one level of priority in `AGEING` steps. All that wait gain alike, so their order never changes, and the rank
    is one number for the whole life of a request. A request of priority p that arrives at step t comes before every request of a lower
    priority q that arrives from step `t + AGEING * (p - q)` on, so nobody waits for ever.

    Args:
        priority: The priority; lower comes first.
        num_steps: How many steps the engine had run when the request arrived.

    Examples:
        >>> rank_of(0, 5000) < rank_of(2, 3000) < rank_of(0, 5100)
        True
    """
    return priority * AGEING + num_steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Request:
    """A request as it was submitted.

    Attributes:
        request_id: The number that `submit` returned.
        num_prompt: Tokens of the prompt.
        sampling: The sampling options.
        seed: The request's half of the random generator's key.
        max_len: The most tokens of prompt and reply together.
        stop_ids: Token ids at which the reply ends.
        arrival: When the request was submitted, in seconds of a monotonic clock.
        keep: Whether its pages stay in `EngineState.kept` when it ends.
        process_logits: The function between its logits and its samples, or None.
        priority: Its priority; lower comes first.
        rank: Its place among the requests, from `rank_of`.
        namespace: Requests share KV only with those of the same number.
        grammar: The compiled form of `sampling.grammar`, or None.
        bad_words: The tokens of `sampling.bad_words`, or None.
        options: `sampling` in the form that steps read.
    """

    request_id: int
    num_prompt: int
    sampling: SamplingParams
    seed: int
    max_len: int
    stop_ids: frozenset[int]
    arrival: float
    keep: bool = False
    process_logits: LogitsProcessor | None = None
    priority: int = 0
    rank: int = 0
    namespace: int = 0
    grammar: CompiledGrammar | None = None
    bad_words: BadWords | None = None
    options: PackedOptions = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", packed_options(self.sampling))

    def __repr__(self) -> str:
        return brief_fields(self)

    @property
    def turn(self) -> tuple[int, int]:
        """What requests are ordered by: the rank, and the id, which is the order of arrival."""
        return self.rank, self.request_id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """A running or waiting request: its tokens, its pages, and counters.

    While a sequence decodes, all its tokens but the newest are filled.

    Attributes:
        request: The request as it was submitted.
        tokens: The tokens of prompt and reply.
        pages: The pages that hold the KV of the first `num_filled` tokens, and perhaps more pages after them.
        num_filled: The number of leading tokens whose KV is in the pages.
        most_filled: The highest `num_filled` so far. Tokens below it that run again were lost to preemption.
        num_cached: Prompt tokens that were reused and not run.
        first_token: When the first token was sampled, in seconds of a monotonic clock.
        logprobs: The log-probabilities as a linked list, newest first: (older, `Scores`).
        stops: The state of the search for stop strings, or None.
        provenance: How the KV came about.
        exact_len: The number of leading tokens whose KV is exact even if the provenance is not.
        gaps: The gaps of the chunk with which the sequence began.
        retired: The number of leading pages whose KV in layers with a sliding window it no longer needs.
        carried: What `process_logits` carries after the newest token, or None.
        loading: The number of leading tokens whose pages are being copied in while replies go on; it runs no token before they are there.
            0: no pages are.
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
    carried: Any = None
    loading: int = 0

    def __repr__(self) -> str:
        return brief_fields(self)

    @property
    def offset(self) -> int:
        """Position minus index of the next token."""
        return offset_after(self.gaps)

    @property
    def num_exact(self) -> int:
        """The number of leading tokens whose KV is filled and exact. Only these may enter the prefix index."""
        filled = min(self.num_filled, self.tokens.length)
        return filled if self.provenance.exact else min(filled, self.exact_len)

    @property
    def todo(self) -> int:
        """The number of tokens whose KV is missing; 0 for a filled context that has no logits yet."""
        return self.tokens.length - self.num_filled

    @property
    def num_generated(self) -> int:
        """The number of tokens of the reply."""
        return self.tokens.length - self.request.num_prompt

    def with_pages(self, pages: IntVector, num_filled: int) -> "Sequence":
        """The sequence over other pages that hold the same KV of `num_filled` tokens."""
        return Sequence(
            request=self.request, tokens=self.tokens, pages=pages, num_filled=num_filled, most_filled=self.most_filled,
            num_cached=self.num_cached, first_token=self.first_token, logprobs=self.logprobs, stops=self.stops,
            provenance=self.provenance, exact_len=self.exact_len, gaps=self.gaps, retired=self.retired, carried=self.carried,
        )  # fmt: skip

    def restart(self, pages: IntVector, num_filled: int, retired: int = 0) -> "Sequence":
        """The sequence over pages of the prefix index, or over none. All its KV is then exact, so its provenance and gaps are reset."""
        return replace(
            self, pages=pages, num_filled=num_filled, provenance=EXACT, exact_len=0, gaps=(), retired=retired, loading=0
        )  # fmt: skip

    def advance(self, count: int) -> "Sequence":
        """The sequence with `count` more tokens filled."""
        filled = self.num_filled + count
        return Sequence(
            request=self.request, tokens=self.tokens, pages=self.pages, num_filled=filled, most_filled=max(self.most_filled, filled),
            num_cached=self.num_cached, first_token=self.first_token, logprobs=self.logprobs, stops=self.stops,
            provenance=self.provenance, exact_len=self.exact_len, gaps=self.gaps, retired=self.retired, carried=self.carried,
        )  # fmt: skip

    def drew(self, token_ids: np.ndarray, scores: "Scores | None" = None, stops: StopScan | None = None) -> "Sequence":
        """The sequence after one step per token of `token_ids`, the last of which is not filled. It must have sampled a token before.

        Args:
            token_ids: The tokens.
            scores: Their log-probabilities, if the request asked for them.
            stops: The search for stop strings, if it has read more tokens.
        """
        tokens = self.tokens.extend(token_ids)
        return Sequence(
            request=self.request, tokens=tokens, pages=self.pages, num_filled=tokens.length - 1, most_filled=tokens.length - 1,
            num_cached=self.num_cached, first_token=self.first_token, provenance=self.provenance, exact_len=self.exact_len,
            logprobs=self.logprobs if scores is None else (self.logprobs, scores), stops=stops or self.stops, gaps=self.gaps,
            retired=self.retired, carried=self.carried,
        )  # fmt: skip

    def unread(self) -> list[int]:
        """The tokens of the reply in which stop strings were not searched yet."""
        return [] if self.stops is None else self.tokens.array(self.request.num_prompt + self.stops.num_read).tolist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queue:
    """The waiting sequences in order of their requests' turns: by rank, and among equals in order of arrival.

    A value never changes: each call returns a new one, in O(log n).

    Attributes:
        items: The sequences by request id.
        turns: The turns of the sequences, and of some that were taken out of the middle. Its least one is that of a sequence.
        num_turns: The number of entries of `turns`.
    """

    items: Map[int, Sequence] = field(default_factory=Map)
    turns: Heap | None = None
    num_turns: int = 0

    def __repr__(self) -> str:
        return brief_fields(self)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self.items.values(), key=lambda sequence: sequence.request.turn))

    def push(self, sequence: Sequence) -> "Queue":
        """The queue with one more sequence, or with another value of one. A preempted sequence comes before all of higher rank."""
        request, items, turns, count = sequence.request, self.items, self.turns, self.num_turns
        if request.request_id not in items:
            turns, count = pushed(turns, request.turn), count + 1
        return Queue(items=items.set(request.request_id, sequence), turns=turns, num_turns=count)

    def first(self) -> Sequence | None:
        """The sequence whose turn it is, or None."""
        return None if self.turns is None else self.items[self.turns.least[1]]

    def pop(self, request_id: int) -> "Queue":
        """The queue without one sequence."""
        items, turns, count = self.items.delete(request_id), self.turns, self.num_turns
        if count > 2 * len(items) + STALE:
            turns, count = None, len(items)
            for sequence in items.values():
                turns = pushed(turns, sequence.request.turn)
        while turns is not None and turns.least[1] not in items:
            turns, count = popped(turns), count - 1
        return Queue(items=items, turns=turns, num_turns=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The times of one request.

    Attributes:
        time_to_first_token: Seconds from submission to the first token.
        total_time: Seconds from submission to the last token.
        decode_tokens_per_second: Tokens per second from the first to the last token.

    Examples:
        >>> (output,) = nv.LLM(model, num_pages=64).generate("Once upon a time", nv.SamplingParams(temperature=0, max_tokens=3))
        >>> 0 < output.metrics.time_to_first_token <= output.metrics.total_time
        True
    """

    time_to_first_token: float
    total_time: float
    decode_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestOutput:
    """The result of a finished request.

    Attributes:
        request_id: The number that `submit` returned.
        prompt_token_ids: The prompt, int32 `[n]`.
        token_ids: All sampled tokens of the reply, also those of a stop string.
        text: The text of the reply. It ends before a stop string and leaves special tokens out.
        finish_reason: `"stop"` for an end token or a stop string, `"length"` if the reply reached its limit, `"error"` if the request
            failed. The tokens and the text are then what it had until then.
        num_cached_tokens: Prompt tokens that were reused and not run.
        logprobs: One entry per token of `token_ids`, or None if they were not asked for.
        metrics: The times of the request.
        error: Why the request failed, or None.
        out_of_pages: Whether the reply ended with `"length"` before its limit, because live chunks left it no page for another token.

    Examples:
        >>> (output,) = nv.LLM(model, num_pages=64).generate("Once upon a time", nv.SamplingParams(temperature=0, max_tokens=3))
        >>> output.text, output.token_ids, output.finish_reason
        (', a boy', [11, 258, 1060], 'length')
    """

    request_id: int
    prompt_token_ids: np.ndarray
    token_ids: list[int]
    text: str
    finish_reason: str
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] | None
    metrics: Metrics
    error: NanoVLLMError | None = None
    out_of_pages: bool = False

    def __repr__(self) -> str:
        return brief_fields(self)

    def _repr_html_(self) -> str:
        figures = [
            ("ended by", self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error}"),
            ("reply tokens", f"{len(self.token_ids):,}"),
            ("prompt tokens", f"{len(self.prompt_token_ids):,}, of which {self.num_cached_tokens:,} were reused"),
        ]
        return card(f"Request {self.request_id}", figures, self.text)


class StepOutput(NamedTuple):
    """The result of one `step` for one request: the sampled tokens, and the whole result if the request ended.

    Attributes:
        request_id: The number that `submit` returned.
        token_ids: The tokens sampled in this step.
        finish_reason: `"stop"`, `"length"` or `"error"` if the request ended, else None.
        output: The whole result if the request ended, else None.
        error: Why the request failed, or None. The other requests go on.
        scored: What `logprobs` is made of, or None.
        logprobs: The log-probabilities of `token_ids`, a tuple of `TokenLogprobs`. None if the request did not ask for them, or if the step
            sampled no token of it.

    Examples:
        >>> params = nv.SamplingParams(temperature=0, max_tokens=1, logprobs=2)
        >>> state, request_id = nv.submit(model, state, "Once upon a time", params)
        >>> state, (out,) = nv.step(model, state)
        >>> out.token_ids, out.finish_reason, out.output.text
        ((11,), 'length', ',')
        >>> out.logprobs[0].token_id, len(out.logprobs[0].top)
        (11, 2)
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    output: RequestOutput | None = None
    error: NanoVLLMError | None = None
    scored: RowScores = None

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The log-probabilities of `token_ids`, or None. They are made from arrays at each use, so that they cost nothing otherwise."""
        if self.scored is None:
            return None
        step, row, num_top = self.scored
        return tuple([step.entry(row + i, num_top, token) for i, token in enumerate(self.token_ids)])

    def __repr__(self) -> str:
        return brief_fields(self)
