"""`init_state`: an engine's first state, its KV pool and its runtime."""

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from . import models
from .attention_plans import AttentionUnavailableError, Cascades, cascade_policy
from .compile import EagerExecutor, Executor, Runtime, compiled_forward
from .config import EngineConfig, loaded_for_short
from .engine import model_key, require_model
from .errors import InvalidRequestError, OutOfPagesError, TuningFileError
from .keywords import explain_unknown_keywords
from .model import Model
from .model_check.examine import by_cuts, choose
from .models import FastChoice
from .models.cuts import Cuts
from .ops.backends import attention_backend
from .state.engine_state import EngineState, Lease
from .state.frames import init_frames
from .state.kv import KVState, init_kv
from .state.pool import init_pool
from .state.sizes import bytes_of, pool_sizes
from .tune.use import cuts_for, plain, require_tuning

R = TypeVar("R")
CPU_KV_BYTES = 4 << 30  # unless told otherwise


@explain_unknown_keywords
def init_state(
    model: Model,
    *,
    num_pages: int | None = None,
    num_frames: int | None = None,
    page_size: int = 16,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int | None = None,
    memory_fraction: float = 0.9,
    seed: int = 0,
    compile: bool | None = None,
    cascade: bool | None = None,
    check: bool | None = None,
    tuning: bool | str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> EngineState:
    """An empty engine for `model`: the KV memory, the prefix index and the kernels that its steps will run.

    Args:
        model: The model that `load_model` returned.
        num_pages: KV memory in pages of `page_size` tokens. None: enough for `max_num_seqs` requests of full length, at most 4 GiB on a
            CPU, and on a GPU at most the rest of `memory_fraction` after the weights and the largest steps, which are measured. If every
            layer has a sliding window, this counts the pages inside the windows. A reply ends with `finish_reason` `"length"` if its
            request alone fills all pages.
        num_frames: For models with some sliding-window layers: how many pages have KV in those layers. Requests give up pages outside
            the window; a chunk needs one for each of its pages. None: enough for `max_num_seqs` windows and a chunk of full length.
        page_size: Tokens per page.
        max_model_len: The most tokens of a prompt and its reply together. None: the model's own limit.
        max_num_seqs: The most requests that run at the same time.
        max_num_batched_tokens: The most tokens of one step. Longer prompts are prefilled in pieces. None: 8,192, or 16,896 on a GPU of
            64 GiB or more.
        memory_fraction: The share of a GPU's memory that may be used.
        seed: Used for requests without a seed of their own.
        compile: True: fused kernels and CUDA graphs on a GPU, `torch.compile` for layers that the kernels do not serve. False: plain torch on
            any device. None: True on a GPU; on a CPU decode steps run in C if there is a compiler.
        cascade: Whether pages that requests share are read once for all of them. None: if that is faster. True: for every whole page, on
            a CPU too.
        check: Whether to compare the fast kernels with the plain layers on the model's own weights at the start. A layer beyond the error
            bound runs in plain torch, with a warning. None: on a GPU. True: on a CPU too, but not together with `compile=True` there.
        tuning: The tile configurations of the GPU's kernels. None: those of the file that `nanovllm tune` wrote for this GPU, model and
            version, if it exists. True: the same, and it must exist. False: the defaults. A path: those of that file.
        progress: Whether to draw progress bars. None: only on a terminal.

    Returns:
        The first state. Every call that changes the engine takes the newest state and returns the next one.

    Raises:
        InvalidRequestError: A limit is below 1, or two options exclude each other.
        OutOfPagesError: The KV memory does not fit into the device.
        TuningFileError: A tuning file was asked for and cannot be used.

    Example:
        >>> init_state(load_model("tiny", device="cpu"), num_pages=64)
        EngineState(0 of 64 pages used, 0 chunks, 0 requests, epoch 0)
    """
    require_model(model)
    for name, value in (("compile", compile), ("cascade", cascade), ("check", check)):
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(f"{name}={value!r} must be True, False or None")
    if check and compile and model.device.type != "cuda":
        why = "compiled layers run there, not the fast ones that check compares"
        raise InvalidRequestError(f"check=True with compile=True on a CPU: {why}; give one of the two")
    require_tuning(tuning)
    if model.foreign:
        if compile:
            raise InvalidRequestError(f"compile=True: {model.config.architecture} runs through transformers, whose module is not compiled")
        where = "on a CPU in C" if model.device.type == "cpu" else "in captured graphs of fused kernels"
        warnings.warn(
            f"{model.config.architecture} is not built in: it runs through transformers' module with attention in plain torch, slowly; "
            f"built-in ones run {where}",
            stacklevel=3,
        )
    config = model.config
    max_model_len = config.max_position_embeddings if max_model_len is None else max_model_len
    if not isinstance(memory_fraction, float | int) or not 0 < memory_fraction <= 1:
        raise InvalidRequestError(f"memory_fraction={memory_fraction!r} must be in (0, 1]")
    if num_frames is not None and not config.widest_window:
        raise InvalidRequestError(f"num_frames={num_frames!r} is for layers with a window, of which {model.name} has none")
    if num_frames is not None and (isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1):
        raise InvalidRequestError(f"num_frames={num_frames!r} must be an integer of at least 1")
    limits = EngineConfig(
        num_pages=1 if num_pages is None else num_pages,
        num_frames=1 if num_frames is None and config.widest_window else num_frames or 0,
        page_size=page_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=default_tokens(model.device) if max_num_batched_tokens is None else max_num_batched_tokens,
        seed=seed,
    )
    if max_model_len > config.max_position_embeddings:
        more = "; load_model(..., max_model_len=...) loads it for longer requests" if loaded_for_short(config) else ""
        raise InvalidRequestError(f"max_model_len={max_model_len} exceeds the model's {config.max_position_embeddings} positions{more}")
    cuts = _cuts(model, limits, compile, tuning)
    choice, cuts = _choice(model, limits, compile, check, cuts, tuning)  # before the pool takes the memory that it needs for a moment
    budget = None
    if num_pages is None:
        needed, cuts = _needed(model, limits, compile, choice, cuts, tuning)
        budget = _budget(model, memory_fraction) - needed
    num_pages, frames = pool_sizes(config, limits, num_pages, num_frames, budget, model.dtype)
    limits = replace(limits, num_pages=num_pages, num_frames=frames)
    try:
        kv = init_kv(config, num_pages=num_pages, num_frames=frames, page_size=page_size, dtype=model.dtype, device=model.device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        size = bytes_of(config, limits, model.dtype)
        raise OutOfPagesError(f"num_pages={num_pages} needs {size / 2**30:.1f} GiB, which {model.device} does not have free") from error
    executor, cuts = _executor(model, limits, kv, compile, cascade, choice, cuts, tuning, progress)
    runtime = Runtime(Lease(model_key(model)), executor, cuts)
    windows = {"window": config.widest_window, "alone": config.all_windowed}
    pool = init_pool(num_pages, page_size, init_frames(frames, num_pages, **windows) if frames else None)
    return EngineState(config=limits, kv=kv, pool=pool, runtime=runtime)


def _captures(model: Model, limits: EngineConfig, compile: bool | None) -> bool:
    """Whether steps will be captured: on a GPU whose attention FlashInfer serves."""
    served = not model.foreign and attention_backend(model.device, model.dtype, model.config.head_dim, limits.page_size) == "flashinfer"
    return compile is not False and served


def _cuts(model: Model, limits: EngineConfig, compile: bool | None, tuning: bool | str | os.PathLike[str] | None) -> Cuts | None:
    """The cuts of the kernels that will run; None: their defaults."""
    if not _captures(model, limits, compile):
        if tuning is None or tuning is False:
            return None
        raise InvalidRequestError(f"tuning={plain(tuning)!r} is for captured steps on a CUDA GPU; there are none on {model.device} here")
    return cuts_for(model, tuning)


def _choice(
    model: Model,
    limits: EngineConfig,
    compile: bool | None,
    check: bool | None,
    cuts: Cuts | None,
    tuning: bool | str | os.PathLike[str] | None,
) -> tuple[FastChoice | None, Cuts | None]:
    """The layers whose fast form keeps its error bound; None where all do, where none has one here, and where nobody looks. Cuts by which
    one does not are dropped for the defaults."""
    cuda = model.device.type == "cuda"
    runs_fast = _captures(model, limits, compile) if cuda else compile is None  # else compiled layers will run
    if not (runs_fast and (cuda if check is None else check)):
        return None, cuts
    (choice, warning), cuts = _by_cuts(partial(_looked, model, limits), cuts, tuning)
    if cuts is not None and choice is not None and not choice.whole:
        warnings.warn(f"the cuts of {cuts.source} are not used but the defaults: by them {warning}", stacklevel=4)
        (choice, warning), cuts = _looked(model, limits, None), None
    if warning:
        warnings.warn(warning, stacklevel=4)
    return None if choice is None or choice.whole else choice, cuts


def _by_cuts(make: Callable[[Cuts | None], R], cuts: Cuts | None, tuning: bool | str | os.PathLike[str] | None) -> tuple[R, Cuts | None]:
    """What is made by the cuts, and the cuts; by the defaults where no kernel can be made by those of a file that nobody asked for."""
    try:
        with by_cuts(cuts):
            return make(cuts), cuts
    except TuningFileError as error:
        if tuning is not None:
            raise
        warnings.warn(f"{error}; the default cuts are used", stacklevel=5)
    gc.collect()  # what was half made holds memory
    return make(None), None


def _looked(model: Model, limits: EngineConfig, cuts: Cuts | None) -> tuple[FastChoice | None, str]:
    """What `choose` finds, where there is memory for it."""
    try:
        return choose(model, limits.page_size, cuts)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, f"{model.name}: no memory to check the fast decode path with: it is used unchecked"


def _executor(
    model: Model,
    limits: EngineConfig,
    kv: KVState,
    compile: bool | None,
    cascade: bool | None,
    choice: FastChoice | None,
    cuts: Cuts | None,
    tuning: bool | str | os.PathLike[str] | None,
    progress: bool | None,
) -> tuple[Executor, Cuts | None]:
    """An executor, and the cuts that it uses."""
    cuda, pages = model.device.type == "cuda", (limits.page_size, limits.num_pages)
    # Plain torch gains nothing by reading once: it is for those who ask.
    cascades = Cascades(model, limits, cascade_policy(model, limits, always=True)) if cascade else None
    if compile is False or model.foreign:
        return EagerExecutor(*pages, model.spec.forward, cascades), None
    if not (cuda or compile):
        return EagerExecutor(*pages, models.forward if choice is None else partial(models.forward, fast=choice), cascades), None
    if not cuda:
        return EagerExecutor(*pages, compiled_forward(model), cascades), None
    from .cuda_graphs import GraphExecutor

    def captured(cuts: Cuts | None) -> Executor:
        with torch.cuda.device(model.device):
            return GraphExecutor(model, limits, kv, cascade=cascade, choice=choice, cuts=cuts, progress=progress)

    try:
        return _by_cuts(captured, cuts, tuning)
    except AttentionUnavailableError as error:
        warnings.warn(f"{error}; attention runs in plain torch, slowly", stacklevel=4)
        return EagerExecutor(*pages, compiled_forward(model), cascades), None


def default_tokens(device: torch.device) -> int:
    """Tokens of a step, unless told otherwise."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 64 << 30
    return 16384 + 512 if large else 8192


def _needed(
    model: Model,
    limits: EngineConfig,
    compile: bool | None,
    choice: FastChoice | None,
    cuts: Cuts | None,
    tuning: bool | str | os.PathLike[str] | None,
) -> tuple[int, Cuts | None]:
    """Bytes that steps hold beside weights and KV, where they are captured; and the cuts by which kernels could be made."""
    if not _captures(model, limits, compile) or model.foreign:
        return 0, cuts
    from .step_memory import measured

    try:
        return _by_cuts(partial(measured, model, limits, choice), cuts, tuning)
    except AttentionUnavailableError:
        return 0, cuts  # the executor says so
    except torch.OutOfMemoryError as error:
        what = f"max_num_batched_tokens={limits.max_num_batched_tokens} and max_num_seqs={limits.max_num_seqs}"
        raise OutOfPagesError(f"a step of {what} does not fit on {model.device} beside the weights") from error


def _budget(model: Model, memory_fraction: float) -> int:
    """Bytes that may be held beside what is held now."""
    if model.device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * memory_fraction) - (total - free)
