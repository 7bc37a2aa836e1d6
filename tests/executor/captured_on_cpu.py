"""A `GraphExecutor` on a CPU: its graphs are calls of the functions that a GPU would record, and read and write the same buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from nanovllm import models
from nanovllm.executor import cuda_graphs, graph_executor, prompt_graphs
from nanovllm.executor.graph_executor import GraphExecutor
from nanovllm.ops.compile_ahead import FirstStart


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

    def plan_halves(self, halves: Any, *, together: bool) -> list[tuple[int, int]]:
        return [(0, 0) for _ in halves]

    def decode_plans(self, size: int) -> Any:
        plan = Ignored()
        plan.handle = 0
        return plan


class Call:
    """A function that stands for a graph: each call writes its results to where the first one left them."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.result, self.freed = run, run(), False

    def reset(self) -> None:
        """Free the graph."""
        self.freed = True

    def replay(self) -> None:
        """Call the function once more."""
        for to, value in zip(pytree.tree_leaves(self.result), pytree.tree_leaves(self.run()), strict=True):
            if isinstance(to, torch.Tensor) and to.data_ptr() != value.data_ptr():
                to.copy_(value)


@contextmanager
def without_cuda() -> Iterator[list[Call]]:
    """Calls of torch.cuda do nothing, and steps are called where a GPU would record them. Prompts of up to 16 tokens are captured.

    Yields:
        The graphs that were recorded so far.
    """
    graphs = list[Call]()

    def recorded(pool: Any, stream: Any, run: Callable[[], Any]) -> tuple[Call, Any]:
        graphs.append(call := Call(run))
        return call, call.result

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, Ignored)
        for name in ("graph_pool_handle", "synchronize", "empty_cache", "current_stream"):
            patch.setattr(torch.cuda, name, lambda *_: Ignored())
        for name in ("device", "stream"):
            patch.setattr(torch.cuda, name, lambda _: nullcontext())
        for module in (cuda_graphs, prompt_graphs):
            patch.setattr(module, "recorded", recorded)
        patch.setattr(cuda_graphs, "EXTENSION", 4)
        patch.setattr(prompt_graphs, "SIZES", (8, 16))
        patch.setattr(prompt_graphs, "WIDE_SIZES", (16,))
        patch.setattr(prompt_graphs, "FEW_ROWS", 2)
        patch.setattr(prompt_graphs, "all_fused", lambda *_: True)
        patch.setattr(graph_executor, "Attention", PlainAttention)
        patch.setattr(graph_executor, "compiled_forward", lambda model: models.forward)
        patch.setattr(graph_executor, "COMPILED_PROMPTS", ())
        yield graphs


def graph_executor_of(model: Any, limits: Any, kv: Any, **options: Any) -> GraphExecutor:
    """An executor, made and used inside of `without_cuda`."""
    return GraphExecutor(model, limits, kv, progress=False, first=FirstStart(None), **options)
