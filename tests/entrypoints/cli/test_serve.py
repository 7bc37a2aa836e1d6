"""How `nanovllm serve` starts."""

import os
import sys
from typing import Any

import pytest
import torch

from nanovllm.entrypoints.cli.serve import WAITING, let_threads_sleep


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that this one would become, on a machine of several cores."""
    made = list[Any]()
    monkeypatch.setattr(os, "execv", lambda *program: made.append((*program, os.environ.get(WAITING[0]))))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for name in WAITING:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return made


def test_threads_of_a_server_sleep_while_they_wait(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "nanovllm", "serve", "--port", "0"])
    let_threads_sleep()
    assert started == [(sys.executable, [sys.executable, "-X", "dev", "-m", "nanovllm", "serve", "--port", "0"], "passive")]


@pytest.mark.parametrize("name", WAITING)
def test_an_environment_that_says_how_threads_wait_is_kept(name: str, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "active")
    let_threads_sleep()
    assert not started


def test_one_thread_waits_for_none(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    let_threads_sleep()
    assert not started
