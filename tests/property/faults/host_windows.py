"""Planted faults in the KV of sliding-window layers that is kept in host memory: frames, and host pages without them."""

from dataclasses import replace

from nanovllm.chunks import offload as offload_module
from nanovllm.engine import host_pages
from nanovllm.state import host_loads, offload
from nanovllm.state import pool as pools
from nanovllm.state.pool import Taken
from nanovllm.state.prefix_keys import keys_of
from nanovllm.testing.machines.host_windows import HostFrameMachine, HostWindowMachine
from tests.property.faults.engine import Fault


def _claims_frames_without_their_copies(keep):
    def faulty(host, pages, keys, frames=None):
        after = keep(host, pages, keys, frames)
        return after if after.moves is None else replace(after, moves=replace(after.moves, frames_out=host.moves.frames_out))

    return faulty


def _overlooks_missing_frames(num_served):
    return lambda have, before, window, num_tokens, page_size: len(have)


def _copies_frames_to_each_others_places(load):
    def faulty(host, held, into, frames_into=()):
        sources, targets = [at for at, _ in frames_into], [frame for _, frame in frames_into]
        return load(host, held, into, [*zip(sources[::-1], targets, strict=True)])

    return faulty


def _takes_the_number_of_a_page_for_its_frame(addresses):
    def faulty(pool, pages):
        first, second = addresses(pool, pages)
        return (first, None) if second is None else (first, pages % pool.frames.num_frames)

    return faulty


def _leaves_new_frames_as_they_are(copied):
    def faulty(pool, shared, count, retired):
        what = copied(pool, shared, count, retired)
        return replace(what, frames=tuple(place for place in what.frames if place >= len(shared)))

    return faulty


def _does_not_note_new_frames(note):
    return lambda taken, pool, fresh, framed=(): note(taken, pool, fresh)


def _keeps_pages_without_kv(kept):
    def faulty(pool, pages):
        if pool.host is None or pool.host.moves is None or not len(pages):
            return pool.host
        return offload.keep(pool.host, pool.frames.of(pages), keys_of(pool.prefix, pages))

    return faulty


def _moves_a_chunk_over_bare_pages(move_out):
    def faulty(pool, chunk):
        after = move_out(pool, chunk)
        if after is None:
            return None
        moves = after.host.moves
        frames_out = moves.frames_out
        for at in frames_out:
            frames_out = frames_out if at in moves.out else frames_out.delete(at)
        return replace(after, host=replace(after.host, moves=replace(moves, frames_out=frames_out)))

    return faulty


class FailedSteps(HostWindowMachine):
    """`HostWindowMachine` in which many steps fail that take frames from pages on the device."""

    abandon = begin = begin_from = commit = decode = detach = fork = generate = generate_from = misuse = prefill_after = None


class ManyMoves(HostWindowMachine):
    """`HostWindowMachine` in which chunks are often moved to host memory, because there is little else to do."""

    abandon = begin = begin_from = commit = decode = detach = fork = generate = generate_from = misuse = prefill_after = None
    cancel = fail_to_prefill = failing_step = plant_failure = step_without_memory = submit_context = None


def _fault(name, faulty, target, machine=HostWindowMachine, draw=0):
    return Fault(name=f"host windows: {name}", machine=machine, targets=(target,), faulty=faulty, draw=draw)


HOST_WINDOW_FAULTS: tuple[Fault, ...] = (
    _fault("a frame that was not copied counts as there", _claims_frames_without_their_copies, (offload, "keep")),
    _fault("a hit that overlooks missing frames", _overlooks_missing_frames, (host_pages, "num_served")),
    _fault("frames copied to each other's places", _copies_frames_to_each_others_places, (offload, "load")),
    _fault("a page's number taken for its frame", _takes_the_number_of_a_page_for_its_frame, (pools, "addresses")),
    _fault("a page on the device gets a frame without KV", _leaves_new_frames_as_they_are, (host_loads, "copied")),
    _fault("new frames are trusted after a failed step", _does_not_note_new_frames, (Taken, "note"), FailedSteps, draw=6),
    _fault("pages without KV are kept", _keeps_pages_without_kv, (pools, "kept"), HostFrameMachine, draw=3),
    _fault("a chunk moves over pages without frames", _moves_a_chunk_over_bare_pages, (offload_module, "move_out"), ManyMoves, draw=13),
)
