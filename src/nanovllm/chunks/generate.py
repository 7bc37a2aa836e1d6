"""Whole replies by one function call each: `generate` and `generate_many`."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from nanovllm.chunks.handles import chunk_of
from nanovllm.chunks.prefill import fill, reserve_all
from nanovllm.chunks.thinking import Retain, check_retain, without_thinking
from nanovllm.engine.donation import commit_state, enter_with, guarded
from nanovllm.engine.prompt import Context
from nanovllm.engine.requests import new_sequence
from nanovllm.engine.step import run_step
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.request import Queue, RequestOutput, Sequence, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """A reply. `chunk` holds the context and the reply, all filled; `finish_reason` is `stop` or `length`.

    After a `stop` text, `text` ends before it, while `chunk` and `token_ids` hold it too.
    """

    chunk: Chunk
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


@explain_unknown_keywords
def generate(
    model: Model, state: EngineState, context: Context, sampling_params: SamplingParams | None = None, *, retain: Retain = "all"
) -> tuple[EngineState, Generation]:
    """One reply to one context. It ends with `length` where the pages available now end. `retain`: see `generate_many`.

    Raises `InvalidRequestError` for what can never be served and `OutOfPagesError` for a context that does not fit now.
    """
    state, (generation,) = generate_many(model, state, [context], sampling_params, retain=retain)
    return state, generation


@explain_unknown_keywords
@torch.no_grad()
def generate_many(
    model: Model,
    state: EngineState,
    contexts: Seq[Context],
    sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
    *,
    retain: Retain = "all",
) -> tuple[EngineState, list[Generation]]:
    """One reply to each context, decoded together; contexts may share chunks. `sampling_params` is one for all or one for each.

    `retain` is what the replies' chunks keep: `"all"`, or all but think blocks, found by the model's think tokens, closed or not, and taken
    out as by `drop` with this mode. `token_ids` and `text` have them either way.

    The pages of all replies at their longest are reserved before anything is written: `OutOfPagesError` where they do not fit now (`submit`
    and `step` serve such a load by waiting and preemption). Requests that were submitted stay as they are.
    """
    state = enter_with(model, state)
    check_retain(model, retain)
    sampling_params = one_for_each(contexts, sampling_params)
    if not contexts:
        return commit_state(state), []
    inner = replace(state, running=(), waiting=Queue())
    sequences = []
    for context, params in zip(contexts, sampling_params, strict=True):
        inner, sequence, _ = new_sequence(model, inner, context, params, keep=True)
        sequences.append(sequence)
    for sequence in _bounded(state, sequences):
        inner = replace(inner, pool=pools.acquire(inner.pool, sequence.pages), waiting=inner.waiting.push(sequence))
    ended: dict[int, RequestOutput] = {}
    with guarded(state) as taken:
        while inner.waiting or inner.running:
            inner, outputs = run_step(model, inner, taken)
            ended.update({out.request_id: out.output for out in outputs if out.output is not None})
        kept = [inner.kept[s.request.request_id] for s in sequences]
        inner, kept = reserve_all(inner, kept, [len(s.tokens) for s in kept], taken)
        inner, filled = fill(model, inner, kept)
        generations = []
        for sequence in filled:
            rid = sequence.request.request_id
            inner, chunk = chunk_of(model, inner, sequence)
            inner, chunk = without_thinking(model, inner, chunk, sequence.request.num_prompt, retain, taken)
            inner = replace(inner, kept=inner.kept.delete(rid))
            out = ended[rid]
            generations.append(
                Generation(chunk=chunk, token_ids=out.token_ids, text=out.text, finish_reason=out.finish_reason, logprobs=out.logprobs)
            )
        return commit_state(inner, running=state.running, waiting=state.waiting, loaded=None), generations


def one_for_each(contexts: Seq[Context], sampling_params: SamplingParams | Seq[SamplingParams | None] | None) -> Seq[SamplingParams | None]:
    """The options of each context. Raises `InvalidRequestError` for what is no list of contexts, or a list of other length."""
    if not isinstance(contexts, list | tuple):
        raise InvalidRequestError(f"contexts must be a list of contexts, not one {type(contexts).__name__}")
    if isinstance(sampling_params, SamplingParams) or sampling_params is None:
        return [sampling_params] * len(contexts)
    if not isinstance(sampling_params, list | tuple):
        raise InvalidRequestError(f"sampling_params must be SamplingParams, None or a list of these, not {type(sampling_params).__name__}")
    if len(sampling_params) != len(contexts):
        raise InvalidRequestError(f"{len(contexts)} contexts and {len(sampling_params)} sampling_params: give one for all or one for each")
    return sampling_params


def _bounded(state: EngineState, sequences: list[Sequence]) -> list[Sequence]:
    """The sequences, none longer than the pages available now can hold; raises where they do not fit together."""
    size, available = state.config.page_size, state.pool.num_available
    if len(sequences) == 1:
        (sequence,) = sequences
        shared = sequence.num_filled // size  # whole pages of the base chunk; a partly filled one is copied into a page of its own
        limit = min(sequence.request.max_len, (shared + available) * size)
        if limit <= sequence.request.num_prompt:
            raise pools.too_few(state.pool, f"the context has {sequence.request.num_prompt} tokens, which leave no page for a reply")
        return [replace(sequence, request=replace(sequence.request, max_len=limit))]
    needed = sum(pages_for(s.request.max_len, size) - s.num_filled // size for s in sequences)
    if needed > available:
        raise pools.too_few(state.pool, f"{len(sequences)} replies need {needed} pages at their longest")
    return sequences
