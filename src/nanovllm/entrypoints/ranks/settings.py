"""What rank 0 tells the other ranks when they start, and how every rank makes its model and its engine from it."""

import importlib
import json
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch

from nanovllm.config import Mesh, ModelConfig
from nanovllm.engine.init_state import init_state
from nanovllm.engine.mirrored import COMPARED
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.distributed import joined, limited
from nanovllm.loading.hub import resolve_folder
from nanovllm.loading.load_model import load_model, read_config, resolve_device
from nanovllm.loading.transformers.spec import TransformersSpec
from nanovllm.models.common.sharding import sharded_config
from nanovllm.models.model import Model
from nanovllm.ops.distributed.process_group import mesh_of
from nanovllm.state.digest import SIZE, digest
from nanovllm.state.engine_state import EngineState

LONGEST = 86_400  # seconds
STARTING = 300.0  # seconds without a sign of a rank that starts
RANK_TIMEOUT = 60.0  # seconds; as in `LLM`


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the engine of each rank is made.

    Attributes:
        model: As in `load_model`.
        devices: The device of each rank.
        loading: Further arguments of `load_model`.
        limits: Arguments of `init_state`.
        rank_timeout: Seconds after which a rank that does not answer counts as dead.
        compared: Steps between two comparisons of the ranks' states.
        whole: Whether their digests are those of `digest(whole=True)`.
        grouped: Whether the ranks join a process group and share the model. Otherwise each has the whole model, for tests.
        threads: The threads of torch.
        change: What is made of the model before the engine: a function of a model as `module:name`, and its further arguments.
        maker: What makes the model in place of `load_model`, with the same arguments, as `module:name`; None: `load_model`.
        hook: A function of the rank, its model, its state and its process group, that returns a model and a state, as `module:name`.
    """

    model: str
    devices: tuple[str, ...]
    loading: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    rank_timeout: float = RANK_TIMEOUT
    compared: int = COMPARED
    whole: bool = False
    grouped: bool = True
    threads: int = 1
    change: tuple[str, tuple[str, ...]] | None = None
    maker: str | None = None
    hook: str | None = None

    def encode(self) -> bytes:
        """The settings as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(body: bytes) -> "Settings":
        """The settings from bytes."""
        given = json.loads(body)
        change = None if given["change"] is None else (given["change"][0], tuple(given["change"][1]))
        return Settings(**{**given, "devices": tuple(given["devices"]), "change": change})


def build(settings: Settings, rank: int, store: Any, joins: Callable[[Mesh], None]) -> tuple[Model, EngineState]:
    """The model and the engine of one rank. All ranks call this at the same time.

    Args:
        settings: The settings.
        rank: The number of this rank.
        store: Where the ranks meet to join a process group; None: they join none.
        joins: Is told the mesh.
    """
    device, size = torch.device(settings.devices[rank]), len(settings.devices)
    group: Any = None
    mesh: Mesh | None = None
    torch.set_num_threads(settings.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is not None:
        group = joined(store, rank, size, device, timedelta(seconds=max(STARTING, settings.rank_timeout)))
        joins(mesh := mesh_of(group, device, store))
    make = load_model if settings.maker is None else _named(settings.maker)
    model = make(settings.model, device=device, **settings.loading, mesh=mesh)
    if settings.change is not None:
        model = _named(settings.change[0])(model, *settings.change[1])
    state = init_state(model, **settings.limits)
    if group is not None:
        limited(group, device, timedelta(seconds=settings.rank_timeout))
    if settings.hook is not None:
        model, state = _named(settings.hook)(rank, model, state, group)
    if mesh is not None:
        model = replace(model, config=replace(model.config, mesh=replace(mesh, led=True)))
    return model, state


def _named(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def begun(state: EngineState, *, whole: bool) -> str:
    """The digest of a first state, with its limits."""
    return blake2b(digest(state, whole=whole) + repr(state.config).encode(), digest_size=SIZE).hexdigest()


def chosen_devices(size: Any, device: Any, devices: Any) -> tuple[str, ...]:
    """The device of each of `size` ranks.

    Args:
        size: `tensor_parallel_size`.
        device: The argument `device` of `LLM`: a CPU, or None or `"cuda"` for the first GPUs.
        devices: The argument `devices`: one for each rank, or None.

    Raises:
        InvalidRequestError: An argument has a wrong type or value, or there are fewer GPUs than ranks.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidRequestError(f"tensor_parallel_size={reprlib.repr(size)} must be an integer of at least 1")
    if devices is not None:
        if device is not None:
            raise InvalidRequestError(f"device={device!r} with devices={devices!r}: set only one of the two")
        if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) != size:
            raise InvalidRequestError(f"devices={reprlib.repr(devices)} must be a list of {size} devices (tensor_parallel_size)")
        named = tuple(str(resolve_device(each)) for each in devices)
        if len({*named} - {"cpu"}) < size and {*named} != {"cpu"}:
            raise InvalidRequestError(f"devices={reprlib.repr(devices)} must be a GPU of its own for each rank, or the CPU for all")
        return named
    first = resolve_device(device)
    if first.type != "cuda":
        return (str(first),) * size
    count = torch.cuda.device_count()
    if size > count:
        raise InvalidRequestError(f"tensor_parallel_size={size} needs {size} GPUs, but torch sees {count}")
    if torch.device("cuda" if device is None else device).index is not None and size > 1:
        raise InvalidRequestError(f"device={device!r} names one GPU for {size} ranks: give devices=[...] with one for each")
    return tuple(f"cuda:{rank}" for rank in range(size))


def settings_of(model: Any, devices: tuple[str, ...], loading: Mapping[str, Any], limits: Mapping[str, Any], rank_timeout: Any) -> Settings:
    """The settings of an engine of several ranks. A model that must be downloaded is downloaded now, once for all ranks.

    Raises:
        InvalidRequestError: An argument has a wrong type or value, or cannot be sent to another process.
        CheckpointError: The model is not found.
    """
    if isinstance(model, Model):
        raise InvalidRequestError(f"{model!r} is already loaded on one device: give tensor_parallel_size={len(devices)} its folder or name")
    require_timeout(rank_timeout)
    asked = {name: _sent(name, value) for name, value in loading.items()}
    name = _sent("model", model)
    trusted = asked["trust_remote_code"]
    folder, _ = resolve_folder(name, revision=asked["revision"], download=asked["download"], with_code=trusted)
    spec, config = read_config(folder, trust_remote_code=trusted)
    if isinstance(spec, TransformersSpec):
        raise InvalidRequestError(f"tensor_parallel_size={len(devices)} needs a built-in architecture, {config.architecture} has none")
    sharded_config(config, Mesh(size=len(devices), rank=0, group=0))  # before any process is started
    return Settings(
        model=name,
        devices=devices,
        loading={**asked, "download": False},
        limits={name: _sent(name, value) for name, value in limits.items()},
        rank_timeout=float(rank_timeout),
        threads=torch.get_num_threads(),
    )


def settings_by(
    maker: str, model: str, config: ModelConfig, devices: tuple[str, ...], loading: Mapping[str, Any], limits: Mapping[str, Any]
) -> Settings:
    """The settings of an engine of several ranks whose model is not loaded but made.

    Args:
        maker: As in `Settings`.
        model: The name that it gets.
        config: The config of the whole model.
        devices: The device of each rank.
        loading: Its further arguments.
        limits: Arguments of `init_state`.

    Raises:
        InvalidRequestError: The ranks cannot share the model, or an argument cannot be sent to another process.
    """
    sharded_config(config, Mesh(size=len(devices), rank=0, group=0))
    return Settings(
        model=model,
        devices=devices,
        loading={name: _sent(name, value) for name, value in loading.items()},
        limits={name: _sent(name, value) for name, value in limits.items()},
        threads=torch.get_num_threads(),
        maker=maker,
    )


def require_timeout(rank_timeout: Any) -> None:
    """Require a number of seconds. Raises `InvalidRequestError`."""
    wrong = isinstance(rank_timeout, bool) or not isinstance(rank_timeout, int | float)
    if wrong or not 0 < rank_timeout <= LONGEST:
        raise InvalidRequestError(f"rank_timeout={reprlib.repr(rank_timeout)} must be a number of seconds in (0, {LONGEST}]")


def _sent(name: str, value: Any) -> Any:
    """An argument of `LLM` as the settings hold it.

    Raises:
        InvalidRequestError: It cannot be sent to another process.
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidRequestError(f"{name}={reprlib.repr(value)} cannot be sent to the other ranks: {type(value).__name__}")
