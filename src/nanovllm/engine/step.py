"""One engine step: schedule, run the model, sample, and post-process the tokens.

Every function takes an `EngineState` and returns the next one; the old one is donated. A call that raises leaves the old state usable.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from nanovllm.engine.admission import gathering
from nanovllm.engine.constrained import Constrained, constrained
from nanovllm.engine.disk_pages import look_ahead
from nanovllm.engine.donation import commit_state, enter_with, guarded
from nanovllm.engine.failures import Attempt, draw, ended, last_output, outside, recovered, relaxed, step_limits, stuck_output, unsearchable
from nanovllm.engine.host_copies import begin_early, copied, copied_ahead, may_land_late
from nanovllm.engine.mirrored import mirrored, require_alike
from nanovllm.engine.output import counted, finish_reason, row_scores, scan_steady
from nanovllm.engine.plan import Plan
from nanovllm.engine.scheduler import schedule, steady
from nanovllm.errors import NanoVLLMError
from nanovllm.executor.executor import Drawn, executor_of, runtime_of
from nanovllm.executor.kv_offload import Landing
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState
from nanovllm.state.expected_reply import after_preemptions, after_reply
from nanovllm.state.kv_cache import KVState, copy_pages
from nanovllm.state.logprobs import RowScores
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.request import Sequence, StepOutput
from nanovllm.state.steady import Steady


@mirrored
@torch.no_grad()
def step(model: Model, state: EngineState) -> tuple[EngineState, list[StepOutput]]:
    """Run one step of the requests that fit into the token budget and the page pool.

    Donates `state`. First every decoding request runs one token; the rest of the budget goes to prompts, in pieces. On a GPU the next step
    may already run when this call returns, so make all calls with an engine's states on one CUDA stream.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.

    Returns:
        The next state, and one output per request that sampled a token or ended. The list is empty if only prompts advanced, or if no
        request is left. A request that fails ends with `finish_reason` `"error"` and an `error`: an `OutOfPagesError` if live chunks leave
        it without pages, or if the device has no memory for even one of its tokens, else a `RequestFailedError`. The others go on.

    Raises:
        EngineDeadError: The device is broken.
        DonatedStateError: `state` was donated to a later call.
        InvalidRequestError: `model` is not the model of this state.

    Examples:
        >>> state, request_id = nv.submit(model, state, "Hello", nv.SamplingParams(temperature=0, max_tokens=12))
        >>> state, outputs = nv.step(model, state)
        >>> model.tokenizer.decode(outputs[0].token_ids), outputs[0].finish_reason
        ('!', None)
        >>> while state.running:
        ...     state, outputs = nv.step(model, state)
        >>> outputs[0].output.text, outputs[0].finish_reason
        ('! How can I help you?', 'stop')
    """
    state = enter_with(model, state)
    with guarded(state) as taken:
        after, outputs = run_step(model, state, taken)
        after = commit_state(after)
        require_alike(model.config.mesh, after)
        return after, outputs


def run_step(model: Model, state: EngineState, taken: Taken) -> tuple[EngineState, list[StepOutput]]:
    """A step without lease and commit, for `step` and `generate_many`. Pages that it takes are noted in `taken`.

    An exception that belongs to requests ends these, and the step is tried again with the others.
    """
    outputs, shortages = [], state.stats.memory_shortages
    if (disk := runtime_of(state).disk) is not None:
        state = look_ahead(state, taken)
    while state.running or state.waiting:
        attempt = Attempt()
        try:
            after, more = _attempted(model, state, taken, attempt)
        except Exception as error:
            if (without := recovered(model, state, error, attempt)) is None:
                raise
        else:
            if after.token_budget is not None and after.stats.memory_shortages == shortages:
                after = relaxed(after)
            after = copied_ahead(state, after, taken)
            if disk is not None:
                disk.hold(bool(after.running or after.waiting))
            return after, [*outputs, *more] if outputs else more
        state, failed, again = without
        outputs += failed
        if not again:
            break
    return state, outputs


def _attempted(model: Model, state: EngineState, taken: Taken, attempt: Attempt) -> tuple[EngineState, list[StepOutput]]:
    """A step that raises whatever a pass over the device raises. Sampled tokens that cannot be post-processed end their requests."""
    if isinstance(running := state.running, Steady) and running.holds(state.pool, state.waiting):
        loaded, decoded, ends = _decode(model, state, running.ids, running, state.kv, state.pool)
        return _settle_steady(model, state, running, loaded, decoded, ends)
    early, limits = begin_early(state), step_limits(state)
    plan = schedule(state.pool, tuple(state.running), state.waiting, limits, *_progress(state))
    attempt.plan = plan
    taken.pages.extend(plan.allocated)
    taken.frames.extend(plan.frames)
    landing = Landing() if may_land_late(state, plan) else None
    state = copied(state, plan.moves, taken, plan.pool.host, plan.allocated, plan.frames, landing, early)
    kv = copy_pages(state.kv, plan.copies, plan.frame_copies)
    # A carry is valid only for the step after its own. After a step without its rows it is stale, even if the same rows return.
    prefilled, loaded, decoded, ends = None, None, None, dict[int, Exception | None]()
    if plan.prefill:
        attempt.stage = "prefill"
        whole = [s for s, count in plan.prefill if count == s.todo]
        masks = constrained(model, runtime_of(state).matchers, whole)
        asked: dict[str, Any] = {} if masks is None else {"masks": masks}
        prefilled, kv = executor_of(state).prefill(model, kv, plan.prefill, frames=plan.pool.frames, **asked)
        ends = _read(masks, prefilled, [s.request.request_id for s in whole])
    if plan.decode:
        attempt.stage = "decode"
        ids = tuple([s.request.request_id for s in plan.decode])
        loaded, decoded, decoded_ends = _decode(model, state, ids, plan.decode, kv, plan.pool, grew=plan.grew)
        if landing is not None:
            landing.land()
        ends |= decoded_ends
        # The device already runs the step, so this work on the host overlaps it.
        known = plan.pool, plan.running, plan.waiting, limits, *_progress(state)
        if plan.only_decodes and (running := steady(*known)) is not None:
            return _settle_steady(model, replace(state, kv=kv, pool=plan.pool, waiting=plan.waiting), running, loaded, decoded, ends)
    return _finish_step(model, state, plan, kv, prefilled, loaded, decoded, ends)


def _progress(state: EngineState) -> tuple[int, int, int]:
    """What `schedule` and `steady` take of the steps so far."""
    return state.expected_reply, state.num_steps, state.gather_until


def _settle_steady(
    model: Model, state: EngineState, running: Steady, loaded: Any, decoded: Drawn, ends: Mapping[int, Exception | None]
) -> tuple[EngineState, list[StepOutput]]:
    """Post-process a decode step that needed no schedule, or only new pages.

    The scheduled sequences are unchanged, so only replies that end with this step need work. `ends` are those that their grammars end.
    """
    now, tokens, pool, kept = time.perf_counter(), decoded.token_ids.tolist(), state.pool, state.kept
    if running.scored:
        step = decoded.scores
        each = enumerate(zip(running.ids, tokens, running.num_top, strict=True))
        outputs = [StepOutput(rid, (token,), scored=None if top is None else (step, row, top)) for row, (rid, token, top) in each]
    else:
        outputs = [StepOutput(rid, (token,)) for rid, token in zip(running.ids, tokens, strict=True)]
    token_ids = decoded.token_ids.astype(np.int32, copy=False)
    after = running.after(token_ids, decoded.logprobs, decoded.top_ids, decoded.top_logprobs)
    after, scans, failed = (after, {}, {}) if after.ends is None else scan_steady(after, token_ids)
    expected = state.expected_reply
    by_grammar = [row for row in running.masked if running.ids[row] in ends] if ends else []
    if rows := sorted({*after.ending(tokens, scans), *failed, *by_grammar}):
        gone, after = after.part(rows)
        for row, sequence in zip(rows, gone, strict=True):
            token, fault = tokens[row], ends.get(running.ids[row])
            reason = finish_reason(sequence, token, complete=row in by_grammar) or "length"
            error = unsearchable(sequence, token, failed[row]) if row in failed else fault and outside(sequence, fault)
            outputs[row] = last_output(model, sequence, (token,), reason, now, error, outputs[row].scored)
            expected = _expected(expected, sequence, state)
        pool, kept = ended(pool, kept, gone)
        if isinstance(after, Steady):
            after = replace(after, pool=pool, steps=0 if state.waiting else after.steps)
    unused = executor_of(state).take_discarded_count()
    stats = state.stats.add(decode_tokens=len(tokens) + unused, discarded_tokens=unused)
    state = replace(
        state, pool=pool, running=after, kept=kept, stats=stats, loaded=loaded, num_steps=state.num_steps + 1, expected_reply=expected
    )  # fmt: skip
    return state, outputs


def _expected(expected: int, sequence: Sequence, state: EngineState) -> int:
    """The expected length of a reply after the end of a sequence."""
    at_limit, longest = sequence.tokens.length >= sequence.request.max_len, state.config.max_model_len
    return after_reply(expected, sequence.num_generated, at_limit=at_limit, longest=longest)


def _decode(model: Model, state: EngineState, ids: tuple[int, ...], rows: Seq[Sequence], kv: KVState, pool: Pool, *, grew: bool = False):
    """Run one decode step, with the carry of the last step if the rows allow it.

    Args:
        ids: The request ids of the rows.
        rows: The sequences.
        grew: Whether some rows have new pages.

    Returns:
        The ids with the new carry, the sampled tokens, and which replies their grammars end; see `_read`.
    """
    executor = executor_of(state)
    before, carry = ((), None) if state.loaded is None else state.loaded
    if carry is not None and before == ids:
        carry = executor.refresh(model, carry, rows, frames=pool.frames) if grew else carry
    elif carry is not None and (keep := _places(before, ids)) is not None:
        carry = executor.narrow(model, carry, keep, rows, grew=grew, frames=pool.frames)
    else:
        carry = executor.load(model, kv, rows, frames=pool.frames)
    masks = constrained(model, runtime_of(state).matchers, rows)
    carry, drawn = executor.decode(model, carry) if masks is None else executor.decode(model, carry, masks)
    return (ids, carry), drawn, _read(masks, drawn, ids)


def _read(masks: Constrained | None, drawn: Drawn | None, ids: Seq[int]) -> dict[int, Exception | None]:
    """Let grammars read the sampled tokens of the requests `ids`.

    Returns:
        By request id the replies that end: None if a reply is complete, or why its newest token is not allowed.
    """
    if masks is None or drawn is None:
        return {}
    return {ids[row]: end for row, end in masks.read(drawn.token_ids.tolist()).items()}


def _places(before: tuple[int, ...], ids: tuple[int, ...]) -> list[int] | None:
    """The index of each request among those of the last step, or None if one is new or their order changed."""
    at = {rid: place for place, rid in enumerate(before)}
    places = [at.get(rid, -1) for rid in ids]
    return places if all(a < b for a, b in pairwise([-1, *places])) else None


def _finish_step(
    model: Model,
    state: EngineState,
    plan: Plan,
    kv: KVState,
    prefilled: Drawn | None,
    loaded,
    decoded: Drawn | None,
    ends: Mapping[int, Exception | None],
):
    """Append the sampled tokens, end finished requests, and count the tokens that ran."""
    now, pool = time.perf_counter(), plan.pool
    # By request id: the new sequence, the token that it sampled, and the log-probabilities.
    moved: dict[int, tuple[Sequence, int | None, RowScores]] = {}
    failed: dict[int, NanoVLLMError] = {}  # by request id: why the token could not be searched for stop strings
    prompt_run = reply_run = rerun = 0
    first_tokens = iter([] if prefilled is None else enumerate(prefilled.token_ids.tolist()))
    for sequence, count in plan.prefill:
        rid = sequence.request.request_id
        prompt, again = counted(sequence, count)
        prompt_run, reply_run, rerun = prompt_run + prompt, reply_run + count - prompt, rerun + again
        grown = sequence.advance(count)
        token = scored = None
        if prefilled is not None and count == sequence.todo:
            row, token = next(first_tokens)
            grown, scored = draw(grown, token, prefilled, row, now, failed), row_scores(sequence, prefilled, row)
        moved[rid] = grown, token, scored
    if decoded is not None:
        reply_run += len(plan.decode)
        for row, (sequence, token) in enumerate(zip(plan.decode, decoded.token_ids.tolist(), strict=True)):
            prompt, again = counted(sequence, 1)
            if prompt or again:
                prompt_run, reply_run, rerun = prompt_run + prompt, reply_run - prompt, rerun + again
            grown = draw(sequence, token, decoded, row, now, failed)
            moved[sequence.request.request_id] = grown, token, row_scores(sequence, decoded, row)
    running, gone, outputs = [], [], []
    expected = after_preemptions(state.expected_reply, plan.num_preempted, state.config.max_model_len)
    for sequence in plan.running:
        rid = sequence.request.request_id
        grown, token, scored = moved.get(rid) or (sequence, None, None)
        if token is None:
            running.append(grown)
            continue
        if (fault := ends.get(rid)) is not None:
            failed.setdefault(rid, outside(grown, fault))
        reason = "error" if rid in failed else finish_reason(grown, token, complete=rid in ends)
        if reason is None:
            running.append(grown)
            outputs.append(StepOutput(rid, (token,), scored=scored))
            continue
        outputs.append(last_output(model, grown, (token,), reason, now, failed.get(rid), scored))
        gone.append(grown)
        expected = _expected(expected, grown, state)
    outputs += [stuck_output(model, sequence, plan.pool, now) for sequence in plan.stuck]
    pool, kept = ended(pool, state.kept, [*gone, *plan.stuck])
    unused = executor_of(state).take_discarded_count()
    stats = state.stats.add(
        prefill_tokens=prompt_run,
        decode_tokens=reply_run + unused,
        reused_tokens=plan.num_reused,
        rerun_tokens=rerun,
        discarded_tokens=unused,
        preemptions=plan.num_preempted,
    )
    state = replace(
        state, kv=kv, pool=pool, running=tuple(running), waiting=plan.waiting, kept=kept, stats=stats, loaded=loaded,
        num_steps=state.num_steps + 1, expected_reply=expected, gather_until=gathering(plan, state.num_steps, state.gather_until),
    )  # fmt: skip
    return state, outputs
