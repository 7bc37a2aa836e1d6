"""Chooses an engine's executor, the layers that run in their fast form, and the tile configurations of its kernels."""

import gc
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from nanovllm import models
from nanovllm.config import EngineConfig
from nanovllm.errors import InvalidRequestError, OutOfPagesError, TuningFileError
from nanovllm.executor.attention_plans import AttentionUnavailableError
from nanovllm.executor.cascade_policy import Cascades, cascade_policy
from nanovllm.executor.compiled import compiled_forward
from nanovllm.executor.distributed import least
from nanovllm.executor.eager import EagerExecutor
from nanovllm.executor.executor import Executor
from nanovllm.executor.prompt_graphs import prompt_kinds
from nanovllm.models.check.examine import by_cuts, choose
from nanovllm.models.check.passed import note_passed, passed
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.fast.path import against
from nanovllm.models.model import Model
from nanovllm.models.tuning.choose import cuts_for, plain
from nanovllm.ops.backends import attention_backend, installed, own_kernels
from nanovllm.ops.compile_ahead import FirstStart
from nanovllm.ops.cpu.build import library
from nanovllm.ops.cpu.native import SOURCE, SYMBOLS
from nanovllm.ops.import_ahead import wait_for_triton
from nanovllm.ops.kernel_keys import hash_kernels
from nanovllm.ops.sampling import cpu_sampling
from nanovllm.sampling.row_options import KINDS
from nanovllm.state.kv_cache import KVState

R = TypeVar("R")


def _captures(model: Model, limits: EngineConfig, compile: bool | None) -> bool:
    """Whether steps will be captured in CUDA graphs: on a GPU whose attention FlashInfer serves, or our own kernels for KV in FP8."""
    if compile is False or model.foreign:
        return False
    if limits.kv_dtype is not None:
        return own_kernels(model.device, model.dtype)
    return attention_backend(model.device, model.dtype, model.config.head_dim, limits.page_size) == "flashinfer"


def tuned_cuts(model: Model, limits: EngineConfig, compile: bool | None, tuning: bool | str | os.PathLike[str] | None) -> Cuts | None:
    """The tile configurations of the kernels that will run. None: the defaults. Raises `InvalidRequestError` if no kernels will run."""
    if not _captures(model, limits, compile):
        if tuning is None or tuning is False:
            return None
        raise InvalidRequestError(
            f"tuning={plain(tuning)!r} is for captured steps on a CUDA GPU; on {model.device} this engine captures none: leave tuning out"
        )
    return cuts_for(model, tuning)


def compares(model: Model, limits: EngineConfig, compile: bool | None, check: bool | None, cuts: Cuts | None) -> bool:
    """Whether the start compares fast layers with plain ones.

    Without a `check` of the caller it does so on a GPU, unless the user's cache records that these weights passed before.
    """
    cuda = model.device.type == "cuda"
    runs_fast = _captures(model, limits, compile) if cuda else compile is None  # otherwise compiled layers run
    if not runs_fast or check is not None:
        return runs_fast and bool(check)
    return cuda and not passed(model, limits.page_size, cuts)


def first_start(
    model: Model, limits: EngineConfig, compile: bool | None, cascade: bool | None, cuts: Cuts | None, *, checked: bool, sized: bool
) -> FirstStart:
    """Compile the kernels of the check, if there is one (`checked`), and of the largest steps if they are measured (`sized`).

    Returns what compiles the others.

    Mixtures of experts are left out: they index tensors with the results of kernels, which a rehearsal leaves out.
    """
    if model.device.type == "cuda":
        wait_for_triton()  # kernels are launched from here on
        if installed("triton"):
            hash_kernels()
    # Ranks that share a model compile as they go: a rehearsal on one rank alone would wait for the others.
    alone = model.config.moe is None and model.config.mesh is None
    ahead = alone and _captures(model, limits, compile) and own_kernels(model.device, model.dtype)
    if not ahead:
        return FirstStart(None)
    from nanovllm.executor.kv_budget import measured

    def start() -> None:
        if checked:
            choose(model, limits.page_size, cuts)
        if sized:
            measured(model, limits, None, cuts, KINDS[:-1])  # log-probabilities are looked up by tokens that no kernel has written

    sizes = limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, limits.page_size
    graphs = prompt_kinds(model, limits, None)
    first = FirstStart(model.device, model.config, model.dtype, (*sizes, cascade, sized, cuts, limits.kv_dtype, model.quantization, graphs))
    first.rehearse(start)
    return first


def checked_choice(
    model: Model, limits: EngineConfig, cuts: Cuts | None, tuning: bool | str | os.PathLike[str] | None
) -> tuple[FastChoice | None, Cuts | None]:
    """Compare the fast form of each layer with its plain form, and choose the layers whose error is within the bound.

    Tile configurations that make a layer exceed the bound are dropped for the defaults, with a warning. If all layers and the head pass on
    a GPU, the user's cache records it.

    Returns:
        The chosen layers, and the tile configurations. The choice is None if all layers pass, or if none has a fast form here.
    """
    (choice, warning), cuts = _by_cuts(partial(_choose, model, limits), cuts, tuning)
    if cuts is not None and choice is not None and not choice.whole:
        warnings.warn(f"ignoring tuning file {cuts.source}, using the default tile configurations: with it, {warning}", stacklevel=4)
        (choice, warning), cuts = _choose(model, limits, None), None
    if warning:
        warnings.warn(warning, stacklevel=4)
    elif choice is not None and choice.whole and model.device.type == "cuda":
        note_passed(model, limits.page_size, cuts)
    return None if choice is None or choice.whole else choice, cuts


def alike(model: Model, choice: FastChoice | None, cuts: Cuts | None) -> tuple[FastChoice | None, Cuts | None]:
    """What all ranks can use: layers that are within the bound on each of them, and tile configurations if none of them dropped them."""
    mesh, count = model.config.mesh, model.config.num_layers
    if mesh is None:
        return choice, cuts
    own = (True,) * (count + 1) if choice is None else (*choice.layers, choice.head)
    *layers, head, kept = map(bool, least(mesh, [*map(int, own), int(cuts is not None)]))
    return None if head and all(layers) else FastChoice(layers=tuple(layers), head=head), cuts if kept else None


def _by_cuts(make: Callable[[Cuts | None], R], cuts: Cuts | None, tuning: bool | str | os.PathLike[str] | None) -> tuple[R, Cuts | None]:
    """Call `make` with the tile configurations and return its result with them.

    If no kernel can be made by the configurations of a file that the caller did not name, warn and use the defaults.
    """
    try:
        with by_cuts(cuts):
            return make(cuts), cuts
    except TuningFileError as error:
        if tuning is not None:
            raise
        warnings.warn(f"{error}; the default tile configurations are used", stacklevel=5)
    gc.collect()  # the unfinished executor still holds memory
    return make(None), None


def _choose(model: Model, limits: EngineConfig, cuts: Cuts | None) -> tuple[FastChoice | None, str]:
    """Return the result of `choose`, or no choice and a warning if memory does not suffice."""
    try:
        return choose(model, limits.page_size, cuts)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, f"{model.name}: not enough memory to check the fast decode path: it is used unchecked"


def _build_c(model: Model, compile: bool | None) -> None:
    """Build the C code that the model runs on a CPU. Otherwise the first request would wait for a compiler.

    Decode steps of plain weights run in C unless `compile` is given, those of quantised weights always.
    """
    cpu_sampling.available()
    if model.quantization:
        library(SOURCE, SYMBOLS)
    elif compile is None and not model.foreign:
        against(model.params, model.config, model.device, model.dtype)


def build_executor(
    model: Model,
    limits: EngineConfig,
    kv: KVState,
    compile: bool | None,
    cascade: bool | None,
    choice: FastChoice | None,
    cuts: Cuts | None,
    tuning: bool | str | os.PathLike[str] | None,
    progress: bool | None,
    first: FirstStart,
) -> tuple[Executor, Cuts | None]:
    """Build an engine's executor. Returns it with the tile configurations that it uses."""
    cuda = model.device.type == "cuda"
    if model.device.type == "cpu":
        _build_c(model, compile)
    # Plain torch is not faster when it reads shared pages once, so it does that only on request.
    cascades = Cascades(model, limits, cascade_policy(model, limits, always=True)) if cascade else None
    if compile is False or model.foreign:
        return EagerExecutor(limits, model.spec.forward, cascades), None
    if not (cuda or compile):
        return EagerExecutor(limits, models.forward if choice is None else partial(models.forward, fast=choice), cascades), None
    if not cuda:
        return EagerExecutor(limits, compiled_forward(model), cascades), None
    from nanovllm.executor.graph_executor import GraphExecutor

    def captured(cuts: Cuts | None) -> Executor:
        with torch.cuda.device(model.device):
            return GraphExecutor(model, limits, kv, cascade=cascade, choice=choice, cuts=cuts, progress=progress, first=first)

    try:
        return _by_cuts(captured, cuts, tuning)
    except AttentionUnavailableError as error:
        warnings.warn(f"{error}; attention runs in plain torch, which is slow", stacklevel=4)
        return EagerExecutor(limits, compiled_forward(model), cascades), None


def step_bytes_needed(
    model: Model,
    limits: EngineConfig,
    compile: bool | None,
    choice: FastChoice | None,
    cuts: Cuts | None,
    tuning: bool | str | os.PathLike[str] | None,
) -> tuple[int, Cuts | None]:
    """Bytes that captured steps hold in addition to weights and KV, and the tile configurations by which kernels could be made."""
    if not _captures(model, limits, compile) or model.foreign:
        return 0, cuts
    from nanovllm.executor.kv_budget import measured

    try:
        return _by_cuts(partial(measured, model, limits, choice), cuts, tuning)
    except AttentionUnavailableError:
        return 0, cuts  # `build_executor` warns
    except torch.OutOfMemoryError as error:
        size = f"max_num_batched_tokens={limits.max_num_batched_tokens} and max_num_seqs={limits.max_num_seqs}"
        raise OutOfPagesError(f"a step with {size} does not fit in the memory of {model.device} next to the weights: lower them") from error
