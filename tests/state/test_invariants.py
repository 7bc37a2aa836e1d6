"""`check` names each invariant that a state breaks."""

from dataclasses import replace

import numpy as np
import pytest
from immutables import Map

from nanovllm.chunks.prefill import prefill
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.engine.step import step
from nanovllm.errors import BrokenInvariantError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pages as page_ops
from nanovllm.state import prefix_cache as prefix_ops
from nanovllm.state.chunk import Provenance
from nanovllm.state.heap import popped
from nanovllm.state.invariants import check
from nanovllm.state.pages import PageState
from nanovllm.state.pool import Pool
from nanovllm.state.prefix_cache import Run
from nanovllm.state.request import Queue
from nanovllm.state.vector import IntVector
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8))


def busy():
    """A state with two running requests, one that waits, and a chunk of three pages."""
    state = init_state(MODEL, num_pages=16, page_size=2, max_num_seqs=2)
    state, chunk = prefill(MODEL, state, [1, 2, 3, 4, 5])
    for prompt in ([6, 6, 6], [7], [8, 8]):
        state, _ = submit(MODEL, state, prompt, SamplingParams(temperature=0.0, max_tokens=5))
    state, _ = step(MODEL, state)
    check(state)
    return state, chunk


def with_pages(state, **changes):
    old = state.pages
    fields = {name: getattr(old, name) for name in PageState.__dataclass_fields__}
    return replace(state, pool=Pool(pages=PageState(**{**fields, **changes}), prefix=state.prefix))


def with_prefix(state, **changes):
    return replace(state, pool=Pool(pages=state.pages, prefix=prefix_ops._replace(state.prefix, **changes)))


def chunk_with(state, chunk, **changes):
    return replace(state, chunks=state.chunks.set(chunk.liveness, replace(chunk, **changes)))


def first_running(state, **changes):
    return replace(state, running=(replace(state.running[0], **changes), *state.running[1:]))


def a_lost_owner(state, chunk):
    pages = state.pages
    return with_pages(state, counts=pages.counts.put(chunk.pages.array(2, 3), 0), num_used=pages.num_used - 1)


def an_owner_too_many(state, chunk):
    return replace(state, pool=Pool(pages=page_ops.retain(state.pages, [chunk.pages[0]]), prefix=state.prefix))


def a_held_page_on_the_free_list(state, chunk):
    return with_pages(state, returned=(chunk.pages[0], state.pages.returned))


def a_page_in_no_list(state, chunk):
    return with_pages(state, unused=state.pages.unused + 1)


def a_key_without_a_page(state, chunk):
    return with_prefix(state, heads=state.prefix.heads.set((-1, b"12345678"), 3))


def a_page_behind_nothing(state, chunk):
    head, run = chunk.pages[0], state.prefix.runs[chunk.pages[0]]
    return with_prefix(state, runs=state.prefix.runs.set(head, replace(run, parent=15)))


def other_tokens_than_the_key(state, chunk):
    head, run = chunk.pages[0], state.prefix.runs[chunk.pages[0]]
    return with_prefix(state, runs=state.prefix.runs.set(head, replace(run, tokens=run.tokens + 1)))


def a_page_of_another_run(state, chunk):
    return with_prefix(state, run_of=state.prefix.run_of.put(chunk.pages.array(1, 2), 15))


def a_page_at_another_place(state, chunk):
    return with_prefix(state, place_of=state.prefix.place_of.put(chunk.pages.array(1, 2), 3))


def an_indexed_page_without_a_run(state, chunk):
    return with_prefix(state, run_of=state.prefix.run_of.put(np.array([15], np.int32), 15))


def the_same_tokens_twice(state, chunk):
    prefix, head = state.prefix, chunk.pages[0]
    run = prefix.runs[head]
    key, twin = (head, run.tokens[2:4].tobytes()), Run(head, run.tokens[2:4], np.array([15], np.int32))
    return with_prefix(
        state,
        heads=prefix.heads.set(key, 15),
        runs=prefix.runs.set(15, twin),
        num_children=prefix.num_children.put(chunk.pages.array(0, 1), 1),
    )


def a_wrong_count_of_runs_behind(state, chunk):
    return with_prefix(state, num_children=state.prefix.num_children.put(chunk.pages.array(0, 1), 5))


def a_page_in_use_called_idle(state, chunk):
    page = chunk.pages.array(1, 2)
    return with_prefix(state, idle=Map({0: page}), idle_since=state.prefix.idle_since.put(page, 0), num_idle=1, now=1)


def a_page_idle_since_another_time(state, chunk):
    page = chunk.pages.array(1, 2)
    return with_prefix(state, idle=Map({0: page}), idle_since=state.prefix.idle_since.put(page, 7), num_idle=1, now=1)


def a_wrong_count_of_idle_pages(state, chunk):
    return with_prefix(state, num_idle=1)


def a_chunk_of_too_few_pages(state, chunk):
    return chunk_with(state, chunk, pages=chunk.pages.truncate(2))


def an_approximate_page_in_the_index(state, chunk):
    return chunk_with(state, chunk, provenance=Provenance(operations=("composed",)), num_exact=0)


def running_out_of_order(state, chunk):
    return replace(state, running=state.running[::-1])


def running_and_waiting(state, chunk):
    return replace(state, waiting=state.waiting.push(state.running[0].with_pages(IntVector.of(), 0)))


def a_queue_that_misses_its_first(state, chunk):
    return replace(state, waiting=Queue(items=state.waiting.items, turns=popped(state.waiting.turns)))


def more_filled_than_pages_hold(state, chunk):
    return first_running(state, pages=state.running[0].pages.truncate(1))


def more_filled_than_there_are_tokens(state, chunk):
    return first_running(state, num_filled=len(state.running[0].tokens) + 1)


def longer_than_allowed(state, chunk):
    return first_running(state, request=replace(state.running[0].request, max_len=1))


def a_state_of_the_future(state, chunk):
    return replace(state, epoch=state.epoch + 1)


def a_negative_counter(state, chunk):
    return replace(state, stats=state.stats.add(prefill_tokens=-1000))


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (a_lost_owner, "'reference counts': page . counts 0 owners and has 1"),
        (an_owner_too_many, "'reference counts': page . counts 3 owners and has 2"),
        (a_held_page_on_the_free_list, "'partition'"),
        (a_page_in_no_list, "'partition'"),
        (a_key_without_a_page, "'index'"),
        (a_page_behind_nothing, "'index': page . follows 15"),
        (other_tokens_than_the_key, "'index': the key of page . does not lead to it"),
        (a_page_of_another_run, "'index': page . is at 1 of the node of . and says"),
        (a_page_at_another_place, "'index': page . is at 1 of the node of . and says"),
        (an_indexed_page_without_a_run, "'reference counts'|'index': . pages are indexed and the nodes have"),
        (the_same_tokens_twice, "'reference counts'|'index': two pages with the same tokens"),
        (a_wrong_count_of_runs_behind, "'index': page . counts 5 nodes"),
        (a_page_in_use_called_idle, "'idle pages'"),
        (a_page_idle_since_another_time, "'eviction order'"),
        (a_wrong_count_of_idle_pages, "'eviction order'"),
        (a_chunk_of_too_few_pages, "'reference counts'|'chunk'"),
        (an_approximate_page_in_the_index, "'exact index'"),
        (running_out_of_order, "'order'"),
        (running_and_waiting, "'order'"),
        (a_queue_that_misses_its_first, "'order'"),
        (more_filled_than_pages_hold, "'reference counts'|'capacity'"),
        (more_filled_than_there_are_tokens, "'sequences'"),
        (longer_than_allowed, "'capacity'"),
        (a_state_of_the_future, "'lease'"),
        (a_negative_counter, "'stats'"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_broken_invariant_is_named(breaks, words):
    state, chunk = busy()
    with pytest.raises(BrokenInvariantError, match=words):
        check(breaks(state, chunk))
    check(state)
