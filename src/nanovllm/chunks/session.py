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
from nanovllm.executor.carry import with_static_addresses
from nanovllm.executor.decode import Branches, DecodeCarry, TokenLog, note, require_carry, require_fresh
from nanovllm.executor.executor import executor_of
from nanovllm.executor.session_lease import SessionLease
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams
from nanovllm.sampling.tensors import features
from nanovllm.state import pool as pools
from nanovllm.state.engine_state import EngineState, Session
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pool import Pool
from nanovllm.state.request import Sequence, TokenLogprobs
from nanovllm.state.vector import IntVector


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
        branching: Whether `split_rows` may let rows go on from other rows. It reserves one more page per context; or one per step, if the
            lengths of the contexts have different remainders modulo the page size.

    Returns:
        The next state, and the carry of the first decode step.

    Raises:
        InvalidRequestError: An argument is invalid, or a context with `room` more tokens is too long for the engine.
            Or `branching` is on, and the GPU's fused kernels do not serve the model.
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
        inner, sequences = reserve_all(inner, sequences, _reserved(sequences, room, branching, state.config.page_size), taken)
        inner, sequences = _filled(model, inner, sequences)
        frames, rows = inner.pool.frames, [_first_pages(s, len(s.pages) - branching) for s in sequences]
        carry = executor_of(state).begin(model, inner.kv, rows, ticket, frames=frames, branching=branching)
        log = TokenLog(
            session=torch.tensor(ticket, device=model.device),
            ran=torch.tensor(0, dtype=torch.int32, device=model.device),
            num_steps=torch.tensor(0, dtype=torch.int32, device=model.device),
            token_ids=torch.zeros(len(sequences), room, dtype=torch.int32, device=model.device),
            logprobs=None if scored is None else torch.zeros(len(sequences), room, device=model.device),
            branches=_branches(inner, sequences, carry) if branching else None,
            lease=SessionLease(session=ticket, room=room),
        )
        note(log, 0)
        session = Session(sequences=tuple(sequences), room=room)
        state = commit_state(inner, next_id=ticket + 1, sessions=inner.sessions.set(ticket, session))
        return state, with_static_addresses(replace(carry, log=log))


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
    sequences, pool = session.sequences, state.pool
    if carry.log.branches is not None:
        sequences, pool = _branched(state, session, carry, carry.log.branches)
    sampled = carry.log.token_ids.cpu().numpy()[:, :num_steps]
    going, split = carry.active.tolist(), carry.log.branches is not None
    rows = [_with_sampled(*row, split=split) for row in zip(sequences, sampled, going, strict=True)]
    prompt = rerun = 0
    if num_steps:
        counts = [counted(s, 1) for s in sequences]
        prompt, rerun = sum(p for p, _ in counts), sum(a for _, a in counts)
    run = num_run * len(rows)
    # Without branches, `fill` runs the newest token of a reply once more.
    used = sum(sequence.num_generated + (sequence.num_generated > 0 and not sequence.todo) for sequence, _ in rows)
    # `begin` does not count the last token of a filled context as reused, because a step runs it. Without a step, it is reused.
    reused = 0 if num_steps else sum(s.todo == 0 for s in sequences)
    stats = state.stats.add(
        prefill_tokens=prompt, decode_tokens=run - prompt, reused_tokens=reused, rerun_tokens=rerun, discarded_tokens=run - used
    )
    with guarded(state):
        # `begin` reserved pages up to each row's newest token, so nothing is allocated here.
        inner, filled = fill(model, replace(state, stats=stats, pool=pool), [sequence for sequence, _ in rows])
        generations = []
        for row, (sequence, (_, reason)) in enumerate(zip(filled, rows, strict=True)):
            inner, chunk = chunk_of(model, inner, sequence)
            token_ids = sequence.tokens.array(sequence.request.num_prompt).tolist()
            logprobs = _logprobs(carry.log, row, token_ids) if sequence.request.sampling.logprobs is not None else None
            text = reply_text(model, sequence)
            generations.append(
                Generation(
                    chunk=chunk,
                    token_ids=token_ids,
                    text=text,
                    finish_reason=reason,
                    logprobs=logprobs,
                    num_dropped=max(0, num_run - session.room),
                )
            )
        after = commit_state(inner, sessions=inner.sessions.delete(ticket))
    _retire(carry)
    executor_of(state).end(ticket)
    return after, generations


def _reserved(sequences: Seq[Sequence], room: int, branching: bool, page_size: int) -> list[int]:
    """The number of tokens of each row for which `begin` reserves pages."""
    if not branching:
        return [len(s.tokens) + room for s in sequences]
    if len({len(s.tokens) % page_size for s in sequences}) == 1:  # all rows reach the ends of their pages in the same steps
        return [(pages_for(len(s.tokens) + room, page_size) + 1) * page_size for s in sequences]
    return [(pages_for(len(s.tokens), page_size) + room + 1) * page_size for s in sequences]


def _filled(model: Model, state: EngineState, sequences: Seq[Sequence]) -> tuple[EngineState, list[Sequence]]:
    """Run all tokens but the last of each sequence. With branches a sequence may have more pages than a step's page tables are wide."""
    size = state.config.page_size
    state, filled = fill(model, state, [_first_pages(s, pages_for(len(s.tokens), size)) for s in sequences], keep_back=1)
    return state, [done.with_pages(s.pages, done.num_filled) for done, s in zip(filled, sequences, strict=True)]


def _first_pages(sequence: Sequence, count: int) -> Sequence:
    """The sequence with the first `count` of its pages."""
    if count == len(sequence.pages):
        return sequence
    return sequence.with_pages(IntVector.of(sequence.pages.array(0, count)), sequence.num_filled)


def _branches(state: EngineState, sequences: Seq[Sequence], carry: DecodeCarry) -> Branches:
    """What `split_rows` needs for these sequences, whose last pages are spare."""
    device, frames = carry.active.device, state.pool.frames
    spare = np.array([s.pages[-1] for s in sequences], np.int32)
    by_page = [] if frames is not None and frames.alone else [spare]
    by_frame = [] if frames is None else [frames.of(spare)]
    return Branches(
        origins=torch.arange(len(sequences), dtype=torch.int32, device=device),
        spares=tuple(torch.from_numpy(pages).to(device) for pages in (*by_page, *by_frame)),
        ran=torch.tensor(0, dtype=torch.int32, device=device),
        num_splits=torch.tensor(0, dtype=torch.int32, device=device),
    )


def _branched(state: EngineState, session: Session, carry: DecodeCarry, branches: Branches) -> tuple[list[Sequence], Pool]:
    """The sequences as `split_rows` has left them, each the owner of its pages, and the pool without the pages that no row needs."""
    tables, frames = carry.batch.page_tables.cpu().numpy(), state.pool.frames
    if frames is not None and frames.alone:
        held = np.unique(np.concatenate([s.pages.array() for s in session.sequences]))
        page_of = dict(zip(frames.of(held).tolist(), held.tolist(), strict=True))
        tables = np.array([[page_of.get(frame, -1) for frame in row] for row in tables.tolist()], np.int32)
    counts = -(-carry.batch.seq_lens.cpu().numpy() // state.config.page_size)
    pool, sequences = state.pool, []
    for row, (origin, count) in enumerate(zip(branches.origins.tolist(), counts.tolist(), strict=True)):
        base = session.sequences[origin]
        pages = IntVector.of(np.ascontiguousarray(tables[row, :count]))
        sequences.append(base.with_pages(pages, base.num_filled))
        pool = pools.acquire(pool, pages)
    for sequence in session.sequences:
        pool = pools.release(pool, sequence.pages)
    return sequences, pool


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


def _logprobs(log: TokenLog, row: int, token_ids: list[int]) -> list[TokenLogprobs] | None:
    """The log-probabilities of a row's tokens, or None if no row asked for them."""
    if log.logprobs is None:
        return None
    values = log.logprobs[row, : len(token_ids)].tolist()
    return [TokenLogprobs(token_id=token, logprob=value) for token, value in zip(token_ids, values, strict=True)]


def _with_sampled(sequence: Sequence, tokens: np.ndarray, going: int, *, split: bool) -> tuple[Sequence, str]:
    """The sequence with its sampled tokens up to the first that ends it, and the finish reason. `going` is 0 if the row was stopped.

    All tokens except the newest are filled. In a session whose rows were split, the newest is filled as well if a later step ran it: its
    page may be shared since.
    """
    reason, filled = None, sequence.num_filled
    for place, token in enumerate(tokens.tolist()):
        if token < 0:  # the row was stopped before this step
            break
        stops = sequence.stops and scan(sequence.stops, token, sequence.request.sampling.stop)
        filled = len(sequence.tokens) + (split and place + 1 < len(tokens))
        sequence = replace(sequence, tokens=sequence.tokens.append(token), stops=stops)
        if (reason := finish_reason(sequence, token)) is not None:
            break
    sequence = replace(sequence, num_filled=filled, most_filled=max(filled, sequence.most_filled))
    return sequence, reason or ("length" if going else "stop")
