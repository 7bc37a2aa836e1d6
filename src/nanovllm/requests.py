"""Requests as the shells need them: several queued by one call or none, and a streamed reply whose KV stays as a chunk."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from nanovllm.chunks.handles import chunk_of
from nanovllm.engine.prompt import Context
from nanovllm.engine.step import commit_state, enter_with, new_sequence
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.loading.load_model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.sequence_pages import give_up_pages


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


def detach(model: Model, state: EngineState, request_id: int) -> tuple[EngineState, Chunk | None]:
    """End a request of `submit_many(keep=True)`, wherever it stands, and hand its KV over as a chunk of the tokens filled so far.

    The newest token is not among them: a continuation runs it. None where nothing is filled. Raises
    `InvalidRequestError` for a request that this state does not hold.
    """
    state = enter_with(model, state)
    waiting, running, kept = state.waiting, state.running, state.kept
    if request_id in kept:
        sequence, kept = kept[request_id], kept.delete(request_id)
    elif request_id in waiting.items:
        sequence, waiting = waiting.items[request_id], waiting.pop(request_id)
    else:
        sequence = next((s for s in running if s.request.request_id == request_id), None)
        if sequence is None:
            raise InvalidRequestError(f"request {request_id!r} is neither kept, waiting nor running")
        running = tuple(s for s in running if s is not sequence)
    if state.pool.frames is not None and not sequence.request.keep:
        raise InvalidRequestError(f"request {request_id} was not queued to be kept, and gives up what is outside of the model's windows")
    state = replace(state, waiting=waiting, running=running, kept=kept)
    if not sequence.num_filled:
        return commit_state(state, pool=give_up_pages(state.pool, sequence)), None
    filled = replace(sequence, tokens=sequence.tokens.truncate(sequence.num_filled))
    state, chunk = chunk_of(model, state, filled)
    return commit_state(state), chunk
