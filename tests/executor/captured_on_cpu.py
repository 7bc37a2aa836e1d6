"""A `GraphExecutor` on a CPU: its graphs are calls of the functions that a GPU would record, and read the same buffers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nanovllm import models
from nanovllm.executor import graph_executor
from nanovllm.executor.captured_step import CapturedStep, StepKind, Way
from nanovllm.executor.cuda_graphs import StepGraphs
from nanovllm.executor.decode_carry import DecodeCarry
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.ops.compile_ahead import FirstStart
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.sampling.row_options import KINDS, Kind


class Ignored:
    """An object of torch.cuda, whose methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class PlainAttention(Ignored):
    """Stands for FlashInfer's plans: all handles are 0, so attention runs in plain torch."""

    def ready(self) -> bool:
        return True

    def shares(self, host: Any) -> bool:
        return False

    def plan_prompt(self, host: Any, *, together: bool) -> tuple[int, int]:
        return 0, 0

    def decode_plans(self, size: int) -> Any:
        plan = Ignored()
        plan.handle = 0
        return plan


@dataclass(frozen=True)
class Call:
    """A call that stands for a graph."""

    replay: Callable[[], None]


def capture(
    self: StepGraphs, kv: Any, size: int, ways: Sequence[Way], processors: tuple[LogitsProcessor, ...] = (), kinds: Sequence[Kind] = KINDS
) -> None:
    """Stands for `StepGraphs.capture`."""
    logits = torch.zeros(size, self._model.config.vocab_size)
    for way in ways:
        carry = self._padding(kv, size, way, processors)

        def model(carry: DecodeCarry = carry) -> None:
            self._run(carry, self._model.params, logits)

        for sampling in kinds:

            def draw(carry: DecodeCarry = carry, sampling: Kind = sampling) -> None:
                self._draw(carry, logits, sampling)

            kind = StepKind(size=size, way=way, sampling=sampling, processors=processors)
            graphs: Any = (Call(model),) if sampling == "greedy" else (Call(model), Call(draw))
            self._steps[kind] = CapturedStep(kind=kind, graphs=graphs, carry=carry, results=self._results)


@contextmanager
def without_cuda() -> Iterator[None]:
    """Calls of torch.cuda do nothing, and steps are called where a GPU would record them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, Ignored)
        for name in ("graph_pool_handle", "synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch.setattr(StepGraphs, "capture", capture)
        patch.setattr(graph_executor, "Attention", PlainAttention)
        patch.setattr(graph_executor, "compiled_forward", lambda model: models.forward)
        patch.setattr(graph_executor, "COMPILED_PROMPTS", ())
        yield


def graph_executor_of(model: Any, limits: Any, kv: Any, **options: Any) -> GraphExecutor:
    """An executor, made and used inside of `without_cuda`."""
    return GraphExecutor(model, limits, kv, progress=False, first=FirstStart(None), **options)
