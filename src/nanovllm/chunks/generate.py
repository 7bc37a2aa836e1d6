"""Whole replies by one function call: `generate` and `generate_many`."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from nanovllm.chunks.generation import Generation, one_for_each
from nanovllm.chunks.handles import chunk_of, released_chunk
from nanovllm.chunks.prefill import fill, reserve_all
from nanovllm.chunks.processed import processed
from nanovllm.chunks.thinking import Retain, check_retain, without_thinking
from nanovllm.engine.donation import commit_state, enter_with, guarded
from nanovllm.engine.mirrored import mirrored
from nanovllm.engine.prompt import Context
from nanovllm.engine.requests import new_sequence
from nanovllm.engine.resident import resident
from nanovllm.engine.step import run_step
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.process_logits import LogitsProcessor, as_processor
from nanovllm.state import pool as pools
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import Queue, RequestOutput, Sequence
from nanovllm.state.sequence_pages import give_up_pages


@mirrored
@explain_unknown_keywords
def generate(
    model: Model,
    state: EngineState,
    context: Context,
    sampling_params: SamplingParams | None = None,
    *,
    retain: Retain = "all",
    process_logits: LogitsProcessor | Callable[..., Any] | None = None,
) -> tuple[EngineState, Generation]:
    """Generate one reply to one context.

    Donates `state`. Requests that were submitted before stay as they are. If the available pages are used up, the reply ends with
    `finish_reason="length"`.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        context: A text, token ids, a chunk, or a list of these in which only the first part may be a chunk.
        sampling_params: The options. None: the model's `generation_config`.
        retain: Which tokens the reply's chunk keeps; see `generate_many`.
        process_logits: A function that every step calls before it samples; see `generate_many`.

    Returns:
        The next state, and the reply.

    Raises:
        InvalidRequestError: An argument is invalid, or the context is too long for the engine.
        OutOfPagesError: Too few pages are available for the context, or the device has no memory for even one token. In the latter case
            `error.request_id` is the number that the request had.
        RequestFailedError: The reply cannot be decoded, or cannot be searched for stop strings.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A chunk in the context was released.
        ForeignChunkError: A chunk in the context belongs to another engine.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")
        >>> state, reply = nv.generate(model, state, [facts, " The king of Aistonia is"], greedy)
        >>> reply.text
        ' Oswin'
    """
    state, (generation,) = _generated(model, state, [context], sampling_params, retain, process_logits, alone=True)
    return state, generation


@mirrored
@explain_unknown_keywords
def generate_many(
    model: Model,
    state: EngineState,
    contexts: Seq[Context],
    sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
    *,
    retain: Retain = "all",
    process_logits: LogitsProcessor | Callable[..., Any] | None = None,
) -> tuple[EngineState, list[Generation]]:
    """Generate one reply to each context, decoded together as a batch.

    Donates `state`. Contexts may share chunks. The full pages of equal beginnings run once, and the contexts share them. The pages of all
    replies at their maximum length are reserved before anything is written. For a load that does not fit, use `submit` and `step`, which
    queue and preempt requests. Requests that were submitted before stay as they are.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        contexts: A list of contexts: texts, token ids, chunks, or lists of these in which only the first part may be a chunk.
        sampling_params: Options for all contexts, or a list with one per context. None: the model's `generation_config`.
        retain: "all", or a mode of `drop` by which think blocks are removed from the replies' chunks. Think blocks are found by the
            model's think tokens, closed or not. `token_ids` and `text` keep them.
        process_logits: A pure function from the logits `[B, V]`, or from the logits and a `TokensSoFar`, to the logits to sample from; or
            a `LogitsProcessor`. Its rows are the contexts, in order, in every step, so it may mix them. Rows that have ended stay in the
            batch. On a GPU it becomes part of the step's CUDA graph. Log-probabilities are then those of the logits that it returns. At
            most `max_num_seqs` contexts.

    Returns:
        The next state, and one reply per context, in the same order. A reply that fails has `finish_reason` `"error"` and an `error`, and
        its chunk counts as released. The others are whole.

    Raises:
        InvalidRequestError: An argument is invalid, or a context is too long for the engine.
        OutOfPagesError: Too few pages are available for all replies at their maximum length.
        Exception: What `process_logits` raises, which belongs to all rows.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A chunk in a context was released.
        ForeignChunkError: A chunk in a context belongs to another engine.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin. The capital of Aistonia is Velmora.")
        >>> questions = [[facts, " The king of Aistonia is"], [facts, " The capital of Aistonia is"]]
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")
        >>> state, replies = nv.generate_many(model, state, questions, greedy)
        >>> [reply.text for reply in replies]
        [' Oswin', ' Velmora']
    """
    return _generated(model, state, contexts, sampling_params, retain, process_logits, alone=False)


@torch.no_grad()
def _generated(
    model: Model,
    state: EngineState,
    contexts: Seq[Context],
    sampling_params: SamplingParams | Seq[SamplingParams | None] | None,
    retain: Retain,
    process_logits: LogitsProcessor | Callable[..., Any] | None,
    *,
    alone: bool,
) -> tuple[EngineState, list[Generation]]:
    """`generate_many`; or `generate`, which raises the error of its request. The old state then stays usable."""
    state = enter_with(model, state)
    check_retain(model, retain)
    sampling_params = one_for_each(contexts, sampling_params)
    if not contexts:
        return commit_state(state), []
    asked = list(zip(contexts, sampling_params, strict=True))
    inner, sequences = _begun(model, state, asked)
    if (back := resident(state, *contexts)) is not state:
        state, (inner, sequences) = back, _begun(model, back, asked)
    sequences = _bounded(state, sequences)
    if (processor := as_processor(process_logits)) is not None:
        return _processed(model, state, inner, sequences, processor, retain)
    for sequence in sequences:
        inner = replace(inner, pool=pools.acquire(inner.pool, sequence.pages), waiting=inner.waiting.push(sequence))
    ended: dict[int, RequestOutput] = {}
    with guarded(state) as taken:
        while inner.waiting or inner.running:
            inner, outputs = run_step(model, inner, taken)
            for out in outputs:
                if out.error is not None:
                    if alone:
                        raise out.error
                    inner = replace(inner, pool=give_up_pages(inner.pool, inner.kept[out.request_id]))
            ended.update({out.request_id: out.output for out in outputs if out.output is not None})
        kept = [inner.kept[rid] for rid, out in ended.items() if out.error is None]
        inner, kept = reserve_all(inner, kept, [len(s.tokens) for s in kept], taken)
        inner, kept = fill(model, inner, kept)
        filled = {sequence.request.request_id: sequence for sequence in kept}
        generations = []
        for sequence in sequences:
            rid = sequence.request.request_id
            if rid in filled:
                inner, chunk = chunk_of(model, inner, filled[rid])
                inner, chunk = without_thinking(model, inner, chunk, sequence.request.num_prompt, retain, taken)
            else:
                inner, chunk = released_chunk(model, inner, inner.kept[rid])
            inner = replace(inner, kept=inner.kept.delete(rid))
            out = ended[rid]
            generations.append(
                Generation(
                    chunk=chunk,
                    token_ids=out.token_ids,
                    text=out.text,
                    finish_reason=out.finish_reason,
                    logprobs=out.logprobs,
                    error=out.error,
                )
            )
        return commit_state(inner, config=state.config, running=state.running, waiting=state.waiting, loaded=None), generations


def _begun(model: Model, state: EngineState, asked: Seq[tuple[Context, SamplingParams | None]]) -> tuple[EngineState, list[Sequence]]:
    """The state without its other requests, and a sequence for each context with its options, which owns no page yet."""
    # Nobody reads these replies before the call ends, so prompts need not be held back for them.
    inner = replace(state, running=(), waiting=Queue(), config=replace(state.config, max_prefill_tokens=None))
    sequences = []
    for context, params in asked:
        inner, sequence, _ = new_sequence(model, inner, context, params, keep=True)
        sequences.append(sequence)
    return inner, sequences


def _processed(
    model: Model, state: EngineState, inner: EngineState, sequences: list[Sequence], processor: LogitsProcessor, retain: Retain
) -> tuple[EngineState, list[Generation]]:
    """The replies of a call with `process_logits`."""
    if len(sequences) > state.config.max_num_seqs:
        raise InvalidRequestError(f"{len(sequences)} contexts with process_logits exceed max_num_seqs={state.config.max_num_seqs}")
    with guarded(state) as taken:
        inner, generations = processed(model, inner, sequences, processor, taken)
        kept = []
        for generation, sequence in zip(generations, sequences, strict=True):
            inner, chunk = without_thinking(model, inner, generation.chunk, sequence.request.num_prompt, retain, taken)
            kept.append(replace(generation, chunk=chunk))
        return commit_state(inner, config=state.config, running=state.running, waiting=state.waiting, loaded=None), kept


def _bounded(state: EngineState, sequences: list[Sequence]) -> list[Sequence]:
    """Limit one sequence to the pages available now, or check that several fit at their maximum length.

    Raises:
        OutOfPagesError: The sequences do not fit together.
    """
    size, available = state.config.page_size, state.pool.num_available
    if len(sequences) == 1:
        (sequence,) = sequences
        shared = sequence.num_filled // size  # whole pages of the base chunk; a partly filled last page is copied, so it counts as new
        limit = min(sequence.request.max_len, (shared + available) * size)
        if limit <= sequence.request.num_prompt:
            raise pools.too_few(state.pool, f"the context has {sequence.request.num_prompt} tokens and leaves no page for a reply")
        return [replace(sequence, request=replace(sequence.request, max_len=limit))]
    needed = sum(pages_for(s.request.max_len, size) - s.num_filled // size for s in sequences)
    if needed > available:
        raise pools.too_few(state.pool, f"{len(sequences)} replies need {needed} pages at their maximum length")
    return sequences
