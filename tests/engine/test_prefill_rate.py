"""The bound on prompt tokens that an engine finds at its start, over a clock that is simulated."""

import math
import re
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.config import Mesh
from nanovllm.engine import prefill_rate
from nanovllm.engine import step as step_module
from nanovllm.errors import EngineDeadError, InvalidRequestError, OutOfPagesError
from nanovllm.executor.agreed_memory import SharedShortage
from nanovllm.executor.eager import EagerExecutor
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.state.engine_state import EngineState
from nanovllm.state.offload import Rates
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config(vocab_size=50, max_position_embeddings=32768))


def engine(**limits) -> EngineState:
    return nv.init_state(MODEL, **{"num_pages": 4096, "max_num_batched_tokens": 16896, **limits})


@pytest.fixture
def clock(monkeypatch):
    """A device on which a step costs 5 ms and a prompt token 0.028 ms, and twice as much after 20,000 others.

    It does the first steps in three quarters of the time.
    """
    asked = []

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        asked.append((context, count))
        return 5 + (0.028 if seconds else 0.021) * count * (1 + context / 20_000), kv

    monkeypatch.setattr(prefill_rate, "_milliseconds", milliseconds)
    return asked


@pytest.mark.parametrize(("max_step_ms", "tokens"), [(35, 768), (45, 1280), (80, 2560), (6, 256), (1, 256)])
def test_the_bound_fits_the_time(clock, max_step_ms, tokens):
    limits = engine(max_step_ms=max_step_ms).config
    assert limits.max_prefill_tokens == tokens
    most = max(count for _, count in clock)
    assert clock[-2:] == [(0, most), (8192, most)] and 5 + 0.021 * most >= max_step_ms - 5 - 1e-9
    took = 5 + 0.028 * most  # what does not grow with the context counts as if it did: the bound is a little lower for short pieces
    assert limits.context_doubling == math.ceil(20_000 * took / (took - 5))


def test_host_memory_knows_what_context_costs(monkeypatch):
    """A token takes 0.02 ms, and twice as long with 1,000 tokens of context."""
    asked = []

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        asked.append((context, count))
        return 0.02 * count * (1 + count / 2 / 1000), kv

    monkeypatch.setattr(prefill_rate, "_milliseconds", milliseconds)
    rates = rates_of(engine(host_kv_gib=1 / 1024))
    count = asked[0][1]
    assert asked[:2] == [(0, count), (0, 2 * count)]
    assert rates.tokens_per_second == pytest.approx(50_000) and rates.context_doubling == pytest.approx(1000)
    assert 1e3 * rates.seconds_to_run(0, 5 * count) == pytest.approx(0.02 * 5 * count * (1 + 5 * count / 2 / 1000))


@pytest.mark.parametrize(
    ("each", "rate", "holds"), [(lambda count: 1.0, 256 / 1e-3, 256), (lambda count: 1e-3 * count**3, 4e3 / (1e-3 * 128**2), 128)]
)
def test_prompts_that_take_longer_or_shorter_than_context_tells_have_rates_too(each, rate, holds, monkeypatch):
    """The time does not grow with the tokens: what was measured for the longer prompt holds.

    Or it grows more than context would make it, so the longer one was late: what was measured for the shorter one holds.
    """
    monkeypatch.setattr(prefill_rate, "_milliseconds", lambda model, executor, kv, pool, context, count, seconds=0.0: (each(count), kv))
    rates = rates_of(engine(host_kv_gib=1 / 1024))
    assert rates.tokens_per_second == pytest.approx(rate) and 1e3 * rates.seconds_to_run(0, holds) == pytest.approx(each(holds))


@pytest.mark.parametrize("window", [32, 128, 200, 4096])
def test_a_model_of_windows_alone_runs_long_prompts_at_an_even_rate(window, monkeypatch):
    """Up to the window, each token takes longer than the one before. After 128 tokens more, one takes twice as long.

    The measured prompts have 128 and 256 tokens. Long ones are at most a sixth off, however wide the window is.
    """

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        seen = min(count, window)
        return 0.02 * (count + seen * (count - seen / 2) / 128), kv

    monkeypatch.setattr(prefill_rate, "_milliseconds", milliseconds)
    for windows in ((window, window), (window, 0)):
        model = random_model(tiny_config(vocab_size=50, windows=windows, max_position_embeddings=32768))
        rates = rates_of(nv.init_state(model, num_pages=64, page_size=16, max_num_batched_tokens=512, host_kv_gib=1 / 1024))
        for count in (2048, 16384):
            true, _ = milliseconds(None, None, None, None, 0, count)
            assert windows[1] == 0 or 1e3 * rates.seconds_to_run(0, count) == pytest.approx(true, rel=1 / 6)
        assert rates.most_context == (windows[1] or math.inf)


@pytest.mark.parametrize("late", [2.0, 10.0, 1000.0])
def test_one_late_measurement_does_not_make_long_prompts_slower_without_bound(late, monkeypatch):
    """Context costs nothing, and the longer prompt was late, however much: a prompt of 2,048 tokens counts as 12.25 times as slow."""

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        return 0.02 * count * (late if count == 256 else 1.0), kv

    monkeypatch.setattr(prefill_rate, "_milliseconds", milliseconds)
    rates = rates_of(engine(host_kv_gib=1 / 1024))
    assert 1e3 * rates.seconds_to_run(0, 2048) == pytest.approx(12.25 * 0.02 * 2048)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 20_000), st.floats(0.001, 1.0), st.floats(10.0, 1e6), st.floats(0.97, 1.03))
def test_a_measurement_that_is_a_little_wrong_moves_long_prompts_by_little(most, each, doubling, wrong):
    """Of a step that holds any number of tokens: prompts of four times the tokens are at most a quarter off."""

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        asked.append(count)
        return each * count * (1 + count / 2 / doubling) * (wrong if len(asked) == 2 else 1.0), kv

    asked, state = list[int](), engine()
    limits = replace(state.config, max_num_batched_tokens=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_rate, "_milliseconds", milliseconds)
        rate, found, _ = prefill_rate.prompt_rates(MODEL, limits, state.runtime.executor, state.kv, state.pool, 4096)
    assert asked == [min(4096, most // 2), 2 * min(4096, most // 2)]
    rates, length = Rates(tokens_per_second=rate, bytes_per_second=1.0, context_doubling=found), 8 * asked[0]
    assert 1e3 * rates.seconds_to_run(0, length) == pytest.approx(each * length * (1 + length / 2 / doubling), rel=0.25)


@pytest.mark.parametrize(("limits", "counts"), [({"num_pages": 8}, [63, 126]), ({"max_num_batched_tokens": 100}, [50, 100])])
def test_shorter_prompts_are_measured_where_long_ones_do_not_fit(limits, counts, monkeypatch):
    asked = []

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        asked.append(count)
        return 1.0, kv

    monkeypatch.setattr(prefill_rate, "_milliseconds", milliseconds)
    engine(host_kv_gib=1 / 1024, **limits)
    assert asked[:-1] == counts  # the last one is a decode step


def test_a_rank_that_alone_lacks_memory_does_not_go_on_without_the_others():
    def run(mesh: Mesh) -> str:
        with pytest.raises(SharedShortage), prefill_rate._shared(mesh):
            raise SharedShortage
        with pytest.raises(OutOfPagesError) as caught, prefill_rate._shared(mesh):
            raise torch.OutOfMemoryError("planted")
        return str(caught.value)

    with pytest.raises(torch.OutOfMemoryError), prefill_rate._shared(None):
        raise torch.OutOfMemoryError
    for rank, told in enumerate(run_ranks(run, 2)):
        assert told == f"rank {rank} has too little memory for the prompt that is measured at the start: planted"


def test_the_others_do_not_wait_for_a_rank_that_alone_lacks_memory(monkeypatch):
    """It runs out in the middle of the measured prompt, while the other one waits for its part of a sum."""
    prefill = EagerExecutor.prefill

    def failing(executor, model, *given, **named):
        if model.config.mesh.rank == 1:
            raise torch.OutOfMemoryError("planted")
        return prefill(executor, model, *given, **named)

    def run(mesh: Mesh) -> str:
        with pytest.raises((OutOfPagesError, EngineDeadError)) as caught:
            nv.init_state(random_model(heads, dtype="float64", mesh=mesh), num_pages=8, page_size=4, host_kv_gib=1 / 1024)
        return str(caught.value)

    heads, begun = tiny_config(num_heads=2, num_kv_heads=2), time.perf_counter()
    monkeypatch.setattr(EagerExecutor, "prefill", failing)
    one, two = run_ranks(run, 2, seconds=30.0)
    assert time.perf_counter() - begun < 20.0, "it was released by the end of its patience"
    assert "a rank has gone" in one and two.startswith("rank 1 has too little memory for the prompt that is measured at the start")


@pytest.mark.parametrize("fits", [0, 1])
def test_host_memory_goes_without_what_the_device_has_no_memory_for(fits, monkeypatch):
    """Neither the measured prompt fits, or only the shorter one."""
    left = [fits]

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        left[0] -= 1
        if left[0] < 0 and count > 1:
            raise torch.OutOfMemoryError
        return 10.0, kv

    monkeypatch.setattr(prefill_rate, "_milliseconds", milliseconds)
    rates = rates_of(engine(host_kv_gib=1 / 1024))
    assert rates.context_doubling == math.inf and rates.tokens_per_second == pytest.approx(128 / 0.01 if fits else 1.0)


def rates_of(state: EngineState) -> Rates:
    assert state.pool.host is not None
    return state.pool.host.rates


def test_a_steady_time_is_the_median_of_the_second_half(monkeypatch):
    """The first steps are quick, as on a GPU that has been idle, and one is late for another reason."""
    took, now = iter([0.01] * 5 + [0.04] * 3 + [0.9] + [0.04] * 99), [0.0]

    def slow(model, kv, rows, frames):
        now[0] += next(took)
        return True, kv

    monkeypatch.setattr(prefill_rate.time, "perf_counter", lambda: now[0])
    state = engine(num_pages=64)
    executor = state.runtime.executor
    monkeypatch.setattr(executor, "prefill", slow)
    for seconds, least in ((0.0, 10), (1.0, 40)):
        found, _ = prefill_rate._milliseconds(MODEL, executor, state.kv, state.pool, 0, 16, seconds)
        assert found == pytest.approx(least)


def test_two_late_runs_of_three_do_not_count(monkeypatch):
    took, now = iter([0.9, 0.3, 0.01]), [0.0]

    def slow(model, kv, rows, frames):
        now[0] += next(took)
        return True, kv

    state = engine(num_pages=64)
    executor = state.runtime.executor
    monkeypatch.setattr(prefill_rate.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(executor, "prefill", slow)
    found, _ = prefill_rate._milliseconds(MODEL, executor, state.kv, state.pool, 0, 16)
    assert found == pytest.approx(10)


def test_a_device_on_which_context_costs_nothing(clock, monkeypatch):
    monkeypatch.setattr(prefill_rate, "_milliseconds", lambda model, executor, kv, pool, context, count, seconds=0.0: (count / 100, kv))
    assert engine(max_step_ms=30).config.context_doubling == prefill_rate.FAINT


def test_no_bound_is_measured_where_none_is_asked_for(clock):
    for asked in ({}, {"max_step_ms": None}, {"max_step_ms": math.inf}, {"max_prefill_tokens": 512}):
        limits = engine(**asked).config
        assert limits.max_prefill_tokens == asked.get("max_prefill_tokens") and limits.context_doubling == 0
    assert clock == []


@pytest.mark.parametrize(
    "limits", [{"num_pages": 1, "page_size": 1}, {"num_pages": 4}, {"max_model_len": 2}, {"max_num_batched_tokens": 1}]
)
def test_small_engines_are_measured(limits):
    state = engine(**limits, max_step_ms=5)
    assert state.config.max_prefill_tokens is not None and state.config.max_prefill_tokens >= 256
    nv.check(state)


def test_what_was_measured_leaves_nothing_behind():
    greedy = nv.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for windows in ((), (4, 0)):
        model = random_model(tiny_config(vocab_size=50, windows=windows))
        replies = []
        for asked in ({}, {"max_step_ms": 3}):
            state = nv.init_state(model, num_pages=64, **asked)
            nv.check(state)
            assert state.pages.num_free == 64
            state, (reply,) = nv.generate_many(model, state, [[1, 2, 3, 4, 5]], greedy)
            replies.append(reply.token_ids)
        assert replies[0] == replies[1]


def test_a_call_that_returns_whole_replies_has_no_bound(monkeypatch):
    plans, plain = [], step_module.schedule
    monkeypatch.setattr(step_module, "schedule", lambda *args: plans.append(plain(*args)) or plans[-1])
    state = engine(max_prefill_tokens=4, num_pages=64, max_num_seqs=2)
    greedy = [nv.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 9, 2)]
    state, _ = nv.generate_many(MODEL, state, [[1] * 40, [2] * 40, [3] * 40], greedy)
    assert [count for plan in plans for _, count in plan.prefill] == [40, 40, 40]
    assert state.config.max_prefill_tokens == 4


@pytest.mark.parametrize("bad", [0, -1.5, math.nan, True, "30", 1e306, 2 * 10**9])
def test_a_bad_time_is_named(bad, untyped):
    with pytest.raises(InvalidRequestError, match=re.escape(f"max_step_ms={bad!r} must be a number of milliseconds")):
        engine(max_step_ms=bad)


def test_a_huge_integer_is_no_time(untyped):
    with pytest.raises(InvalidRequestError, match=r"max_step_ms=10+\.\.\.0+ must be a number"):
        engine(max_step_ms=10**400)
    assert engine(max_step_ms=1e9, num_pages=64).config.max_prefill_tokens is not None


@pytest.mark.parametrize(("fits", "tokens"), [(0, 256), (255, 256), (600, 768), (8192, 1024), (1 << 20, 1024)])
def test_memory_ends_the_measurement(clock, monkeypatch, fits, tokens):
    """The largest piece that fits is measured, and the time without memory counts for nothing."""
    plain = prefill_rate._milliseconds

    def milliseconds(model, executor, kv, pool, context, count, seconds=0.0):
        if context + count > fits:
            raise torch.OutOfMemoryError
        return plain(model, executor, kv, pool, context, count, seconds)

    monkeypatch.setattr(prefill_rate, "_milliseconds", milliseconds)
    found = engine(max_step_ms=42).config
    assert found.max_prefill_tokens == tokens and bool(found.context_doubling) == (fits > 8192 + 2048)


def test_two_bounds_are_refused():
    with pytest.raises(InvalidRequestError, match="max_step_ms=30 with max_prefill_tokens=512: set only one"):
        engine(max_step_ms=30, max_prefill_tokens=512)
