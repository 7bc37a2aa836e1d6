"""`init_state`: an engine's first state, its KV pool and its runtime."""

import os
import warnings
from dataclasses import replace

import torch

from nanovllm.config import EngineConfig, loaded_for_short
from nanovllm.engine.donation import model_key, require_model
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.executor.build_executor import build_executor, checked_choice, step_bytes_needed, tuned_cuts
from nanovllm.executor.executor import Runtime
from nanovllm.executor.kv_budget import default_tokens, device_budget
from nanovllm.models.model import Model
from nanovllm.models.tuning.choose import require_tuning
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import init_kv
from nanovllm.state.lease import Lease
from nanovllm.state.pool import init_pool
from nanovllm.state.pool_sizes import bytes_of, pool_sizes
from nanovllm.state.window_frames import init_frames


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
    """An empty engine for `model`.

    `num_pages` (excluding the dummy page): None takes what `max_num_seqs` sequences of full length need, at most 4 GiB on a CPU and
    what `memory_fraction` of a GPU's memory leaves beside the weights and what the largest steps hold, which is measured. `num_frames`:
    for how many pages layers with a window keep KV (where it is None, `state/pool_sizes.py` says how many that are); where all layers have
    one, `num_pages` says it. `max_num_batched_tokens`: None is 8,192, and
    on a GPU of 64 GiB or more what takes a prompt of 16k and a question. `compile`: None is on for CUDA and off for a CPU, where decode
    steps run in C if there is a compiler; False is the plain reference on any device. `cascade`: whether pages that
    requests share are read once for all of them; None does it where that is faster, True for every whole page, on a CPU too.
    `check`: whether the fast form of each decode layer is compared with the plain one on the model's own weights before it is used; a
    layer beyond the error bound runs in plain torch, with one warning for all. None does it on a GPU; True on a CPU too, but not with
    `compile=True` there, which runs compiled layers in the place of the fast ones. With `compile=False` nothing is fast, or compared.
    Compared are batches of 1, 8 and 24 rows, and of up to 6 more numbers of rows, 256 at most, for which a tuning file has cuts.
    `tuning`: how the kernels of a GPU cut their work: None as the file says that `nanovllm tune` wrote for this GPU, model and version,
    where it is there; True where it must be; False by the defaults; a path as the file there says. Cuts by which a layer errs beyond the
    bound, or no kernel can be made, are dropped for the defaults, with a warning; the latter are an error where the file was asked for.
    `progress`: None draws bars on a terminal.
    Raises `InvalidRequestError` for a limit below 1 and for options that exclude each other, and `OutOfPagesError` where the pool does not
    fit into memory, `TuningFileError` for a tuning file that was asked for and cannot be used.
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
    cuts = tuned_cuts(model, limits, compile, tuning)
    choice, cuts = checked_choice(
        model, limits, compile, check, cuts, tuning
    )  # before the pool takes the memory that it needs for a moment
    budget = None
    if num_pages is None:
        needed, cuts = step_bytes_needed(model, limits, compile, choice, cuts, tuning)
        budget = device_budget(model, memory_fraction) - needed
    num_pages, frames = pool_sizes(config, limits, num_pages, num_frames, budget, model.dtype)
    limits = replace(limits, num_pages=num_pages, num_frames=frames)
    try:
        kv = init_kv(config, num_pages=num_pages, num_frames=frames, page_size=page_size, dtype=model.dtype, device=model.device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        size = bytes_of(config, limits, model.dtype)
        raise OutOfPagesError(f"num_pages={num_pages} needs {size / 2**30:.1f} GiB, which {model.device} does not have free") from error
    executor, cuts = build_executor(model, limits, kv, compile, cascade, choice, cuts, tuning, progress)
    runtime = Runtime(Lease(model_key(model)), executor, cuts)
    windows = {"window": config.widest_window, "alone": config.all_windowed}
    pool = init_pool(num_pages, page_size, init_frames(frames, num_pages, **windows) if frames else None)
    return EngineState(config=limits, kv=kv, pool=pool, runtime=runtime)
