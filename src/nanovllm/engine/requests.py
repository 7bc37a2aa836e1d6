"""The requests of an engine: `submit` queues them and `cancel` drops them."""

import time
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.engine.donation import commit_state, enter, enter_with
from nanovllm.engine.prompt import Context, resolve
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams, from_generation_config, validate_for
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk, offset_after
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import Request, Sequence, StopScan
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import least_frames, num_retired
from nanovllm.tokenizer.tokenizer import Detokenizer


@explain_unknown_keywords
def submit(model: Model, state: EngineState, context: Context, sampling_params: SamplingParams | None = None) -> tuple[EngineState, int]:
    """Queue a request and return its id; it runs as `step` is called. None takes the model's own `generation_config`.

    Raises `InvalidRequestError` for a prompt that can never fit, and what `resolve` raises.
    """
    state = enter_with(model, state)
    state, sequence, _ = new_sequence(model, state, context, sampling_params)
    if sequence.pages.length:
        state = replace(state, pool=pools.acquire(state.pool, sequence.pages, sequence.retired))
    return commit_state(state, waiting=state.waiting.push(sequence)), sequence.request.request_id


def cancel(state: EngineState, request_id: int) -> EngineState:
    """Drop a request wherever it stands; its pages return. Raises `InvalidRequestError` for one that is not waiting or running."""
    state = enter(state)
    waiting, running = state.waiting, state.running
    found = waiting.items.get(request_id) or next((s for s in running if s.request.request_id == request_id), None)
    if found is None:
        raise InvalidRequestError(f"request {request_id!r} is neither waiting nor running: it never was submitted, or has ended")
    if request_id in waiting.items:
        waiting = waiting.pop(request_id)
    else:
        running = tuple(s for s in running if s is not found)
    return commit_state(state, pool=give_up_pages(state.pool, found), waiting=waiting, running=running)


def new_sequence(
    model: Model, state: EngineState, context: Context, sampling_params: SamplingParams | None, *, keep: bool = False
) -> tuple[EngineState, Sequence, Chunk | None]:
    """A sequence for a context, with the next request id, and its base chunk; it refers to that chunk's pages but is not an owner yet."""
    params = from_generation_config(model.generation_config) if sampling_params is None else sampling_params
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"sampling_params must be SamplingParams or None, not {type(params).__name__}")
    validate_for(params, model.config.vocab_size)
    resolved = resolve(model, state, context)
    num_prompt, limit = len(resolved.tokens), capacity(state, resolved.base, whole=keep)
    if num_prompt >= limit:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens; this engine holds at most {limit}, one of them generated: what max_model_len and its "
            "KV memory (num_pages, num_frames) allow"
        )
    ends = () if params.ignore_eos else model.config.eos_token_ids
    rid = state.next_id
    request = Request(
        request_id=rid,
        num_prompt=num_prompt,
        sampling=params,
        seed=request_seed(state.config.seed, rid) if params.seed is None else params.seed,
        max_len=min(num_prompt + params.max_tokens, limit),
        stop_ids=frozenset((*ends, *params.stop_token_ids)),
        arrival=time.perf_counter(),
        keep=keep,
    )
    if params.stop and model.tokenizer is None:
        raise InvalidRequestError(f"stop={params.stop!r} needs a tokenizer, and this model has none")
    stops = StopScan(detokenizer=Detokenizer.of(model.tokenizer)) if params.stop and model.tokenizer is not None else None
    sequence = begin_sequence(request, resolved.tokens, resolved.base, stops)
    if (frames := state.pool.frames) is not None and not keep:
        retired = num_retired(sequence.num_filled, num_prompt, frames.window, state.config.page_size)
        sequence = replace(sequence, retired=retired)
    return replace(state, next_id=rid + 1), sequence, resolved.base


def begin_sequence(request: Request, tokens: IntVector, base: Chunk | None, stops: StopScan | None = None) -> Sequence:
    """A sequence over the pages of its base chunk, whose owner it is not yet."""
    if base is None:
        return Sequence(request=request, tokens=tokens, pages=IntVector.of(), stops=stops)
    return Sequence(
        request=request, tokens=tokens, pages=base.pages, num_filled=len(base), stops=stops, provenance=base.provenance,
        exact_len=base.num_exact, gaps=base.gaps,
    )  # fmt: skip


def capacity(state: EngineState, base: Chunk | None = None, *, whole: bool = True) -> int:
    """The most tokens that one request can have, prompt and reply; after a chunk with gaps fewer, because positions end too.

    `whole`: all its KV stays, as a chunk's does; a request without that gives up what is outside of the windows of layers that have one.
    """
    offset, config, frames = 0 if base is None else offset_after(base.gaps), state.config, state.pool.frames
    pages = config.num_pages
    if frames is not None and (whole or frames.num_frames < least_frames(frames.window, config.page_size)):
        pages = min(pages, frames.num_frames)
    return min(config.max_model_len - offset, pages * config.page_size)


def request_seed(seed: int, request_id: int) -> int:
    """A request's own seed where it gave none: reproducible from the engine's seed and the order of submission."""
    return int(np.random.SeedSequence((seed, request_id)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def submit_many(
    model: Model, state: EngineState, contexts: Seq[Context], sampling_params: Seq[SamplingParams | None], *, keep: bool = False
) -> tuple[EngineState, list[int]]:
    """Queue a request for each context and return their ids, in order; where one is refused, none is queued.

    `keep`: the pages of a request that ends stay with it until `detach`. Raises what `submit` raises, naming the prompt's place.
    """
    state = enter_with(model, state)
    ids = []
    for place, (context, params) in enumerate(zip(contexts, sampling_params, strict=True)):
        try:
            state, sequence, _ = new_sequence(model, state, context, params, keep=keep)
        except NanoVLLMError as error:
            raise (error if len(contexts) == 1 else type(error)(f"prompt {place}: {error}")) from None
        if sequence.pages.length:
            state = replace(state, pool=pools.acquire(state.pool, sequence.pages, sequence.retired))
        state = replace(state, waiting=state.waiting.push(sequence))
        ids.append(sequence.request.request_id)
    return commit_state(state), ids
