"""Engines of two processes for tests: a look at their processes, and that these are gone afterwards."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints import llm as llm_module
from nanovllm.entrypoints.ranks.settings import settings_of
from nanovllm.executor.executor import runtime_of

LIMITS = {"device": "cpu", "num_pages": 48, "page_size": 8, "max_num_seqs": 4, "max_model_len": 256}
HOOKS = "tests.entrypoints.ranks.hooks"


@contextmanager
def started(
    hook: str = "", *, grouped: bool = False, rank_timeout: float = 60.0, size: int = 2, limits: dict[str, Any] = LIMITS, **changes: Any
) -> Iterator[nv.LLM]:
    """An engine of several ranks that compares whole digests after every call. None of its processes is left."""
    more = {"compared": 1, "whole": True, "grouped": grouped, "hook": f"{HOOKS}:{hook}" if hook else None, **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "settings_of", lambda *args: replace(settings_of(*args), **more))
        llm = nv.LLM("tiny", **limits, tensor_parallel_size=size, rank_timeout=rank_timeout)
    pids = pids_of(llm)
    try:
        yield llm
    finally:
        llm.close()
        assert not any(map(alive, pids))


def pids_of(llm: nv.LLM | nv.AsyncLLM) -> list[int]:
    """The processes of the other ranks."""
    return [one.process.pid for one in ranks_of(llm).all]


def ranks_of(llm: nv.LLM | nv.AsyncLLM) -> Any:
    """What rank 0 knows of the others."""
    mirror: Any = runtime_of(llm.state).mirror
    return mirror._followers


def alive(pid: int) -> bool:
    """Whether a process is there, also one that has ended and that nobody has asked for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def dies(match: str, within: float = 60.0) -> Iterator[list[float]]:
    """A block that must raise `EngineDeadError` within some seconds of its last entry in the yielded list, or of its begin."""
    begun = [time.monotonic()]
    with pytest.raises(nv.EngineDeadError, match=match) as caught:
        yield begun
    took = time.monotonic() - begun[-1]
    print(f"[{took:.2f} s] {caught.value}")
    assert took < within
