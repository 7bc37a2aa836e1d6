"""`Subject`: a machine to run, the name that users call it by, and the code that a written test makes it with."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine

from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.testing.fuzz.hunt import Machine
from nanovllm.testing.fuzz.program import Import
from nanovllm.testing.machines.cascade import CascadeChunkMachine, CascadeMachine
from nanovllm.testing.machines.chunks import ChunkMachine, ModelChunkMachine
from nanovllm.testing.machines.disk import DiskMachine
from nanovllm.testing.machines.disk_windows import DiskFrameMachine, DiskWindowMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.engine_holder import EngineHolder
from nanovllm.testing.machines.failures import FailureMachine
from nanovllm.testing.machines.frames import FrameMachine
from nanovllm.testing.machines.host_memory import HostChunkMachine, HostMemoryMachine
from nanovllm.testing.machines.host_windows import HostFrameMachine, HostWindowChunkMachine, HostWindowMachine
from nanovllm.testing.machines.pages import PageMachine
from nanovllm.testing.machines.prefix import PrefixMachine
from nanovllm.testing.machines.run_ahead import AheadMachine
from nanovllm.testing.machines.scheduler import ScheduleMachine
from nanovllm.testing.machines.windows import MixedWindowMachine, WindowChunkMachine, WindowMachine
from nanovllm.testing.shadows.chunks import ChunkShadow
from nanovllm.testing.shadows.worlds import ModelWorld

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "pages": PageMachine,
        "frames": FrameMachine,
        "prefix": PrefixMachine,
        "scheduler": ScheduleMachine,
        "engine": EngineMachine,
        "ahead": AheadMachine,
        "failures": FailureMachine,
        "host-memory": HostMemoryMachine,
        "host-chunks": HostChunkMachine,
        "disk": DiskMachine,
        "chunks": ChunkMachine,
        "model-chunks": ModelChunkMachine,
        "cascade": CascadeMachine,
        "cascade-chunks": CascadeChunkMachine,
        "windows": WindowMachine,
        "mixed-windows": MixedWindowMachine,
        "window-chunks": WindowChunkMachine,
        "host-windows": HostWindowMachine,
        "host-frames": HostFrameMachine,
        "host-window-chunks": HostWindowChunkMachine,
        "disk-windows": DiskWindowMachine,
        "disk-frames": DiskFrameMachine,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A machine to run.

    Attributes:
        name: What users call it: a key of `MACHINES`, or `module:ClassName`.
        machine: The class.
        imports: What a written test imports for it.
        definition: The code of the class, if it is made of another one and a model.
        code: The name of the class in written code.
    """

    name: str
    machine: Machine
    imports: frozenset[Import]
    definition: str = ""
    code: str

    @property
    def about(self) -> str:
        """What the machine tests: the first line of its docstring."""
        return first_line(self.machine)

    @property
    def label(self) -> str:
        """The name as part of the name of a function or a file."""
        return self.name.rpartition(":")[2].replace("-", "_").lower()

    def over(self, model: Model, code: str, imports: Iterable[Import]) -> "Subject":
        """The same machine over a model, if it runs a model; else the subject itself.

        Args:
            model: A model on the CPU in float32 or float64.
            code: The code that makes the model.
            imports: What this code needs.

        Raises:
            InvalidRequestError: The machine needs another kind of model.
        """
        if not issubclass(self.machine, EngineHolder):
            return self
        if issubclass(self.machine, FailureMachine):
            raise InvalidRequestError(f"{self.name} needs a tokenizer that it can break, and runs no other model: leave {self.name} out")
        if getattr(self.machine, "num_frames", None) is not None and not any(model.config.windows):
            raise InvalidRequestError(f"{self.name} needs a model with sliding windows, and {model.name} has none: leave {self.name} out")
        world = ModelWorld(model)
        if issubclass(self.machine, ChunkMachine):
            try:
                told = world.logits_after(ChunkShadow(world).exact([0, 1, 0]).cells)
            except ValueError as error:
                raise InvalidRequestError(f"{self.name} cannot run {model.name}: {error}") from None
            if (world.uncached([0, 1, 0])[0][-1] - torch.tensor(told)).abs().max() > world.tolerance:
                raise InvalidRequestError(f"{self.name} cannot run {model.name}: the decoder in numpy does not know its architecture")
        name = f"Fuzzed{self.machine.__name__}"
        return replace(
            self,
            machine=type(name, (self.machine,), {"__doc__": self.machine.__doc__, "__module__": self.machine.__module__, "world": world}),
            imports=self.imports | {("nanovllm.testing", "ModelWorld"), *imports},
            definition=f"class {name}({self.code}):\n    world = ModelWorld({code})",
            code=name,
        )


def find_subject(name: str) -> Subject:
    """The machine of this name.

    Args:
        name: A key of `MACHINES`, or `module:ClassName` for a machine of your own, which is imported.

    Raises:
        InvalidRequestError: There is no such machine.
    """
    if name in MACHINES:
        machine = MACHINES[name]
        return _subject(name, machine, "nanovllm.testing")
    module, _, attribute = name.partition(":")
    if not attribute:
        choices = ", ".join(MACHINES)
        raise InvalidRequestError(f"unknown machine {name!r}; choose from {choices}, or give module:ClassName for a machine of your own")
    try:
        machine: Any = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module raises
        raise InvalidRequestError(f"the machine {name!r} cannot be imported: {error}") from None
    if not (inspect.isclass(machine) and issubclass(machine, RuleBasedStateMachine)):
        raise InvalidRequestError(f"{name} is {machine!r}, not a subclass of hypothesis.stateful.RuleBasedStateMachine")
    return _subject(name, machine, module)


def first_line(documented: Any) -> str:
    """The first line of a docstring; empty if there is none."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _subject(name: str, machine: Machine, module: str) -> Subject:
    attribute = name.rpartition(":")[2] if ":" in name else machine.__name__
    return Subject(name=name, machine=machine, imports=frozenset({(module, attribute)}), code=attribute)
