"""How steps are executed: what an executor is, the runtime that owns it, and the result of a step on the host.

`Runtime` owns the donation lease and an executor: all that cannot be a value. `EagerExecutor` calls the functions as they are;
`GraphExecutor` captures decode steps in CUDA graphs, and owns their static buffers and the attention plans.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from nanovllm.executor.decode import DecodeCarry
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import KVState
from nanovllm.state.lease import Lease
from nanovllm.state.request import Sequence
from nanovllm.state.window_frames import Frames
from nanovllm.types import Tensor

Forward = Callable[..., tuple[Tensor, KVState]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """What a step drew, on the host: tokens `[R]`, and log-probabilities where they were asked for."""

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def at(self, rows: np.ndarray) -> "Drawn":
        """What some of the rows drew, in this order."""

        def chosen(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array[rows]

        return Drawn(
            token_ids=self.token_ids[rows],
            logprobs=chosen(self.logprobs),
            top_ids=chosen(self.top_ids),
            top_logprobs=chosen(self.top_logprobs),
        )


@runtime_checkable
class Executor(Protocol):
    """Runs the two kinds of step. Page tables, slots and sampling tensors come from the sequences' own values, and from `frames`, those of
    their pages, where layers have windows."""

    def prefill(
        self, model: Model, kv: KVState, rows: Seq[tuple[Sequence, int]], *, draw: bool = True, frames: Frames | None = None
    ) -> tuple[Drawn | None, KVState]:
        """Donates `kv`. Run prompt tokens; draw for the sequences that are whole afterwards (None where none is, or not `draw`)."""
        ...

    def load(self, model: Model, kv: KVState, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """The carry of a decode step over these rows."""
        ...

    def refresh(self, model: Model, carry: DecodeCarry, rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Donates `carry`. The same rows after some got other pages."""
        ...

    def narrow(self, model: Model, carry: DecodeCarry, keep: Seq[int], rows: Seq[Sequence], *, frames: Frames | None = None) -> DecodeCarry:
        """Donates `carry`. Of its rows those at the places `keep`, ascending, go on: `rows`. The others have ended."""
        ...

    def decode(self, model: Model, carry: DecodeCarry) -> tuple[DecodeCarry, Drawn]:
        """Donates `carry`. One token of every row."""
        ...

    def thrown_away(self) -> int:
        """Tokens run before they were asked for, and then not used, since the last call of this."""
        ...

    def begin(self, model: Model, kv: KVState, rows: Seq[Sequence], ticket: int, *, frames: Frames | None = None) -> DecodeCarry:
        """A carry over tensors of its own for steps that the caller runs; what it needs beside lives until `end` of its ticket."""
        ...

    def end(self, ticket: int) -> None:
        """Let go of what `begin` set up."""
        ...


@dataclass(slots=True, eq=False)
class Runtime:
    """The opaque part of an `EngineState`: the lease on its memory, and the executor with what cannot be a value.

    `cuts`: by which the executor's kernels cut their work; None: by their defaults, or there are none.
    """

    lease: Lease
    executor: Executor
    cuts: Cuts | None = None


def runtime_of(state: EngineState) -> Runtime:
    """The runtime of a state made by `init_state`, with its executor. Raises `TypeError` for a state that holds another kind of runtime."""
    if not isinstance(state.runtime, Runtime):
        raise TypeError(f"the state's runtime is a {type(state.runtime).__name__}, which has no executor")
    return state.runtime


def executor_of(state: EngineState) -> Executor:
    """What runs the steps of a state."""
    return runtime_of(state).executor
