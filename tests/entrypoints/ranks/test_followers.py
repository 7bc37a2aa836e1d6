"""How an engine of several ranks ends: its thread waits for no process, and its graphs are freed unless a call still replays them."""

import gc
import os
import signal
import socket
import threading
import time
import weakref
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.ranks import followers as followers_module
from nanovllm.entrypoints.ranks import leader
from nanovllm.entrypoints.ranks.followers import Followers
from nanovllm.executor.eager import EagerExecutor
from nanovllm.executor.executor import executor_of
from tests.entrypoints.ranks.engines import LIMITS, dies, pids_of, ranks_of, started


class Gone:
    """A rank that has closed its connection, and whose process would end late."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        theirs.close()
        self.waits = 0

    def ended(self) -> str:
        self.waits += 1
        return "it is gone"


@pytest.mark.parametrize(("dead", "closing", "waits"), [(None, False, 1), ("another rank is gone", False, 0), (None, True, 0)])
@pytest.mark.usefixtures("untyped")
def test_only_the_first_rank_that_is_gone_is_waited_for(dead: str | None, closing: bool, waits: int) -> None:
    followers: Any = Followers.__new__(Followers)
    followers.dead, followers.closing, causes = dead, closing, list[str]()
    followers.fail = causes.append
    one = Gone()
    with one.link:
        followers._read(one)
    assert one.waits == len(causes) == waits


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine that ends does, in order."""
    done = list[str]()

    def noted(name: str, real: Any) -> Any:
        def call(*given: Any) -> Any:
            done.append(name)
            return real(*given)

        return call

    for name in ("left", "given_up"):
        monkeypatch.setattr(followers_module, name, noted(name, getattr(followers_module, name)))
    return done


@pytest.mark.unhooked
@pytest.mark.parametrize("killed", [False, True])
def test_a_closed_engine_frees_its_graphs_once_no_call_runs(ends: list[str], killed: bool) -> None:
    with started("joined", grouped=True) as llm:
        ranks, lease = ranks_of(llm), llm.state.runtime.lease
        ranks.free = lambda: ends.append("freed" if lease.dead is not None and lease.holder is None else "freed too early")
        if killed:
            os.kill(pids_of(llm)[0], signal.SIGKILL)
            with dies("was ended by SIGKILL"):
                while True:
                    llm.generate("Hello")
        else:
            lease.take(lease.epoch)
            lease._holder = -1  # another thread
            threading.Timer(0.5, lease.give_back).start()
        llm.close()
        llm.close()
    assert ends == ["left"] * killed + ["freed", "left", "given_up"]


@pytest.mark.unhooked
@pytest.mark.parametrize("own", [False, True])
def test_a_call_that_does_not_end_keeps_the_graphs(ends: list[str], monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Its waits for other ranks end. A call of this thread, in which a signal came, is not waited for."""
    monkeypatch.setattr(followers_module, "GONE", 60.0 if own else 0.3)
    with started("joined", grouped=True) as llm:
        ranks_of(llm).free, lease = (lambda: ends.append("freed")), llm.state.runtime.lease
        lease.take(lease.epoch)
        if not own:
            lease._holder = -1
        began = time.monotonic()
        llm.close()
    assert ends == ["left"] and time.monotonic() - began < 30


@pytest.mark.unhooked
def test_graphs_that_cannot_be_freed_leave_no_process() -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with started() as llm:
        ranks_of(llm).free = broken
        llm.close()  # afterwards no process is left, as `started` finds


@pytest.mark.unhooked
@pytest.mark.parametrize("cycle", [False, True])
def test_an_engine_that_is_dropped_frees_its_graphs(monkeypatch: pytest.MonkeyPatch, cycle: bool) -> None:
    calls = list[int]()
    monkeypatch.setattr(leader, "GraphExecutor", EagerExecutor)
    monkeypatch.setattr(EagerExecutor, "free", lambda self: calls.append(id(self)), raising=False)
    holder: list[Any] = [nv.LLM("tiny", **LIMITS, tensor_parallel_size=2)]
    if cycle:
        holder.append(holder)
    executor = executor_of(holder[0].state)
    known, gone = id(executor), weakref.ref(executor)
    del holder, executor
    gc.collect()
    assert calls == [known]
    gc.collect()
    assert gone() is None
