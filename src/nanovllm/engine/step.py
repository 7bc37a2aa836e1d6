"""The life of a token: a request is submitted, scheduled, run, its token drawn and settled, until it ends.

Every function takes an `EngineState` and returns the next; the old one is donated. A call that raises leaves the old state usable.
"""

import reprlib
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from immutables import Map

from nanovllm import ops
from nanovllm.engine.output import counted, draw_token, finish_reason, result
from nanovllm.engine.prompt import Context, resolve
from nanovllm.engine.scheduler import Plan, schedule, steady
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.executor.executor import Drawn
from nanovllm.loading.load_model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams, from_generation_config, validate_for
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk, offset_after
from nanovllm.state.engine_state import EngineState, ModelKey
from nanovllm.state.kv_cache import KVState
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.request import Request, Sequence, StepOutput, StopScan
from nanovllm.state.sequence_pages import give_up_pages
from nanovllm.state.steady import Steady
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import least_frames, num_retired, pages_with
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
        prefilled, kv = state.runtime.executor.prefill(model, kv, plan.prefill, frames=plan.pool.frames)
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
    unused = state.runtime.executor.thrown_away()
    stats = state.stats.add(decode_tokens=len(tokens) + unused, discarded_tokens=unused)
    return replace(state, pool=pool, running=after, kept=kept, stats=stats, loaded=loaded), outputs


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


def enter(state: EngineState, model: Model | None = None) -> EngineState:
    """The state as a call finds it: checked against the lease, and without the pages whose KV an earlier failed call overwrote.

    Raises `DonatedStateError` for an old state, `InvalidRequestError` for another model than the one that `init_state` was given.
    """
    if not isinstance(state, EngineState):
        raise InvalidRequestError(f"state must be an EngineState, not {type(state).__name__}")
    lease = state.runtime.lease
    lease.check(state.epoch)
    if model is not None and model_key(model) != lease.model:
        raise InvalidRequestError(f"model {model.name!r} is not the one this state was made for: its KV would be another's")
    if not lease.dirty:
        return state
    lost, pool, waiting, kept = lease.lost, state.pool, state.waiting, []
    for sequence in (*state.running, *state.waiting):
        if not lost.isdisjoint(sequence.pages):
            pool = pools.release(pool, sequence.pages, sequence.retired)
            waiting = waiting.push(sequence.restart(IntVector.of(), 0))
        elif sequence.request.request_id not in waiting.items:
            kept.append(sequence)
    # The lease stays dirty until a call commits: one that fails again must find the same losses.
    return replace(state, pool=pools.forget(pool, lost), running=tuple(kept), waiting=waiting, loaded=None)


def enter_with(model: Model, state: EngineState) -> EngineState:
    """`enter`, for a call that needs the model. Raises `InvalidRequestError` for what is none, too."""
    require_model(model)
    return enter(state, model)


def require_model(model: Any) -> None:
    """Raise `InvalidRequestError` for what is no model."""
    if not isinstance(model, Model):
        raise InvalidRequestError(f"model={reprlib.repr(model)} must be a Model, which load_model(...) returns, not {type(model).__name__}")


def model_key(model: Model) -> ModelKey:
    """What a state and its model must agree in."""
    config = model.config
    return ModelKey(fingerprint=model.fingerprint, dtype=model.dtype, device=model.device, rope=config.rope, places=config.places)


def commit_state(state: EngineState, **changes) -> EngineState:
    """The state that a call returns; every older one is donated from here on."""
    return replace(state, **changes, epoch=state.runtime.lease.advance())


@contextmanager
def guarded(state: EngineState) -> Iterator[Taken]:
    """Device work of one call up to its commit, which notes what it takes in what this gives. Where it raises, Ctrl-C included, what it
    took over from the index or from preempted sequences, and the decode carry, count as lost for the old state."""
    taken, pool = Taken(), state.pool
    try:
        yield taken
    except BaseException as error:
        overwritten = [] if pool.frames is None else pages_with(pool.frames, taken.frames)
        state.runtime.lease.lose([*(page for page in taken.pages if pool.pages.refcount(page)), *overwritten])
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfPagesError("the device's memory ran out in the middle of a step; the state is as it was before the call") from error
        raise


def copy_pages(kv: KVState, copies: tuple[tuple[int, int], ...], frame_copies: tuple[tuple[int, int], ...] = ()) -> KVState:
    """Donates `kv`. Copy whole pages, all layers, from the first to the second of each pair; `frame_copies` are these pages' frames."""
    if copies:
        of_pools = (copies,) * len(kv.pools) if not frame_copies else (copies, frame_copies)[-len(kv.pools) :]
        for pages, pairs in zip(kv.pools, of_pools, strict=True):
            source, target = torch.tensor(pairs, dtype=torch.int32).to(pages.device).unbind(1)
            ops.copy_pages(pages, source.contiguous(), target.contiguous())
    return kv


def _decode(model: Model, state: EngineState, ids: tuple[int, ...], rows: Seq[Sequence], kv: KVState, pool: Pool, *, grew: bool = False):
    """One decode step, on the carry of the last one where no other rows have come; `grew` where some have other pages."""
    executor = state.runtime.executor
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
    unused = state.runtime.executor.thrown_away()
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


def request_seed(seed: int, request_id: int) -> int:
    """A request's own seed where it gave none: reproducible from the engine's seed and the order of submission."""
    return int(np.random.SeedSequence((seed, request_id)).generate_state(1, np.uint64)[0] >> np.uint64(1))
