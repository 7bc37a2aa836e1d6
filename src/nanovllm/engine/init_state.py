"""`init_state`: the first state of an engine, with its KV pool and its runtime."""

import os
import warnings
from dataclasses import replace
from math import isinf
from typing import Literal

import torch

from nanovllm.config import EngineConfig, Mesh, loaded_for_short
from nanovllm.engine.disk_tier import add_disk, require_a_page, require_kv_dir
from nanovllm.engine.donation import model_key, require_model
from nanovllm.engine.host_memory import add_host_memory, bounded_auto, require_host_kv, stage_bytes
from nanovllm.engine.prefill_rate import bounded, require_step_ms
from nanovllm.errors import InvalidRequestError, OutOfPagesError
from nanovllm.executor.build_executor import alike, build_executor, checked_choice, compares, first_start, step_bytes_needed, tuned_cuts
from nanovllm.executor.distributed import least
from nanovllm.executor.executor import Runtime
from nanovllm.executor.kv_budget import device_budget
from nanovllm.models.model import Model
from nanovllm.models.tuning.choose import require_tuning
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import init_kv, require_kv_dtype, stored_dtype
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
    max_step_ms: int | float | None = None,
    max_prefill_tokens: int | None = None,
    memory_fraction: float = 0.9,
    seed: int = 0,
    compile: bool | None = None,
    cascade: bool | None = None,
    check: bool | None = None,
    tuning: bool | str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    kv_dtype: Literal["fp8"] | None = None,
    host_kv_gib: int | float | Literal["auto"] = 0,
    kv_dir: str | os.PathLike[str] | None = None,
    kv_dir_gib: int | float = 16,
    mesh: Mesh | None = None,
) -> EngineState:
    """Create an empty engine for a model: its KV memory, its prefix index and the kernels of its steps.

    Args:
        model: The model that `load_model` returned.
        num_pages: KV memory in pages of `page_size` tokens. None: enough for `max_num_seqs` requests of full length, within a limit. The
            limit is 4 GiB on a CPU. On a GPU it is the rest of `memory_fraction` after the weights and the largest steps, which are
            measured. If every layer has a sliding window, this counts the pages inside the windows. A reply ends with `finish_reason`
            `"length"` if its request alone fills all pages.
        num_frames: For models with some sliding-window layers: the number of pages with KV in those layers. Requests give up pages outside
            the window; a chunk needs one for each of its pages. None: enough for `max_num_seqs` windows and a chunk of full length.
        page_size: Tokens per page.
        max_model_len: The maximum number of tokens of a prompt and its reply together. None: the model's own limit.
        max_num_seqs: The maximum number of requests that run at the same time.
        max_num_batched_tokens: The maximum number of tokens of one step. Longer prompts are prefilled in pieces. None: 8,192, or 16,896 on
            a GPU of 64 GiB or more; of several ranks all take the least.
        max_step_ms: About how many milliseconds a step may take while replies go on, so that they need not wait long for their next
            tokens. The engine measures at its start how many prompt tokens that allows, and how much longer tokens take that have many
            others before them. While no reply goes on, prompts fill whole steps. None, or infinity: no bound.
        max_prefill_tokens: Instead of `max_step_ms`: the maximum number of prompt tokens in a step in which replies go on. Nothing is
            measured, so prompts are divided alike on every machine. None: no bound.
        memory_fraction: The fraction of a GPU's memory that may be used.
        seed: The seed of requests that have none of their own, in [0, 2**63).
        compile: True: fused kernels and CUDA graphs on a GPU, `torch.compile` for layers that the kernels do not serve. False: plain torch
            on any device. None: True on a GPU; on a CPU decode steps run in C if there is a compiler.
        cascade: Whether pages that requests share are read once for all of them. None: if that is faster. True: for every whole page, on
            a CPU too.
        check: Whether to compare the fast kernels with the plain layers on the model's own weights at the start. A layer beyond the error
            bound runs in plain torch, with a warning. None: on a GPU, once for the same weights, GPU and versions; that all layers passed
            is kept in the user's cache. True: always, on a CPU too, but not together with `compile=True` there. This option is not
            `nv.check`.
        tuning: The tile configurations of the GPU's kernels. None: use the file that `nanovllm tune` wrote for this GPU, model and
            version, or else the file that nanovllm ships for them, if there is one. True: use the file of `nanovllm tune`, which must
            exist. False: the defaults. A path: use this file.
        progress: Whether to draw progress bars. None: only on a terminal.
        kv_dtype: "fp8": keys and values as codes of 8 bits (e4m3), with a scale for each token and head, in about half of the memory.
            Results differ from those of unrounded KV. None: the dtype of the model.
        host_kv_gib: GiB of host memory for KV that would be lost when its pages are needed for other requests. Later requests with the
            same prefix copy it back, where that is faster than running the tokens; the engine measures both at its start. Several ranks
            divide the memory. "auto": a quarter of the host memory that is free, and at most twice the KV of the device. 0: none.
        kv_dir: A folder for KV that outlives the engine; it needs `host_kv_gib`. Evicted KV is written to it, and `flush_kv` writes the
            rest. A later engine of the same model reads it for requests with the same prefix, where that is faster than running the tokens.
            Several processes may share the folder. None: KV is not kept on disk.
        kv_dir_gib: The size limit of the pages in `kv_dir`, in GiB. The pages that were not used for the longest time make room. A
            server's named chunks in the folder do not count.
        mesh: The ranks that share the model, as given to `load_model`, for a program that wants to be sure. None: those of the model.

    Returns:
        The first state. Every call that changes the engine takes the newest state and returns the next one.

    Raises:
        InvalidRequestError: A limit is invalid, or two options exclude each other.
        OutOfPagesError: The KV memory does not fit into the device.
        TuningFileError: A tuning file was requested and cannot be used.

    Examples:
        >>> nv.init_state(model, num_pages=64)
        EngineState(0 of 64 pages used, 0 chunks, 0 requests, epoch 0)
        >>> nv.init_state(model, num_pages=64, max_model_len=512).config.max_model_len
        512
    """
    require_model(model)
    own, parts = model.config.mesh, 1 if model.config.mesh is None else model.config.mesh.size
    if own is not None and own.led:
        raise InvalidRequestError(f"{model.name}: its ranks have an engine, whose calls they repeat: make another model for another engine")
    if not model.foreign and len(model.params.embed) != -(-model.config.vocab_size // parts):
        raise InvalidRequestError(f"{model.name}: its weights are not those of a rank of {own!r}: give the mesh to load_model")
    if mesh is not None and mesh != model.config.mesh:
        raise InvalidRequestError(f"mesh={mesh!r}, but the model has {model.config.mesh!r}: give the mesh to load_model, too")
    for name, value in (("compile", compile), ("cascade", cascade), ("check", check)):
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(f"{name}={value!r} must be True, False or None")
    if check and compile and model.device.type != "cuda":
        why = "check compares the layers in C, but compile=True replaces them"
        raise InvalidRequestError(f"check=True with compile=True on a CPU: {why}; set only one of the two")
    require_tuning(tuning)
    if model.foreign:
        if compile:
            raise InvalidRequestError(
                f"compile=True: {model.config.architecture} runs through transformers, whose modules are not compiled"
            )
        where = "in C" if model.device.type == "cpu" else "as fused kernels in CUDA graphs"
        warnings.warn(
            f"{model.config.architecture} has no built-in implementation: it runs through transformers with plain torch attention, which "
            f"is slow; built-in architectures run {where}",
            stacklevel=3,
        )
    config = model.config
    max_model_len = config.max_position_embeddings if max_model_len is None else max_model_len
    if not isinstance(memory_fraction, float | int) or not 0 < memory_fraction <= 1:
        raise InvalidRequestError(f"memory_fraction={memory_fraction!r} must be in (0, 1]")
    if num_frames is not None and not config.widest_window:
        raise InvalidRequestError(f"num_frames={num_frames!r}: {model.name} has no sliding-window layers; leave it out")
    if num_frames is not None and (isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1):
        raise InvalidRequestError(f"num_frames={num_frames!r} must be an integer of at least 1")
    require_step_ms(max_step_ms)
    if max_step_ms is not None and max_prefill_tokens is not None:
        raise InvalidRequestError(f"max_step_ms={max_step_ms!r} with max_prefill_tokens={max_prefill_tokens!r}: set only one of the two")
    if max_num_batched_tokens is None:
        (max_num_batched_tokens,) = least(config.mesh, [default_tokens(model.device)])
    limits = EngineConfig(
        num_pages=1 if num_pages is None else num_pages,
        num_frames=1 if num_frames is None and config.widest_window else num_frames or 0,
        page_size=page_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        seed=seed,
        max_prefill_tokens=max_prefill_tokens,
        kv_dtype=kv_dtype,
    )
    require_kv_dtype(config, kv_dtype, model.device)
    num_host_pages = require_host_kv(model, host_kv_gib, limits)
    folder = require_kv_dir(model, kv_dir, kv_dir_gib, num_host_pages)
    dtype = stored_dtype(limits, model.dtype)
    if folder is not None:
        require_a_page(config, kv_dir_gib, page_size, dtype)
    if max_model_len > config.max_position_embeddings:
        more = "; pass max_model_len to load_model for longer requests" if loaded_for_short(config) else ""
        raise InvalidRequestError(f"max_model_len={max_model_len} exceeds the model's {config.max_position_embeddings} positions{more}")
    cuts = tuned_cuts(model, limits, compile, tuning)
    checked = bool(-least(config.mesh, [-compares(model, limits, compile, check, cuts)])[0])  # all ranks, if one of them does
    first = first_start(model, limits, compile, cascade, cuts, checked=checked, sized=num_pages is None)
    budget, choice = None, None
    if checked:  # it needs memory for a moment, so it comes before the KV pool
        choice, cuts = alike(model, *checked_choice(model, limits, cuts, tuning))
    if num_pages is None:
        needed, cuts = step_bytes_needed(model, limits, compile, choice, cuts, tuning)
        needed += stage_bytes(model, num_host_pages)
        (budget,) = least(config.mesh, [device_budget(model, memory_fraction) - needed])
    num_pages, frames = pool_sizes(config, limits, num_pages, num_frames, budget, dtype)
    num_host_pages = bounded_auto(host_kv_gib, num_host_pages, num_pages)
    limits = replace(limits, num_pages=num_pages, num_frames=frames)
    try:
        kv = init_kv(config, num_pages=num_pages, num_frames=frames, page_size=page_size, dtype=dtype, device=model.device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        size = bytes_of(config, limits, dtype)
        raise OutOfPagesError(
            f"num_pages={num_pages} needs {size / 2**30:.1f} GiB, more than {model.device} has free: set it lower"
        ) from error
    executor, cuts = build_executor(model, limits, kv, compile, cascade, choice, cuts, tuning, progress, first)
    first.completed()
    runtime = Runtime(Lease(model_key(model)), executor, cuts)
    windows = {"window": config.widest_window, "alone": config.all_windowed}
    pool = init_pool(num_pages, page_size, init_frames(frames, num_pages, **windows) if frames else None)
    if max_step_ms is not None and not isinf(max_step_ms):
        limits, kv = bounded(model, limits, executor, kv, pool, float(max_step_ms))
    if num_host_pages:
        runtime.host, host, kv = add_host_memory(model, limits, executor, kv, pool, num_host_pages)
        if folder is not None:
            runtime.disk, host = add_disk(model, folder, float(kv_dir_gib), page_size, runtime.host, host)
        pool = replace(pool, host=host)
    return EngineState(config=limits, kv=kv, pool=pool, runtime=runtime)


def default_tokens(device: torch.device) -> int:
    """The default of `max_num_batched_tokens` on this device."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 64 << 30
    return 16384 + 512 if large else 8192
