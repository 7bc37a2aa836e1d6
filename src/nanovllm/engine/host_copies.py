"""Copies between the device and host memory: before a call writes anything else, and ahead of evictions at the end of a step."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from nanovllm.engine.draft import id_of
from nanovllm.engine.plan import Plan
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.kv_offload import Begun, Landing
from nanovllm.state import offload
from nanovllm.state import pool as pools
from nanovllm.state.disk_pages import lasting
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kept_ahead import SHARE, keep_ahead
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.offload import HostPages, Moves
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.steady import Steady

# Pages that a step copies ahead. The host begins thousands of such copies per second, and meanwhile the device may wait for the next step.
MOST = 32  # of a step that runs no prompt; one that does copies two more for each page that it fills
MOST_IDLE = 1024  # of a step after which no request is left
ALONE = 4  # one of so many steps in which replies wait for short prompts copies ahead


def begin_early(state: EngineState) -> Begun | None:
    """Begin to copy the first pages of the next request of an engine that runs none, so that the bus does not wait for the plan.

    Returns:
        The copies, for `copied`. None if the plan will hardly load these pages: they are not in host memory, or running them is faster.
    """
    memory, pool, host = runtime_of(state).host, state.pool, state.pool.host
    if memory is None or host is None or state.running or not len(host.by_key) or pool.frames is not None:
        return None
    first, size = state.waiting.first(), state.config.page_size
    if first is None or first.num_filled or (host.disk is not None and host.disk.reading):  # it may wait for these reads
        return None
    tokens, namespace = first.tokens.array(), first.request.namespace
    num_matched = len(pools.match(pool, tokens, namespace))
    held = offload.find(host, tokens, num_matched, size, namespace, most=memory.num_at_once)
    filled = num_matched * size
    num_tokens = min(filled + len(held) * size, len(tokens) - 1) - filled
    return memory.begin(held) if offload.worth_loading(num_tokens, len(held) * host.page_bytes, host.rates, filled) else None


def copied(
    state: EngineState, moves: Moves | None, taken: Taken, host: HostPages | None, pages: Seq[int], frames: Seq[int],
    landing: Landing | None = None, early: Begun | None = None,
) -> EngineState:  # fmt: skip
    """Donates the KV. Make the copies of a plan, and count them. What can be found in host memory then is written to the disk later.

    Args:
        state: The state.
        moves: The copies.
        taken: The record of the call. The host pages that are written are noted first.
        host: The host pages after the plan.
        pages: The pages that may be written afterwards.
        frames: The frames that may be.
        landing: Gets pages that are copied in, to be scattered later; see `HostMemory.move`.
        early: Copies that have begun already.
    """
    if (memory := runtime_of(state).host) is None:
        return state
    if moves:
        state = _made(state, moves, taken, host, landing=landing, early=early)
    alone = state.pool.frames is not None and state.pool.frames.alone
    memory.let_write(*((frames,) if alone else (pages, frames)))
    return state


def copied_ahead(before: EngineState, state: EngineState, taken: Taken) -> EngineState:
    """Donates the KV. Copy pages to host memory that are likely to be evicted soon, beside whatever the engine runs next.

    Most steps in which replies wait for short prompts leave this to later ones, because nothing runs on the device beside their end.
    Prompts are short here if `ALONE` such steps fill at most half of the pages that are free or kept.

    Args:
        before: The state before a step.
        state: The state after it.
        taken: The record of the step, which gets the host pages that are written.
    """
    config, host, num_run = state.config, state.pool.host, state.stats.prefill_tokens - before.stats.prefill_tokens
    if host is None or not (host.behind or num_run or state.pool.prefix.now != before.pool.prefix.now):
        return state
    busy, replied = bool(state.running or state.waiting), state.stats.decode_tokens != before.stats.decode_tokens
    few = 0 < num_run <= state.pool.pages.num_pages * config.page_size // (2 * SHARE * ALONE)
    alone = busy and replied and few
    if alone and state.num_steps % ALONE:
        return replace(state, pool=replace(state.pool, host=replace(host, behind=True)))
    most = (MOST + 2 * num_run // config.page_size) * (ALONE if alone else 1) if busy else MOST_IDLE
    if (done := keep_ahead(state.pool, pages_for(config.max_model_len, config.page_size), most)) is None:
        return state
    pool, moves = done
    running = state.running
    if isinstance(running, Steady) and running.holds(state.pool, state.waiting):  # it still needs no schedule
        running = replace(running, pool=pool)
    state = replace(state, pool=pool, running=running)
    return _made(state, moves, taken, pool.host, ahead=True) if moves else state


def may_land_late(state: EngineState, plan: Plan) -> bool:
    """Whether the pages that a step copies in may be scattered after its work: replies go on in it, and nothing in it reads or writes them.

    A sequence that decoded in the last step has all its pages. A page that was loaded for a sequence which then gave up its pages may
    belong to another one already.
    """
    moves, pool = plan.moves, plan.pool
    if not moves or not moves.into or not plan.decode or plan.num_preempted or plan.stuck or plan.copies or pool.frames is not None:
        return False
    if state.loaded is None or not {id_of(s) for s in plan.decode}.issubset(state.loaded[0]):
        return False
    pages = np.array([page for _, page in moves.into], np.int32)
    return not any(np.isin(s.pages.array(), pages).any() for s, _ in plan.prefill)


def _made(
    state: EngineState, moves: Moves, taken: Taken, host: HostPages | None, *, ahead: bool = False, landing: Landing | None = None,
    early: Begun | None = None,
) -> EngineState:  # fmt: skip
    taken.host_pages.extend(moves.out)  # a bare page whose frame is written stays what it was before: without its frame
    memory, disk = runtime_of(state).host, runtime_of(state).disk
    assert memory is not None and host is not None
    written = {*moves.out, *moves.frames_out}
    if disk is not None:
        disk.overwriting(written)
    kv = memory.move_ahead(state.kv, moves) if ahead else memory.move(state.kv, moves, landing, early)
    if disk is not None:
        disk.keep(lasting(host, written))
    size, into = state.config.page_size, len(moves.reads)
    return replace(state, kv=kv, stats=state.stats.add(offloaded_tokens=len(written) * size, loaded_tokens=into * size))


def settled(state: EngineState, pool: Pool, taken: Taken) -> EngineState:
    """Donates the KV. The state with a pool whose plan has ended: its copies are made, and its new pages may be written.

    Args:
        state: The state.
        pool: A pool that `pools.planning` began, after all pages were allocated and noted in `taken`.
        taken: The record of the pages that the call takes.
    """
    if pool.host is None:
        return replace(state, pool=pool)
    host, moves = (pool.host, None) if pool.host.moves is None else offload.settled(pool.host)
    return copied(replace(state, pool=replace(pool, host=host)), moves, taken, host, taken.pages, taken.frames)
