"""From sequences to the rows of decode steps that nobody schedules, and back: `opened` and `closed`, for sessions and for `generate`."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from nanovllm.chunks.generation import Generation
from nanovllm.chunks.handles import chunk_of
from nanovllm.chunks.prefill import adopt, fill, reserve_all
from nanovllm.engine.output import counted, finish_reason, reply_text, scan
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.carry import with_static_addresses
from nanovllm.executor.decode_carry import Branches, DecodeCarry, TokenLog
from nanovllm.executor.executor import executor_of
from nanovllm.executor.fresh_carry import note
from nanovllm.executor.session_lease import SessionLease
from nanovllm.models.model import Model
from nanovllm.sampling.process_logits import LogitsProcessor, first_carried, mapped, processing_of, tokens_of
from nanovllm.sampling.row_options import is_masked
from nanovllm.sampling.tensors import features
from nanovllm.state import pool as pools
from nanovllm.state.engine_state import EngineState, Session
from nanovllm.state.kv_cache import copy_pages, pages_for
from nanovllm.state.logprobs import TokenLogprobs, scores_of
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import frames_of_copies, written_pages
from nanovllm.state.vector import IntVector
from nanovllm.types import Tensor


def opened(
    model: Model,
    state: EngineState,
    sequences: Seq[Sequence],
    taken: Taken,
    *,
    branching: bool = False,
    to_fill: bool = True,
    processor: LogitsProcessor | None = None,
) -> tuple[EngineState, Session, DecodeCarry]:
    """Give each sequence pages up to its limit, fill all its tokens but the last, and make the carry of the first step.

    Sequences share the full pages of equal beginnings. Without `to_fill` the first step fills the tokens. Donates the KV. `executor.end`
    frees what the executor keeps for the session, whose number is `state.next_id`.

    Raises:
        OutOfPagesError: Too few pages are available; nothing was written.
        InvalidRequestError: Without `to_fill`, the tokens to fill are more than a step can run.
    """
    if (masked := next((s.request.sampling for s in sequences if is_masked(s.request.sampling)), None)) is not None:
        name = "grammar" if masked.grammar is not None else "bad_words" if masked.bad_words else "min_tokens"
        raise InvalidRequestError(
            f"{name}={getattr(masked, name)!r} needs the host between two steps: use generate, or submit and step, where process_logits "
            f"works too; begin, and generate_many with process_logits, take no {name}"
        )
    ticket, size = state.next_id, state.config.page_size
    lease = SessionLease(session=ticket, engine=state.runtime.lease)
    room = max(s.request.max_len - len(s.tokens) for s in sequences)
    state, sequences = adopt(state, sequences, logits=True)
    lengths = _reserved(sequences, room, branching, size)
    sharing = {"kept_back": int(to_fill), "most_todo": None if to_fill else state.config.max_num_batched_tokens}
    if branching:
        state, sequences = _with_own_last_pages(state, sequences, lengths, taken, **sharing)
    else:
        state, sequences = reserve_all(state, sequences, lengths, taken, **sharing)
    if to_fill:
        state, sequences = _filled(model, state, sequences)
    else:
        state = _without_unfilled(state, sequences)
    frames, rows = state.pool.frames, [_first_pages(s, len(s.pages) - branching) for s in sequences]
    try:
        carry = executor_of(state).begin(model, state.kv, rows, ticket, frames=frames, branching=branching, fill=to_fill)
        log = _log(sequences, lease, room, model.device)
        log = replace(log, branches=_branches(state, sequences, model.device, model.config.vocab_size)) if branching else log
        note(log, 0)
        carry = replace(carry, log=log)
        if processor is not None:
            carry = _with_processor(carry, sequences, processor, room)
        carry = with_static_addresses(carry)
    except BaseException:
        executor_of(state).end(ticket)
        raise
    return replace(state, next_id=ticket + 1), Session(sequences=tuple(sequences), room=room, lease=lease), carry


def closed(
    model: Model, state: EngineState, session: Session, carry: DecodeCarry, tops: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[EngineState, list[Generation]]:
    """Turn each row into a reply with its chunk. Donates the KV.

    `tops` are the most probable tokens of each step and their log-probabilities, `[steps, B, k]`, if rows asked for them.
    """
    assert carry.log is not None
    num_run = int(carry.log.num_steps)
    num_steps = min(num_run, session.room)
    sequences, pool = session.sequences, state.pool
    if carry.log.branches is not None:
        sequences, pool = _branched(state, session, carry, carry.log.branches)
    sampled = carry.log.token_ids.cpu().numpy()[:, :num_steps]
    going, split = carry.active.tolist(), carry.log.branches is not None
    rows = [_with_sampled(*row, split=split) for row in zip(sequences, sampled, going, strict=True)]
    prompt = rerun = 0
    if num_steps:
        counts = [counted(s, max(1, s.todo)) for s in sequences]
        prompt, rerun = sum(p for p, _ in counts), sum(a for _, a in counts)
    run = num_run * len(rows)
    more = sum(max(1, s.todo) - 1 for s in sequences) if num_steps else 0  # tokens of prompts that the first step ran
    # Without branches, `fill` runs the newest token of a reply once more.
    used = sum(sequence.num_generated + (sequence.num_generated > 0 and not sequence.todo) for sequence, _ in rows)
    # `opened` does not count the last token of a filled context as reused, because a step runs it. Without a step, it is reused.
    reused = 0 if num_steps else sum(s.todo == 0 for s in sequences)
    stats = state.stats.add(
        prefill_tokens=prompt, decode_tokens=run + more - prompt, reused_tokens=reused, rerun_tokens=rerun, discarded_tokens=run - used
    )
    # `opened` reserved pages up to each row's newest token, so nothing is allocated here. Without a step, contexts may still be to fill.
    state, filled = fill(model, replace(state, stats=stats, pool=pool), [sequence for sequence, _ in rows], shared=not num_steps)
    generations = []
    for row, (sequence, (_, reason)) in enumerate(zip(filled, rows, strict=True)):
        state, chunk = chunk_of(model, state, sequence)
        token_ids = sequence.tokens.array(sequence.request.num_prompt).tolist()
        generations.append(
            Generation(
                chunk=chunk,
                token_ids=token_ids,
                text=reply_text(model, sequence),
                finish_reason=reason,
                logprobs=_logprobs(carry.log, row, token_ids, sequence.request.sampling.logprobs, tops),
                num_dropped=max(0, num_run - session.room),
            )
        )
    return state, generations


def _reserved(sequences: Seq[Sequence], room: int, branching: bool, page_size: int) -> list[int]:
    """The number of tokens of each row for which `begin` reserves pages."""
    if not branching:
        return [s.request.max_len for s in sequences]
    if len({len(s.tokens) % page_size for s in sequences}) == 1:  # all rows reach the ends of their pages in the same steps
        return [(pages_for(len(s.tokens) + room, page_size) + 1) * page_size for s in sequences]
    return [(pages_for(len(s.tokens), page_size) + room + 1) * page_size for s in sequences]


def _with_own_last_pages(
    state: EngineState, sequences: Seq[Sequence], lengths: Seq[int], taken: Taken, **sharing: int | None
) -> tuple[EngineState, list[Sequence]]:
    """Reserve pages, and copy the last page of each context that is full and filled, because other owners or the index may have it.

    The first split of a row makes the page of its newest token the spare page, which the next split overwrites. Donates the KV.
    """
    size = state.config.page_size
    full = [s.todo == 0 and len(s.tokens) % size == 0 for s in sequences]
    lengths = [n + size * more for n, more in zip(lengths, full, strict=True)]
    state, reserved = reserve_all(state, sequences, lengths, taken, **sharing)
    copies, own = [], []
    for sequence, copied in zip(reserved, full, strict=True):
        pages = sequence.pages
        if copied:
            at, last = len(sequence.tokens) // size - 1, len(pages) - 1
            copies.append((pages[at], pages[last]))
            pages = pages.replace(at, pages[last]).truncate(last)
        own.append(sequence.with_pages(pages, sequence.num_filled))
    kv = copy_pages(state.kv, tuple(copies), frames_of_copies(state.pool, copies))
    return replace(state, kv=kv, pool=pools.release(state.pool, [source for source, _ in copies])), own


def _filled(model: Model, state: EngineState, sequences: Seq[Sequence]) -> tuple[EngineState, list[Sequence]]:
    """Run all tokens but the last of each sequence. With branches a sequence may have more pages than a step's page tables are wide."""
    size = state.config.page_size
    state, filled = fill(model, state, [_first_pages(s, pages_for(len(s.tokens), size)) for s in sequences], keep_back=1, shared=True)
    return state, [done.with_pages(s.pages, done.num_filled) for done, s in zip(filled, sequences, strict=True)]


def _without_unfilled(state: EngineState, sequences: Seq[Sequence]) -> EngineState:
    """The state whose index lacks the pages that the first step will fill: other calls may come before it."""
    size = state.config.page_size
    unfilled = frozenset(page for s in sequences for page in written_pages(s, s.todo, size).tolist())
    return replace(state, pool=pools.withdraw(state.pool, unfilled))


def _first_pages(sequence: Sequence, count: int) -> Sequence:
    """The sequence with the first `count` of its pages."""
    if count == len(sequence.pages):
        return sequence
    return sequence.with_pages(IntVector.of(sequence.pages.array(0, count)), sequence.num_filled)


def _log(sequences: Seq[Sequence], lease: SessionLease, room: int, device: torch.device) -> TokenLog:
    """The log of a session before its first step."""
    scored = features([s.request.sampling for s in sequences]).num_logprobs
    return TokenLog(
        session=torch.tensor(lease.session, device=device),
        ran=_counter(device),
        num_steps=_counter(device),
        token_ids=torch.zeros(len(sequences), room, dtype=torch.int32, device=device),
        logprobs=None if scored is None else torch.zeros(len(sequences), room, device=device),
        lease=lease,
    )


def _counter(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # whose tensors do not count the writes to them, as the lease needs it
        return torch.tensor(0, dtype=torch.int32, device=device)


def _with_processor(carry: DecodeCarry, sequences: Seq[Sequence], processor: LogitsProcessor, room: int) -> DecodeCarry:
    """The carry with a processor, and with the table of tokens that it reads."""
    width = 1 << (max(len(s.tokens) for s in sequences) + room).bit_length()  # few widths, so that a graph serves many calls
    tokens = tokens_of([s.tokens.array() for s in sequences], width, carry.active.device)
    # Memory of their own: `init` may return the table itself, one tensor twice, or an expanded one, which steps cannot write in place.
    carried = mapped(torch.clone, first_carried(processor, tokens))
    return replace(carry, processing=(processing_of(processor, carried),), token_ids=tokens.token_ids)


def _branches(state: EngineState, sequences: Seq[Sequence], device: torch.device, vocab_size: int) -> Branches:
    """What `split_rows` needs for these sequences, whose last pages are spare."""
    frames = state.pool.frames
    spare = np.array([s.pages[-1] for s in sequences], np.int32)
    by_page = [] if frames is not None and frames.alone else [spare]
    by_frame = [] if frames is None else [frames.of(spare)]
    return Branches(
        vocab_size=vocab_size,
        origins=torch.arange(len(sequences), dtype=torch.int32, device=device),
        spares=tuple(torch.from_numpy(pages).to(device) for pages in (*by_page, *by_frame)),
        ran=_counter(device),
        num_splits=_counter(device),
    )


def _branched(state: EngineState, session: Session, carry: DecodeCarry, branches: Branches) -> tuple[list[Sequence], Pool]:
    """The sequences as `split_rows` has left them, each the owner of its pages, and the pool without the pages that no row needs."""
    tables, frames = carry.batch.page_tables.cpu().numpy(), state.pool.frames
    if frames is not None and frames.alone:
        held = np.unique(np.concatenate([s.pages.array() for s in session.sequences]))
        page_of = dict(zip(frames.of(held).tolist(), held.tolist(), strict=True))
        tables = np.array([[page_of.get(frame, -1) for frame in row] for row in tables.tolist()], np.int32)
    pool, sequences = state.pool, []
    for row, (origin, length) in enumerate(zip(branches.origins.tolist(), carry.batch.seq_lens.tolist(), strict=True)):
        base = session.sequences[origin]
        most = len(base.tokens) + session.room  # steps beyond the room may have taken more pages, or the dummy page
        pages = IntVector.of(np.ascontiguousarray(tables[row, : pages_for(min(length, most), state.config.page_size)]))
        sequences.append(base.with_pages(pages, base.num_filled))
        pool = pools.acquire(pool, pages)
    for sequence in session.sequences:
        pool = pools.release(pool, sequence.pages)
    return sequences, pool


def _logprobs(
    log: TokenLog, row: int, token_ids: list[int], num_top: int | None, tops: tuple[np.ndarray, np.ndarray] | None
) -> list[TokenLogprobs] | None:
    """The log-probabilities of a row's tokens, with `num_top` alternatives if `tops` are known. None if the row did not ask for them."""
    if log.logprobs is None or num_top is None:
        return None
    count, top = len(token_ids), () if tops is None else [each[: len(token_ids), row] for each in tops]
    return scores_of(count, num_top, log.logprobs[row, :count].detach().cpu().numpy(), *top).entries(token_ids)


def _with_sampled(sequence: Sequence, tokens: np.ndarray, going: int, *, split: bool) -> tuple[Sequence, str]:
    """The sequence with its sampled tokens up to the first that ends it, and the finish reason. `going` is 0 if the row was stopped.

    All tokens except the newest are filled. In a session with branches, the newest is filled as well if a later step ran it: its page
    may be shared since.
    """
    start, stops, request = len(sequence.tokens), sequence.stops, sequence.request
    stopped = np.flatnonzero(tokens < 0)  # the row was stopped before these steps
    count = int(stopped[0]) if len(stopped) else len(tokens)
    ends = np.flatnonzero(np.isin(tokens[:count], list(request.stop_ids)))
    count = int(ends[0]) + 1 if len(ends) else count
    if stops is not None:
        for place, token in enumerate(tokens[:count].tolist()):
            stops = scan(stops, [token], request.sampling)
            if stops.found is not None:
                count = place + 1
                break
    reason, filled = None, sequence.num_filled
    if len(tokens) and count == 0:  # a row that was stopped from the start has run its prompt
        filled = start
    elif count > 0:
        filled = start + count - 1 + (split and count < len(tokens))
        sequence = replace(sequence, tokens=sequence.tokens.extend(tokens[:count]), stops=stops)
        reason = finish_reason(sequence, int(tokens[count - 1]))
    sequence = replace(sequence, num_filled=filled, most_filled=max(filled, sequence.most_filled))
    return sequence, reason or ("length" if going else "stop")
