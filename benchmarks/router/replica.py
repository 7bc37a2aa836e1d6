"""A replica: the package's own scheduler, pages and prefix index, with an executor that runs nothing and a clock that is given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import nanovllm as nv
from benchmarks.host import VOCABULARY, Nothing
from benchmarks.router.device import Device
from benchmarks.router.workload import PAGE, Request
from nanovllm.executor.executor import Drawn
from nanovllm.testing.models import random_model, tiny_config


class Noted(Nothing):
    """An executor that runs nothing. It notes the pieces of prompts of a step, and which of them are the last of their prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[int, int]] = []
        self.whole: set[int] = set()

    def prefill(self, model: nv.Model, kv: Any, rows: Any, *, draw: bool = True, frames: Any = None) -> tuple[Drawn | None, Any]:
        """Note the pieces; return zeros for the rows whose prompt is complete."""
        self.prompts.clear()
        self.pieces += [(sequence.num_filled, count) for sequence, count in rows]
        self.whole |= {sequence.request.request_id for sequence, count in rows if count == sequence.todo}
        return super().prefill(model, kv, rows, draw=draw, frames=frames)

    def decode(self, model: nv.Model, carry: Any, masks: Any = None) -> tuple[Any, Drawn]:
        """Return zeros."""
        self.steps.clear()
        return super().decode(model, carry, masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a replica's engine."""

    num_pages: int
    max_num_seqs: int
    max_prefill_tokens: int | None
    context_doubling: int = 0
    max_num_batched_tokens: int = 16_896


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a step gave to a request."""

    request: Request
    first: bool
    last: bool
    cached: int  # prompt tokens that were reused; known with the last token


@cache
def _model() -> nv.Model:
    config = tiny_config(
        vocab_size=VOCABULARY, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=4, intermediate_size=4,
        max_position_embeddings=65_536,
    )  # fmt: skip
    return replace(random_model(config), tokenizer=None)


class Replica:
    """An engine of the package and the requests that a router gave it."""

    def __init__(self, name: int, limits: Limits, device: Device) -> None:
        self.name, self.device, self.model = name, device, _model()
        self.executor = Noted()
        state = nv.init_state(
            self.model, num_pages=limits.num_pages, page_size=PAGE, max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens, max_prefill_tokens=limits.max_prefill_tokens, compile=False,
        )  # fmt: skip
        cast(Any, state.runtime).executor = self.executor
        self.state = replace(state, config=replace(state.config, context_doubling=limits.context_doubling))
        self.inbox: list[Request] = []
        self.lengths: dict[int, int] = {}  # tokens in the context of each request, by the engine's number
        self.requests: dict[int, Request] = {}
        self.busy = 0.0
        self.stepping = False

    @property
    def unfinished(self) -> Sequence[Request]:
        """The requests that have not ended."""
        return [*self.requests.values(), *self.inbox]

    def step(self) -> tuple[float, list[Token]]:
        """Queue what came in and run one step of the engine. Returns its seconds by the device's model, and its tokens."""
        for request in self.inbox:
            params = nv.SamplingParams(temperature=0.0, max_tokens=request.reply, ignore_eos=True, seed=0)
            self.state, number = nv.submit(self.model, self.state, request.tokens, params)
            self.requests[number], self.lengths[number] = request, len(request.tokens)
        self.inbox.clear()
        noted = self.executor
        noted.pieces.clear()
        noted.whole.clear()
        self.state, outputs = nv.step(self.model, self.state)
        rows, context, tokens, lengths, requests, whole = 0, 0, [], self.lengths, self.requests, noted.whole
        for out in outputs:
            number = out.request_id
            length, request = lengths[number], requests[number]
            if number not in whole:
                rows += 1
                context += length
            lengths[number] = length + 1
            if (ended := out.output) is not None:
                del lengths[number], requests[number]
            tokens.append(Token(request, length == len(request.tokens), ended is not None, 0 if ended is None else ended.num_cached_tokens))
        seconds = self.device.prefill(noted.pieces) + self.device.decode(rows, context)
        self.busy += seconds
        return seconds, tokens
