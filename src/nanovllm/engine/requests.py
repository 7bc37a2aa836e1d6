"""The requests of an engine: `submit` and `submit_many` queue them, `cancel` drops them; sequences, capacity and seeds of requests."""

import reprlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.config import loaded_for_short
from nanovllm.engine.constrained import compiled_for
from nanovllm.engine.donation import commit_state, enter, enter_with, require_namespace
from nanovllm.engine.mirrored import mirrored
from nanovllm.engine.prompt import Context, resolve
from nanovllm.engine.resident import resident
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.models.model import Model
from nanovllm.sampling.bad_words import bad_words_of
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams, from_generation_config, validate_for
from nanovllm.sampling.process_logits import LogitsProcessor, as_processor
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk, offset_after
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import Request, Sequence, rank_of
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.stop_scan import StopScan
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import least_frames, num_retired

MOST_PRIORITY = 1 << 53  # priorities are below it, and above its negative


@mirrored
@explain_unknown_keywords
def submit(
    model: Model,
    state: EngineState,
    context: Context,
    sampling_params: SamplingParams | None = None,
    *,
    priority: int = 0,
    process_logits: LogitsProcessor | Callable[..., Any] | None = None,
) -> tuple[EngineState, int]:
    """Queue a request, to be run by calls of `step`.

    Donates `state`.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        context: A text, token ids, a chunk, or a list of these in which only the first part may be a chunk.
        sampling_params: The options. None: the model's `generation_config`.
        priority: An integer; requests of lower numbers run first. A request that waits gains one level in 1,024 steps, so that nobody
            waits for ever.
        process_logits: A pure function from the logits `[B, V]`, or from the logits and a `TokensSoFar`, to the logits to sample from; or
            a `LogitsProcessor`. The rows of a step come and go, so it must treat each row by itself. The rows of other requests that it
            gets are ignored. Pass the same function for many requests: they share one call per step. On a GPU it becomes part of the
            step's CUDA graph.

    Returns:
        The next state, and the request's id.

    Raises:
        InvalidRequestError: An argument is invalid, or the context is too long for the engine.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A chunk in the context was released.
        ForeignChunkError: A chunk in the context belongs to another engine.

    Examples:
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=12)
        >>> state, request_id = nv.submit(model, state, "Hello", greedy)
        >>> replies = {}
        >>> while state.running or state.waiting:
        ...     state, outputs = nv.step(model, state)
        ...     replies.update({out.request_id: out.output.text for out in outputs if out.output})
        >>> replies[request_id]
        '! How can I help you?'
    """
    state = enter_with(model, state)
    processor = as_processor(process_logits)
    asked: dict[str, Any] = {"priority": priority, "process_logits": processor}
    after, sequence, _ = new_sequence(model, state, context, sampling_params, **asked)
    if (back := resident(state, context)) is not state:
        after, sequence, _ = new_sequence(model, back, context, sampling_params, **asked)
    state = after
    if sequence.pages.length:
        state = replace(state, pool=pools.acquire(state.pool, sequence.pages, sequence.retired))
    return commit_state(state, waiting=state.waiting.push(sequence)), sequence.request.request_id


@mirrored
def cancel(state: EngineState, request_id: int) -> EngineState:
    """Drop a request that waits or runs, and free its pages.

    Donates `state`.

    Args:
        state: The newest state of the engine.
        request_id: The id that `submit` returned.

    Returns:
        The next state.

    Raises:
        InvalidRequestError: No request of this id waits or runs.
        DonatedStateError: `state` was donated to a later call.

    Examples:
        >>> state, request_id = nv.submit(model, state, "Once upon a time")
        >>> state = nv.cancel(state, request_id)
        >>> len(state.waiting), len(state.running)
        (0, 0)
    """
    state = enter(state)
    waiting, running = state.waiting, state.running
    sequence = waiting.items.get(request_id) or next((s for s in running if s.request.request_id == request_id), None)
    if sequence is None:
        raise InvalidRequestError(f"request {request_id!r} is neither waiting nor running: it has ended, or was never submitted")
    if request_id in waiting.items:
        waiting = waiting.pop(request_id)
    else:
        running = tuple(s for s in running if s is not sequence)
    return commit_state(state, pool=give_up_pages(state.pool, sequence), waiting=waiting, running=running)


def new_sequence(
    model: Model,
    state: EngineState,
    context: Context,
    sampling_params: SamplingParams | None,
    *,
    keep: bool = False,
    priority: int = 0,
    process_logits: LogitsProcessor | None = None,
    namespace: int = 0,
) -> tuple[EngineState, Sequence, Chunk | None]:
    """A sequence for a context, with the next request id, and its base chunk.

    The sequence refers to the chunk's pages but does not own them yet.

    Raises:
        InvalidRequestError: The options or the context are invalid, or the prompt is too long for the engine.
    """
    params = from_generation_config(model.generation_config) if sampling_params is None else sampling_params
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"sampling_params must be SamplingParams or None, not {type(params).__name__}")
    validate_for(params, model.config.vocab_size)
    require_namespace(namespace)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= MOST_PRIORITY:
        given = reprlib.repr(priority)
        raise InvalidRequestError(f"priority={given} must be an integer between -2**53 and 2**53; requests of lower numbers run first")
    resolved = resolve(model, state, context)
    num_prompt, limit = len(resolved.tokens), capacity(state, resolved.base, whole=keep)
    if num_prompt >= limit:
        offset = 0 if resolved.base is None else offset_after(resolved.base.gaps)
        raise InvalidRequestError(f"the prompt has {resolved.count} tokens; {_shortage(model, state, num_prompt, limit, offset)}")
    bad_words = bad_words_of(model.tokenizer, tuple(params.bad_words), model.config.vocab_size)
    compiled = None if params.grammar is None else compiled_for(model, params.grammar)
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
        process_logits=process_logits,
        priority=priority,
        rank=rank_of(priority, state.num_steps),
        namespace=namespace,
        grammar=compiled,
        bad_words=bad_words,
    )
    if params.stop and model.tokenizer is None:
        raise InvalidRequestError(f"stop={params.stop!r} needs a tokenizer, but this model has none: use stop_token_ids")
    stops = None
    if params.stop and model.tokenizer is not None:
        stops = StopScan.of(model.tokenizer, params.stop, params.skip_special_tokens)
    sequence = begin_sequence(request, resolved.tokens, resolved.base, stops)
    if (frames := state.pool.frames) is not None and not keep:
        retired = num_retired(sequence.num_filled, num_prompt, frames.window, state.config.page_size)
        sequence = replace(sequence, retired=retired)
    return replace(state, next_id=rid + 1), sequence, resolved.base


def _shortage(model: Model, state: EngineState, num_prompt: int, limit: int, offset: int) -> str:
    """Which limit a prompt exceeds, and what to change. Its gaps use up `offset` positions."""
    most, max_model_len = model.config.max_position_embeddings - offset, state.config.max_model_len - offset
    if num_prompt >= most and not loaded_for_short(model.config):
        return f"the model's limit is {most} tokens, one of them generated: shorten the prompt"
    short = ["max_model_len"] * (max_model_len <= num_prompt) + ["the KV memory (num_pages, num_frames)"] * (limit < max_model_len)
    return f"this engine holds at most {limit}, one of them generated: shorten the prompt, or raise {' and '.join(short)}"


def begin_sequence(request: Request, tokens: IntVector, base: Chunk | None, stops: StopScan | None = None) -> Sequence:
    """A sequence over the pages of its base chunk. It does not own them yet."""
    if base is None:
        return Sequence(request=request, tokens=tokens, pages=IntVector.of(), stops=stops)
    return Sequence(
        request=request, tokens=tokens, pages=base.pages, num_filled=len(base), stops=stops, provenance=base.provenance,
        exact_len=base.num_exact, gaps=base.gaps,
    )  # fmt: skip


def capacity(state: EngineState, base: Chunk | None = None, *, whole: bool = True) -> int:
    """The maximum number of tokens of one request, prompt and reply. It is lower after a chunk with gaps, which uses up positions.

    Args:
        whole: Whether the sequence keeps all its KV, as a chunk does. Otherwise it gives up KV outside the sliding windows.
    """
    offset, config, frames = 0 if base is None else offset_after(base.gaps), state.config, state.pool.frames
    pages = config.num_pages
    if frames is not None and (whole or frames.num_frames < least_frames(frames.window, config.page_size)):
        pages = min(pages, frames.num_frames)
    return min(config.max_model_len - offset, pages * config.page_size)


def request_seed(seed: int, request_id: int) -> int:
    """The seed of a request that gives none, derived from the engine's seed and the request's id."""
    return int(np.random.SeedSequence((seed, request_id)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@mirrored
def submit_many(
    model: Model,
    state: EngineState,
    contexts: Seq[Context],
    sampling_params: Seq[SamplingParams | None],
    *,
    keep: bool = False,
    priorities: Seq[int] | None = None,
    process_logits: LogitsProcessor | None = None,
    namespace: int = 0,
) -> tuple[EngineState, list[int]]:
    """Queue a request for each context and return their ids in order. If one is invalid, none is queued.

    Args:
        keep: Whether a request that ends keeps its pages until `detach`.
        priorities: The priority of each, as in `submit`. None: 0.
        process_logits: The function between logits and samples of all of them.
        namespace: A number of at least 0. Requests begin with indexed KV only of those with the same number, so that neither their time
            nor their `num_cached_tokens` tells what others asked. The KV of a chunk is that of whoever has the chunk.

    Raises:
        InvalidRequestError: As in `submit`; the message names the prompt's index.
    """
    state = enter_with(model, state)
    asked = {"keep": keep, "process_logits": process_logits, "namespace": namespace}
    ranked = list(zip(contexts, sampling_params, [0] * len(contexts) if priorities is None else priorities, strict=True))
    after, ids = _queued(model, state, ranked, asked)
    if (back := resident(state, *contexts)) is not state:
        after, ids = _queued(model, back, ranked, asked)
    return commit_state(after), ids


def _queued(model: Model, state: EngineState, ranked: Seq[tuple[Any, Any, Any]], asked: dict[str, Any]) -> tuple[EngineState, list[int]]:
    """The state with a request for each (context, options, priority), and their ids."""
    ids = []
    for place, (context, params, priority) in enumerate(ranked):
        try:
            state, sequence, _ = new_sequence(model, state, context, params, priority=priority, **asked)
        except NanoVLLMError as error:
            raise (error if len(ranked) == 1 else type(error)(f"prompt {place}: {error}")) from None
        if sequence.pages.length:
            state = replace(state, pool=pools.acquire(state.pool, sequence.pages, sequence.retired))
        state = replace(state, waiting=state.waiting.push(sequence))
        ids.append(sequence.request.request_id)
    return state, ids
