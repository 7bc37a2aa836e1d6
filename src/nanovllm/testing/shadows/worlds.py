"""Worlds: an engine under test together with an oracle that computes the correct replies and the correct KV."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from nanovllm.chunks.prefill import plain_request
from nanovllm.engine.init_state import init_state
from nanovllm.engine.step import step
from nanovllm.executor.batch import prefill_batch, to_device
from nanovllm.executor.cascade_policy import Cascades, cascade_policy
from nanovllm.executor.decode import decode_step
from nanovllm.executor.decode_carry import DecodeCarry, DecodeOutput
from nanovllm.executor.eager import EagerExecutor
from nanovllm.executor.executor import Drawn, Executor, Masks, Runtime, executor_of
from nanovllm.executor.scoring import Scored
from nanovllm.models.model import Model
from nanovllm.ops.kv_cache.fp8 import FP8
from nanovllm.ops.kv_cache.fp8 import numbers as numbers_in
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
from nanovllm.testing.shadows.symbolic import folded, logits_of, memory_of, next_token, number_of, numbers, read, symbolic_forward
from nanovllm.testing.strategies import Limits

T = TypeVar("T")


class PlantedError(Exception):
    """`FlakyExecutor` raises this on purpose."""


@dataclass(slots=True)
class FlakyExecutor:
    """An executor that passes all calls to another executor until it is told to fail.

    `countdown` is the number of device calls that still succeed; None means all. Then `times` calls raise `error`. With `late`, a failing
    call does its work and then raises. `num_failed` counts the calls that have raised.
    """

    inner: Executor
    countdown: int | None = None
    late: bool = False
    error: Exception = field(default_factory=lambda: PlantedError("planted"))
    times: int = 1
    num_failed: int = 0

    def arm(self, countdown: int, late: bool, error: Exception | None = None, times: int = 1) -> None:
        """Let `times` device calls fail, after `countdown` more calls have succeeded. None: by a `PlantedError`."""
        self.countdown, self.late, self.times = countdown, late, times
        self.error = PlantedError("planted") if error is None else error

    def disarm(self) -> None:
        """Let all device calls succeed again."""
        self.countdown = None

    def prefill(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], **options: Any) -> tuple[Drawn | None, KVState]:
        """Run prompt tokens of the rows, or raise `PlantedError`."""
        return self._run(lambda: self.inner.prefill(model, kv, rows, **options))

    def score(self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], asked: Any, **options: Any) -> tuple[Scored, KVState]:
        """Run prompt tokens and score the tokens after them, or raise `PlantedError`."""
        return self._run(lambda: self.inner.score(model, kv, rows, asked, **options))

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], **options: Any) -> DecodeCarry:
        """Make a decode carry for a new batch of rows, or raise `PlantedError`."""
        return self._run(lambda: self.inner.load(model, kv, rows, **options))

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], **options: Any) -> DecodeCarry:
        """Update a carry after some of its rows got other pages, or raise `PlantedError`."""
        return self._run(lambda: self.inner.refresh(model, carry, rows, **options))

    def narrow(self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], **options: Any) -> DecodeCarry:
        """Keep only some rows of a carry, or raise `PlantedError`."""
        return self._run(lambda: self.inner.narrow(model, carry, keep, rows, **options))

    def decode(self, model: Model, carry: DecodeCarry, masks: Masks | None = None) -> tuple[DecodeCarry, Drawn]:
        """Run one decode step, or raise `PlantedError`."""
        return self._run(lambda: self.inner.decode(model, carry, masks))

    def take_discarded_count(self) -> int:
        """The number of tokens that steps ahead ran in vain since the last call; counting starts again. Never fails."""
        return self.inner.take_discarded_count()

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, **options: Any) -> DecodeCarry:
        """Make a carry for a decode session, or raise `PlantedError`."""
        return self._run(lambda: self.inner.begin(model, kv, rows, ticket, **options))

    def end(self, ticket: int) -> None:
        """Let go of the resources of a decode session. This call never fails."""
        self.inner.end(ticket)

    def captured(self, function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> Callable[..., Any]:
        """The function, whose calls count and may raise `PlantedError`."""
        run = self.inner.captured(function, carry, *inputs)
        return lambda *arguments: self._run(lambda: run(*arguments))

    def _run(self, call: Callable[[], T]) -> T:
        if self.countdown is None:
            return call()
        if self.countdown:
            self.countdown -= 1
            return call()
        self.times, self.num_failed = self.times - 1, self.num_failed + 1
        if not self.times:
            self.countdown = None
        if self.late:
            call()
        raise self.error


def _tested(executor: Executor, limits: Limits) -> FlakyExecutor:
    return FlakyExecutor(AheadExecutor.over(executor, limits.page_size) if limits.ahead else executor)


class World(Protocol):
    """An engine under test and its oracle, as `EngineMachine` and its subclasses need them.

    `SymbolicWorld` and `ModelWorld` implement this protocol. Implement it to test another engine.

    Attributes:
        greedy_only: Whether the oracle can only check greedy replies, because it cannot compute the sampled tokens of other replies.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import EngineMachine, SymbolicWorld
        >>> class Logged(SymbolicWorld):
        ...     def init_state(self, limits):
        ...         assert limits.num_pages >= 1
        ...         return super().init_state(limits)  # start your engine here
        >>> class MyEngine(EngineMachine):
        ...     world = Logged()
        >>> run_state_machine_as_test(MyEngine, settings=settings(max_examples=2, stateful_step_count=3, deadline=None))
    """

    greedy_only: bool

    @property
    def model(self) -> Model:
        """The model that runs."""
        ...

    def init_state(self, limits: Limits) -> EngineState:
        """Start a fresh engine.

        Args:
            limits: The arguments of `nanovllm.init_state`, and whether decode steps run ahead.

        Returns:
            The engine's state. Its executor is a `FlakyExecutor`, so that machines can let device calls fail.
        """
        ...

    def decode(self, carry: DecodeCarry) -> tuple[DecodeCarry, DecodeOutput]:
        """Donates `carry`: run one decode step.

        Args:
            carry: A carry from `nanovllm.begin` or from this method.

        Returns:
            The next carry, and the step's output.

        Raises:
            DonatedStateError: `carry` was used before.
        """
        ...

    def require_reply(self, prompt: Seq[int], drawn: Seq[int], request: Request, checked: int = 0) -> None:
        """Check that a request samples the tokens that it would sample alone in a fresh engine.

        Args:
            prompt: Token ids of the prompt.
            drawn: Token ids of the reply.
            request: The request, with its sampling parameters and seed.
            checked: Number of first tokens of the reply that were checked before.

        Raises:
            ShadowMismatchError: A token differs.
        """
        ...

    def require_kv(self, kv: KVState, pages: Seq[int], tokens: Seq[int], frames: Frames | None = None, retired: int = 0) -> None:
        """Check that pages, and their frames, contain the KV that a prefill of `tokens` writes.

        Args:
            kv: The KV memory.
            pages: Page numbers, in order.
            tokens: Token ids whose KV the pages contain.
            frames: The frames (KV memory of sliding-window pages), if the model has sliding windows.
            retired: Number of first pages that need no frames.

        Raises:
            ShadowMismatchError: The KV differs, or a page lacks a frame that it needs.
        """
        ...


class ChunkWorld(World, Oracle, Protocol):
    """A world whose oracle also computes approximate KV, as `ChunkMachine` needs it."""


class SymbolicWorld:
    """The engine over a symbolic model: the KV of a token is a number computed from all tokens before it.

    A wrong slot changes the numbers of all later tokens, so the comparison is exact. A step takes about a millisecond. Replies with any
    sampling parameters can be checked. The engine, its pages and its page copies are real. Only the forward pass is replaced (see
    `nanovllm.testing.shadows.symbolic`).

    Args:
        vocab_size: Size of the vocabulary; the default of 2 makes shared prefixes likely.
        windows: Sliding window of each of the two layers, in tokens; 0 means full attention, `()` that no layer has a window.
        kv_dtype: The option of `init_state`.

    Examples:
        >>> from nanovllm.testing import SymbolicWorld
        >>> from nanovllm.testing.strategies import Limits
        >>> world = SymbolicWorld()
        >>> limits = Limits(num_pages=4, page_size=2, max_model_len=8, max_num_seqs=2, max_num_batched_tokens=8)
        >>> state, chunk = nv.prefill(world.model, world.init_state(limits), [0, 1, 1])
        >>> world.require_kv(state.kv, list(chunk.pages), [0, 1, 1])
    """

    greedy_only = False

    def __init__(self, vocab_size: int = 2, windows: tuple[int, ...] = (), kv_dtype: Literal["fp8"] | None = None):
        config = tiny_config(
            vocab_size=vocab_size, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=2,
            head_dim=2 if kv_dtype is None else 4, windows=windows,
        )  # fmt: skip
        model = random_model(config)
        self.model = replace(model, params=replace(model.params, inv_freq=torch.zeros_like(model.params.inv_freq)))
        self.kv_dtype: Literal["fp8"] | None = kv_dtype

    def init_state(self, limits: Limits) -> EngineState:
        """Start a fresh engine whose forward pass is symbolic."""
        state = init_state(self.model, **limits.options(), kv_dtype=self.kv_dtype)
        config = replace(limits.config(), kv_dtype=self.kv_dtype)
        cascades = Cascades(self.model, config, cascade_policy(self.model, config, always=True)) if limits.cascade else None
        executor = EagerExecutor(config, symbolic_forward, cascades)
        return replace(state, runtime=Runtime(Lease(state.runtime.lease.model), _tested(executor, limits)))

    def decode(self, carry: DecodeCarry) -> tuple[DecodeCarry, DecodeOutput]:
        """Donates `carry`: run one symbolic decode step."""
        return decode_step(self.model.params, carry, self.model.config, forward=symbolic_forward)

    def require_reply(self, prompt: Seq[int], drawn: Seq[int], request: Request, checked: int = 0) -> None:
        """Raise `ShadowMismatchError` unless the request samples the tokens that it samples alone in a fresh engine."""
        vocab_size = self.model.config.vocab_size
        for at in range(checked, len(drawn)):
            expected = next_token([*prompt, *drawn[:at]], len(prompt), request.sampling, request.seed, vocab_size, self.model.config)
            expect(drawn[at] == expected, f"prompt {list(prompt)} sampled {list(drawn)}; alone it samples {expected} at index {at}")

    def require_kv(self, kv: KVState, pages: Seq[int], tokens: Seq[int], frames: Frames | None = None, retired: int = 0) -> None:
        """Raise `ShadowMismatchError` unless pages and frames contain the numbers that a prefill of `tokens` writes."""
        wanted, size = numbers(tokens, self.model.config), kv.pools[0].shape[4]
        for pool, table in zip(kv.pools, _tables(pages, frames, retired), strict=True):
            memory = memory_of(pool)
            for at, number in enumerate(wanted):
                place = table[at // size]
                held = number if place < 0 else read(memory, place, at % size)
                expect(held == number, f"slot {at} of {list(tokens)} in place {place} holds {held}, not {number}", invariant=4)

    def kv_of(self, before: Cells, token: int, position: int) -> int:
        """Return the number of a token that ran after the cells `before`."""
        return number_of(folded([cell.kv for cell in before], self.model.config), token, position - len(before))

    def logits_after(self, cells: Cells) -> list[float]:
        """Return the logits after the last cell, computed from its number."""
        return logits_of(cells[-1].kv, self.model.config.vocab_size)

    def require_cells(self, kv: KVState, pages: Seq[int], cells: Cells, frames: Frames | None = None, retired: int = 0) -> None:
        """Raise `ShadowMismatchError` unless pages and frames contain the numbers of these cells."""
        found, present = _slots(kv, _tables(pages, frames, retired), len(cells), self.model.config.places)
        wanted = np.array([cell.kv for cell in cells])
        wrong = ((found.reshape(*found.shape[:2], -1) != wanted[:, None, None]) & present[:, :, None]).any((1, 2))
        if wrong.any():
            at = int(wrong.argmax())
            expect(False, f"slot {at} of pages {list(pages)} contains {np.unique(found[at])}, not {wanted[at]}")

    def require_logits(self, found: Seq[float], cells: Cells, *, exact: bool) -> None:
        """Raise `ShadowMismatchError` unless these are the logits after the cells. Numbers of exact cells equal those of a full prefill."""
        wanted = self.logits_after(cells)
        expect(list(found) == wanted, f"the logits after {[cell.token for cell in cells]} are {found}, not {wanted}")

    def likeliest(self, token: int, logits: Seq[float]) -> bool:
        """Return whether the token has the largest logit."""
        return logits[token] == max(logits)


class ModelWorld:
    """The engine over a real model, compared with one forward pass over all tokens without a cache.

    Only greedy replies are checked. Each sampled token's logit must be within `tolerance` of the largest logit. KV must agree within
    `tolerance`. Approximate chunks are compared with a decoder in numpy and float64.

    Args:
        model: A model on the CPU in float32 or float64. None: a Qwen3 of two layers with random weights.
        tolerance: The largest absolute difference allowed in logits and KV.
        kv_dtype: The option of `init_state`. KV in FP8 is compared with that of a forward pass over KV in FP8.

    Examples:
        >>> from nanovllm.testing import ModelWorld
        >>> world = ModelWorld(tolerance=1e-4)
        >>> logits, kv = world.uncached([1, 2, 3])
        >>> logits.shape
        torch.Size([3, 8])
    """

    greedy_only = True

    def __init__(self, model: Model | None = None, tolerance: float = 1e-3, kv_dtype: Literal["fp8"] | None = None):
        config = tiny_config(vocab_size=8, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
        self.model = random_model(config) if model is None else model
        self.tolerance = tolerance
        self.kv_dtype: Literal["fp8"] | None = kv_dtype

    def init_state(self, limits: Limits) -> EngineState:
        """Start a fresh engine over the model."""
        state = init_state(self.model, **limits.options(), kv_dtype=self.kv_dtype)
        return replace(state, runtime=Runtime(state.runtime.lease, _tested(executor_of(state), limits)))

    def decode(self, carry: DecodeCarry) -> tuple[DecodeCarry, DecodeOutput]:
        """Donates `carry`: run one decode step of the model."""
        return decode_step(self.model.params, carry, self.model.config)

    def require_reply(self, prompt: Seq[int], drawn: Seq[int], request: Request, checked: int = 0) -> None:
        """Raise `ShadowMismatchError` unless each token's logit is within the tolerance of the largest. Checks greedy requests only."""
        if request.sampling.temperature or len(drawn) == checked:
            return
        logits, _ = self.uncached([*prompt, *drawn[:-1]])
        last = logits[len(prompt) - 1 :]
        chosen = last.gather(1, torch.tensor(drawn)[:, None])[:, 0]
        short = (last.amax(1) - chosen).amax().item()
        expect(short <= self.tolerance, f"prompt {list(prompt)} sampled {list(drawn)}, one of them {short} below the largest logit")

    def require_kv(self, kv: KVState, pages: Seq[int], tokens: Seq[int], frames: Frames | None = None, retired: int = 0) -> None:
        """Raise `ShadowMismatchError` unless pages and frames contain the KV of `tokens` within the tolerance."""
        if not tokens:
            return
        _, fresh = self.uncached(tokens)
        for pool, expected, places in zip(kv.pools, fresh.pools, _tables(pages, frames, retired), strict=True):
            size, count = pool.shape[4], len(tokens)
            table = torch.tensor(places[: pages_for(count, size)])
            found = numbers_in(pool)[:, table].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :count]
            wanted = numbers_in(expected)[:, 0, :, :, :count]
            there = (table >= 0).repeat_interleave(size)[:count, None]  # H D behind it
            error = ((found - wanted) * there).abs().amax().item()
            expect(error <= self.tolerance, f"the KV of {list(tokens)} in {places} is off by {error}", invariant=4)

    @cached_property
    def reference(self) -> Reference:
        """The same weights in numpy."""
        return Reference(self.model)

    def kv_of(self, before: Cells, token: int, position: int) -> KeysValues:
        """Return keys (before rotation) and values of a token that runs after the cells `before`."""
        return self.reference.run([(cell.position, cell.kv) for cell in before], token, position)[0]

    def logits_after(self, cells: Cells) -> list[float]:
        """Return the reference's logits after these cells; the last token attends to its own cell as it is."""
        *before, last = cells
        result = self.reference.run([(cell.position, cell.kv) for cell in before], last.token, last.position, held=last.kv)
        return result[1].tolist()

    def require_cells(self, kv: KVState, pages: Seq[int], cells: Cells, frames: Frames | None = None, retired: int = 0) -> None:
        """Raise `ShadowMismatchError` unless pages and frames contain these cells, with rotated keys, within the tolerance."""
        found, present = _slots(kv, _tables(pages, frames, retired), len(cells), self.model.config.places)
        wanted = np.stack([cell.kv for cell in cells])  # n L 2 K D
        wanted[:, :, 0] = self.reference.rotate(wanted[:, :, 0], np.array([cell.position for cell in cells]))
        error = (np.abs(found - wanted).max((2, 3, 4)) * present).max(1)
        if error.max() > self.tolerance:
            expect(False, f"slots of {[cell.token for cell in cells]} in pages {list(pages)} are off by {error.tolist()}")

    def require_logits(self, found: Seq[float], cells: Cells, *, exact: bool) -> None:
        """Raise `ShadowMismatchError` unless these are the logits after the cells within the tolerance.

        Logits after exact cells must also equal those of an uncached forward pass.
        """
        tokens, wanted = [cell.token for cell in cells], [self.logits_after(cells)]
        if exact:
            wanted.append(self.uncached(tokens)[0][-1].tolist())
        error = np.abs(np.array(wanted) - np.array(found)).max()
        expect(bool(error <= self.tolerance), f"the logits after {tokens} are off by {error}")

    def likeliest(self, token: int, logits: Seq[float]) -> bool:
        """Return whether the token's logit is within the tolerance of the largest."""
        return logits[token] >= max(logits) - self.tolerance

    def uncached(self, tokens: Seq[int]) -> tuple[torch.Tensor, KVState]:
        """Run one full prefill in KV memory of its own.

        Args:
            tokens: Token ids, at least one.

        Returns:
            Logits `[T, V]`, and the KV memory: one page with all tokens.
        """
        count = len(tokens)
        dtype = self.model.dtype if self.kv_dtype is None else FP8
        kv = init_kv(self.model.config, num_pages=1, page_size=count, dtype=dtype, device=self.model.device)
        row = Sequence(request=plain_request(count), tokens=IntVector.of(np.array(tokens, np.int32)), pages=IntVector.of([0]))
        batch = to_device(prefill_batch([(row, count)], page_size=count, dummy_page=1, draw=False), self.model.device)
        return self.model.spec.forward(self.model.params, kv, replace(batch, logit_indices=None), self.model.config)


def _tables(pages: Seq[int], frames: Frames | None, retired: int) -> list[list[int]]:
    """Return the index of each page's KV in each pool; -1 for a page that needs no frame and has none."""
    table = list(pages)
    if frames is None:
        return [table]
    of = frames.frame_of.get(np.array(table, np.int32)).tolist()
    lost = [page for page, frame in zip(table[retired:], of[retired:], strict=True) if frame < 0]
    expect(not lost, f"pages {lost} of {table} need frames and have none")
    return [of] if frames.alone else [table, of]


def _slots(kv: KVState, tables: Seq[Seq[int]], count: int, places: Seq[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the KV of the first `count` slots, `[count, L, 2, K, D]`, and a mask `[count, L]` of the KV that is present.

    `tables` has one page table per pool.
    """
    at, size = np.arange(count), kv.pools[0].shape[4]
    of_pools = [np.array(table)[at // size] for table in tables]
    by_pool = [memory_of(pool)[:, table, :, :, at % size] for pool, table in zip(kv.pools, of_pools, strict=True)]  # count L 2 K D
    by_layer = [(by_pool[pool][:, index], of_pools[pool] >= 0) for pool, index in places]
    return np.stack([values for values, _ in by_layer], 1), np.stack([present for _, present in by_layer], 1)


def drain(model: Model, state: EngineState, max_steps: int = 10000) -> tuple[EngineState, dict[int, RequestOutput]]:
    """Donates `state`: step until no request is left, and return the next state and all outputs by request id.

    Raises `ShadowMismatchError` if that takes more than `max_steps` steps.
    """
    ended: dict[int, RequestOutput] = {}
    for _ in range(max_steps):
        if not state.running and not state.waiting:
            return state, ended
        state, outputs = step(model, state)
        ended.update({out.request_id: out.output for out in outputs if out.output is not None})
    expect(False, f"{len(state.running)} requests run and {len(state.waiting)} wait after {max_steps} steps", invariant=6)
    return state, ended
