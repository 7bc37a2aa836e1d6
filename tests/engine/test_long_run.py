"""Many steps of one engine leave nothing behind: pages return, and neither objects nor memory grow, whatever the requests' numbers.

The executor runs nothing, so a step costs the host's time alone. Clients come, are cancelled, are preempted, keep their pages, go on from
chunks, and chunks are forked, cut and released. At each checkpoint the engine is emptied and brought into one known state: then two
checkpoints hold equal numbers of objects, unless something was left behind.
"""

import gc
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import pytest

import nanovllm as nv
from benchmarks.host import Nothing
from nanovllm.chunks.handles import detach
from nanovllm.engine.requests import submit_many
from nanovllm.executor.executor import Drawn
from nanovllm.testing.models import random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
MODEL = random_model(tiny_config(vocab_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=4, intermediate_size=4))
PAGES, PAGE_SIZE = 48, 4
BEYOND, FAR = 2**31, 2**40  # request ids
WHOLE = [i % 7 for i in range(PAGES * PAGE_SIZE)]  # tokens that take every page


class Idle(Nothing):
    """An executor that runs nothing, keeps nothing, and draws tokens of a fixed random order."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.at = np.random.default_rng(0).integers(0, 8, 4096).astype(np.int32), 0

    def decode(self, model: Any, carry: Any, masks: Any = None) -> tuple[Any, Drawn]:
        """Draw a token for each row."""
        self.at = (self.at + 1) % 4000
        return carry, Drawn(token_ids=self.tokens[self.at : self.at + carry])

    def forget(self) -> None:
        """Drop what the base class records."""
        self.prompts.clear()
        self.refreshed = None


class Clients:
    """An engine and the random clients that call it."""

    def __init__(self, seed: int) -> None:
        self.random, self.idle, self.done = Random(seed), Idle(), Counter[str]()
        state = nv.init_state(MODEL, num_pages=PAGES, page_size=PAGE_SIZE, max_num_seqs=12, max_num_batched_tokens=64)
        state.runtime.executor = cast(Any, self.idle)
        self.state = replace(state, next_id=BEYOND - 300)
        self.chunks, self.live, self.kept = list[nv.Chunk](), dict[int, bool](), list[int]()  # live: whether each keeps its pages

    def run(self, steps: int) -> None:
        """Run steps, and now and then let a client act before one."""
        actions = (self.submit, self.submit, self.submit, self.submit, self.cancel, self.prefill, self.fork, self.release)
        while steps:
            if not self.live or not self.random.randrange(8):
                self.random.choice(actions)()
            if self.live:
                self.step()
                steps -= 1

    def step(self) -> None:
        """Run a step. Of the kept requests that have ended, one may keep its pages."""
        self.state, outs = nv.step(MODEL, self.state)
        for out in outs:
            if out.output is not None and self.live.pop(out.request_id):
                self.kept.append(out.request_id)
            self.done["ended"] += out.output is not None
        while len(self.kept) > 1:
            self.detach(self.kept.pop(0))

    def submit(self) -> None:
        """Submit a request for a prompt, or for a chunk and more tokens; one of eight keeps its pages when it ends."""
        if len(self.live) == 24:
            return
        context: list[Any] = self.random.choices(range(3), k=self.random.randint(1, 24))
        if self.chunks and self.random.randrange(2):
            context = [self.random.choice(self.chunks), context]
        params = nv.SamplingParams(temperature=0.0, max_tokens=self.random.choice((1, 5, 20, 60)), ignore_eos=True)
        keep = not self.random.randrange(8)
        self.state, (rid,) = submit_many(MODEL, self.state, [context], [params], keep=keep)
        self.live[rid] = keep

    def cancel(self) -> None:
        """Cancel a request; one that keeps its pages is detached."""
        if self.live:
            rid = self.random.choice([*self.live])
            if self.live.pop(rid):
                return self.detach(rid)
            self.state = nv.cancel(self.state, rid)
            self.done["cancelled"] += 1

    def detach(self, rid: int) -> None:
        """Turn a request that keeps its pages into a chunk, and release it."""
        self.state, chunk = detach(MODEL, self.state, rid)
        self.done["detached"] += 1
        if chunk is not None:
            self.state = nv.release(self.state, chunk)

    def prefill(self) -> None:
        """Make a chunk, if few are held."""
        if len(self.chunks) < 3:
            tokens = self.random.choices(range(3), k=self.random.randint(1, 24))
            try:
                self.state, chunk = nv.prefill(MODEL, self.state, tokens)
            except nv.OutOfPagesError:
                self.done["refused"] += 1
            else:
                self.chunks.append(chunk)

    def fork(self) -> None:
        """Fork a chunk, or cut it, and release the old handle."""
        if self.chunks:
            old = self.chunks.pop(0)
            self.state, new = nv.truncate(self.state, old, self.random.randint(1, len(old))) if len(old) > 8 else nv.fork(self.state, old)
            self.state = nv.release(self.state, old)
            self.chunks.append(new)
            self.done["forked"] += 1

    def release(self) -> None:
        """Release a chunk."""
        if self.chunks:
            self.state = nv.release(self.state, self.chunks.pop(0))

    def empty(self) -> None:
        """Let everything go, and bring the engine into one state: nothing runs, and the index holds `WHOLE`, which has every page."""
        for rid in [*self.live, *self.kept]:
            if self.live.pop(rid, True):
                self.detach(rid)
            else:
                self.state = nv.cancel(self.state, rid)
        self.kept.clear()
        while self.chunks:
            self.release()
        assert self.state.pool.num_available == PAGES
        self.state, chunk = nv.prefill(MODEL, self.state, WHOLE)
        self.state = nv.release(self.state, chunk)
        nv.check(self.state)
        assert not (self.state.chunks or self.state.kept or self.state.sessions or self.state.running or self.state.waiting)
        assert (self.state.pool.num_available, self.state.pool.pages.num_free) == (PAGES, 0)
        self.idle.forget()


def reached(value: Any) -> int:
    """The number of objects that a value refers to, itself counted, without classes, functions and modules."""
    seen, left = set[int](), [value]
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType)):
            seen.add(id(each))
            left += gc.get_referents(each)
    return len(seen)


def resident() -> int:
    """The bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(steps: int, checkpoint: int, blocks: int = 400, room: int = 32 << 20) -> Clients:
    """Run steps. No checkpoint after the second has many more blocks of memory, or bytes, than the second has; the first two warm up.

    Request ids pass 2^31 soon, and 2^40 in the second half. `blocks` and `room`: how many more; torch keeps a few.
    """
    clients, start = Clients(0), (0, 0)
    for place in range(steps // checkpoint):
        if 2 * place == steps // checkpoint:
            clients.state = replace(clients.state, next_id=FAR)
        clients.run(checkpoint)
        clients.empty()
        gc.collect()
        now = sys.getallocatedblocks(), resident()
        start = now if place < 2 else start
        grown = now[0] - start[0], now[1] - start[1]
        assert grown[0] < blocks and grown[1] < room, f"{grown[0]} blocks and {grown[1]} bytes more after {(place + 1) * checkpoint} steps"
        state = clients.state
        count = reached((state.pool, state.waiting, state.running, state.stats, state.loaded, state.chunks, state.kept, state.sessions))
        assert count < 200, f"the state has {count} objects"
    assert clients.state.next_id > FAR
    return clients


def fresh(code: str) -> None:
    """Run code of this file in a process of its own: blocks are counted for a whole process, and other tests may leave threads at work."""
    command = [sys.executable, "-c", f"from tests.engine.test_long_run import run, thousands; {code}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([".", "src"])}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]


def thousands() -> None:
    """Three thousand steps, in which all that clients do happens often."""
    clients = run(3_000, 500)
    for what, count in {"ended": 100, "cancelled": 10, "detached": 10, "forked": 10}.items():
        assert clients.done[what] > count, clients.done
    assert clients.state.stats.preemptions > 3


def test_thousands_of_steps_leave_nothing_behind() -> None:
    fresh("thousands()")


def test_what_is_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    left, step = [], nv.step

    def leaking(model: nv.Model, state: nv.EngineState) -> tuple[nv.EngineState, list[nv.StepOutput]]:
        state, outs = step(model, state)
        left.append(outs)
        return state, outs

    monkeypatch.setattr(nv, "step", leaking)
    with pytest.raises(AssertionError, match="blocks and"):
        run(2_500, 500)


@pytest.mark.long
def test_a_million_steps_leave_nothing_behind() -> None:
    fresh("run(1_000_000, 10_000, blocks=1_000)")
