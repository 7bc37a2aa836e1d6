"""Property tests for an engine, a model, a scheduler or a page allocator, as Hypothesis state machines.

Each machine calls the code under test in random order and compares the results with a shadow: a simple model of the same thing in plain
Python. Run a machine with `hypothesis.stateful.run_state_machine_as_test`, or for some minutes with the command `nanovllm fuzz`. Subclass
it to test other code. The package needs the extra `nanovllm[testing]`.

Messages and docstrings name invariants by their number in `nanovllm.state.invariants.INVARIANTS`.

Examples:
    >>> from hypothesis import settings
    >>> from hypothesis.stateful import run_state_machine_as_test
    >>> from nanovllm.testing import EngineMachine, ModelWorld
    >>> class MyModel(EngineMachine):
    ...     world = ModelWorld()  # a small random Qwen3; ModelWorld(model) tests another float32 or float64 model on a CPU
    >>> run_state_machine_as_test(MyModel, settings=settings(max_examples=1, stateful_step_count=4, deadline=None))
"""

from importlib.util import find_spec

if find_spec("hypothesis") is None:
    raise ModuleNotFoundError("nanovllm.testing needs hypothesis: pip install 'nanovllm[testing]'", name="hypothesis")

from nanovllm.testing.draws import Draws
from nanovllm.testing.machines.cascade import CascadeChunkMachine, CascadeMachine
from nanovllm.testing.machines.chunks import ChunkMachine, ModelChunkMachine
from nanovllm.testing.machines.disk import DiskMachine
from nanovllm.testing.machines.disk_windows import DiskFrameMachine, DiskWindowMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.failures import FailureMachine
from nanovllm.testing.machines.frames import FrameMachine
from nanovllm.testing.machines.host_memory import HostChunkMachine, HostMemoryMachine
from nanovllm.testing.machines.host_windows import HostFrameMachine, HostWindowChunkMachine, HostWindowMachine
from nanovllm.testing.machines.pages import PageMachine
from nanovllm.testing.machines.prefix import PrefixMachine
from nanovllm.testing.machines.run_ahead import AheadMachine
from nanovllm.testing.machines.scheduler import ScheduleMachine
from nanovllm.testing.machines.windows import MixedWindowMachine, WindowChunkMachine, WindowMachine
from nanovllm.testing.shadows.worlds import ModelWorld, SymbolicWorld, World

__all__ = [
    "AheadMachine",
    "CascadeChunkMachine",
    "CascadeMachine",
    "ChunkMachine",
    "DiskFrameMachine",
    "DiskMachine",
    "DiskWindowMachine",
    "Draws",
    "EngineMachine",
    "FailureMachine",
    "FrameMachine",
    "HostChunkMachine",
    "HostFrameMachine",
    "HostMemoryMachine",
    "HostWindowChunkMachine",
    "HostWindowMachine",
    "MixedWindowMachine",
    "ModelChunkMachine",
    "ModelWorld",
    "PageMachine",
    "PrefixMachine",
    "ScheduleMachine",
    "SymbolicWorld",
    "WindowChunkMachine",
    "WindowMachine",
    "World",
]
