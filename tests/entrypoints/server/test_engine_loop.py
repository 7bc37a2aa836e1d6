"""The rounds of an engine's loop: requests that come together run together, and options that come again are checked once."""

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.entrypoints.server import engine_loop
from nanovllm.entrypoints.server.engine_loop import EngineLoop
from nanovllm.entrypoints.server.wire import Submit, frame
from tests.entrypoints.server.live import LIMIT, Live


@pytest.fixture
def loop(live: Live) -> Iterator[EngineLoop]:
    """A loop that does not run."""
    with socket.socket(socket.AF_UNIX) as listener:
        made = EngineLoop(live.model, nv.init_state(live.model, num_pages=64), listener)
        yield made
        made.close()


def coming(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch, count: int) -> list[float | None]:
    """Let one of `count` requests come with each look at the sockets, and nothing later. Returns how long each look waits."""
    looks: list[float | None] = []

    def look(seconds: float | None) -> bool:
        looks.append(seconds)
        if len(looks) > count:
            return False
        loop.state, _ = nv.submit(loop.model, loop.state, [5, 6, 7])
        return True

    monkeypatch.setattr(loop, "_look", look)
    look(None)
    return looks


@pytest.mark.parametrize(
    ("together", "count", "num_looks", "num_first"),
    [(1, 5, 1, 1), (3, 5, 3, 3), (3, 3, 3, 3), (5, 3, 4, 3), (2, 1, 2, 1)],
    ids=["it came alone before", "more come", "as many come", "fewer come", "it comes alone"],
)
def test_the_first_request_waits_for_as_many_as_came_before(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch, together: int, count: int, num_looks: int, num_first: int
) -> None:
    loop._together = together
    monkeypatch.setattr(engine_loop, "GATHER_SECONDS", LIMIT)
    looks = coming(loop, monkeypatch, count)
    loop._gather()
    assert looks == [None, *[engine_loop.QUIET_SECONDS] * (num_looks - 1)]
    assert loop._num_first == len(loop.state.waiting) == num_first


def test_the_wait_is_bounded(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop._together = 1000
    monkeypatch.setattr(engine_loop, "GATHER_SECONDS", 0.0)
    assert len(coming(loop, monkeypatch, 1000)) == 1
    loop._gather()
    assert len(loop.state.waiting) == 1


def test_how_many_came_together_is_learnt(live: Live) -> None:
    with Live(live.model) as server:
        for count in (3, 1, 2):
            so_far = server.engine.metrics.generation_tokens
            with socket.socket(socket.AF_UNIX) as front:
                front.connect(str(server.path))
                ids = np.arange(300, 310, dtype=np.int32).tobytes()
                frames = [frame(Submit([i], [[ids]], [{"max_tokens": 50, "ignore_eos": True}], True)) for i in range(count)]
                front.sendall(b"".join(frames))
                server.wait_until_generated(so_far + 50 * count)
                server.wait_until_idle()
            assert server.engine._together == count and server.engine._num_first == 0


def test_requests_that_find_no_place_at_once_are_counted_once(live: Live) -> None:
    with Live(live.model, max_num_seqs=2) as server:
        for _ in range(2):
            body = {"prompt": ["a b", "c d", "e f", "g h"], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            assert server.post("/v1/completions", body).status == 200
            assert server.engine._together == 4


def test_options_that_come_again_are_checked_once(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    one = loop._params({"temperature": 0.5, "max_tokens": 7})
    assert one == nv.SamplingParams(temperature=0.5, max_tokens=7) and loop._params({"temperature": 0.5, "max_tokens": 7}) is one
    assert loop._params({"stop": ["a"], "max_tokens": 7}) == nv.SamplingParams(stop="a", max_tokens=7)
    for seed in range(3 * engine_loop.MOST_KNOWN):
        assert loop._params({"seed": seed}).seed == seed
    assert len(loop._known) <= engine_loop.MOST_KNOWN
    with pytest.raises(nv.InvalidRequestError):
        loop._params({"temperature": -1.0})


def test_chunks_that_have_gone_are_not_remembered(loop: EngineLoop):
    loop._saves.begin(("", "gone", 7))
    loop._saves.end(("", "gone", 7), loop.named, nv.InvalidRequestError("no"))
    loop._saves.begin(("", "gone too", 8))
    assert loop._write_some() and not loop._saves._begun and loop._saves.wait is None


def test_the_loop_does_not_rest_before_all_who_wait_for_chunks_that_have_gone_were_told(live: Live, monkeypatch: pytest.MonkeyPatch):
    told, looks = list[Any](), list[float | None]()
    with socket.socket(socket.AF_UNIX) as listener:
        loop = EngineLoop(live.model, nv.init_state(live.model, num_pages=64), listener)

        def look(seconds: float | None) -> bool:
            looks.append(seconds)
            if seconds is None:
                loop.stop()
            return False

        monkeypatch.setattr(loop, "_look", look)
        loop._reads.wait(7, told.append)
        loop._reads.wait(8, told.append)
        loop.run()
    assert told == [None, None] and looks == [0.0, 0.0, None]
