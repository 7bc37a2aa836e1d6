"""`begin` and `commit`: decode loops that the caller writes, from the reservation of pages to the finished replies."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from nanovllm.chunks.generate import Generation, one_for_each
from nanovllm.chunks.handles import chunk_of
from nanovllm.chunks.prefill import adopt, fill, reserve_all
from nanovllm.engine.donation import commit_state, enter_with, guarded
from nanovllm.engine.output import counted, finish_reason, reply_text, scan
from nanovllm.engine.prompt import Context
from nanovllm.engine.requests import capacity, new_sequence
from nanovllm.errors import DonatedStateError, InvalidRequestError
from nanovllm.executor.decode import DecodeCarry, TokenLog, require_carry, require_fresh
from nanovllm.executor.executor import executor_of
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.tensors import features
from nanovllm.state.engine_state import EngineState, Session
from nanovllm.state.request import Sequence, TokenLogprobs


@explain_unknown_keywords
@torch.no_grad()
def begin(
    model: Model,
    state: EngineState,
    contexts: Seq[Context],
    sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
    *,
    room: int,
) -> tuple[EngineState, DecodeCarry]:
    """Fill contexts and reserve pages, so that the caller can run the decode steps.

    Donates `state`. Call `decode_step` with the returned carry at most `room` times, then `commit`. The first step samples the first new
    token of each context.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        contexts: A list of at least one and at most `max_num_seqs` contexts: texts, token ids, chunks, or lists of these.
        sampling_params: Options for all contexts, or a list with one per context. None: the model's `generation_config`.
        room: The number of decode steps, at least 1. It replaces `max_tokens`; stop conditions take effect at `commit`.

    Returns:
        The next state, and the carry of the first decode step.

    Raises:
        InvalidRequestError: An argument is invalid, or a context with `room` more tokens is too long for the engine.
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
    if isinstance(room, bool) or not isinstance(room, int) or room < 1:
        raise InvalidRequestError(f"room={room!r} must be an integer of at least 1, the number of decode steps")
    sampling_params = one_for_each(contexts, sampling_params)
    if not contexts:
        raise InvalidRequestError("contexts=[]: begin needs at least one context")
    if len(contexts) > state.config.max_num_seqs:
        raise InvalidRequestError(f"{len(contexts)} contexts exceed max_num_seqs={state.config.max_num_seqs}: pass fewer contexts")
    inner, sequences = state, []
    for context, params in zip(contexts, sampling_params, strict=True):
        inner, sequence, base = new_sequence(model, inner, context, params, keep=True)
        limit = capacity(state, base)
        if len(sequence.tokens) + room > limit:
            raise InvalidRequestError(
                f"a context of {len(sequence.tokens)} tokens with room={room} exceeds this engine's limit of {limit} tokens per request"
            )
        request = replace(sequence.request, max_len=sequence.request.num_prompt + room)
        sequences.append(replace(sequence, request=request))
    ticket = inner.next_id
    scored = features([s.request.sampling for s in sequences]).num_logprobs
    with guarded(state) as taken:
        inner, sequences = adopt(inner, sequences, logits=True)
        inner, sequences = reserve_all(inner, sequences, [len(s.tokens) + room for s in sequences], taken)
        inner, sequences = fill(model, inner, sequences, keep_back=1)
        carry = executor_of(state).begin(model, inner.kv, sequences, ticket, frames=inner.pool.frames)
        log = TokenLog(
            session=torch.tensor(ticket, device=model.device),
            ran=torch.tensor(0, dtype=torch.int32, device=model.device),
            num_steps=torch.tensor(0, dtype=torch.int32, device=model.device),
            token_ids=torch.zeros(len(sequences), room, dtype=torch.int32, device=model.device),
            logprobs=None if scored is None else torch.zeros(len(sequences), room, device=model.device),
        )
        session = Session(sequences=tuple(sequences), room=room)
        state = commit_state(inner, next_id=ticket + 1, sessions=inner.sessions.set(ticket, session))
        return state, replace(carry, log=log)


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
    require_carry(carry)
    if carry.log is None:
        raise InvalidRequestError(f"carry={carry!r} has no log: pass the carry of begin, or of a later decode_step")
    ticket, num_run = int(carry.log.session), int(carry.log.num_steps)
    session = state.sessions.get(ticket)
    memory = [[pool.data_ptr() for pool in kv.pools] for kv in (carry.kv, state.kv)]
    if session is None or memory[0] != memory[1]:  # compare the memory too: another engine may have a session of this number
        raise DonatedStateError(f"session {ticket} was committed already, or began in another engine: call begin for a new one")
    require_fresh(carry.log)
    num_steps = min(num_run, session.room)
    sampled = carry.log.token_ids.cpu().numpy()[:, :num_steps]
    rows = [_with_sampled(model, sequence, tokens) for sequence, tokens in zip(session.sequences, sampled, strict=True)]
    prompt = rerun = 0
    if num_steps:
        counts = [counted(s, 1) for s in session.sequences]
        prompt, rerun = sum(p for p, _ in counts), sum(a for _, a in counts)
    run = num_run * len(rows)
    used = sum(sequence.num_generated for sequence, _ in rows)
    # `begin` does not count the last token of a filled context as reused, because a step runs it. Without a step, it is reused.
    reused = 0 if num_steps else sum(s.todo == 0 for s in session.sequences)
    stats = state.stats.add(
        prefill_tokens=prompt, decode_tokens=run - prompt, reused_tokens=reused, rerun_tokens=rerun, discarded_tokens=run - used
    )
    with guarded(state):
        # `begin` reserved pages up to each row's newest token, so nothing is allocated here.
        inner, filled = fill(model, replace(state, stats=stats), [sequence for sequence, _ in rows])
        generations = []
        for row, (sequence, (_, reason)) in enumerate(zip(filled, rows, strict=True)):
            inner, chunk = chunk_of(model, inner, sequence)
            token_ids = sequence.tokens.array(sequence.request.num_prompt).tolist()
            logprobs = _logprobs(carry.log, row, token_ids) if sequence.request.sampling.logprobs is not None else None
            text = reply_text(model, sequence)
            generations.append(Generation(chunk=chunk, token_ids=token_ids, text=text, finish_reason=reason, logprobs=logprobs))
        after = commit_state(inner, sessions=inner.sessions.delete(ticket))
    _retire(carry)
    executor_of(state).end(ticket)
    return after, generations


def _retire(carry: DecodeCarry) -> None:
    """Point a committed carry at the dummy page, so that traced code that still steps from it cannot write into the chunks' pages."""
    assert carry.log is not None
    carry.log.ran.fill_(-1)
    for pages, tables in zip(carry.kv.pools, (carry.batch, carry.batch.windowed), strict=False):
        if tables is not None:
            dummy, page_size = pages.shape[1] - 1, pages.shape[4]
            tables.page_tables.fill_(dummy)
            tables.slots.fill_(dummy * page_size)
    carry.active.fill_(0)


def _logprobs(log: TokenLog, row: int, token_ids: list[int]) -> list[TokenLogprobs] | None:
    """The log-probabilities of a row's tokens, or None if no row asked for them."""
    if log.logprobs is None:
        return None
    values = log.logprobs[row, : len(token_ids)].tolist()
    return [TokenLogprobs(token_id=token, logprob=value) for token, value in zip(token_ids, values, strict=True)]


def _with_sampled(model: Model, sequence: Sequence, tokens: np.ndarray) -> tuple[Sequence, str]:
    """The sequence with its sampled tokens up to the first that ends it, and the finish reason. All tokens except the newest are filled."""
    reason, filled = None, sequence.num_filled
    for token in tokens.tolist():
        stops = sequence.stops and scan(sequence.stops, token, sequence.request.sampling.stop)
        filled = len(sequence.tokens)
        sequence = replace(sequence, tokens=sequence.tokens.append(token), stops=stops)
        if (reason := finish_reason(sequence, token)) is not None:
            break
    sequence = replace(sequence, num_filled=filled, most_filled=max(filled, sequence.most_filled))
    return sequence, reason or "length"
