"""Copies between the device and host memory, made before the call that planned them writes anything else."""

from dataclasses import replace

from nanovllm.executor.executor import runtime_of
from nanovllm.state import offload
from nanovllm.state.engine_state import EngineState
from nanovllm.state.offload import Moves
from nanovllm.state.pool import Pool, Taken


def copied(state: EngineState, moves: Moves | None, taken: Taken) -> EngineState:
    """Donates the KV. Make the copies of a plan, and count them. The host pages that they write are noted in `taken` first."""
    if not moves:
        return state
    taken.host_pages.extend(moves.out)
    host = runtime_of(state).host
    assert host is not None
    kv = host.move(state.kv, moves)
    size, out, into = state.config.page_size, len(moves.out), len(moves.into)
    return replace(state, kv=kv, stats=state.stats.add(offloaded_tokens=out * size, loaded_tokens=into * size))


def settled(state: EngineState, pool: Pool, taken: Taken) -> EngineState:
    """Donates the KV. The state with a pool whose plan has ended: its copies are made, and its new pages may be written.

    Args:
        state: The state.
        pool: A pool that `pools.planning` began, after all pages were allocated and noted in `taken`.
        taken: The record of the pages that the call takes.
    """
    if pool.host is None or pool.host.moves is None:
        return replace(state, pool=pool)
    host, moves = offload.settled(pool.host)
    return copied(replace(state, pool=replace(pool, host=host)), moves, taken)
