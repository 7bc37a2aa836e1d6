"""Public helpers for testing an engine, a model or an op: strategies, machines, shadow models, planted faults and small random models.

The machines are Hypothesis state machines; run one with `hypothesis.stateful.run_state_machine_as_test(EngineMachine)`, or a subclass that
puts another engine, model or scheduler in its place.
"""

from nanovllm.testing.machines.cascade import CascadeChunkMachine, CascadeMachine
from nanovllm.testing.machines.chunks import ChunkMachine, ModelChunkMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.frames import FrameMachine
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
    "EngineMachine",
    "FrameMachine",
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
