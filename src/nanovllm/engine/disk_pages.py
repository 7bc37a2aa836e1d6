"""Pages on disk in the life of a request: looked for while it waits, and read before it runs.

Reads end at any time, which is a fact from outside, as the time is. It enters the engine's state at the beginning of a step
(`look_ahead`), and the plan of the step is a function of the state alone. A request whose pages are being read waits, and others go first.
It waits no longer than running these tokens, and the prompts that come first, would take. Then it goes on with the pages that have come,
and runs the other tokens. Or it runs the front of its prompt meanwhile (`split_reads.py`), and goes on after the pages that were read where
it meets them (`meeting.py`).
"""

from dataclasses import replace
from itertools import islice

from nanovllm.engine.disk_facts import Ended, mesh_of, told_by_all
from nanovllm.engine.disk_lookup import looked_up
from nanovllm.engine.draft import Draft, id_of
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.state import disk_pages
from nanovllm.state import pool as pools
from nanovllm.state.disk_reads import NOTHING, Wait
from nanovllm.state.engine_state import EngineState
from nanovllm.state.pool import Taken
from nanovllm.state.prefix_keys import keys_from
from nanovllm.state.request import Sequence
from nanovllm.state.steady import Steady

NEXT = 4  # waiting requests whose pages are read ahead
LONGEST_WAIT = 0.005  # seconds that a step with nothing else to do waits for a read


def look_ahead(state: EngineState, taken: Taken) -> EngineState:
    """The state at the beginning of a step: with the pages whose reads have ended, and with reads for the requests that are next.

    Args:
        state: The state of an engine that keeps KV on disk.
        taken: Gets the host pages that are written. If the call fails, the old state does not trust them.
    """
    disk, host = runtime_of(state).disk, state.pool.host
    if disk is None or host is None or host.disk is None:
        return state
    disk.hold(bool(state.running or state.waiting))
    ended, waits = disk.ended(host.disk.reading), host.disk.waits
    known = disk.looked_at[0] is state.waiting and disk.looked_at[1] is waits
    fresh = [] if known else [sequence for sequence in _next(state) if id_of(sequence) not in waits]
    if not (fresh or host.disk.reading):
        disk.looked_at = state.waiting, waits
        return state  # the same pool, so that decode steps need no schedule
    disk.looked_at = None, None  # until all have been looked up
    state, mesh = _with(state, disk, ended), mesh_of(state)
    host = state.pool.host
    assert host is not None
    size, before = state.config.page_size, sum((host.rates.seconds_to_run(s.num_filled, s.tokens.length) for s in _prompts(state)), 0.0)
    for sequence in _next(state) if fresh else ():
        assert host is not None and host.disk is not None
        rid = id_of(sequence)
        if rid not in host.disk.waits:
            start, keys, frames = looked_up(replace(state.pool, host=host), disk, mesh, sequence, size)
            num_tokens = sequence.tokens.length - 1 - start * size  # the last token runs in any case
            host, pairs = disk_pages.read_ahead(host, rid, keys, num_tokens, size, start=start, before_run=before, frames=frames)
            assert host.disk is not None
            taken.host_pages.extend(at for at, _ in pairs)
            disk.read(pairs, host.disk.framed, last_first=host.disk.waits[rid].stop > 0)
        before += 0.0 if host.disk.holds(rid) else host.rates.seconds_to_run(sequence.num_filled, sequence.tokens.length)
    state = replace(state, pool=replace(state.pool, host=host))
    if host is not None and host.disk is not None:
        disk.looked_at = state.waiting, host.disk.waits
    if not state.running and _all_wait(state):
        assert host is not None and host.disk is not None
        disk.wait(LONGEST_WAIT)
        state = _with(state, disk, disk.ended(host.disk.reading))
    return state


def with_reads_ended(state: EngineState) -> EngineState:
    """The state after all reads have ended, for which this waits. Their host pages may then be replaced."""
    disk, host = runtime_of(state).disk, state.pool.host
    if disk is None or host is None or host.disk is None or not host.disk.reading:
        return state
    disk.end_reads()
    return _with(state, disk, disk.ended(host.disk.reading))


def set_reading_apart(draft: Draft) -> None:
    """Take the requests out of the queue that wait for reads, so that others need not wait for them."""
    host = draft.pool.host
    if host is None or host.disk is None or not host.disk.reading:
        return
    for request_id, wait in host.disk.waits.items():
        sequence = draft.waiting.items.get(request_id) if host.disk.holds(request_id) else None
        if sequence is not None and not _has_come_otherwise(draft, sequence, wait):
            draft.reading.append(sequence)
            draft.waiting = draft.waiting.pop(request_id)


def _has_come_otherwise(draft: Draft, sequence: Sequence, wait: Wait) -> bool:
    """Whether the index has all pages that are still being read for a request: another one has run them meanwhile."""
    host, tokens, namespace = draft.pool.host, sequence.tokens.array(), sequence.request.namespace
    assert host is not None and host.disk is not None
    matched = len(pools.reusable(draft.pool, tokens, whole=sequence.request.keep, namespace=namespace)[0])
    if matched < len(wait.pages):  # which come after at least as many tokens
        return False
    indexed = {*islice(keys_from(tokens, 0, draft.config.page_size, namespace), matched)}
    return indexed.issuperset(host.disk.reading[at] for at in wait.pages if at in host.disk.reading)


def _with(state: EngineState, disk: DiskTier, ended: Ended) -> EngineState:
    """The state at the time of the disk's clock, after some reads have ended."""
    host = state.pool.host
    assert host is not None and host.disk is not None
    ended, now = told_by_all(disk, mesh_of(state), ended)
    prompts = {id_of(sequence) for sequence in _prompts(state)}
    alive = {request_id for request_id in host.disk.waits if request_id in prompts or request_id in state.waiting.items}
    host = disk_pages.timed(disk_pages.arrived(host, ended), now, alive)
    read = sum(part > NOTHING for _, part in ended) * state.config.page_size
    return replace(state, pool=replace(state.pool, host=host), stats=state.stats.add(read_tokens=read) if read else state.stats)


def _next(state: EngineState) -> list[Sequence]:
    """The waiting requests that come first."""
    found, waiting = list[Sequence](), state.waiting
    while len(found) < NEXT and (sequence := waiting.first()) is not None:
        found.append(sequence)
        waiting = waiting.pop(id_of(sequence))
    return found


def _prompts(state: EngineState) -> list[Sequence]:
    """The running sequences that have prompt tokens to run. If the state has a `Steady`, there are none."""
    return [] if isinstance(state.running, Steady) else [sequence for sequence in state.running if sequence.todo > 1]


def _all_wait(state: EngineState) -> bool:
    """Whether all requests wait for reads."""
    disk = None if state.pool.host is None else state.pool.host.disk
    return disk is not None and len(state.waiting) > 0 and all(disk.holds(request_id) for request_id in state.waiting.items)
