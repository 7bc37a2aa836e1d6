"""FlashInfer's plans that one engine needs, loaded in a thread, so that the engine starts before their kernels are built."""

from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch

from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_build import Kernels, build_apart, missing
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import PrefillPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """What all plans of an engine have in common, and the windows of the layers of each KV pool."""

    workspace: AttentionWorkspace
    sizes: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]
    softcap: float

    def prompts(self, max_rows: int, windows: tuple[int, ...] = (0,), *, causal: bool = True) -> PrefillPlan:
        """Return a new plan for batches of up to `max_rows` prompts."""
        options: dict[str, Any] = {"causal": causal, "windows": windows, "softcap": self.softcap}
        try:
            return PrefillPlan(self.workspace, max_rows, *self.sizes, **options)
        except (ImportError, OSError, RuntimeError):
            return PrefillPlan(self.workspace, max_rows, *self.sizes, backend="fa2", **options)

    def kernels(self) -> list[Kernels]:
        """FlashInfer's kernels that plans of this shape load."""
        *_, head_dim, _, dtype, device = self.sizes
        backends = ("fa2", "fa3") if head_dim == 128 and torch.cuda.get_device_capability(device)[0] == 9 else ("fa2",)
        limited = dict.fromkeys((False, *(any(windows) for windows in self.groups)))
        return [Kernels(backend, dtype, head_dim, windows, self.softcap > 0) for windows in limited for backend in backends]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlans:
    """FlashInfer's plans that serve one batch of prompts after the other."""

    prompt: PrefillPlan
    windowed: PrefillPlan | None
    cascade: FlashInferCascade


def shared_plans(shape: PlanShape, max_rows: int) -> SharedPlans:
    """Make the plans. Builds the kernels that are missing on this machine."""
    windows, windowed = shape.groups[0], None
    prompt = shape.prompts(max_rows, windows)
    if len(shape.groups) == 2:
        windowed = shape.prompts(max_rows, shape.groups[1])
    own, limited = (shape.prompts(max_rows), prompt) if any(windows) else (prompt, None)
    return SharedPlans(prompt=prompt, windowed=windowed, cascade=FlashInferCascade(own, shape.prompts(max_rows, causal=False), limited))


class Loading:
    """FlashInfer's plans on their way, in a thread of their own."""

    def __init__(self, shape: PlanShape, max_rows: int) -> None:
        self.plans: Future[SharedPlans] = Future()
        self._looked, self._builds = Event(), False
        Thread(target=self._load, args=(shape, max_rows), name="nanovllm-flashinfer", daemon=True).start()

    def builds(self) -> bool:
        """Whether kernels are built now, because this machine has none. Waits until that is known, which is at most some seconds."""
        self._looked.wait()
        return self._builds and not self.plans.done()

    def _load(self, shape: PlanShape, max_rows: int) -> None:
        try:
            absent = missing(shape.kernels())
            self._builds = bool(absent)
            self._looked.set()
            if absent:
                build_apart(absent)  # if that fails, the next line tells why
            with torch.cuda.device(shape.workspace.buffer.device):
                self.plans.set_result(shared_plans(shape, max_rows))
        except BaseException as error:
            self.plans.set_exception(error)
        finally:
            self._looked.set()
