"""A rank that dies, stops, fails or differs ends its engine with one typed error within seconds, and a new engine is whole."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.cli.main import main as command_line
from tests.entrypoints.ranks.engines import LIMITS, alive, dies, pids_of, started

pytestmark = pytest.mark.unhooked
GREEDY = nv.SamplingParams(temperature=0, max_tokens=12)
LONG = nv.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SILENT = 6.0  # seconds: a rank that runs is not silent for so long, also on a busy machine


def whole(llm: nv.LLM) -> None:
    """The engine serves a request."""
    assert llm.generate("Hello", GREEDY)[0].text == "! How can I help you?"


def dead(llm: nv.LLM) -> None:
    """Every later call says so, those that are made here alone too."""
    for call in (lambda: nv.submit(llm.model, llm.state, "Hello"), lambda: nv.memory(llm.state), lambda: llm.generate("Hello")):
        with pytest.raises(nv.EngineDeadError, match="make a new engine"):
            call()


def test_a_rank_is_killed_while_idle() -> None:
    with started(size=4) as llm:
        whole(llm)
        os.kill(pids_of(llm)[0], signal.SIGKILL)
        with dies(r"rank 1 \(process \d+\) was ended by SIGKILL") as begun:
            begun.append(time.monotonic())
            while True:
                llm.generate("Hello", GREEDY)
        dead(llm)


def test_a_rank_is_killed_in_a_step() -> None:
    with started("joined", grouped=True, compared=64) as llm:
        whole(llm)
        (pid,) = pids_of(llm)
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with dies("rank 1 .* was ended by SIGKILL"):
            while True:
                llm.generate(["Once upon a time", "Hello"], LONG)
        killer.join()
        dead(llm)


def test_a_rank_is_stopped() -> None:
    with started("joined", grouped=True, rank_timeout=SILENT) as llm:
        whole(llm)
        (pid,) = pids_of(llm)
        os.kill(pid, signal.SIGSTOP)
        with dies("rank 1 .* does not answer for 6 seconds"):
            llm.generate("Hello", LONG)
        dead(llm)


def test_a_rank_is_stopped_while_idle() -> None:
    with started(rank_timeout=SILENT) as llm:
        os.kill(pids_of(llm)[0], signal.SIGSTOP)
        stopped = time.monotonic()
        while llm.state.runtime.lease.dead is None and time.monotonic() < stopped + 60:
            time.sleep(0.05)
        with dies("rank 1 .* does not answer for 6 seconds"):
            nv.memory(llm.state)


def test_a_slow_rank_is_waited_for_and_one_that_is_stuck_is_not() -> None:
    with started("slow_then_stuck", grouped=True, rank_timeout=SILENT) as llm:
        assert len(llm.generate("Hello", nv.SamplingParams(temperature=0, max_tokens=3))[0].token_ids) == 3
        with dies(r"rank 1 \(process \d+\) does not answer"):
            llm.generate("Hello", LONG)


@pytest.mark.parametrize(("hook", "rank"), [("short_of_memory", 1), ("leader_short", 0)])
def test_a_device_fails_on_one_rank(hook: str, rank: int) -> None:
    with started(hook, grouped=True, compared=64) as llm:
        with dies(f"call 4 failed on rank {rank}.*: OutOfPagesError: the device ran out of memory"):
            llm.generate("Hello", LONG)
        dead(llm)


def test_ranks_that_differ_are_found() -> None:
    with started("other_token", compared=4, whole=False) as llm:
        with dies("the ranks differ after call .*rank 0: state .*, rank 1: state"):
            llm.generate("Hello", LONG)
        dead(llm)


@pytest.mark.parametrize(
    ("hook", "kind", "message"),
    [
        ("exits", nv.EngineDeadError, r"(?s)rank 1 .* ended with exit code 7.*what the library said at last"),
        ("refuses", nv.InvalidRequestError, "rank 1: there is no cuda:1"),
        ("other_state", nv.EngineDeadError, "the ranks have made different engines"),
    ],
)
def test_ranks_that_cannot_start(hook: str, kind: type[nv.NanoVLLMError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught, started(hook, grouped=hook == "refuses"):
        pass
    assert type(caught.value) is kind


def test_a_folder_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(nv.CheckpointError):
        nv.LLM("./missing", device="cpu", tensor_parallel_size=2)


PROGRAM = f"""
import sys, time
import nanovllm as nv
llm = nv.LLM("tiny", **{LIMITS}, tensor_parallel_size=2)
print(llm.state.runtime.mirror._followers.all[0].process.pid, flush=True)
sys.stdin.readline()
"""


def test_other_ranks_end_with_the_program() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    starts = [subprocess.Popen([sys.executable, "-c", PROGRAM], **pipes) for _ in range(3)]
    pids = [int(program.stdout.readline()) for program in starts if program.stdout is not None]
    assert all(map(alive, pids))
    killed, interrupted, returns = starts
    killed.kill()
    interrupted.send_signal(signal.SIGINT)
    returns.communicate("\n", 60)
    until = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    assert [program.communicate()[0] for program in starts] == ["", "", ""]
    assert returns.returncode == 0


def test_an_engine_of_tasks_tells_all_of_them() -> None:
    async def main() -> None:
        async with nv.AsyncLLM("tiny", **LIMITS, tensor_parallel_size=2) as llm:
            (pid,) = pids_of(llm)
            assert (await llm.generate("Hello", GREEDY))[0].text == "! How can I help you?"
            tasks = [asyncio.create_task(llm.generate(text, LONG)) for text in ("Hello", "The cat")]
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            begun = time.monotonic()
            for told in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(told, nv.EngineDeadError) and "rank 1" in str(told)
            assert time.monotonic() - begun < 60 and isinstance(llm.refusal, nv.EngineDeadError)
        assert not alive(pid)

    asyncio.run(main())


def test_a_command_runs_on_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "Once upon a time", "--device", "cpu", "--temperature", "0", "--max-tokens", "5", "--num-pages", "16"]
    assert command_line([*asked, "--tensor-parallel-size", "2"]) == 0
    assert capsys.readouterr().out == ", a boy named Jonas\n"
