"""Machines over models whose layers have windows, in pools with fewer frames than pages."""

from nanovllm.testing.machines.chunks import ChunkMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.shadows.worlds import SymbolicWorld


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
