"""The life of a token: a request is submitted, scheduled, run, its token drawn and settled, until it ends.

Every function takes an `EngineState` and returns the next; the old one is donated. A call that raises leaves the old state usable.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from immutables import Map

from nanovllm.engine.donation import commit_state, enter_with, guarded
from nanovllm.engine.output import counted, draw_token, finish_reason, result
from nanovllm.engine.scheduler import Plan, schedule, steady
from nanovllm.errors import OutOfPagesError
from nanovllm.executor.executor import Drawn, executor_of
from nanovllm.models.model import Model
from nanovllm.state import pool as pools
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState, copy_pages
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.request import Sequence, StepOutput
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.steady import Steady


@torch.no_grad()
def step(model: Model, state: EngineState) -> tuple[EngineState, list[StepOutput]]:
    """Run one step of every request that the token budget and the pool allow: one token each of those that decode, then prompts in chunks.

    Returns what each drew; an empty list means only that no reply moved on, or that nothing is left to do. On a GPU the next step may
    run already when this returns: all calls with an engine's states belong on one CUDA stream.
    """
    state = enter_with(model, state)
    with guarded(state) as taken:
        after, outputs = run_step(model, state, taken)
        return commit_state(after), outputs


def run_step(model: Model, state: EngineState, taken: Taken) -> tuple[EngineState, list[StepOutput]]:
    """A step without the lease: what `step` and `generate_many` share. What it takes over is noted in `taken`."""
    if not state.running and not state.waiting:
        return state, []
    if isinstance(running := state.running, Steady) and running.holds(state.pool, state.waiting):
        loaded, decoded = _decode(model, state, running.ids, running, state.kv, state.pool)
        return _settle_steady(model, state, running, loaded, decoded)
    plan = schedule(state.pool, tuple(state.running), state.waiting, state.config)
    for sequence in plan.stuck:
        if not sequence.num_generated:
            raise OutOfPagesError(
                f"request {sequence.request.request_id} has {sequence.tokens.length} tokens and the live chunks leave it "
                f"{plan.pool.num_available} of {state.config.num_pages} pages: release chunks, or cancel it"
            )
    taken.pages.extend(plan.allocated)
    taken.frames.extend(plan.frames)
    kv = copy_pages(state.kv, plan.copies, plan.frame_copies)
    # A carry follows its rows from step to step: after a step without them it is stale, even where the same rows come back later.
    prefilled, loaded, decoded = None, None, None
    if plan.prefill:
        prefilled, kv = executor_of(state).prefill(model, kv, plan.prefill, frames=plan.pool.frames)
    if plan.decode:
        ids = tuple([s.request.request_id for s in plan.decode])
        loaded, decoded = _decode(model, state, ids, plan.decode, kv, plan.pool, grew=plan.grew)
        # Only now: the step does not wait for what is found out here.
        if plan.only_decodes and (running := steady(plan.pool, plan.running, plan.waiting, state.config)) is not None:
            return _settle_steady(model, replace(state, kv=kv, pool=plan.pool, waiting=plan.waiting), running, loaded, decoded)
    return _settle(model, state, plan, kv, prefilled, loaded, decoded)


def _settle_steady(model: Model, state: EngineState, running: Steady, loaded: Any, decoded: Drawn) -> tuple[EngineState, list[StepOutput]]:
    """The end of a step of these sequences that needed no schedule, or got only pages by it: all that there is to settle are the replies
    that end with it."""
    now, tokens, pool, kept = time.perf_counter(), decoded.token_ids.tolist(), state.pool, state.kept
    outputs = [StepOutput(rid, (token,)) for rid, token in zip(running.ids, tokens, strict=True)]
    after = running.after(decoded.token_ids.astype(np.int32))
    if rows := after.ending(tokens):
        gone, after = after.part(rows)
        for row, sequence in zip(rows, gone, strict=True):
            reason = finish_reason(sequence, tokens[row]) or "length"
            outputs[row] = outputs[row]._replace(finish_reason=reason, output=result(model, sequence, reason, now))
            pool, kept = _end(pool, kept, sequence)
        if isinstance(after, Steady):
            after = replace(after, pool=pool, steps=0 if state.waiting else after.steps)
    unused = executor_of(state).thrown_away()
    stats = state.stats.add(decode_tokens=len(tokens) + unused, discarded_tokens=unused)
    return replace(state, pool=pool, running=after, kept=kept, stats=stats, loaded=loaded), outputs


def _decode(model: Model, state: EngineState, ids: tuple[int, ...], rows: Seq[Sequence], kv: KVState, pool: Pool, *, grew: bool = False):
    """One decode step, on the carry of the last one where no other rows have come; `grew` where some have other pages."""
    executor = executor_of(state)
    before, carry = ((), None) if state.loaded is None else state.loaded
    if carry is not None and before == ids:
        carry = executor.refresh(model, carry, rows, frames=pool.frames) if grew else carry
    elif carry is not None and not grew and (keep := _places(before, ids)) is not None:
        carry = executor.narrow(model, carry, keep, rows, frames=pool.frames)
    else:
        carry = executor.load(model, kv, rows, frames=pool.frames)
    carry, drawn = executor.decode(model, carry)
    return (ids, carry), drawn


def _places(before: tuple[int, ...], ids: tuple[int, ...]) -> list[int] | None:
    """Where these requests stood among those before, in the same order; None where one did not."""
    at = {rid: place for place, rid in enumerate(before)}
    places = [at.get(rid, -1) for rid in ids]
    return places if all(a < b for a, b in pairwise([-1, *places])) else None


def _settle(model: Model, state: EngineState, plan: Plan, kv: KVState, prefilled: Drawn | None, loaded, decoded: Drawn | None):
    """Append what was drawn, end what is done, index what was filled, count what was run."""
    now, pool, page_size = time.perf_counter(), plan.pool, state.config.page_size
    moved: dict[int, tuple[Sequence, int | None]] = {}  # by request: what it has grown to, and the token that it drew
    prompt_run = reply_run = rerun = 0
    first_tokens = iter([] if prefilled is None else enumerate(prefilled.token_ids.tolist()))
    for sequence, count in plan.prefill:
        rid = sequence.request.request_id
        prompt, again = counted(sequence, count)
        prompt_run, reply_run, rerun = prompt_run + prompt, reply_run + count - prompt, rerun + again
        grown = sequence.advance(count)
        pool = pools.insert(pool, grown.tokens.array(0, grown.num_exact), grown.pages.array(), sequence.num_exact // page_size)
        token = None
        if prefilled is not None and count == sequence.todo:
            row, token = next(first_tokens)
            grown = draw_token(grown, token, prefilled, row, now)
        moved[rid] = grown, token
    if decoded is not None:
        reply_run += len(plan.decode)
        for row, (sequence, token) in enumerate(zip(plan.decode, decoded.token_ids.tolist(), strict=True)):
            prompt, again = counted(sequence, 1)
            if prompt or again:
                prompt_run, reply_run, rerun = prompt_run + prompt, reply_run - prompt, rerun + again
            moved[sequence.request.request_id] = draw_token(sequence, token, decoded, row, now), token
    running, kept, outputs = [], state.kept, []
    for sequence in plan.running:
        rid = sequence.request.request_id
        grown, token = moved.get(rid) or (sequence, None)
        if token is None:
            running.append(grown)
            continue
        reason = finish_reason(grown, token)
        if reason is None:
            running.append(grown)
            outputs.append(StepOutput(rid, (token,)))
            continue
        output = result(model, grown, reason, now)
        outputs.append(StepOutput(rid, (token,), reason, output))
        pool, kept = _end(pool, kept, grown)
    for sequence in plan.stuck:
        rid, output = sequence.request.request_id, result(model, sequence, "length", now)
        outputs.append(StepOutput(rid, (), "length", output))
        pool, kept = _end(pool, kept, sequence)
    unused = executor_of(state).thrown_away()
    stats = state.stats.add(
        prefill_tokens=prompt_run,
        decode_tokens=reply_run + unused,
        reused_tokens=plan.num_reused,
        rerun_tokens=rerun,
        discarded_tokens=unused,
        preemptions=plan.num_preempted,
    )
    state = replace(state, kv=kv, pool=pool, running=tuple(running), waiting=plan.waiting, kept=kept, stats=stats, loaded=loaded)
    return state, outputs


def _end(pool: Pool, kept: Map[int, Sequence], sequence: Sequence) -> tuple[Pool, Map[int, Sequence]]:
    """Give the pages of an ended sequence up, or keep them for whoever asked for them."""
    if sequence.request.keep:
        return pool, kept.set(sequence.request.request_id, sequence)
    return give_up_pages(pool, sequence), kept
