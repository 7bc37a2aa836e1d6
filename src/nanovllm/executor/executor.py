"""The `Executor` protocol, the runtime that owns an executor, and the results of a step on the host.

`Runtime` owns everything that cannot be a value: the donation lease and an executor. `EagerExecutor` calls the functions directly.
`GraphExecutor` captures decode steps in CUDA graphs, and owns their static buffers and the attention plans.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.kv_disk import DiskTier
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.executor.mirror import Mirror
from nanovllm.executor.row_processing import CarriedRow, carried_rows
from nanovllm.executor.scoring import Scored
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.sampling.matchers import Matchers
from nanovllm.sampling.process_logits import Processing
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState
from nanovllm.state.lease import Lease
from nanovllm.state.logprobs import StepScores
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Int32, Int64, Tensor

Forward = Callable[..., tuple[Tensor, KVState]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """The results of a step on the host: R sampled tokens, and their log-probabilities if a row asked for them.

    Attributes:
        token_ids: The tokens, `[R]`.
        logprobs: Their log-probabilities, `[R]`, or None.
        top_ids: The k most probable tokens, `[R, k]`, or None.
        top_logprobs: The log-probabilities of `top_ids`, `[R, k]`, or None.
        processing: The processors that carry tensors, as they are after the step. Row r of the results is their row `rows[r]`.
        rows: See `processing`; None: the same rows.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    processing: tuple[Processing, ...] = ()
    rows: np.ndarray | None = None

    @property
    def scores(self) -> StepScores:
        """The log-probabilities."""
        return StepScores(self.logprobs, self.top_ids, self.top_logprobs)

    def at(self, rows: np.ndarray) -> "Drawn":
        """The results of some rows, in the order of `rows`."""

        def chosen(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array[rows]

        return Drawn(
            token_ids=self.token_ids[rows],
            logprobs=chosen(self.logprobs),
            top_ids=chosen(self.top_ids),
            top_logprobs=chosen(self.top_logprobs),
            processing=self.processing,
            rows=rows if self.rows is None else self.rows[rows],
        )

    def carried_of(self, sequence: Sequence, row: int) -> CarriedRow | None:
        """What the processor of the sequence in row `row` carries after the step, or None."""
        if not self.processing:
            return None
        return carried_rows(self.processing, sequence, row if self.rows is None else int(self.rows[row]))


@runtime_checkable
class Masks(Protocol):
    """What the next tokens of some rows may be, known when the tokens before them are."""

    def fill(self, words: Int32[np.ndarray, "L W"], lines: Seq[int]) -> None:
        """Write the mask of each row r that has one into `words[lines[r]]`, one bit per token. Other lines stay as they are.

        Its exceptions belong to a request, and leave the step to be run again.
        """
        ...


@runtime_checkable
class Executor(Protocol):
    """Runs the kinds of step: prefill, scoring and decode.

    Page tables, slots and sampling tensors are built from the sequences' own values. If layers have a sliding window, `frames` gives the
    frames of the sequences' pages.
    """

    def prefill(
        self,
        model: Model,
        kv: KVState,
        rows: Seq[tuple[Sequence, int]],
        *,
        draw: bool = True,
        frames: Frames | None = None,
        masks: Masks | None = None,
    ) -> tuple[Drawn | None, KVState]:
        """Donates `kv`. Run prompt tokens, and sample for each sequence that is complete afterwards.

        Args:
            model: The model of the state.
            kv: The KV memory.
            rows: Each sequence, with the number of its next tokens to run.
            draw: Whether to sample at all.
            frames: The frames of the sliding-window pages, if layers have a window.
            masks: What the tokens may be, if sequences follow grammars. Its rows are the complete sequences, in order.

        Returns:
            The sampled tokens of the complete sequences, in order, and the KV memory. The former is None if there are none, or if `draw` is
            False.
        """
        ...

    def score(
        self,
        model: Model,
        kv: KVState,
        rows: Seq[tuple[Sequence, int]],
        asked: Int64[np.ndarray, "K 2"],
        *,
        num_top: int = 0,
        frames: Frames | None = None,
    ) -> tuple[Scored, KVState]:
        """Donates `kv`. Run prompt tokens, and return the log-probabilities of tokens that the caller names.

        Args:
            model: The model of the state.
            kv: The KV memory.
            rows: Each sequence, with the number of its next tokens to run. A filled sequence runs its last token again.
            asked: For each log-probability the index of a token of the batch, ascending, and the id of the token after it.
            num_top: How many of the most probable tokens to return in the place of each.
            frames: The frames of the sliding-window pages, if layers have a window.

        Returns:
            The log-probabilities and the most probable tokens, on the device, and the KV memory.
        """
        ...

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Return the carry of a decode step over these rows."""
        ...

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Donates `carry`. Return the carry for the same rows after some of them got other pages."""
        ...

    def narrow(
        self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, grew: bool = False, frames: Frames | None = None
    ) -> DecodeCarry:
        """Donates `carry`. Return the carry for `rows`, the rows that go on; the others have ended.

        `keep` are the places of these rows in the carry, ascending. `grew` tells whether some of them got other pages.
        """
        ...

    def decode(self, model: Model, carry: DecodeCarry, masks: Masks | None = None) -> tuple[DecodeCarry, Drawn]:
        """Donates `carry`. Run one decode step: one token of every row.

        `masks` says what the tokens may be, if rows follow grammars. It is called once, when the model runs already if the executor can.
        """
        ...

    def take_discarded_count(self) -> int:
        """Return how many tokens ran ahead and were discarded since the last call, and reset the count to 0."""
        ...

    def begin(
        self,
        model: Model,
        kv: KVState,
        rows: Seq[Sequence],
        ticket: int,
        *,
        frames: Frames | None = None,
        branching: bool = False,
        fill: bool = True,
    ) -> DecodeCarry:
        """Return a carry with its own tensors, for steps that the caller runs.

        `end` with the same ticket frees the plan that the executor keeps for it. With `branching` the page tables of the rows may change
        later, so no plan may depend on them. Without `fill` all tokens of the rows that are not filled yet run in the first step.
        """
        ...

    def end(self, ticket: int) -> None:
        """Free the plan that `begin` made for this ticket."""
        ...

    def captured(self, function: Callable[..., Any], carry: DecodeCarry, *inputs: Any) -> Callable[..., Any]:
        """A function of a carry and of inputs as a CUDA graph, kept for later calls, or as it is where there are no graphs."""
        ...


@dataclass(slots=True, eq=False)
class Runtime:
    """The opaque part of an `EngineState`.

    Attributes:
        lease: The lease on the engine's KV memory.
        executor: Runs the steps, and holds graphs, buffers and plans.
        cuts: The tile configurations of the executor's kernels. None: the defaults, or no kernels.
        matchers: Where running replies stand in their grammars.
        mirror: What repeats the calls on other ranks; None: there are none, or each makes them by itself.
        host: The KV of pages in host memory; None: there is none.
        disk: The KV of pages in files; None: there is none.
    """

    lease: Lease
    executor: Executor
    cuts: Cuts | None = None
    matchers: Matchers = field(default_factory=Matchers)
    mirror: Mirror | None = None
    host: HostMemory | None = None
    disk: DiskTier | None = None


def runtime_of(state: EngineState) -> Runtime:
    """Return the runtime of a state made by `init_state`. Raises `TypeError` for a state with another kind of runtime."""
    if not isinstance(state.runtime, Runtime):
        raise TypeError(f"the state's runtime is a {type(state.runtime).__name__}, which has no executor: make states with init_state")
    return state.runtime


def executor_of(state: EngineState) -> Executor:
    """Return the executor that runs the steps of a state."""
    return runtime_of(state).executor
