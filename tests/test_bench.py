"""The workloads: the engine that they measure is left as it was."""

import pytest

import nanovllm as nv
from nanovllm import bench
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config())


def test_host_time_leaves_the_executor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    state = nv.init_state(MODEL, num_pages=64)
    runtime, executor = state.runtime, state.runtime.executor
    state, figures = bench.host_time(MODEL, state, 2, steps=4)
    assert set(figures) == {"b2_step_us", "b2_host_us"}
    assert runtime.executor is executor

    def failing(model: nv.Model, state: nv.EngineState) -> None:
        raise nv.OutOfPagesError("in the middle")

    monkeypatch.setattr(bench, "step", failing)
    with pytest.raises(nv.OutOfPagesError):
        bench.host_time(MODEL, state, 2, steps=4)
    assert runtime.executor is executor
