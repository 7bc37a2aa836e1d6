"""Copies between the device and host memory, made before the call that planned them writes anything else."""

from dataclasses import replace

from nanovllm.executor.executor import runtime_of
from nanovllm.state import offload
from nanovllm.state.disk_pages import lasting
from nanovllm.state.engine_state import EngineState
from nanovllm.state.offload import HostPages, Moves
from nanovllm.state.pool import Pool, Taken


def copied(state: EngineState, moves: Moves | None, taken: Taken, host: HostPages | None) -> EngineState:
    """Donates the KV. Make the copies of a plan, and count them. What can be found in host memory then is written to the disk later.

    Args:
        state: The state.
        moves: The copies.
        taken: The record of the pages that the call takes. The host pages that are written are noted first.
        host: The host pages after the plan.
    """
    if not moves:
        return state
    taken.host_pages.extend(moves.out)  # a bare page whose frame is written stays what it was before: without its frame
    memory, disk = runtime_of(state).host, runtime_of(state).disk
    assert memory is not None and host is not None
    written = {*moves.out, *moves.frames_out}
    if disk is not None:
        disk.overwriting(written)
    kv = memory.move(state.kv, moves)
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
    if pool.host is None or pool.host.moves is None:
        return replace(state, pool=pool)
    host, moves = offload.settled(pool.host)
    return copied(replace(state, pool=replace(pool, host=host)), moves, taken, host)
