"""How an engine of several ranks ends: its thread waits for no process, and its graphs are freed unless a call still replays them."""

import gc
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest

from nanovllm.entrypoints.ranks import followers as followers_module
from nanovllm.entrypoints.ranks.followers import Followers
from nanovllm.entrypoints.ranks.leader import freeing
from nanovllm.executor.graph_executor import GraphExecutor
from tests.entrypoints.ranks.engines import dies, pids_of, ranks_of, started


class Plain:
    """An executor without graphs."""


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


@pytest.mark.unhooked
@pytest.mark.parametrize("killed", [False, True])
def test_a_closed_engine_frees_its_graphs_once_no_call_runs(killed: bool) -> None:
    freed = list[tuple[bool, bool]]()
    with started("joined", grouped=True) as llm:
        ranks, lease = ranks_of(llm), llm.state.runtime.lease
        ranks.free = lambda: freed.append((lease.dead is not None, lease.taken))
        if killed:
            os.kill(pids_of(llm)[0], signal.SIGKILL)
            with dies("was ended by SIGKILL"):
                while True:
                    llm.generate("Hello")
            assert not freed
            llm.close()
        else:
            lease.take(lease.epoch)
            threading.Timer(0.5, lease.give_back).start()
            llm.close()
        llm.close()
    assert freed == [(True, False)]


@pytest.mark.unhooked
def test_a_call_that_does_not_end_keeps_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers_module, "GONE", 0.3)
    freed = list[bool]()
    with started() as llm:
        ranks_of(llm).free = lambda: freed.append(True)
        llm.state.runtime.lease.take(llm.state.epoch)
        began = time.monotonic()
        llm.close()
    assert not freed and time.monotonic() - began < 30


@pytest.mark.usefixtures("untyped")
def test_what_frees_graphs_keeps_no_executor() -> None:
    calls = list[str]()

    class Graphs(GraphExecutor):
        def __init__(self) -> None:
            pass

        def free(self) -> None:
            calls.append("freed")

    executor: Any = Graphs()
    free = freeing(executor)
    free()
    del executor
    gc.collect()
    free()
    assert calls == ["freed"]
    plain: Any = Plain()
    freeing(plain)()
