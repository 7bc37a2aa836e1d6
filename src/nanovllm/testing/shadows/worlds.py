"""What the engine's machines run against: an engine, and an oracle that knows what its replies and its KV memory ought to be."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from nanovllm.chunks.prefill import plain_request
from nanovllm.engine.init_state import init_state
from nanovllm.engine.step import step
from nanovllm.executor.batch import prefill_batch, to_device
from nanovllm.executor.cascade_policy import Cascades, cascade_policy
from nanovllm.executor.decode import DecodeCarry, DecodeOutput, decode_step
from nanovllm.executor.eager import EagerExecutor
from nanovllm.executor.executor import Drawn, Executor, Runtime, executor_of
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState, init_kv, pages_for
from nanovllm.state.lease import Lease
from nanovllm.state.request import Request, RequestOutput, Sequence
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import Frames
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.chunks import Cells, Oracle
from nanovllm.testing.shadows.memory import expect
from nanovllm.testing.shadows.reference import KeysValues, Reference
from nanovllm.testing.shadows.run_ahead_executor import AheadExecutor
from nanovllm.testing.shadows.symbolic import folded, logits_of, next_token, number_of, numbers, read, symbolic_forward
from nanovllm.testing.strategies import Limits

T = TypeVar("T")


class PlantedError(Exception):
    """Raised by `FlakyExecutor` on purpose."""


@dataclass(slots=True)
class FlakyExecutor:
    """An executor that does what another does, until it is told to fail.

    `countdown` is the number of device calls that still succeed (None: all do); `late`: the failing call does its work, then raises.
    """

    inner: Executor
    countdown: int | None = None
    late: bool = False

    def arm(self, countdown: int, late: bool) -> None:
        """Let one call fail after `countdown` calls."""
        self.countdown, self.late = countdown, late

    def disarm(self) -> None:
        """Fail no more."""
        self.countdown = None

    def prefill(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], **options: Any) -> tuple[Drawn | None, KVState]:
        """See `Executor`."""
        return self._run(lambda: self.inner.prefill(model, kv, rows, **options))

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self._run(lambda: self.inner.load(model, kv, rows, **options))

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self._run(lambda: self.inner.refresh(model, carry, rows, **options))

    def narrow(self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self._run(lambda: self.inner.narrow(model, carry, keep, rows, **options))

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """See `Executor`."""
        return self._run(lambda: self.inner.decode(model, carry))

    def take_discarded_count(self) -> int:
        """See `Executor`."""
        return self.inner.take_discarded_count()

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, **options: Any) -> DecodeCarry:
        """See `Executor`."""
        return self._run(lambda: self.inner.begin(model, kv, rows, ticket, **options))

    def end(self, ticket: int) -> None:
        """See `Executor`."""
        self.inner.end(ticket)

    def _run(self, call: Callable[[], T]) -> T:
        if self.countdown is None:
            return call()
        self.countdown -= 1
        if self.countdown >= 0:
            return call()
        self.countdown = None
        if self.late:
            call()
        raise PlantedError("planted")


def _tested(executor: Executor, limits: Limits) -> FlakyExecutor:
    return FlakyExecutor(AheadExecutor.over(executor, limits.page_size) if limits.ahead else executor)


class World(Protocol):
    """An engine and its oracle. `greedy_only`: drawn replies of this world cannot be foretold."""

    greedy_only: bool

    @property
    def model(self) -> Model:
        """The model that runs."""
        ...

    def init_state(self, limits: Limits) -> EngineState:
        """A fresh engine."""
        ...

    def decode(self, carry: DecodeCarry) -> tuple[DecodeCarry, DecodeOutput]:
        """One `decode_step` on a carry from `begin`."""
        ...

    def require_reply(self, prompt: Seq[int], drawn: Seq[int], request: Request, checked: int = 0) -> None:
        """Raise `ShadowMismatchError` unless a request alone in a fresh engine draws these tokens; the first `checked` are right."""
        ...

    def require_kv(self, kv: KVState, pages: Seq[int], tokens: Seq[int], frames: Frames | None = None, retired: int = 0) -> None:
        """Raise `ShadowMismatchError` unless the pages hold what a prefill of `tokens` writes, and so do their frames, which those from
        place `retired` on must have."""
        ...


class ChunkWorld(World, Oracle, Protocol):
    """An engine and an oracle that knows approximate KV too."""


class SymbolicWorld:
    """The symbolic model (see `symbolic`): every wrong slot is seen, exactly, and steps take a millisecond."""

    greedy_only = False

    def __init__(self, vocab_size: int = 2, windows: tuple[int, ...] = ()):
        """`windows` are those of two layers."""
        config = tiny_config(
            vocab_size=vocab_size, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=2,
            windows=windows,
        )  # fmt: skip
        model = random_model(config)
        self.model = replace(model, params=replace(model.params, inv_freq=torch.zeros_like(model.params.inv_freq)))

    def init_state(self, limits: Limits) -> EngineState:
        """See `World`."""
        state = init_state(self.model, **limits.options())
        config = limits.config()
        cascades = Cascades(self.model, config, cascade_policy(self.model, config, always=True)) if limits.cascade else None
        executor = EagerExecutor(limits.page_size, limits.num_pages, symbolic_forward, cascades)
        return replace(state, runtime=Runtime(Lease(state.runtime.lease.model), _tested(executor, limits)))

    def decode(self, carry: DecodeCarry) -> tuple[DecodeCarry, DecodeOutput]:
        """See `World`."""
        return decode_step(self.model.params, carry, self.model.config, forward=symbolic_forward)

    def require_reply(self, prompt: Seq[int], drawn: Seq[int], request: Request, checked: int = 0) -> None:
        """See `World`."""
        vocab_size = self.model.config.vocab_size
        for at in range(checked, len(drawn)):
            expected = next_token([*prompt, *drawn[:at]], len(prompt), request.sampling, request.seed, vocab_size, self.model.config)
            expect(drawn[at] == expected, f"prompt {list(prompt)} drew {list(drawn)}; alone it draws {expected} in place {at}")

    def require_kv(self, kv: KVState, pages: Seq[int], tokens: Seq[int], frames: Frames | None = None, retired: int = 0) -> None:
        """See `World`."""
        wanted, size = numbers(tokens, self.model.config), kv.pools[0].shape[4]
        for pool, table in zip(kv.pools, _tables(pages, frames, retired), strict=True):
            memory = pool.numpy()
            for at, number in enumerate(wanted):
                place = table[at // size]
                held = number if place < 0 else read(memory, place, at % size)
                expect(held == number, f"slot {at} of {list(tokens)} in place {place} holds {held}, not {number}", invariant=4)

    def kv_of(self, before: Cells, token: int, position: int) -> int:
        """See `Oracle`."""
        return number_of(folded([cell.kv for cell in before], self.model.config), token, position - len(before))

    def logits_after(self, cells: Cells) -> list[float]:
        """See `Oracle`."""
        return logits_of(cells[-1].kv, self.model.config.vocab_size)

    def require_cells(self, kv: KVState, pages: Seq[int], cells: Cells, frames: Frames | None = None, retired: int = 0) -> None:
        """See `Oracle`."""
        held, there = _slots(kv, _tables(pages, frames, retired), len(cells), self.model.config.places)
        wanted = np.array([cell.kv for cell in cells])
        wrong = ((held.reshape(*held.shape[:2], -1) != wanted[:, None, None]) & there[:, :, None]).any((1, 2))
        if wrong.any():
            at = int(wrong.argmax())
            expect(False, f"slot {at} of pages {list(pages)} holds {np.unique(held[at])}, not {wanted[at]}")

    def require_logits(self, found: Seq[float], cells: Cells, *, exact: bool) -> None:
        """See `Oracle`. Numbers of exact cells are those of a full prefill."""
        wanted = self.logits_after(cells)
        expect(list(found) == wanted, f"the logits after {[cell.token for cell in cells]} are {found}, not {wanted}")

    def likeliest(self, token: int, logits: Seq[float]) -> bool:
        """See `Oracle`."""
        return logits[token] == max(logits)


class ModelWorld:
    """A real model: greedy replies within a margin of the logits, KV within a tolerance, of one uncached forward over all tokens."""

    greedy_only = True

    def __init__(self, model: Model | None = None, tolerance: float = 1e-3):
        config = tiny_config(vocab_size=8, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
        self.model = random_model(config) if model is None else model
        self.tolerance = tolerance

    def init_state(self, limits: Limits) -> EngineState:
        """See `World`."""
        state = init_state(self.model, **limits.options())
        return replace(state, runtime=Runtime(state.runtime.lease, _tested(executor_of(state), limits)))

    def decode(self, carry: DecodeCarry) -> tuple[DecodeCarry, DecodeOutput]:
        """See `World`."""
        return decode_step(self.model.params, carry, self.model.config)

    def require_reply(self, prompt: Seq[int], drawn: Seq[int], request: Request, checked: int = 0) -> None:
        """See `World`."""
        if request.sampling.temperature or len(drawn) == checked:
            return
        logits, _ = self.uncached([*prompt, *drawn[:-1]])
        last = logits[len(prompt) - 1 :]
        chosen = last.gather(1, torch.tensor(drawn)[:, None])[:, 0]
        short = (last.amax(1) - chosen).amax().item()
        expect(short <= self.tolerance, f"prompt {list(prompt)} drew {list(drawn)}, in one place {short} below the largest logit")

    def require_kv(self, kv: KVState, pages: Seq[int], tokens: Seq[int], frames: Frames | None = None, retired: int = 0) -> None:
        """See `World`."""
        if not tokens:
            return
        _, fresh = self.uncached(tokens)
        for held, expected, places in zip(kv.pools, fresh.pools, _tables(pages, frames, retired), strict=True):
            size, count = held.shape[4], len(tokens)
            table = torch.tensor(places[: pages_for(count, size)])
            found = held[:, table].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :count]
            wanted = expected[:, 0, :, :, :count]
            there = (table >= 0).repeat_interleave(size)[:count, None]  # H D behind it
            error = ((found - wanted) * there).abs().amax().item()
            expect(error <= self.tolerance, f"the KV of {list(tokens)} in {places} is off by {error}", invariant=4)

    @cached_property
    def reference(self) -> Reference:
        """The same weights in numpy."""
        return Reference(self.model)

    def kv_of(self, before: Cells, token: int, position: int) -> KeysValues:
        """See `Oracle`."""
        return self.reference.run([(cell.position, cell.kv) for cell in before], token, position)[0]

    def logits_after(self, cells: Cells) -> list[float]:
        """See `Oracle`."""
        *before, last = cells
        found = self.reference.run([(cell.position, cell.kv) for cell in before], last.token, last.position, held=last.kv)
        return found[1].tolist()

    def require_cells(self, kv: KVState, pages: Seq[int], cells: Cells, frames: Frames | None = None, retired: int = 0) -> None:
        """See `Oracle`."""
        held, there = _slots(kv, _tables(pages, frames, retired), len(cells), self.model.config.places)
        wanted = np.stack([cell.kv for cell in cells])  # n L 2 K D
        wanted[:, :, 0] = self.reference.rotate(wanted[:, :, 0], np.array([cell.position for cell in cells]))
        error = (np.abs(held - wanted).max((2, 3, 4)) * there).max(1)
        if error.max() > self.tolerance:
            expect(False, f"slots of {[cell.token for cell in cells]} in pages {list(pages)} are off by {error.tolist()}")

    def require_logits(self, found: Seq[float], cells: Cells, *, exact: bool) -> None:
        """See `Oracle`."""
        tokens, wanted = [cell.token for cell in cells], [self.logits_after(cells)]
        if exact:
            wanted.append(self.uncached(tokens)[0][-1].tolist())
        error = np.abs(np.array(wanted) - np.array(found)).max()
        expect(bool(error <= self.tolerance), f"the logits after {tokens} are off by {error}")

    def likeliest(self, token: int, logits: Seq[float]) -> bool:
        """See `Oracle`."""
        return logits[token] >= max(logits) - self.tolerance

    def uncached(self, tokens: Seq[int]) -> tuple[torch.Tensor, KVState]:
        """Logits `[T, V]` and KV of one whole prefill into memory of its own, one page for all tokens."""
        count = len(tokens)
        kv = init_kv(self.model.config, num_pages=1, page_size=count, dtype=self.model.dtype, device=self.model.device)
        row = Sequence(request=plain_request(count), tokens=IntVector.of(np.array(tokens, np.int32)), pages=IntVector.of([0]))
        batch = to_device(prefill_batch([(row, count)], page_size=count, dummy_page=1, draw=False), self.model.device)
        return self.model.spec.forward(self.model.params, kv, replace(batch, logit_indices=None), self.model.config)


def _tables(pages: Seq[int], frames: Frames | None, retired: int) -> list[list[int]]:
    """Where the pages' KV lies in each pool; -1 for a page that has none there and is not needed."""
    held = list(pages)
    if frames is None:
        return [held]
    of = frames.frame_of.get(np.array(held, np.int32)).tolist()
    lost = [page for page, frame in zip(held[retired:], of[retired:], strict=True) if frame < 0]
    expect(not lost, f"pages {lost} of {held} are needed and have no frames")
    return [of] if frames.alone else [held, of]


def _slots(kv: KVState, tables: Seq[Seq[int]], count: int, places: Seq[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The KV of the first `count` slots, `[count, L, 2, K, D]`, and which of it is there, `[count, L]`; each pool has a table."""
    at, size = np.arange(count), kv.pools[0].shape[4]
    of_pools = [np.array(table)[at // size] for table in tables]
    held = [pool.numpy()[:, table, :, :, at % size] for pool, table in zip(kv.pools, of_pools, strict=True)]  # count L 2 K D
    by_layer = [(held[pool][:, index], of_pools[pool] >= 0) for pool, index in places]
    return np.stack([values for values, _ in by_layer], 1), np.stack([there for _, there in by_layer], 1)


def drain(model: Model, state: EngineState, max_steps: int = 10000) -> tuple[EngineState, dict[int, RequestOutput]]:
    """Step until nothing is left to do; what ended, by request id. Raises `ShadowMismatchError` if that takes more than `max_steps`."""
    ended: dict[int, RequestOutput] = {}
    for _ in range(max_steps):
        if not state.running and not state.waiting:
            return state, ended
        state, outputs = step(model, state)
        ended.update({out.request_id: out.output for out in outputs if out.output is not None})
    expect(False, f"{len(state.running)} requests run and {len(state.waiting)} wait after {max_steps} steps", invariant=6)
    return state, ended
