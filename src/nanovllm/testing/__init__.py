"""Public helpers for testing an engine, a model or an op: strategies, machines, shadow models, planted faults and small random models.

The machines are Hypothesis state machines; run one with `hypothesis.stateful.run_state_machine_as_test(EngineMachine)`, or a subclass that
puts another engine, model or scheduler in its place.
"""

from .ahead_machine import AheadMachine
from .cascade_machine import CascadeChunkMachine, CascadeMachine
from .chunk_machine import ChunkMachine, ModelChunkMachine
from .engine_machine import EngineMachine
from .frames_machine import FrameMachine
from .pages_machine import PageMachine
from .prefix_machine import PrefixMachine
from .schedule_machine import ScheduleMachine
from .window_machine import MixedWindowMachine, WindowChunkMachine, WindowMachine
from .worlds import ModelWorld, SymbolicWorld, World

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
