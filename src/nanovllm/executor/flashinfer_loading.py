"""FlashInfer's kernels for one engine, built and loaded in a thread, so that the engine starts before they exist."""

from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch

from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_build import Kernels, build_apart, load, missing
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import PrefillPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """What all plans of an engine have in common, the windows of the layers of each KV pool, and the `backend` of plans for prompts."""

    workspace: AttentionWorkspace
    sizes: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]
    softcap: float
    backend: str = "auto"

    def prompts(self, max_rows: int, windows: tuple[int, ...] = (0,), *, causal: bool = True) -> PrefillPlan:
        """Return a new plan for batches of up to `max_rows` prompts."""
        options: dict[str, Any] = {"causal": causal, "windows": windows, "softcap": self.softcap}
        try:
            return PrefillPlan(self.workspace, max_rows, *self.sizes, backend=self.backend, **options)
        except torch.OutOfMemoryError:  # a RuntimeError that says nothing about kernels
            raise
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
    """FlashInfer's kernels on their way, in a thread of their own, which touches neither the engine nor the memory of the GPU.

    Attributes:
        builds: Whether kernels are built, because this machine has none. Is known after a second or two.
        backend: The option of `PlanShape`, as soon as plans find their kernels in memory. It has the exception if no kernels for prompts
            can be built or loaded.
    """

    def __init__(self, wanted: Seq[Kernels], device: torch.device) -> None:
        self.builds: Future[bool] = Future()
        self.backend: Future[str] = Future()
        self._wanted, self._device = wanted, device
        Thread(target=self._load, name="nanovllm-flashinfer", daemon=True).start()

    def _load(self) -> None:
        try:
            with torch.cuda.device(self._device):
                absent = missing(self._wanted)
                self.builds.set_result(bool(absent))
                if absent:
                    build_apart(absent)  # if that fails, the next lines tell why
                backend = "auto"
                for kernels in self._wanted:
                    try:
                        load(kernels)
                    except Exception:
                        if kernels.backend == "fa2":
                            raise
                        backend = "fa2"
        except BaseException as error:  # SystemExit too, which must not end the thread that asks
            self.backend.set_exception(error)
        else:
            self.backend.set_result(backend)
        finally:
            if not self.builds.done():
                self.builds.set_result(False)
