"""Machines over models whose layers have windows, in pools with fewer frames than pages."""

from .chunk_machine import ChunkMachine
from .engine_machine import EngineMachine
from .worlds import SymbolicWorld


class WindowMachine(EngineMachine):
    """`EngineMachine` where every layer has a window: frames are the memory, and requests may be longer than it."""

    world = SymbolicWorld(windows=(3, 2))
    num_frames = (2, 9)


class MixedWindowMachine(EngineMachine):
    """`EngineMachine` where one layer has a window and one has none: pages and frames are two scarce things."""

    world = SymbolicWorld(windows=(0, 3))
    num_frames = (2, 12)
    max_tokens = 24


class WindowChunkMachine(ChunkMachine):
    """`ChunkMachine` over the same model: what is made of chunks takes their frames along."""

    world = SymbolicWorld(windows=(0, 3))
    num_frames = (4, 24)
