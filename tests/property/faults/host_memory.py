"""Planted faults in KV that is kept in host memory."""

from dataclasses import replace

import numpy as np

from nanovllm.chunks import handles, prefill
from nanovllm.chunks import offload as offload_module
from nanovllm.engine import donation, failures, host_copies, host_pages, resident
from nanovllm.engine import step as step_module
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.state import lru, moved_chunks, offload, prefix_keys
from nanovllm.state import pages as page_ops
from nanovllm.state import pool as pools
from nanovllm.state.moved_chunks import let_go
from nanovllm.state.offload import Moves
from nanovllm.state.pool import Taken
from nanovllm.state.prefix_keys import keys_from
from nanovllm.testing.machines.host_memory import HostChunkMachine, HostMemoryMachine
from nanovllm.testing.shadows.late_copies import LateCopies
from tests.property.faults.engine import Fault


def _reads_before_the_copy_ended(hold_engine):
    def faulty(copies, mark):
        return None if mark == copies.mark() else hold_engine(copies, mark)

    return faulty


def _fills_a_stage_before_its_copy_ended(hold_engine):
    def faulty(copies, mark):
        return hold_engine(copies, mark) if mark == copies.mark() else None

    return faulty


def _reads_before_it_is_written(hold):
    return lambda copies, mark: None


def _writes_pages_that_are_copied_ahead(let_write):
    return lambda memory, pages, gathers: None


def _reads_what_is_copied_ahead(hold_for_ahead):
    return lambda memory, copies, *held: None


def _lands_after_all_steps(may_land_late):
    return lambda state, plan: bool(plan.moves and plan.decode)


def _keeps_without_copies(keep_ahead):
    def faulty(pool, longest, most):
        done = keep_ahead(pool, longest, most)
        return None if done is None else (done[0], Moves())

    return faulty


def _copies_in_before_out(move):
    def faulty(memory, kv, moves, *more):
        return move(memory, move(memory, kv, Moves(into=moves.into), *more), Moves(out=moves.out))

    return faulty


def _trusts_what_a_failed_step_wrote(forget_host):
    return lambda state, lost: state


def _keeps_the_key_of_a_replaced_page(dropped):
    def faulty(host, held):
        after = dropped(host, held)
        for at in held:
            after = replace(after, by_key=after.by_key.set(host.key_of[at], at))
        return after

    return faulty


def _replaces_what_the_plan_reads(read):
    def faulty(host, held):
        read(host, held)
        return replace(host, used=page_ops.retain(host.used, np.array(held, np.int32)))

    return faulty


def _frees_what_the_plan_reads(settled):
    def faulty(host):
        after, moves = settled(host)
        return replace(after, used=page_ops.release(after.used, list(moves.reads))), moves

    return faulty


def _hashes_only_its_node(tokens_before):
    return lambda index, page: ([], tokens_before(index, page)[1])


def _fills_one_page_too_many(find):
    def faulty(host, tokens, start, page_size, *more, **options):
        found = find(host, tokens, start, page_size, *more, **options)
        others = [at for at in sorted(host.key_of) if at not in found]
        return [*found, others[0]] if found and others and (start + len(found) + 1) * page_size <= len(tokens) else found

    return faulty


def _mixes_up_keys(keep):
    return lambda host, pages, keys, frames=None: keep(host, pages[::-1], keys, frames)


def _forgets_the_copies(settled):
    def faulty(state, pool, taken):
        return replace(state, pool=replace(pool, host=offload.settled(pool.host)[0]))

    return faulty


def _notes_no_host_pages(settled):
    return lambda state, pool, taken: settled(state, pool, Taken())


def _frees_a_moved_chunk_twice(given_up):
    def faulty(host, liveness):
        after = given_up(host, liveness)
        return replace(after, held=(*after.held, after.held[-1]))

    return faulty


def _frees_it_on_the_device_twice(move_out):
    def faulty(pool, chunk):
        after = move_out(pool, chunk)
        return after and pools.release(after, [page for page in chunk.pages if after.pages.refcount(page)])

    return faulty


def _lets_the_plan_replace_it(given_up):
    def faulty(host, liveness):
        return let_go(given_up(host, liveness))

    return faulty


def _replaces_chunks(move_out):
    def faulty(pool, chunk):
        after = move_out(pool, chunk)
        if after is None or after.host is None:
            return after
        pages = np.array([at for at in after.host.moved[chunk.liveness].pages if at in after.host.key_of], np.int32)
        pages = pages[after.host.ages.since.get(pages) < 0]
        return replace(after, host=replace(after.host, ages=lru.add(after.host.ages, pages)))

    return faulty


def _copies_one_page_too_few(move_in):
    def faulty(pool, chunk):
        done = move_in(pool, chunk)
        if done is None or not done[0].host.moves.into:
            return done
        host = done[0].host
        short = replace(host.moves, into=host.moves.into[:-1], reads=host.moves.reads[:-1])
        short = replace(host, used=page_ops.release(host.used, [host.moves.into[-1][0]]), moves=short)
        return replace(done[0], host=short), *done[1:]

    return faulty


def _indexes_approximate_pages(indexed):
    """The keys of all full pages of a chunk, whatever its KV is."""

    def faulty(pool, chunk, pages):
        namespace, keys = indexed(pool, chunk, pages)
        return (namespace, list(keys_from(chunk.token_ids, 0, pool.prefix.page_size))) if not keys else (namespace, keys)

    return faulty


def _takes_any_tail_for_the_same(key_of):
    return lambda tokens, namespace=0: key_of(tokens[: len(tokens) - 1], namespace).removesuffix(prefix_keys.PARTLY)


class Returns(HostChunkMachine):
    """`HostChunkMachine` in which chunks often come back while other pages leave."""

    compose = damage = decode = drop = generate = leave_out = load = misuse = pass_on = plant_failure = serve = truncate = None


HOST_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="host memory: a page used before its copy ended",
        machine=HostMemoryMachine,
        targets=((LateCopies, "hold_engine"),),
        faulty=_reads_before_the_copy_ended,
    ),
    Fault(
        name="host memory: a stage filled before its copy ended",
        machine=HostMemoryMachine,
        targets=((LateCopies, "hold_engine"),),
        faulty=_fills_a_stage_before_its_copy_ended,
    ),
    Fault(
        name="host memory: pages scattered after a step that uses them",
        machine=HostMemoryMachine,
        targets=((step_module, "may_land_late"),),
        faulty=_lands_after_all_steps,
    ),
    Fault(
        name="host memory: a host page read before it is written",
        machine=HostMemoryMachine,
        targets=((LateCopies, "hold"),),
        faulty=_reads_before_it_is_written,
    ),
    Fault(
        name="host memory: a page written before it is copied ahead",
        machine=HostMemoryMachine,
        targets=((HostMemory, "_let_write"),),
        faulty=_writes_pages_that_are_copied_ahead,
    ),
    Fault(
        name="host memory: a host page read before its copy ahead ended",
        machine=HostMemoryMachine,
        targets=((HostMemory, "_hold_for_ahead"),),
        faulty=_reads_what_is_copied_ahead,
    ),
    Fault(
        name="host memory: pages kept ahead are not copied",
        machine=HostMemoryMachine,
        targets=((host_copies, "keep_ahead"),),
        faulty=_keeps_without_copies,
    ),
    Fault(
        name="host memory: copies in come before copies out",
        machine=HostMemoryMachine,
        targets=((HostMemory, "move"),),
        faulty=_copies_in_before_out,
    ),
    Fault(
        name="host memory: what a failed step wrote is trusted",
        machine=HostMemoryMachine,
        targets=((donation, "without_host_pages"), (failures, "without_host_pages")),
        faulty=_trusts_what_a_failed_step_wrote,
    ),
    Fault(
        name="host memory: a stale key of a replaced page",
        machine=HostMemoryMachine,
        targets=((offload, "_dropped"),),
        faulty=_keeps_the_key_of_a_replaced_page,
    ),
    Fault(
        name="host memory: a page replaced while it is read",
        machine=HostMemoryMachine,
        targets=((offload, "read"),),
        faulty=_replaces_what_the_plan_reads,
    ),
    Fault(
        name="host memory: a page freed while it has a key",
        machine=HostMemoryMachine,
        targets=((offload, "settled"),),
        faulty=_frees_what_the_plan_reads,
    ),
    Fault(
        name="host memory: a key of one page alone",
        machine=HostMemoryMachine,
        targets=((prefix_keys, "_tokens_before"),),
        faulty=_hashes_only_its_node,
    ),
    Fault(
        name="host memory: a page too many is loaded",
        machine=HostMemoryMachine,
        targets=((offload, "find"),),
        faulty=_fills_one_page_too_many,
    ),
    Fault(
        name="host memory: pages get each other's keys",
        machine=HostMemoryMachine,
        targets=((offload, "keep"),),
        faulty=_mixes_up_keys,
    ),
    Fault(
        name="host memory: last pages with other tokens are taken",
        machine=HostMemoryMachine,
        targets=((host_pages, "key_of"),),
        faulty=_takes_any_tail_for_the_same,
    ),
    Fault(
        name="host memory: a call on chunks that forgets its copies",
        machine=HostMemoryMachine,
        targets=((prefill, "settled"),),
        faulty=_forgets_the_copies,
    ),
    Fault(
        name="host memory: what a failed call on chunks wrote is trusted",
        machine=HostMemoryMachine,
        targets=((prefill, "settled"),),
        faulty=_notes_no_host_pages,
    ),
    Fault(
        name="host chunks: a chunk that was moved out is freed twice in host memory",
        machine=HostChunkMachine,
        targets=((handles, "given_up"), (moved_chunks, "given_up")),
        faulty=_frees_a_moved_chunk_twice,
    ),
    Fault(
        name="host chunks: a chunk that was moved out is freed twice on the device",
        machine=HostChunkMachine,
        targets=((offload_module, "move_out"),),
        faulty=_frees_it_on_the_device_twice,
    ),
    Fault(
        name="host chunks: the host pages of a chunk are replaced while the call may fail",
        machine=Returns,
        targets=((moved_chunks, "given_up"),),
        faulty=_lets_the_plan_replace_it,
        draw=2,
    ),
    Fault(
        name="host chunks: the host pages of a live chunk are replaced",
        machine=HostChunkMachine,
        targets=((offload_module, "move_out"),),
        faulty=_replaces_chunks,
    ),
    Fault(
        name="host chunks: a chunk comes back without its last page",
        machine=HostChunkMachine,
        targets=((resident, "move_in"),),
        faulty=_copies_one_page_too_few,
    ),
    Fault(
        name="host chunks: approximate pages have keys",
        machine=HostChunkMachine,
        targets=((moved_chunks, "_indexed"),),
        faulty=_indexes_approximate_pages,
    ),
)
