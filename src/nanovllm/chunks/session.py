"""`begin` and `commit`: decode loops that the caller writes, from the reservation of pages to the finished replies."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, cast

import torch

from nanovllm.chunks.generation import Generation, one_for_each
from nanovllm.chunks.session_rows import closed, opened
from nanovllm.engine.donation import commit_state, enter, enter_with, guarded
from nanovllm.engine.mirrored import require_no_mirror
from nanovllm.engine.prompt import Context
from nanovllm.engine.requests import capacity, new_sequence
from nanovllm.engine.resident import resident
from nanovllm.errors import DonatedStateError, InvalidRequestError
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.executor import executor_of
from nanovllm.executor.fresh_carry import log_of, require_fresh
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.process_logits import LogitsProcessor, as_processor
from nanovllm.state import pool as pools
from nanovllm.state.device_errors import watched
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import same_memory
from nanovllm.state.request import Sequence


@explain_unknown_keywords
@torch.no_grad()
def begin(
    model: Model,
    state: EngineState,
    contexts: Seq[Context],
    sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
    *,
    room: int,
    branching: bool = False,
    fill: bool = True,
    process_logits: LogitsProcessor | Callable[..., Any] | None = None,
) -> tuple[EngineState, DecodeCarry]:
    """Fill contexts and reserve pages, so that the caller can run the decode steps.

    Donates `state`. Call `decode_step` with the returned carry at most `room` times, then `commit`. The first step samples the first new
    token of each context. The full pages of equal beginnings run once, and the contexts share them.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        contexts: A list of at least one and at most `max_num_seqs` contexts: texts, token ids, chunks, or lists of these.
        sampling_params: Options for all contexts, or a list with one per context. None: the model's `generation_config`.
        room: The number of decode steps, at least 1. It replaces `max_tokens`; stop conditions take effect at `commit`.
        branching: Whether `split_rows` may let rows go on from other rows. It reserves one more page per context; or one per step, if the
            lengths of the contexts have different remainders modulo the page size.
        fill: Whether to run the contexts now. False: the first `decode_step` runs all their tokens, so that prompts are part of the
            caller's program. Together they may then have at most `max_num_batched_tokens` tokens that are not filled yet.
        process_logits: A function that every step calls before it samples; see `generate_many`. Its rows are the contexts, in order.

    Returns:
        The next state, and the carry of the first decode step.

    Raises:
        InvalidRequestError: An argument is invalid, or a context with `room` more tokens is too long for the engine.
            Or `branching` is on, and the GPU's fused kernels do not serve the model. Or `fill` is off, and the contexts are longer than
            one step.
        OutOfPagesError: Too few pages are available for all contexts with `room` more tokens each.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A chunk in a context was released.
        ForeignChunkError: A chunk in a context belongs to another engine.

    Examples:
        >>> greedy = nv.SamplingParams(temperature=0)
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], greedy, room=5)
        >>> for _ in range(5):
        ...     carry, out = nv.decode_step(model.params, carry, model.config)
        >>> state, replies = nv.commit(model, state, carry)
        >>> replies[0].text
        ', a boy named Jonas'
    """
    state = enter_with(model, state)
    require_no_mirror(state, "begin")
    if isinstance(room, bool) or not isinstance(room, int) or room < 1:
        raise InvalidRequestError(f"room={room!r} must be an integer of at least 1, the number of decode steps")
    sampling_params = one_for_each(contexts, sampling_params)
    if not contexts:
        raise InvalidRequestError("contexts=[]: begin needs at least one context")
    if len(contexts) > state.config.max_num_seqs:
        raise InvalidRequestError(f"{len(contexts)} contexts exceed max_num_seqs={state.config.max_num_seqs}: pass fewer contexts")
    asked = list(zip(contexts, sampling_params, strict=True))
    inner, sequences = _begun(model, state, asked, room)
    if (back := resident(state, *contexts)) is not state:
        state, (inner, sequences) = back, _begun(model, back, asked, room)
    processor = as_processor(process_logits)
    with guarded(state) as taken:
        inner, session, carry = opened(model, inner, sequences, taken, branching=branching, to_fill=fill, processor=processor)
        assert carry.log is not None and carry.log.lease is not None
        return commit_state(inner, sessions=inner.sessions.set(carry.log.lease.session, session)), carry


def _begun(
    model: Model, state: EngineState, asked: Seq[tuple[Context, SamplingParams | None]], room: int
) -> tuple[EngineState, list[Sequence]]:
    """A sequence for each context with its options, which owns no page yet. The state has counted them.

    Raises:
        InvalidRequestError: A context with `room` more tokens is too long for the engine.
    """
    inner, sequences = state, []
    for context, params in asked:
        inner, sequence, base = new_sequence(model, inner, context, params, keep=True)
        limit = capacity(state, base)
        if len(sequence.tokens) + room > limit:
            raise InvalidRequestError(
                f"a context of {len(sequence.tokens)} tokens with room={room} exceeds this engine's limit of {limit} tokens per request: "
                f"room may be at most {max(0, limit - len(sequence.tokens))}; max_model_len and num_pages of init_state set the limit"
            )
        request = replace(sequence.request, max_len=sequence.request.num_prompt + room)
        sequences.append(replace(sequence, request=request))
    return inner, sequences


@explain_unknown_keywords
@torch.no_grad()
def commit(model: Model, state: EngineState, carry: DecodeCarry) -> tuple[EngineState, list[Generation]]:
    """End a run of decode steps and turn each row into a reply with its chunk.

    Donates `state` and `carry`. Each reply ends at its first reason to stop. Later tokens of its row, and steps beyond `room`, count as
    discarded. Log-probabilities are those of the sampled tokens only, without alternatives.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        carry: The carry that `begin` or the last `decode_step` returned.

    Returns:
        The next state, and one reply per context, in the order of `begin`.

    Raises:
        InvalidRequestError: `carry` does not come from `begin`, or an argument has the wrong type.
        DonatedStateError: `carry` was committed or stepped from before, or `state` was donated.
        OutOfPagesError: The device ran out of memory.

    Examples:
        >>> greedy = nv.SamplingParams(temperature=0, stop=",")
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], greedy, room=2)
        >>> carry, out = nv.decode_step(model.params, carry, model.config)
        >>> state, (reply,) = nv.commit(model, state, carry)
        >>> reply.token_ids == out.token_ids.tolist(), reply.finish_reason
        (True, 'stop')
    """
    state = enter_with(model, state)
    with watched(state.runtime.lease):
        return _committed(model, state, carry)


def _committed(model: Model, state: EngineState, carry: DecodeCarry) -> tuple[EngineState, list[Generation]]:
    log = log_of(carry)
    ticket = int(log.session)
    session = state.sessions.get(ticket)
    if session is None or not same_memory(carry.kv, state.kv):  # compare the memory too: another engine may have a session of this number
        raise DonatedStateError(f"session {ticket} was committed already, or began in another engine: call begin for a new one")
    require_fresh(log)
    with guarded(state):
        inner, generations = closed(model, state, session, carry)
        after = commit_state(inner, sessions=inner.sessions.delete(ticket))
        _retire(carry)
        executor_of(state).end(ticket)
    return after, generations


@explain_unknown_keywords
def abandon(state: EngineState, session: DecodeCarry | int) -> EngineState:
    """End a run of decode steps without replies, and give its pages back.

    Donates `state`, and all carries of the session. Use it when the newest carry is lost, for example because a function of yours raised
    an error after a step. The steps are not counted in `state.stats`. Compiled code must not step from a carry of an abandoned session,
    because its pages may be another's by then.

    Args:
        state: The newest state of the engine.
        session: Any carry of the session, also a used one; or the session's number, which is a key of `state.sessions`.

    Returns:
        The next state.

    Raises:
        InvalidRequestError: `session` is neither a carry of `begin` nor the number of a session that has begun and not ended.
        DonatedStateError: The carry's session has ended or began in another engine, or `state` was donated.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], nv.SamplingParams(temperature=0), room=40)
        >>> state = nv.abandon(state, carry)
        >>> len(state.sessions), nv.memory(state).num_held
        (0, 0)
    """
    state = enter(state)
    with watched(state.runtime.lease):
        return _abandoned(state, session)


def _abandoned(state: EngineState, session: DecodeCarry | int) -> EngineState:
    carry: DecodeCarry | None = None
    if isinstance(session, int) and not isinstance(session, bool):
        ticket = session
        if ticket not in state.sessions:
            raise InvalidRequestError(f"session={session} has ended or never began: {sorted(state.sessions)} have begun")
    else:
        ticket, carry = int(log_of(session).session), cast(DecodeCarry, session)
        if ticket not in state.sessions or not same_memory(carry.kv, state.kv):
            raise DonatedStateError(f"session {ticket} has ended already, or began in another engine")
    ended, pool = state.sessions[ticket], state.pool
    for sequence in ended.sequences:
        pool = pools.release(pool, sequence.pages)
    with guarded(state):
        after = commit_state(state, pool=pool, sessions=state.sessions.delete(ticket))
        ended.lease.committed = True
        if carry is not None:
            _retire(carry)
        executor_of(state).end(ticket)
    return after


@torch.inference_mode()  # so that tensors made in this mode can be written too
def _retire(carry: DecodeCarry) -> None:
    """Point a committed carry at the dummy page, so that traced code that still steps from it cannot write into the chunks' pages."""
    assert carry.log is not None
    carry.log.ran.fill_(-1)
    if carry.log.lease is not None:
        carry.log.lease.committed = True
    for pages, tables in zip(carry.kv.pools, (carry.batch, carry.batch.windowed), strict=False):
        if tables is not None:
            dummy, page_size = pages.shape[1] - 1, pages.shape[4]
            tables.page_tables.fill_(dummy)
            tables.slots.fill_(dummy * page_size)
    carry.active.fill_(0)
    if carry.log.branches is not None:
        for pages, spare in zip(carry.kv.pools, carry.log.branches.spares, strict=True):
            spare.fill_(pages.shape[1] - 1)
