"""Bad use and failures that the engine can meet: a clear error, nothing half done, and a right answer to the next good request."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from nanovllm.chunks.compose import compose, drop
from nanovllm.chunks.generate import generate, generate_many
from nanovllm.chunks.handles import fork, release
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.session import begin, commit
from nanovllm.chunks.storage.file import load_chunk
from nanovllm.engine.donation import enter
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import cancel, submit
from nanovllm.engine.step import step
from nanovllm.errors import DonatedStateError, ForeignChunkError, InvalidRequestError, NanoVLLMError, OutOfPagesError, ReleasedChunkError
from nanovllm.executor.decode import decode_step
from nanovllm.executor.executor import Runtime
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.invariants import check
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import FlakyExecutor, ModelWorld, PlantedError, SymbolicWorld, drain
from nanovllm.testing.strategies import Limits

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
CONFIG = tiny_config(vocab_size=50, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
MODEL = random_model(CONFIG)
WORLD = ModelWorld(MODEL)
IDS = [1, 2, 3, 4, 5, 6, 7]


def engine(**limits):
    """An engine whose device calls can be made to fail."""
    state = init_state(MODEL, **{"num_pages": 16, "page_size": 4, "max_num_seqs": 4, **limits})
    return replace(state, runtime=Runtime(state.runtime.lease, FlakyExecutor(state.runtime.executor)))


def arm(state, countdown, late=False):
    state.runtime.executor.arm(countdown, late)


def disarm(state):
    state.runtime.executor.disarm()


def greedy(count, **options):
    return SamplingParams(temperature=0.0, max_tokens=count, **options)


def reply(prompt, count):
    return generate(MODEL, engine(), prompt, greedy(count))[1].token_ids


def serves(state, prompt=(1, 2, 3, 4, 5, 6, 7), count=5):
    """The next good request gets a right answer, and its pages come back."""
    check(enter(state))
    available = enter(state).pool.num_available
    state, rid = submit(MODEL, state, list(prompt), greedy(count))
    state, ended = drain(MODEL, state)
    assert ended[rid].token_ids == reply(list(prompt), count)
    check(state)
    assert state.pool.num_available == available
    return state


# 1, 2, 3: prompts that cannot be served


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (
            [1] * 64,
            r"64 tokens; this engine holds at most 64, .*: shorten the prompt, or raise the KV memory \(num_pages, num_frames\)$",
        ),
        (
            [1] * 1000,
            f"1000 tokens; the model's limit is {CONFIG.max_position_embeddings} tokens, .*: shorten the prompt$",
        ),
        ([], "empty"),
        ("", "no tokenizer|empty"),
        ([50], "token id 50 is outside the vocabulary 0 ... 49"),
        ([-1], "token id -1"),
        ([1.5], "token id 1.5 is of type float"),
        ([1, "2", 3], "token id '2' is of type str"),
    ],
)
def test_faults_1_2_3_bad_prompts(prompt, words):
    state = engine()
    calls = (
        lambda: submit(MODEL, state, prompt, greedy(1)),
        lambda: generate(MODEL, state, prompt, greedy(1)),
        lambda: generate_many(MODEL, state, [IDS, prompt], greedy(1)),
        lambda: begin(MODEL, state, [IDS, prompt], greedy(1), room=1),
    )
    for call in calls:
        with pytest.raises(InvalidRequestError, match=words):
            call()
    serves(state)


def test_fault_1_the_longest_prompts_that_fit():
    state, rid = submit(MODEL, engine(), [1] * 63, greedy(5))
    state, ended = drain(MODEL, state)
    assert (len(ended[rid].token_ids), ended[rid].finish_reason) == (1, "length")
    with pytest.raises(
        InvalidRequestError,
        match=r"9 tokens; this engine holds at most 9, .*, or raise max_model_len$",
    ):
        submit(MODEL, engine(max_model_len=9), [1] * 9, greedy(5))
    serves(state)


# 8: the pool exhausted


def test_fault_8_by_one_request():
    state = engine(num_pages=3)
    state, rid = submit(MODEL, state, IDS, greedy(1000))
    state, ended = drain(MODEL, state)
    assert (ended[rid].token_ids, ended[rid].finish_reason) == (reply(IDS, 5), "length")
    serves(state)


def test_fault_8_by_many_requests():
    state, prompts = engine(num_pages=4, max_num_seqs=4), [[i] * (i + 1) for i in range(1, 9)]
    for prompt in prompts:
        state, _ = submit(MODEL, state, prompt, greedy(6))
    state, ended = drain(MODEL, state)
    assert [ended[rid].token_ids for rid in sorted(ended)] == [reply(prompt, 6) for prompt in prompts]
    serves(state)


def test_fault_8_by_chunks():
    state, held = engine(num_pages=4), []
    for token in range(4):
        state, chunk = prefill(MODEL, state, [token] * 4)
        held.append(chunk)
    for call in (lambda: prefill(MODEL, state, [9] * 4), lambda: generate(MODEL, state, [9], greedy(1))):
        with pytest.raises(OutOfPagesError, match=r"\b0\b.*available"):
            call()
    for chunk in held[:3]:
        state = release(state, chunk)
    serves(state)


# 12, 13: stale values


def test_fault_12_released_twice_or_used_elsewhere():
    state, chunk = prefill(MODEL, engine(), IDS)
    other, foreign = prefill(MODEL, engine(), IDS)
    with pytest.raises(ForeignChunkError):
        release(state, foreign)
    state = release(state, chunk)
    with pytest.raises(ReleasedChunkError):
        release(state, chunk)
    with pytest.raises(ReleasedChunkError):
        generate(MODEL, state, chunk, greedy(1))
    serves(state)
    serves(other)


def test_fault_13_every_call_refuses_a_donated_state():
    old, carry = begin(MODEL, engine(), [IDS], greedy(1), room=1)
    carry, _ = decode_step(MODEL.params, carry, MODEL.config)
    old, chunk = prefill(MODEL, old, IDS)
    old, rid = submit(MODEL, old, IDS, greedy(2))
    state, _ = generate(MODEL, old, IDS, greedy(1))
    for call in (
        lambda: submit(MODEL, old, IDS, greedy(1)),
        lambda: step(MODEL, old),
        lambda: cancel(old, rid),
        lambda: prefill(MODEL, old, IDS),
        lambda: fork(old, chunk),
        lambda: release(old, chunk),
        lambda: generate(MODEL, old, IDS, greedy(1)),
        lambda: begin(MODEL, old, [IDS], greedy(1), room=1),
        lambda: commit(MODEL, old, carry),
    ):
        with pytest.raises(DonatedStateError, match="1 call"):
            call()
    state, _ = commit(MODEL, state, carry)
    state, _ = drain(MODEL, state)
    serves(state)


def test_a_state_with_another_model_is_refused():
    other = random_model(CONFIG, seed=1)
    state = engine()
    with pytest.raises(InvalidRequestError, match="random-1"):
        generate(other, state, IDS, greedy(1))
    serves(state)


# 14: cancelling


CANCELLED = [IDS, [9] * 6, [5, 5]]
REPLIES = [reply(prompt, 4) for prompt in CANCELLED]


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("which", [0, 1, 2])
def test_fault_14_cancelled_at_any_time(steps, which):
    state, ids = engine(num_pages=5, max_num_batched_tokens=3), []
    for prompt in CANCELLED:
        state, rid = submit(MODEL, state, prompt, greedy(4))
        ids.append(rid)
    ended = {}
    for _ in range(steps):
        state, outputs = step(MODEL, state)
        ended.update({out.request_id: out.output for out in outputs if out.output is not None})
    if ids[which] not in ended:
        state = cancel(state, ids[which])
    check(state)
    with pytest.raises(InvalidRequestError, match=f"request {ids[which]}"):
        cancel(state, ids[which])
    state, others = drain(MODEL, state)
    assert ids[which] not in others
    ended.update(others)
    assert {rid: out.token_ids for rid, out in ended.items()} == {rid: REPLIES[rid] for rid in ended}
    assert len(ended) >= 2
    assert state.pool.num_available == 5
    serves(state)


def test_fault_14_unknown_requests():
    state = engine()
    with pytest.raises(InvalidRequestError, match="request 5 is neither waiting nor running"):
        cancel(state, 5)
    serves(state)


# 15: exceptions in the middle of a call


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("countdown", range(12))
def test_fault_15_a_step_that_fails_midway(countdown, late):
    """A tight pool, so that the failing step evicts, copies and preempts."""
    state, base = prefill(MODEL, engine(num_pages=6), IDS[:6])
    contexts = {0: [*IDS[:6], 9], 1: IDS[:6], 2: [9] * 6}
    state, first = submit(MODEL, state, [base, [9]], greedy(7))
    state, second = submit(MODEL, state, base, greedy(7))
    state, third = submit(MODEL, release(state, base), [9] * 6, greedy(7))
    arm(state, countdown, late)
    ended, failures = {}, 0
    for _ in range(60):
        before = state
        try:
            state, outputs = step(MODEL, state)
        except PlantedError:
            failures += 1
            check(enter(before))
            continue
        check(state)
        ended.update({out.request_id: out.output.token_ids for out in outputs if out.output is not None})
    assert failures == 1
    assert [ended[rid] for rid in (first, second, third)] == [reply(contexts[i], 7) for i in range(3)]
    assert state.pool.num_available == 6
    serves(state)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("kind", "countdown"), [*(("prefill", i) for i in range(4)), *(("generate_many", i) for i in range(6)), ("begin", 0), ("begin", 1)]
)
def test_fault_15_a_functional_call_that_fails_midway(kind, countdown, late):
    """What the failed call overwrote of the index is forgotten; chunks and waiting requests are as they were."""
    state, idle = prefill(MODEL, engine(num_pages=8, max_num_batched_tokens=3), [8] * 12)
    state, base = prefill(MODEL, release(state, idle), IDS)
    state, rid = submit(MODEL, state, [base, [4]], greedy(3))
    state, _ = step(MODEL, state)

    def call():
        if kind == "prefill":
            return prefill(MODEL, state, [7] * 12)
        if kind == "generate_many":
            return generate_many(MODEL, state, [base, [7] * 4], greedy(3))
        return begin(MODEL, state, [base, [7] * 4], greedy(1), room=3)

    arm(state, countdown, late)
    with pytest.raises(PlantedError):
        call()
    check(enter(state))
    WORLD.require_kv(state.kv, list(base.pages), base.token_ids.tolist())
    state, ended = drain(MODEL, state)
    assert ended[rid].token_ids == reply([*IDS, 4], 3)
    state, again = prefill(MODEL, state, [8] * 12)
    WORLD.require_kv(state.kv, list(again.pages), again.token_ids.tolist())
    serves(release(release(state, again), base))


def test_fault_15_a_failing_commit_can_be_tried_again():
    state, carry = begin(MODEL, engine(), [IDS], greedy(1), room=3)
    for _ in range(3):
        carry, _ = decode_step(MODEL.params, carry, MODEL.config)
    arm(state, 0)
    with pytest.raises(PlantedError):
        commit(MODEL, state, carry)
    state, (made,) = commit(MODEL, state, carry)
    assert made.token_ids == reply(IDS, 3)
    serves(release(state, made.chunk))


def interrupted(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["prefill", "step", "generate", "begin", "commit"])
def test_fault_15_ctrl_c_between_the_work_and_its_commit(kind, monkeypatch):
    """The device work is done and idle pages are overwritten, but the old state stays: it must not trust them."""
    state, idle = prefill(MODEL, engine(num_pages=4), [8] * 12)
    state, carry = release(state, idle), None
    if kind == "step":
        state, _ = submit(MODEL, state, [7] * 12, greedy(2))
    if kind == "commit":
        state, carry = begin(MODEL, state, [[7] * 10], greedy(1), room=2)
        carry, _ = decode_step(MODEL.params, carry, MODEL.config)
    calls = {
        "prefill": lambda: prefill(MODEL, state, [7] * 12),
        "step": lambda: step(MODEL, state),
        "generate": lambda: generate(MODEL, state, [7] * 12, greedy(2)),
        "begin": lambda: begin(MODEL, state, [[7] * 10], greedy(1), room=2),
        "commit": lambda: commit(MODEL, state, carry),
    }
    with monkeypatch.context() as patched:
        for name in ("chunks.handles", "chunks.prefill", "engine.step", "chunks.generate", "chunks.session"):
            patched.setattr(import_module(f"nanovllm.{name}"), "commit_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls[kind]()
    if kind == "step":
        state = cancel(state, state.waiting.first().request.request_id)
    if kind == "commit":
        state, (made,) = commit(MODEL, state, carry)
        assert made.token_ids == reply([7] * 10, 1)
        state = release(state, made.chunk)
    state, again = prefill(MODEL, state, [8] * 12)
    WORLD.require_kv(state.kv, list(again.pages), again.token_ids.tolist())
    serves(release(state, again))


def test_fault_15_what_a_waiting_request_refers_to_is_overwritten():
    """A failing step takes the pages that a waiting request holds of its released context: the request must not read them again."""
    world = SymbolicWorld(vocab_size=8)
    state = world.init_state(Limits(num_pages=4, page_size=2, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16))
    state, base = prefill(world.model, state, [1, 2, 3, 4])
    state, _ = submit(world.model, state, [5] * 7, greedy(1))
    state, second = submit(world.model, state, base, greedy(2))
    state = release(state, base)
    request = state.waiting.items[second].request
    for countdown in range(8):
        arm(state, 0, late=True)
        try:
            state, _ = step(world.model, state)
        except PlantedError:
            check(enter(state))
            for sequence in enter(state).waiting:
                world.require_kv(state.kv, list(sequence.pages), sequence.tokens.array(0, sequence.num_filled).tolist())
        disarm(state)
        if countdown % 2:
            state, _ = step(world.model, state)
    state, ended = drain(world.model, state)
    if second in ended:
        world.require_reply([1, 2, 3, 4], ended[second].token_ids, request)
    assert state.pool.num_available == 4


def test_fault_16_device_memory_runs_out_in_a_functional_call():
    """`test_request_errors.py` has steps of submitted requests."""
    state = engine()
    state.runtime.executor.arm(0, False, torch.OutOfMemoryError("no memory"))
    with pytest.raises(OutOfPagesError, match="memory"):
        prefill(MODEL, state, IDS)
    serves(state)


# 20: two engines


def test_fault_20_two_engines_of_different_models_in_turns():
    other = random_model(CONFIG, seed=5)
    models, states, ids = (MODEL, other), [engine(num_pages=6), init_state(other, num_pages=9, page_size=2)], ([], [])
    for at in (0, 1):
        for prompt in (IDS, [9, 9], IDS[:3]):
            states[at], rid = submit(models[at], states[at], prompt, greedy(6))
            ids[at].append(rid)
    ended = ({}, {})
    for _ in range(40):
        for at in (0, 1):
            states[at], outputs = step(models[at], states[at])
            check(states[at])
            ended[at].update({out.request_id: out.output.token_ids for out in outputs if out.output is not None})
    for at in (0, 1):
        fresh = init_state(models[at], num_pages=32, page_size=4)
        fresh, made = generate_many(models[at], fresh, [IDS, [9, 9], IDS[:3]], greedy(6))
        assert [ended[at][rid] for rid in ids[at]] == [generation.token_ids for generation in made]


def test_errors_have_one_root():
    for error in (InvalidRequestError, OutOfPagesError, DonatedStateError, ReleasedChunkError, ForeignChunkError):
        assert issubclass(error, NanoVLLMError)
    assert issubclass(InvalidRequestError, ValueError)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda state: init_state("tiny", num_pages=4), r"model='tiny' must be a Model, which load_model\(...\) returns, not str"),
        (lambda state: generate("tiny", state, IDS), "model='tiny' must be a Model"),
        (lambda state: generate_many(None, state, [IDS]), "model=None must be a Model"),
        (lambda state: submit("tiny", state, IDS), "model='tiny' must be a Model"),
        (lambda state: step(None, state), "model=None must be a Model"),
        (lambda state: prefill(None, state, IDS), "model=None must be a Model"),
        (lambda state: prefill(state, MODEL, IDS), "model=EngineState.* must be a Model"),
        (lambda state: compose("tiny", state, []), "model='tiny' must be a Model"),
        (lambda state: drop(None, state, None, 0, 1), "model=None must be a Model"),
        (lambda state: load_chunk("tiny", state, "a"), "model='tiny' must be a Model"),
        (lambda state: begin("tiny", state, [IDS], room=1), "model='tiny' must be a Model"),
        (lambda state: commit(None, state, None), "model=None must be a Model"),
        (lambda state: commit(MODEL, state, None), "carry=None must be a DecodeCarry from begin"),
        (lambda state: decode_step(MODEL.params, None, CONFIG), "carry=None must be a DecodeCarry from begin"),
        (lambda state: decode_step(None, begin(MODEL, engine(), [IDS], room=1)[1], CONFIG), "params=None must be Params"),
        (lambda state: decode_step(MODEL, begin(MODEL, engine(), [IDS], room=1)[1], CONFIG), "params=Model.* must be Params"),
        (lambda state: init_state(MODEL, num_pages=4, compile="yes"), "compile='yes'"),
        (lambda state: init_state(MODEL, num_pages=4, compile=1), "compile=1"),
        (lambda state: generate(MODEL, state, IDS, 5), "not int"),
        (lambda state: generate(MODEL, state, IDS, {"temperature": 0}), "not dict"),
        (lambda state: check("state"), "not str"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(call, named, untyped):
    state = engine()
    with pytest.raises(InvalidRequestError, match=named):
        call(state)
    state, _ = generate(MODEL, state, IDS, SamplingParams(max_tokens=3))
    check(state)
