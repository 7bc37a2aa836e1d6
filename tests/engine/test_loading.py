"""Prompts that come back from host memory while replies go on: a few pages in each step, beside the replies."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nanovllm.chunks.prefill import prefill
from nanovllm.engine import step as steps
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit, submit_many
from nanovllm.engine.step import step
from nanovllm.executor.executor import executor_of, runtime_of
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.engine_state import EngineState
from nanovllm.state.invariants import check
from nanovllm.state.offload import Rates, replaced
from nanovllm.state.prefix_keys import keys_from
from nanovllm.testing.shadows.late_copies import LateCopies
from nanovllm.testing.shadows.memory import freeze
from nanovllm.testing.shadows.worlds import drain
from tests.engine.test_host_memory import GREEDY, MODEL, prompt

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PAGES = 5  # of a prompt that comes back


def engine(per_step: int, num_pages: int = 30, late: bool = False, **options: Any) -> EngineState:
    """An engine that loads so many pages of 4 tokens in a step while replies go on, and whose host memory has the pages of two prompts."""
    state = init_state(MODEL, num_pages=num_pages, page_size=4, host_kv_gib=1 / 1024, **options)
    host, runtime = state.pool.host, runtime_of(state)
    assert host is not None
    if late:
        runtime.host = HostMemory(state.kv, host.num_pages, LateCopies, stage_bytes=host.page_bytes)
    rates = Rates(tokens_per_second=1e5, bytes_per_second=1e5 * host.page_bytes, step_seconds=per_step / 1e5)
    state = replace(state, pool=replace(state.pool, host=replace(host, rates=rates)))
    for seed in range(num_pages // PAGES + 2):
        state, _ = submit(MODEL, state, prompt(seed), GREEDY)
        state, _ = drain(MODEL, state)
    assert state.pool.host is not None and state.pool.prefix.num_idle > 0
    return state


def replying(state: EngineState, seed: int = 100) -> tuple[EngineState, int]:
    """The state with a reply that goes on, and its request."""
    state, rid = submit(MODEL, state, prompt(seed, 6), LONG)
    for _ in range(3):
        state, _ = step(MODEL, state)
    return state, rid


def alone(seed: int, params: SamplingParams = GREEDY, length: int = 21) -> list[int]:
    """The reply of an engine without host memory."""
    state, rid = submit(MODEL, init_state(MODEL, num_pages=30, page_size=4), prompt(seed, length), params)
    return drain(MODEL, state)[1][rid].token_ids


@pytest.mark.parametrize("per_step", [1, 2, 9])
def test_a_reply_gets_a_token_in_each_step_that_loads_a_few_pages(per_step):
    state, going = replying(engine(per_step))
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    counts, outputs = [], {}
    while state.running:
        before = state.stats
        state, out = step(MODEL, state)
        check(state)
        counts.append((state.stats.loaded_tokens - before.loaded_tokens) // 4)
        assert {one.request_id for one in out} >= {going} - outputs.keys()
        assert state.stats.prefill_tokens == before.prefill_tokens or not counts[-1]  # it runs when all its pages are there
        outputs |= {one.request_id: one.output for one in out if one.output is not None}
    assert [count for count in counts if count] == [min(per_step, PAGES - at) for at in range(0, PAGES, per_step)]
    assert outputs[rid].num_cached_tokens == 20
    assert outputs[rid].token_ids == alone(0) and outputs[going].token_ids == alone(100, LONG, 6)


@pytest.mark.parametrize(("per_step", "loaded"), [(PAGES - 1, 0), (PAGES, PAGES)])
def test_a_prompt_of_more_pages_than_a_step_loads_begins_in_the_step_after_its_look_up(per_step, loaded):
    state, _ = replying(engine(per_step))
    state, _ = submit(MODEL, state, prompt(0), GREEDY)
    before = state.stats.loaded_tokens
    state, _ = step(MODEL, state)
    assert (state.stats.loaded_tokens - before) // 4 == loaded
    state, _ = step(MODEL, state)
    assert (state.stats.loaded_tokens - before) // 4 == per_step


def test_prompts_that_come_together_and_fit_into_a_step_begin_at_once():
    state, _ = replying(engine(9))
    before = state.stats.loaded_tokens
    for seed in (0, 1):
        state, _ = submit(MODEL, state, prompt(seed), GREEDY)
    state, _ = step(MODEL, state)
    assert (state.stats.loaded_tokens - before) // 4 == PAGES  # of the other one, 4 of 5 pages would come


def test_while_others_load_a_new_prompt_does_not_stop_them():
    state, _ = replying(engine(1))
    state, _ = submit(MODEL, state, prompt(0), GREEDY)
    for _ in range(2):
        state, _ = step(MODEL, state)
    before = state.stats.loaded_tokens
    state, _ = submit(MODEL, state, prompt(1), GREEDY)
    state, _ = step(MODEL, state)
    assert state.stats.loaded_tokens - before == 4 and sum(s.loading > 0 for s in state.running) == 2


def test_a_step_without_replies_loads_all_pages_and_runs():
    state = engine(1)
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    before = state.stats.loaded_tokens
    state, outputs = step(MODEL, state)
    assert state.stats.loaded_tokens - before == 20 and outputs[0].request_id == rid


def test_the_rest_is_loaded_at_once_when_the_last_reply_ends():
    state, going = replying(engine(1))
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    state, _ = step(MODEL, state)
    assert state.running[-1].loading == 20 and state.running[-1].num_filled == 4
    state = cancel(state, going)
    state, outputs = step(MODEL, state)
    assert [one.request_id for one in outputs] == [rid] and not state.running[-1].loading
    assert drain(MODEL, state)[1][rid].token_ids == alone(0)


def test_requests_that_load_share_what_a_step_may_load():
    state, _ = replying(engine(2))
    before = state.stats.loaded_tokens
    rids = []
    for seed in (0, 1):
        state, rid = submit(MODEL, state, prompt(seed), GREEDY)
        rids.append(rid)
    state, _ = step(MODEL, state)
    state, _ = step(MODEL, state)
    assert state.stats.loaded_tokens - before == 4 * 2 and state.running[-1].loading == 20 and not state.running[-1].num_filled
    state, outputs = drain(MODEL, state)
    assert [outputs[rid].token_ids for rid in rids] == [alone(0), alone(1)]


def test_replies_do_not_wait_for_the_copies(monkeypatch):
    """When a decode step begins, the pages that it does not use are still on their way. The next call finds them."""
    state, _ = replying(engine(2, late=True))
    memory, executor, left = runtime_of(state).host, executor_of(state), list[int]()
    assert memory is not None and isinstance(memory._inward, LateCopies)
    inward, decode = memory._inward, executor.decode

    def watched(*given):
        left.append(len(inward._left))
        return decode(*given)

    monkeypatch.setattr(executor, "decode", watched)
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    for _ in range(4):
        state, _ = step(MODEL, state)
        check(state)
    assert not left[0] and all(left[1:])
    assert drain(MODEL, state)[1][rid].token_ids == alone(0)


def fetched(state: EngineState, monkeypatch) -> list[tuple[str, int]]:
    """What later calls do in order: plans, and copies of so many host pages into stages, of which each holds one."""
    memory, done, schedule = runtime_of(state).host, list[tuple[str, int]](), steps.schedule
    assert memory is not None
    fetch = memory._fetch
    monkeypatch.setattr(memory, "_fetch", lambda images, held, stage: done.append(("copy", len(held))) or fetch(images, held, stage))
    monkeypatch.setattr(steps, "schedule", lambda *given: done.append(("plan", 0)) or schedule(*given))
    return done


def test_an_idle_engine_begins_its_copies_before_it_plans_and_makes_each_once(monkeypatch):
    state = engine(1, late=True)
    done = fetched(state, monkeypatch)
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    check(state)
    assert done == [("copy", 1)] * 4 + [("plan", 0), ("copy", 1)]
    assert drain(MODEL, state)[1][rid].token_ids == alone(0)


def test_no_copies_begin_of_what_runs_faster(monkeypatch):
    state = engine(1, late=True)
    host, done = state.pool.host, fetched(state, monkeypatch)
    assert host is not None
    state = replace(state, pool=replace(state.pool, host=replace(host, rates=replace(host.rates, bytes_per_second=1.0))))
    state, _ = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    assert done == [("plan", 0)]


@pytest.mark.parametrize(("length", "begun"), [(5, 4), (21, 0)])
def test_no_copies_begin_of_what_is_on_the_device(length, begun, monkeypatch):
    state = engine(1, late=True)
    state, _ = submit(MODEL, state, prompt(0)[:length], GREEDY)
    state, _ = step(MODEL, state)
    state, _ = drain(MODEL, state)
    done = fetched(state, monkeypatch)
    state, _ = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    assert done == [("copy", 1)] * begun + [("plan", 0)]


@pytest.mark.parametrize(("doubling", "loaded"), [(math.inf, 0), (80.0, 4)])
def test_context_makes_copies_worth_while(doubling, loaded, monkeypatch):
    """The first page is on the device. To copy the four others takes 180 us; to run them takes 160, and 184 after four tokens of context.

    As if they came first it would take 176.
    """
    state = engine(1, late=True)
    state, _ = submit(MODEL, state, prompt(0)[:5], GREEDY)
    state, _ = drain(MODEL, state)
    host, done = state.pool.host, fetched(state, monkeypatch)
    assert host is not None
    rates = replace(host.rates, bytes_per_second=5e4 * host.page_bytes, context_doubling=doubling)
    state = replace(state, pool=replace(state.pool, host=replace(host, rates=rates)))
    before = state.stats.loaded_tokens
    state, _ = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    assert done == [("copy", 1)] * loaded + [("plan", 0)] and state.stats.loaded_tokens - before == 4 * loaded


def test_no_copies_begin_for_a_request_over_a_chunk(monkeypatch):
    """It has pages already, and the plan may find others for it."""
    state = engine(1, late=True)
    state, chunk = prefill(MODEL, state, prompt(0)[:4])
    done = fetched(state, monkeypatch)
    state, rid = submit(MODEL, state, [chunk, prompt(0)[4:]], GREEDY)
    state, _ = step(MODEL, state)
    assert done == [("plan", 0)] + [("copy", 1)] * 4
    assert drain(MODEL, state)[1][rid].token_ids == alone(0)


def test_copies_begin_in_the_namespace_of_the_request(monkeypatch):
    state = engine(1, late=True)
    state, _ = submit_many(MODEL, state, [prompt(0)], [GREEDY], namespace=1)
    state, _ = drain(MODEL, state)
    for seed in range(200, 208):
        state, _ = submit(MODEL, state, prompt(seed), GREEDY)
        state, _ = drain(MODEL, state)
    done = fetched(state, monkeypatch)
    state, _ = submit_many(MODEL, state, [prompt(0)], [GREEDY], namespace=1)
    state, _ = step(MODEL, state)
    assert done == [("copy", 1)] * 4 + [("plan", 0), ("copy", 1)]


def test_no_copies_begin_beside_replies(monkeypatch):
    state, _ = replying(engine(1, late=True))
    done = fetched(state, monkeypatch)
    state, _ = submit(MODEL, state, prompt(1), GREEDY)
    state, _ = step(MODEL, state)
    assert done == [("plan", 0)]
    state, _ = step(MODEL, state)
    assert done[1:] == [("plan", 0), ("copy", 1)]


def test_copies_that_began_for_a_plan_that_failed_are_lost(monkeypatch):
    state = engine(1, late=True)
    done, schedule = fetched(state, monkeypatch), steps.schedule
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    content = freeze(state.pool)

    def failing(*given):
        raise RuntimeError("planted")

    monkeypatch.setattr(steps, "schedule", failing)
    with pytest.raises(RuntimeError, match="planted"):
        step(MODEL, state)
    monkeypatch.setattr(steps, "schedule", schedule)
    assert done == [("copy", 1)] * 4 and freeze(state.pool) == content
    check(state)
    state = cancel(state, rid)
    state, rid = submit(MODEL, state, prompt(1), GREEDY)
    assert drain(MODEL, state)[1][rid].token_ids == alone(1)


@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_request_that_loads_can_be_cancelled(before):
    state, going = replying(engine(1))
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    for _ in range(before):
        state, _ = step(MODEL, state)
    state = cancel(state, rid)
    check(state)
    assert drain(MODEL, state)[1][going].token_ids == alone(100, LONG, 6)


def test_a_step_that_fails_after_its_copies_began_leaves_the_old_state_usable(monkeypatch):
    state, going = replying(engine(1, late=True))
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    content, executor = freeze(state.pool), executor_of(state)

    def failing(*given):
        raise RuntimeError("planted")

    monkeypatch.setattr(executor, "decode", failing)
    with pytest.raises(RuntimeError, match="planted"):
        step(MODEL, state)
    assert freeze(state.pool) == content
    monkeypatch.undo()
    state, outputs = drain(MODEL, state)
    check(state)
    assert outputs[rid].token_ids == alone(0) and outputs[going].token_ids == alone(100, LONG, 6)


def test_host_pages_that_a_request_waits_for_are_replaced_last():
    state, _ = replying(engine(1))
    state, _ = submit(MODEL, state, prompt(0), GREEDY)
    state, _ = step(MODEL, state)
    assert state.pool.host is not None
    left = replaced(state.pool.host, state.pool.host.ages.count - PAGES)
    assert {*keys_from(np.array(prompt(0), np.int32), 0, 4)} == {*left.by_key}


def loading_beside_a_prompt(state: EngineState) -> tuple[EngineState, int, int]:
    """Donates `state`. A request has begun to load, and another one comes whose prompt has to run. Returns the numbers of both."""
    state, loads = submit(MODEL, state, prompt(0), GREEDY)
    for _ in range(2):
        state, _ = step(MODEL, state)
    state, runs = submit(MODEL, state, prompt(50), GREEDY)
    return state, loads, runs


@pytest.mark.parametrize(("per_step", "budget", "pages"), [(1, 3, 1), (1, 9, 2), (2, 9, 2), (2, 5, 1)])
def test_steps_that_run_prompts_load_as_long_as_a_quarter_of_them_takes(per_step, budget, pages):
    """A page takes as long as a token: two tokens and four leave time for one page, and eight for two.

    If a step without prompts loads more, one of four steps with prompts does.
    """
    state, _ = replying(engine(per_step, max_num_batched_tokens=budget))
    state, rid, new = loading_beside_a_prompt(state)
    loads = list[int]()
    while any(s.loading for s in state.running):
        before = state
        state, _ = step(MODEL, state)
        check(state)
        count = (state.stats.loaded_tokens - before.stats.loaded_tokens) // 4
        if state.stats.prefill_tokens - before.stats.prefill_tokens == budget - 1:
            assert count == (0 if pages < per_step and before.num_steps % 4 else min(pages, PAGES - per_step - sum(loads)))
        loads.append(count)
    assert sum(loads) == PAGES - per_step and sum(map(bool, loads)) > 1
    outputs = drain(MODEL, state)[1]
    assert outputs[rid].token_ids == alone(0) and outputs[new].token_ids == alone(50)


@pytest.mark.parametrize(("doubling", "expected"), [(math.inf, [1, 1, 1, 1]), (4.0, [1, 2, 1])])
def test_prompts_take_longer_after_others_and_leave_time_for_more_pages(doubling, expected):
    """Of a prompt four tokens run at a time. With context the first ones leave time for 1.5 pages, and those after them for 2.5."""
    state, _ = replying(engine(1, max_num_batched_tokens=5))
    host = state.pool.host
    assert host is not None
    state = replace(state, pool=replace(state.pool, host=replace(host, rates=replace(host.rates, context_doubling=doubling))))
    state, _, _ = loading_beside_a_prompt(state)
    loads = list[int]()
    while any(s.loading for s in state.running):
        before = state.stats.loaded_tokens
        state, _ = step(MODEL, state)
        loads.append((state.stats.loaded_tokens - before) // 4)
    assert loads == expected


def test_what_a_long_prompt_leaves_time_for_is_loaded_and_runs_with_it():
    """The prompt of 21 tokens comes first, so there is time for the five pages of the other prompt in the same step."""
    state, _ = replying(engine(1))
    state, _ = submit(MODEL, state, prompt(50), GREEDY)
    state, rid = submit(MODEL, state, prompt(0), GREEDY)
    before = state.stats
    state, outputs = step(MODEL, state)
    assert state.stats.loaded_tokens - before.loaded_tokens == 20 and rid in {one.request_id for one in outputs}
    assert drain(MODEL, state)[1][rid].token_ids == alone(0)


def test_requests_with_the_same_beginning_load_it_once():
    state, _ = replying(engine(1))
    before, rids = state.stats, list[int]()
    for last in range(4):
        state, rid = submit(MODEL, state, [*prompt(0)[:20], 7 + last, 3], GREEDY)
        rids.append(rid)
    state, outputs = drain(MODEL, state)
    check(state)
    assert state.stats.loaded_tokens - before.loaded_tokens == 20
    assert [outputs[rid].num_cached_tokens for rid in rids] == [20] * 4 and state.stats.prefill_tokens - before.prefill_tokens == 8


@pytest.mark.parametrize("num_pages", [20, 22, 26])
def test_requests_that_wait_for_pages_are_counted_with_them(num_pages):
    """Nobody is admitted over the pages that another request needs and has not got yet. So nothing is preempted, and nothing runs again."""
    state, _ = replying(engine(1, num_pages=num_pages, max_num_seqs=8))
    before, rids = state.stats, list[int]()
    for seed in range(5):
        state, rid = submit(MODEL, state, prompt(seed), GREEDY)
        rids.append(rid)
    state, outputs = drain(MODEL, state)
    check(state)
    assert [outputs[rid].token_ids for rid in rids] == [alone(seed) for seed in range(5)]
    assert [outputs[rid].num_cached_tokens for rid in rids] == [20] * 5
    assert state.stats.preemptions == before.preemptions and state.stats.prefill_tokens - before.prefill_tokens == 5
