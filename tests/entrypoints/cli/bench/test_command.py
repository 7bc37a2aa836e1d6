"""The workloads: the engine that they measure is left as it was, and what they count is what ran."""

import runpy
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.cli.bench import stopwatch
from nanovllm.entrypoints.cli.bench.stopwatch import host_time
from nanovllm.testing.models import random_model, tiny_config

MODEL = random_model(tiny_config())
TINY = nv.load_model("tiny", device="cpu")
CHAT_TURNS = runpy.run_path(str(Path(__file__).parents[4] / "benchmarks/chat_turns.py"), run_name="chat_turns")
HOST = runpy.run_path(str(Path(__file__).parents[4] / "benchmarks/host.py"), run_name="host")
TEXT = ("reuse", "anew")


def test_host_time_leaves_the_executor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    state = nv.init_state(MODEL, num_pages=64)
    runtime, executor = state.runtime, state.runtime.executor
    state, figures = host_time(MODEL, state, 2, steps=4)
    assert set(figures) == {"b2_step_us", "b2_host_us", "b2_host_mean_us"}
    assert runtime.executor is executor

    def failing(model: nv.Model, state: nv.EngineState) -> tuple[nv.EngineState, list[nv.StepOutput]]:
        if runtime.executor is not executor:
            raise nv.OutOfPagesError("in the middle")
        return nv.step(model, state)

    monkeypatch.setattr(stopwatch, "step", failing)
    with pytest.raises(nv.OutOfPagesError):
        host_time(MODEL, state, 2, steps=4)
    assert runtime.executor is executor


def test_the_end_of_all_rows_is_in_the_mean_of_host_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which the rows end may be as slow as it likes."""

    def slow_at_the_end(model: nv.Model, state: nv.EngineState) -> tuple[nv.EngineState, list[nv.StepOutput]]:
        after, outs = nv.step(model, state)
        if state.running and not after.running:
            time.sleep(4.2)
        return after, outs

    monkeypatch.setattr(stopwatch, "step", slow_at_the_end)
    _, figures = host_time(MODEL, nv.init_state(MODEL, num_pages=64), 2, steps=20)
    assert figures["b2_host_mean_us"] > 135e3  # a 28th of it
    assert figures["b2_host_us"] < 60e3 and figures["b2_step_us"] < 110e3


@pytest.fixture(scope="module")
def chats() -> dict[str, Any]:
    """Three turns in every way; the context is too short to keep the positions of two thoughts for the third."""
    return CHAT_TURNS["measure"](TINY, 3, max_model_len=200)


@pytest.mark.unhooked  # hundreds of steps, which the hook makes five to nine times as long
def test_a_chat_runs_what_its_turns_add_and_as_text_no_less(chats: dict[str, Any]) -> None:
    assert TINY.tokenizer is not None
    encode = partial(TINY.tokenizer.encode, add_special_tokens=False)
    said = [encode(f"\n<|im_start|>user\n{asked.text}<|im_end|>\n<|im_start|>assistant\n") for asked in CHAT_TURNS["questions"](3)]
    new = [len(said[0]) - 1, *map(len, said[1:])]  # nothing stands before the first
    for way, chat in chats.items():
        assert len(chat.turns) == (2 if way in ("gap", "all") else 3)
        assert way in TEXT or [turn.prompt for turn in chat.turns] == new[: len(chat.turns)]
        assert way == "recompute" or not chat.total("again")
    for turn in chats["recompute"].turns:
        assert turn.again == len(encode(turn.text.split("</think>")[1].strip() + "<|im_end|>"))
    held = [0, *(turn.held for turn in chats["recompute"].turns)]
    assert [turn.prompt for turn in chats["anew"].turns] == [before + count for before, count in zip(held, new, strict=False)]
    for anew, reuse, shift in zip(*(chats[way].turns for way in ("anew", "reuse", "shift")), strict=True):
        assert anew.prompt >= reuse.prompt >= shift.prompt
    assert chats["anew"].total("prompt") > chats["reuse"].total("prompt") > chats["shift"].total("prompt")


@pytest.mark.unhooked  # hundreds of steps, which the hook makes five to nine times as long
def test_the_figures_of_a_chat_add_up(chats: dict[str, Any]) -> None:
    for way, chat in chats.items():
        figures = CHAT_TURNS["figures"](chat, chats["anew"])
        assert figures["prompt_tokens_run"] == sum(figures["prompt"]) + sum(figures["again"])
        assert figures["of_these_again"] == sum(figures["again"])
        assert figures["right"] == figures["replies_as_run_anew"] == figures["turns"] == len(figures["prompt"])
        assert (figures["tokens_held"] > 0) == (figures["pages_held"] > 0) == (way not in TEXT)
    lines = CHAT_TURNS["table"](chats, 3).splitlines()
    assert len({len(line) for line in lines if line}) == 1
    assert [line.count("no room") for line in lines] == [0, 0, 0, 2, *[0] * (len(lines) - 4)]
    again = chats["recompute"]
    assert f" {again.total('prompt')} ({again.total('again')}) " in lines[5]


def seconds(num_pages: int, served: int = 0) -> float:
    """The time that two requests take of this thread in a pool of this size, after others."""
    engine, _ = HOST["engine_of"](num_pages)
    for place in range(0, served, 32):
        engine.generate([[1 + place + i, 5] for i in range(32)], [1] * 32)
    start = time.thread_time()
    engine.generate([[3] * 40, [4] * 40], [100, 90])
    return time.thread_time() - start


@pytest.mark.parametrize(("small", "large"), [((64,), (2_000_000,)), ((4096,), (4096, 320))], ids=["pool", "served"])
def test_host_time_grows_neither_with_the_pool_nor_with_what_was_served(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    assert min(seconds(*large) for _ in range(3)) < 3 * min(seconds(*small) for _ in range(3))


def test_the_figures_of_the_host() -> None:
    figures = HOST["shared_prompt"](1, requests=2, prefix=64, own=3, count=4) | HOST["decode_steps"](1, (1, 2)) | HOST["offline"](1, 2)
    figures |= HOST["cached"](1, prefix=64) | HOST["ends"](1, rows=2, prompt=8, reply=20)
    figures |= HOST["evicting"](1, rows=2, length=16, prompt=64) | HOST["taking_pages"](1, rows=2, longest=8, reply=100)
    assert all(value > 0 for value in figures.values())
    assert figures["offline_steps"] > 100
