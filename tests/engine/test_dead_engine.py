"""A broken device: one typed error from the call that finds it, and from every later call with a state of that engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.engine.donation import guarded
from nanovllm.engine.requests import submit_many
from nanovllm.executor.executor import Runtime, executor_of
from nanovllm.state.device_errors import fatal, out_of_memory, watched
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.worlds import FlakyExecutor

MODEL = random_model(tiny_config(vocab_size=40), 0)
FIRST = "CUDA error: an illegal memory access was encountered"
BROKEN = RuntimeError(f"{FIRST}\nCUDA kernel errors might be asynchronously reported at some other API call.")
GREEDY = nv.SamplingParams(temperature=0, max_tokens=4)


def engine():
    state = nv.init_state(MODEL, num_pages=40, page_size=4)
    return replace(state, runtime=Runtime(state.runtime.lease, FlakyExecutor(executor_of(state))))


def breaks(*given: Any, **options: Any) -> Any:
    raise BROKEN


FINDERS = {
    "step": lambda state, chunk, carry: nv.step(MODEL, state),
    "generate": lambda state, chunk, carry: nv.generate(MODEL, state, [1, 2], GREEDY),
    "prefill": lambda state, chunk, carry: nv.prefill(MODEL, state, [1] * 9),
    "score": lambda state, chunk, carry: nv.score(MODEL, state, [[1, 2]], [[3]]),
    "begin": lambda state, chunk, carry: nv.begin(MODEL, state, [[1, 2]], GREEDY, room=1),
    "decode_step": lambda state, chunk, carry: nv.decode_step(MODEL.params, carry, MODEL.config, forward=breaks),
    "decode_loop": lambda state, chunk, carry: nv.decode_loop(MODEL, state, carry, 2, breaks),
    "commit": lambda state, chunk, carry: nv.commit(MODEL, state, nv.decode_step(MODEL.params, carry, MODEL.config)[0]),
}


@pytest.mark.parametrize("finder", FINDERS)
def test_every_call_raises_one_error_that_names_the_first_cause(finder: str, tmp_path: Path):
    state, chunk = nv.prefill(MODEL, engine(), [1, 2, 3])
    state, carry = nv.begin(MODEL, state, [[4, 5]], GREEDY, room=3)
    state, rid = nv.submit(MODEL, state, [6, 7], GREEDY)
    state.runtime.executor.arm(0, False, BROKEN)
    with pytest.raises(nv.EngineDeadError, match=FIRST) as raised:
        FINDERS[finder](state, chunk, carry)
    assert raised.value.__cause__ is BROKEN
    executor = state.runtime.executor
    executor.arm(0, False, AssertionError("a call of a dead device"), times=1000)
    calls = [
        lambda: nv.step(MODEL, state),
        lambda: nv.cancel(state, rid),
        lambda: nv.submit(MODEL, state, [1], GREEDY),
        lambda: submit_many(MODEL, state, [[1]], [GREEDY]),
        lambda: nv.generate(MODEL, state, [1], GREEDY),
        lambda: nv.generate_many(MODEL, state, [[1]], GREEDY),
        lambda: nv.prefill(MODEL, state, [1]),
        lambda: nv.fork(state, chunk),
        lambda: nv.truncate(state, chunk, 1),
        lambda: nv.release(state, chunk),
        lambda: nv.compose(MODEL, state, [chunk, chunk]),
        lambda: nv.drop(MODEL, state, chunk, 0, 1),
        lambda: nv.save_chunk(state, chunk, tmp_path / "a.safetensors"),
        lambda: nv.load_chunk(MODEL, state, tmp_path / "a.safetensors"),
        lambda: nv.score(MODEL, state, [[1]], [[2]]),
        lambda: nv.begin(MODEL, state, [[1]], GREEDY, room=1),
        lambda: nv.decode_step(MODEL.params, carry, MODEL.config, forward=breaks),
        lambda: nv.decode_loop(MODEL, state, carry, 1),
        lambda: nv.capture(lambda carry: nv.decode_step(MODEL.params, carry, MODEL.config), carry),
        lambda: nv.commit(MODEL, state, carry),
        lambda: nv.abandon(state, carry),
        lambda: nv.check(state),
        lambda: nv.memory(state),
    ]
    for call in calls:
        with pytest.raises(nv.EngineDeadError, match=FIRST):
            call()
    assert "2 requests" in repr(state)
    _, reply = nv.generate(MODEL, engine(), [1, 2], GREEDY)  # another engine, on a device that works
    assert len(reply.token_ids) == 4


def test_the_llm_raises_it_too():
    llm = nv.LLM(MODEL, num_pages=40, page_size=4)
    llm.state = replace(llm.state, runtime=Runtime(llm.state.runtime.lease, FlakyExecutor(executor_of(llm.state))))
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    executor_of(llm.state).arm(0, False, BROKEN)
    with pytest.raises(nv.EngineDeadError, match=FIRST):
        llm.generate([[1], [2]], GREEDY)
    with pytest.raises(nv.EngineDeadError, match=FIRST):
        list(stream)
    with pytest.raises(nv.EngineDeadError, match=FIRST):
        llm.generate([1], GREEDY)


@pytest.mark.parametrize(
    ("error", "dead", "full"),
    [
        (BROKEN, True, False),
        (RuntimeError("CUDA error: device-side assert triggered"), True, False),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), True, False),
        (torch.AcceleratorError("CUDA error: misaligned address"), True, False),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False, False),
        (RuntimeError("CUDA error: invalid configuration argument"), False, False),
        (RuntimeError("CUDA error: out of memory"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False, True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), False, True),
        (torch.OutOfMemoryError("no memory"), False, True),
        (MemoryError(), False, False),
        (ValueError(FIRST), False, False),
        (RuntimeError("device-side assert"), False, False),
    ],
)
def test_which_errors_break_a_device(error: Exception, dead: bool, full: bool):
    assert (fatal(error) is not None, out_of_memory(error)) == (dead, full)
    try:
        try:
            raise error
        except Exception as first:  # the end of a capture that has failed raises an error of its own
            raise RuntimeError("the capture has failed") from first
    except RuntimeError as second:
        assert (fatal(second) is not None, out_of_memory(second)) == (dead, full)


def test_a_block_without_an_engine_raises_what_it_raises():
    with pytest.raises(RuntimeError, match="illegal memory"), watched(None):
        breaks()


def test_an_engine_whose_other_ranks_have_gone_stays_dead():
    """The error comes from an operation that waits for the ranks, in the middle of a call."""
    state = nv.init_state(MODEL, num_pages=16, page_size=4)
    with pytest.raises(nv.EngineDeadError, match="rank 1 has gone"), guarded(state):
        raise nv.EngineDeadError("rank 1 has gone")
    with pytest.raises(nv.EngineDeadError, match="rank 1 has gone"):
        nv.prefill(MODEL, state, [1, 2, 3])
