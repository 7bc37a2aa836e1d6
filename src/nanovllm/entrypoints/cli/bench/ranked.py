"""The engine of several ranks that `nanovllm bench` measures and `nanovllm check` examines: that of `LLM(tensor_parallel_size=n)`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_weights, require_no_revision
from nanovllm.entrypoints.ranks.leader import start
from nanovllm.entrypoints.ranks.settings import RANK_TIMEOUT, settings_by, settings_of
from nanovllm.executor.executor import runtime_of
from nanovllm.models.model import Model
from nanovllm.state.engine_state import EngineState

MAKER = f"{random_weights.__module__}:{random_weights.__name__}"
ONE_DEVICE = "it starts an engine on one device; omit --tensor-parallel-size"  # why some workloads are left out


@contextmanager
def ranked_engine(
    name: str, devices: tuple[str, ...], loading: Mapping[str, Any], limits: Mapping[str, Any], rank_timeout: float = RANK_TIMEOUT
) -> Iterator[tuple[Model, EngineState]]:
    """Start the ranks, yield the model and the engine of rank 0, and end the ranks.

    Args:
        name: One of `SHAPES`, for random weights, or what `load_model` takes.
        devices: The device of each rank.
        loading: Further arguments of `load_model`, of which random weights take the dtype and how they are rounded.
        limits: Arguments of `init_state`.
        rank_timeout: As in `LLM`.

    Raises:
        NanoVLLMError: As `LLM`.
    """
    if name in SHAPES:
        require_no_revision(name, loading["revision"])
        known = {key: loading[key] for key in ("dtype", "quantization", "quantize_head", "fp8_activations")}
        settings = replace(settings_by(MAKER, name, SHAPES[name], devices, known, limits), rank_timeout=rank_timeout)
    else:
        settings = settings_of(name, devices, loading, limits, rank_timeout)
    model, state = start(settings)
    try:
        yield model, state
    finally:
        mirror = runtime_of(state).mirror
        assert mirror is not None
        mirror.close()
