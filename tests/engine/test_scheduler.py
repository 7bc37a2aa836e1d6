"""The scheduler alone: who runs, who waits, who gives way."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.config import EngineConfig
from nanovllm.engine import admission
from nanovllm.engine.admission import CROWD, GATHER, gathering
from nanovllm.engine.decode_pages import EARLY
from nanovllm.engine.scheduler import schedule, steady
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.pages import retain
from nanovllm.state.pool import Pool, init_pool
from nanovllm.state.pool_sizes import LOOKAHEAD
from nanovllm.state.request import Queue, Request, Sequence
from nanovllm.state.sequence_pages import give_up_pages, reserve
from nanovllm.state.vector import IntVector


def config(**limits):
    return EngineConfig(
        **{"num_pages": 8, "page_size": 2, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "seed": 0, **limits}
    )


def waiting(request_id, num_tokens, max_tokens=4):
    request = Request(
        request_id=request_id,
        num_prompt=num_tokens,
        sampling=SamplingParams(),
        seed=0,
        max_len=num_tokens + max_tokens,
        stop_ids=frozenset(),
        arrival=0.0,
    )
    tokens = [(request_id * 100 + i) % 1000 for i in range(num_tokens)]  # no two requests share a prefix
    return Sequence(request=request, tokens=IntVector.of(tokens), pages=IntVector.of())


def queue(*sequences):
    found = Queue()
    for sequence in sequences:
        found = found.push(sequence)
    return found


def settled(plan):
    """The sequences of a plan once it has run: everything scheduled is filled, whole ones draw token 0."""
    counts = {s.request.request_id: count for s, count in plan.prefill}
    counts.update({s.request.request_id: s.todo for s in plan.decode})
    running = []
    for sequence in plan.running:
        count = counts.get(sequence.request.request_id)
        grown = sequence if count is None else sequence.advance(count)
        if count is not None and grown.todo == 0:
            grown = replace(grown, tokens=grown.tokens.append(0))
        running.append(grown)
    return plan.pool, running, plan.waiting


def ids(sequences):
    return [s.request.request_id for s in sequences]


def start(limits, *sequences):
    return schedule(init_pool(limits.num_pages, limits.page_size), [], queue(*sequences), limits)


def test_nothing_to_do():
    plan = start(config())
    assert (plan.decode, plan.prefill, plan.running, plan.allocated) == ((), (), (), ())


def test_prompts_fill_the_budget_in_order_of_arrival():
    plan = start(config(max_num_batched_tokens=7), waiting(0, 3), waiting(1, 3), waiting(2, 3))
    assert [(s.request.request_id, count) for s, count in plan.prefill] == [(0, 3), (1, 3), (2, 1)]
    assert ids(plan.running) == [0, 1, 2] and not plan.waiting


def test_decoding_comes_before_prompts():
    limits = config(max_num_batched_tokens=3)
    plan = start(limits, waiting(0, 3))
    pool, running, left = settled(plan)
    plan = schedule(pool, running, left.push(waiting(1, 5)), limits)
    assert ids(plan.decode) == [0]
    assert [(s.request.request_id, count) for s, count in plan.prefill] == [(1, 2)]


def test_a_prompt_of_one_token_decodes():
    plan = start(config(), waiting(0, 1))
    assert ids(plan.decode) == [0] and not plan.prefill


def test_max_num_seqs():
    plan = start(config(max_num_seqs=2), waiting(0, 2), waiting(1, 2), waiting(2, 2))
    assert ids(plan.running) == [0, 1] and ids(plan.waiting) == [2]


def on_context(request_id, context, num_tokens, max_tokens=4):
    """A waiting request that continues a context, whose pages it holds too."""
    tokens = context.tokens.truncate(context.num_filled).extend([900 + i for i in range(num_tokens)])
    asked = waiting(request_id, len(tokens), max_tokens)
    return replace(asked, tokens=tokens, pages=context.pages, num_filled=context.num_filled)


def test_the_copy_of_a_shared_page_is_counted_before_a_prompt_is_cut():
    """A page is missing for the last of eleven tokens until the older request has ended. They run in two pieces, without preemption."""
    limits = config(num_pages=8)
    pool, (older, context), _ = settled(start(limits, waiting(0, 3, max_tokens=2), waiting(1, 3)))
    asked = on_context(2, context, 8)
    pool = pools.acquire(pool, asked.pages)
    plan = schedule(pool, [older], queue(asked), limits)
    assert plan.num_preempted == 0
    assert ids(plan.decode) == [0] and [(s.request.request_id, count) for s, count in plan.prefill] == [(2, 7)]
    pool, (older, asked), left = settled(plan)
    pool = pools.release(pool, older.pages)
    plan = schedule(pool, [asked], left, limits)
    assert plan.num_preempted == 0 and ids(plan.decode) == [2]


def test_no_overtaking():
    """The first of the queue needs more pages than are left: those behind it wait, small as they are."""
    limits = config(num_pages=4)
    pool, running, left = settled(start(limits, waiting(0, 5)))
    plan = schedule(pool, running, left.push(waiting(1, 4)).push(waiting(2, 1)), limits)
    assert ids(plan.running) == [0] and ids(plan.waiting) == [1, 2]


def sharing(num_tokens):
    """A pool of 8 pages of which 3 are a running request's, two of them indexed; and a waiting request that begins with these."""
    limits = config(num_pages=8)
    pool, running, _ = settled(start(limits, waiting(0, 5)))
    pool = pools.insert(pool, running[0].tokens.array(0, 4), running[0].pages.array())
    tokens = running[0].tokens.truncate(4).extend([900 + i for i in range(num_tokens - 4)])
    return limits, pool, running, replace(waiting(1, num_tokens), tokens=tokens)


@pytest.mark.parametrize(("num_tokens", "running"), [(13, [0, 1]), (14, [0])])
def test_shared_pages_are_not_missing(num_tokens, running):
    """With its next token the request takes 7 or 8 pages, two of which are shared; 5 are free."""
    limits, pool, rows, asked = sharing(num_tokens)
    assert ids(schedule(pool, rows, queue(asked), limits).running) == running


@pytest.mark.parametrize(("num_tokens", "running"), [(9, [2, 3]), (10, [2])])
def test_idle_pages_that_a_prompt_begins_with_are_not_available_too(num_tokens, running):
    """5 pages are available, and the prompt begins with two of them: these two cannot hold its other tokens too."""
    limits, pool, rows, asked = sharing(num_tokens)
    pool = pools.release(pool, rows[0].pages)
    other = schedule(pool, [], queue(waiting(2, 5)), limits)
    pool, rows, _ = settled(other)
    assert pool.num_available == 5 and pool.prefix.num_idle == 2
    asked = replace(asked, request=replace(asked.request, request_id=3))
    assert ids(schedule(pool, rows, queue(asked), limits).running) == running


def test_the_youngest_gives_way_and_stands_in_front_again():
    limits = config(num_pages=4)
    pool, running, left = settled(start(limits, waiting(0, 3), waiting(1, 3)))
    plan = schedule(pool, running, left, limits)
    pool, running, left = settled(plan)
    assert ids(plan.decode) == [0, 1]
    plan = schedule(pool, running, left.push(waiting(2, 1)), limits)
    assert ids(plan.running) == ids(plan.decode) == [0]
    assert ids(plan.waiting) == [1, 2]
    assert plan.num_preempted == 1
    (preempted, _) = plan.waiting
    assert len(preempted.pages) == preempted.num_filled == 0
    assert len(preempted.tokens) == 5 and preempted.most_filled == 4


def test_what_a_preempted_request_had_filled_is_found_again():
    limits = config(num_pages=4)
    pool, running, left = settled(start(limits, waiting(0, 3), waiting(1, 3)))
    pool, running, left = settled(schedule(pool, running, left, limits))
    plan = schedule(pool, running, left, limits)
    pool = pools.release(plan.pool, plan.running[0].pages)
    plan = schedule(pool, [], plan.waiting, limits)
    assert plan.running[0].num_filled == 2  # its second page went to the oldest
    assert plan.num_reused == 0  # it had run before: nothing new is saved


def test_the_youngest_that_waits_gives_its_context_up_first():
    """The running request needs a page, and the pool's others are the contexts of two that wait."""
    limits = config(num_pages=6, max_num_seqs=1)
    pool, rows, _ = settled(start(limits, waiting(0, 4)))
    contexts = []
    for rid in (1, 2):
        done = pools.allocate(pool, 2)
        assert done is not None
        pool, held = done
        contexts.append(waiting(rid, 6).with_pages(IntVector.of(held), 4))
    plan = schedule(pool, rows, queue(*contexts), limits)
    assert ids(plan.decode) == [0] and ids(plan.waiting) == [1, 2]
    assert [len(s.pages) for s in plan.waiting] == [2, 0]


def test_a_plan_changes_nothing_that_was_passed_in():
    limits = config(num_pages=4)
    pool, running, left = settled(start(limits, waiting(0, 3), waiting(1, 3)))
    before = (pool.pages.num_free, ids(running), [list(s.pages) for s in running], ids(left))
    for _ in range(2):
        schedule(pool, running, left.push(waiting(2, 4)), limits)
        assert (pool.pages.num_free, ids(running), [list(s.pages) for s in running], ids(left)) == before


def test_pages_ahead_of_need_leave_an_eighth_of_the_pool():
    limits = config(num_pages=100)
    pool, running, left = settled(start(limits, waiting(0, 2, max_tokens=500)))
    plan = schedule(pool, running, left, limits)
    assert plan.grew
    assert len(plan.running[0].pages) == (3 + LOOKAHEAD + 1) // 2
    tight = config(num_pages=34)
    pool, running, left = settled(start(tight, waiting(0, 2, max_tokens=500)))
    plan = schedule(pool, running, left, tight)
    assert len(plan.running[0].pages) == 2


@pytest.mark.parametrize("num_pages", [1200, 420, 140, 90])
def test_pages_ahead_of_need_are_those_that_one_row_after_the_other_would_get(num_pages):
    """First what all need now, then what is ahead of need, in order of arrival, while an eighth of the pool is left."""
    limits = config(num_pages=num_pages, max_num_seqs=12, max_num_batched_tokens=64)
    pool, running, left = settled(start(limits, *(waiting(i, 2 + i % 3, max_tokens=60 + 20 * i) for i in range(12))))
    plan = schedule(pool, running, left, limits)
    allocated, rows = [], list(running)
    for ahead in (False, True):
        for at, sequence in enumerate(rows):
            length = len(sequence.tokens)
            if ahead:
                length = min(sequence.request.max_len, length + LOOKAHEAD)
            if not ahead or pages_for(length, 2) - len(sequence.pages) <= pool.num_available - num_pages // 8:
                done = reserve(pool, sequence, length, 2)
                assert done is not None
                pool, rows[at], _, taken = done
                allocated.extend(taken)
    assert plan.grew and plan.only_decodes and list(plan.allocated) == allocated
    assert [list(s.pages) for s in plan.running] == [list(s.pages) for s in rows]
    assert plan.pool.pages.refcounts == pool.pages.refcounts


def test_steps_without_a_schedule_are_those_for_which_pages_are_there():
    limits = config(num_pages=1000, max_model_len=500)
    pool, running, left = settled(start(limits, waiting(0, 2, max_tokens=500), waiting(1, 3, max_tokens=9)))
    assert steady(pool, tuple(running), left, limits) is None  # a page is missing
    plan = schedule(pool, running, left, limits)
    found = steady(plan.pool, plan.running, left, limits)
    room = 2 * len(plan.running[0].pages) - plan.running[0].num_filled
    assert found is not None and found.steps == room - EARLY > 9  # the second has all pages that it can ever fill, and ends before
    assert steady(plan.pool, plan.running, left.push(waiting(2, 1)), limits) is None  # would be admitted
    shared = Pool(pages=retain(plan.pool.pages, plan.running[1].pages), prefix=plan.pool.prefix)
    assert steady(shared, plan.running, left, limits) is None
    asked = replace(plan.running[0].request, sampling=SamplingParams(logprobs=0))
    found = steady(plan.pool, (replace(plan.running[0], request=asked), plan.running[1]), left, limits)
    assert found is not None and found.steps == room - EARLY  # log-probabilities are kept as they come


def test_pages_ahead_of_need_may_be_those_that_only_the_index_holds():
    """Where replies of the past fill the pool, the tables change no more often than in an empty one."""
    limits = config(num_pages=100)
    pool = init_pool(limits.num_pages, limits.page_size)
    for first in range(0, 1000, 10):  # other tokens each time
        done = pools.allocate(pool, 1)
        assert done is not None
        pool, pages = done
        pool = pools.insert(pool, np.arange(first, first + 2, dtype=np.int32), np.array(pages, np.int32))
        pool = pools.release(pool, pages)
    assert pool.pages.num_free == 0 and pool.num_available == 100
    pool, running, left = settled(schedule(pool, [], queue(waiting(0, 2, max_tokens=500)), limits))
    plan = schedule(pool, running, left, limits)
    assert plan.grew and len(plan.running[0].pages) == (3 + LOOKAHEAD + 1) // 2


def served(limits, sequences):
    """Serve requests to their ends. Returns the share of tokens that ran twice, the number of steps, and the most that ran at once."""
    pool, running, left, ran, again, steps, most = init_pool(limits.num_pages, limits.page_size), [], queue(*sequences), 0, 0, 0, 0
    while running or left:
        plan = schedule(pool, running, left, limits)
        for sequence, count in (*((s, 1) for s in plan.decode), *plan.prefill):
            ran, again = ran + count, again + max(0, min(sequence.most_filled, sequence.num_filled + count) - sequence.num_filled)
        pool, running, left = settled(plan)
        for sequence in [s for s in running if s.tokens.length >= s.request.max_len]:
            pool = give_up_pages(pool, sequence)
            running.remove(sequence)
        steps, most = steps + 1, max(most, len(running))
    assert pool.num_available == limits.num_pages
    return again / ran, steps, most


@pytest.mark.parametrize(("lengths", "replies"), [((2, 6), (20, 90)), ((20, 60), (20, 60))])
def test_requests_are_admitted_that_can_grow_beside_those_that_run(lengths, replies, monkeypatch):
    """Under pressure less than a tenth of the tokens run twice, and steps are hardly more than without the rule."""
    random, limits = Random(0), config(num_pages=400, page_size=4, max_model_len=500, max_num_seqs=64, max_num_batched_tokens=256)
    sequences = [waiting(i, random.randint(*lengths), random.randint(*replies)) for i in range(80)]
    share, steps, most = served(limits, sequences)
    monkeypatch.setattr(admission, "SMALL", 1 << 20)
    without, least, _ = served(limits, sequences)
    assert without > 0 and share < min(0.1, without) and steps < 1.25 * least and most > 10, (without, share, steps, least, most)


def test_what_a_request_shares_need_not_grow(monkeypatch):
    """Eight requests of 41 pages fit into a pool of 60 pages, because they share 40."""
    monkeypatch.setattr(admission, "SMALL", 0)
    limits = config(num_pages=60, page_size=4, max_model_len=200, max_num_seqs=16, max_num_batched_tokens=400)
    beginning = [*range(160)]
    asked = [replace(waiting(i, 162, 4), tokens=IntVector.of([*beginning, i, i])) for i in range(8)]
    plan = start(limits, *asked)
    assert len(plan.running) == 8 and plan.num_preempted == 0


def test_the_budget_never_falls_short_of_those_that_decode():
    limits = config(max_num_batched_tokens=2, num_pages=64)
    pool, running, left = settled(start(limits, *(waiting(i, 1 + i % 3) for i in range(6))))
    for _ in range(3):
        plan = schedule(pool, running, left, limits)
        assert 0 < len(plan.decode) + sum(count for _, count in plan.prefill) <= 2
        assert sum(s.todo <= 1 for s in plan.running) <= 2
        pool, running, left = settled(plan)


def test_places_are_given_away_several_at_a_time():
    """Of 64 places two are given away together, unless only one request waits, a prompt runs anyway, or the request is urgent."""
    limits = config(num_pages=400, page_size=8, max_model_len=32, max_num_seqs=64, max_num_batched_tokens=256)
    pool, running, left = settled(start(limits, *[waiting(i, 3) for i in range(64 + 5)]))
    assert len(running) == 64 and len(left) == 5

    def gone(count):
        after = pool
        for sequence in running[:count]:
            after = give_up_pages(after, sequence)
        return after, running[count:]

    def admitted(count, queue, num_steps=1):
        return ids([s for s, _ in schedule(*gone(count), queue, limits, num_steps=num_steps).prefill])

    def left_steady(count, num_steps):
        after, others = gone(count)
        found = steady(after, tuple(others), left, limits, num_steps=num_steps)
        return None if found is None else found.steps

    assert admitted(1, left) == [] and admitted(2, left) == [64, 65] and admitted(1, left, num_steps=8) == [64]
    assert left_steady(0, 1) == left_steady(0, 8) == 32  # the rows have all their pages
    assert left_steady(1, 1) == 7 and [left_steady(1, n) for n in (5, 6, 7, 8)] == [3, 2, 1, None] and left_steady(2, 1) is None
    assert admitted(1, queue(waiting(99, 3))) == [99]
    urgent = waiting(99, 3)
    assert admitted(1, left.push(replace(urgent, request=replace(urgent.request, rank=-1)))) == [99]
    after, others = gone(2)
    plan = schedule(after, [*others, waiting(98, 2)], left, limits, num_steps=1)  # one place is free, and a prompt runs
    assert ids([s for s, _ in plan.prefill]) == [98, 64]


def test_a_free_place_waits_for_a_few_steps_only():
    """Whatever the number of steps so far, a place that becomes free is given away within 8 steps, and no step after that is left out."""
    limits = config(num_pages=400, page_size=4, max_model_len=16, max_num_seqs=64, max_num_batched_tokens=256)
    pool, running, left = settled(start(limits, *[waiting(i, 3) for i in range(64 + 5)]))
    pool, running = give_up_pages(pool, running[0]), running[1:]
    for first in range(16):
        waits = next(wait for wait in range(9) if schedule(pool, running, left, limits, num_steps=first + wait).prefill)
        assert waits == -first % 8


def test_few_requests_wait_for_others_after_a_step_with_prompts():
    """While 12 replies go on, two requests wait for some steps. A crowd does not wait, nor an urgent one, nor one without a prompt."""
    limits = config(num_pages=400, page_size=8, max_model_len=32, max_num_seqs=64, max_num_batched_tokens=256)
    plan = start(limits, *[waiting(i, 3) for i in range(12)])
    until = gathering(plan, 7, 0)
    pool, running, _ = settled(plan)
    two, crowd = queue(*[waiting(i, 3) for i in (12, 13)]), queue(*[waiting(i, 3) for i in range(12, 12 + 12 // CROWD)])
    urgent = waiting(99, 3)
    urgent = two.push(replace(urgent, request=replace(urgent.request, rank=-1)))
    assert until == 8 + GATHER

    def admitted(left, num_steps):
        plan = schedule(pool, running, left, limits, num_steps=num_steps, gather_until=until)
        assert gathering(plan, num_steps, until) == (until if not plan.prefill else num_steps + 1 + GATHER)
        return ids([s for s, _ in plan.prefill])

    for num_steps in range(8, until):
        assert admitted(two, num_steps) == []
        found = steady(pool, tuple(running), two, limits, num_steps=num_steps, gather_until=until)
        assert found is not None and found.steps == until - num_steps
        assert admitted(crowd, num_steps) == [*range(12, 12 + 12 // CROWD)] and admitted(urgent, num_steps) == [99, 12, 13]
        assert len(schedule(pool, running, queue(waiting(12, 1)), limits, num_steps=num_steps, gather_until=until).decode) == 13
    assert admitted(two, until) == [12, 13]
    assert steady(pool, tuple(running), two, limits, num_steps=until, gather_until=until) is None


def test_requests_that_a_full_step_left_behind_go_on_at_once():
    """A burst of 14 prompts beside 60 replies, of which a step has room for one or two, takes no more steps than it has pieces."""
    limits = config(num_pages=4000, page_size=8, max_model_len=400, max_num_seqs=128, max_num_batched_tokens=2048, max_prefill_tokens=256)
    pool, running, _ = settled(start(replace(limits, context_doubling=8192), *[waiting(i, 3, 300) for i in range(60)]))
    asked = [replace(waiting(100 + i, 200, 100), tokens=IntVector.of([1000 + i] * 200)) for i in range(14)]
    left, until, steps = queue(*asked), 0, 0
    while len(left) or any(s.todo > 1 for s in running):
        plan = schedule(pool, running, left, replace(limits, context_doubling=8192), num_steps=steps, gather_until=until)
        assert plan.prefill
        until, steps = gathering(plan, steps, until), steps + 1
        pool, running, left = settled(plan)
    assert steps <= 14 and until == steps + GATHER


@given(running=st.integers(1, 16), more=st.integers(0, 8), num_steps=st.integers(0, 16), until=st.integers(0, 20), seats=st.integers(0, 4))
def test_steady_steps_are_those_in_which_the_schedule_admits_nobody(running, more, num_steps, until, seats):
    limits = config(num_pages=400, page_size=8, max_model_len=32, max_num_seqs=running + seats, max_num_batched_tokens=256)
    pool, rows, _ = settled(start(limits, *[waiting(i, 3) for i in range(running)]))
    left = queue(*[waiting(100 + i, 3) for i in range(more)])
    found = steady(pool, tuple(rows), left, limits, num_steps=num_steps, gather_until=until)
    for ahead in range(0 if found is None else found.steps):
        plan = schedule(pool, rows, left, limits, num_steps=num_steps + ahead, gather_until=until)
        assert not plan.prefill and len(plan.decode) == running


def test_pages_grow_two_steps_before_they_are_needed():
    """A sequence gets pages when it decodes for the first time, and again while it has enough for two steps: the second may run already."""
    limits = config(num_pages=1000, page_size=4, max_model_len=500, max_num_seqs=2)
    pool, running, left = settled(start(limits, waiting(0, 2, max_tokens=500)))
    for _ in range(2):
        plan = schedule(pool, running, left, limits)
        assert plan.grew and len(plan.running[0].pages) == pages_for(plan.running[0].num_filled + 1 + LOOKAHEAD, 4)
        found = steady(plan.pool, plan.running, left, limits)
        assert found is not None and found.steps == 4 * len(plan.running[0].pages) - plan.running[0].num_filled - 2
        pool, running = plan.pool, list(plan.running)
        for _ in range(found.steps):
            assert not schedule(pool, [replace(s, request=replace(s.request, num_prompt=0)) for s in running], left, limits).grew
            running = [replace(s.advance(1), tokens=s.tokens.append(0)) for s in running]


def test_pages_grow_late_where_a_step_would_be_discarded():
    """A row that has pages for this step only did not get more in time: it waits until it needs them. So do rows with frames."""
    limits = config(num_pages=1000, page_size=4, max_model_len=500, max_num_seqs=2)
    pool, running, left = settled(start(limits, waiting(0, 2, max_tokens=500), waiting(1, 3, max_tokens=500)))
    old = [replace(s, request=replace(s.request, num_prompt=0)) for s in running]  # with 1 and 2 tokens left in their pages
    assert [4 - s.num_filled for s in old] == [2, 1] and not schedule(pool, old, left, limits).grew
    assert schedule(pool, old[:1], left, limits).grew


def test_pages_do_not_grow_early_while_a_request_could_begin_with_them():
    limits = config(num_pages=40, page_size=4, max_model_len=400, max_num_seqs=2)
    pool, running, left = settled(start(limits, waiting(0, 5, max_tokens=300)))
    asked = queue(waiting(1, 139, max_tokens=2))
    plan = schedule(pool, running, asked, limits)
    assert ids(plan.running) == [0, 1] and not plan.grew
    alone = schedule(pool, running, left, limits)
    assert alone.grew and len(alone.running[0].pages) > 3
    full = replace(limits, max_num_seqs=1)
    assert schedule(pool, running, asked, full).grew
