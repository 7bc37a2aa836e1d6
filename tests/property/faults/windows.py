"""Planted faults in the KV of sliding-window layers: frames, the owners that need them, retired pages and reused prefixes."""

from dataclasses import replace

import numpy as np

from nanovllm.chunks import prefill as fill
from nanovllm.engine import donation, draft, preemption, requests
from nanovllm.executor import batch, decode
from nanovllm.state import lru as ages
from nanovllm.state import pool
from nanovllm.state import window_frames as frames
from nanovllm.testing.machines.frames import FrameMachine
from nanovllm.testing.machines.windows import MixedWindowMachine, WindowChunkMachine, WindowMachine
from tests.property.faults.engine import Fault

# Frames


def _changes_nothing(change):
    return lambda held, pages: held


def _takes_the_youngest(take):
    def faulty(spare, count):
        pages = np.array(spare.pages()[::-1][:count], np.int32)
        return ages.remove(spare, pages), pages

    return faulty


def _gives_a_frame_twice(without):
    return lambda held, pages: replace(held, used=without(held, pages).used)


def _retires_from_the_back(retire):
    return lambda held, pages: retire(held, np.array(list(pages)[::-1], np.int32))


def _counts_needs_once(retire):
    return lambda held, pages: retire(held, list(dict.fromkeys(pages))[:1])


def _keeps_what_has_no_frames(made_way):
    return lambda held, *more, **options: held


# Retired pages and reused prefixes


def _a_token_too_early(num_retired):
    return lambda num_filled, num_tokens, window, page_size: num_retired(num_filled, num_tokens, window - 1, page_size)


def _as_if_the_last_did_not_run_again(num_retired):
    return lambda num_filled, num_tokens, window, page_size: num_retired(num_filled, num_filled + 1, window, page_size)


def _overlooks_holes(reusable):
    def faulty(held, tokens, *, whole, **options):
        matched = pool.match(held, tokens, **options)
        return matched, 0 if whole or not len(matched) else len(matched)

    return faulty


def _forgets_what_is_retired(give_up_pages):
    return lambda held, sequence: give_up_pages(held, replace(sequence, retired=0))


# Batches and failures


def _copies_pages_as_frames(frames_of_copies):
    return lambda held, copies: ()


def _forgets_overwritten_frames(pages_with):
    return lambda held, wanted: []


def _takes_pages_for_frames(frame_tables):
    return lambda rows, held: np.minimum(batch.page_tables(rows, held.num_frames), held.num_frames)


def _writes_on_where_it_was(advance):
    def faulty(carry, kv, sampled):
        after = advance(carry, kv, sampled)
        if carry.batch.windowed is None:
            return after
        return replace(after, batch=replace(after.batch, windowed=carry.batch.windowed))

    return faulty


def _fault(name, faulty, *targets, machine, draw=0):
    return Fault(name=name, machine=machine, targets=targets, faulty=faulty, draw=draw)


WINDOW_FAULTS: tuple[Fault, ...] = (
    _fault("a need not counted", _changes_nothing, (frames, "need"), machine=FrameMachine),
    _fault("a frame freed too early", _changes_nothing, (ages, "remove"), machine=FrameMachine),
    _fault("a frame kept by a free page", _changes_nothing, (frames, "vacate"), machine=FrameMachine),
    _fault("a frame given twice", _gives_a_frame_twice, (frames, "_without"), machine=FrameMachine),
    _fault("the youngest spare frame taken first", _takes_the_youngest, (ages, "take"), machine=FrameMachine, draw=1),
    _fault("the first of a run spare before its end", _retires_from_the_back, (frames, "retire"), machine=FrameMachine),
    _fault("a need never given up", _counts_needs_once, (frames, "retire"), machine=FrameMachine),
    _fault("pages without frames found before pages with frames", _keeps_what_has_no_frames, (pool, "_made_way"), machine=FrameMachine),
    _fault("a prefix with a hole", _overlooks_holes, (pool, "reusable"), machine=FrameMachine, draw=1),
    _fault("a page retired too early", _a_token_too_early, (draft, "num_retired"), machine=WindowMachine),
    _fault(
        "a page retired that the last token reads again",
        _as_if_the_last_did_not_run_again,
        (requests, "num_retired"),
        machine=WindowMachine,
        draw=8,
    ),
    _fault("a retired page given up twice", _forgets_what_is_retired, (preemption, "give_up_pages"), machine=WindowMachine, draw=2),
    _fault("a copy without its frame", _copies_pages_as_frames, (draft, "frames_of_copies"), machine=WindowChunkMachine),
    _fault("a chunk's copy without its frame", _copies_pages_as_frames, (fill, "frames_of_copies"), machine=WindowChunkMachine),
    _fault(
        "frames that a failed call overwrote still trusted",
        _forgets_overwritten_frames,
        (donation, "pages_with"),
        machine=WindowMachine,
        draw=2,
    ),
    _fault("slots of frames that do not move on", _writes_on_where_it_was, (decode, "advance"), machine=MixedWindowMachine),
    _fault("pages taken for frames", _takes_pages_for_frames, (batch, "frame_tables"), machine=MixedWindowMachine),
)
