"""Machines for models with sliding-window layers, in pools with fewer frames (KV memory of sliding-window pages) than pages."""

from nanovllm.testing.machines.chunks import ChunkMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.shadows.worlds import SymbolicWorld


class WindowMachine(EngineMachine):
    """`EngineMachine` for a model in which every layer has a sliding window.

    Frames are the only KV memory, 2 to 9 per pool, and a request may be longer than that memory. Otherwise samples and invariants are
    those of `EngineMachine`.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with windows of 3 and 2 tokens.
        num_frames: Smallest and largest number of frames.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import SymbolicWorld, WindowMachine
        >>> class LongWindows(WindowMachine):
        ...     world, num_frames = SymbolicWorld(windows=(5, 5)), (3, 12)
        >>> run_state_machine_as_test(LongWindows, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    world = SymbolicWorld(windows=(3, 2))
    num_frames = (2, 9)


class MixedWindowMachine(EngineMachine):
    """`EngineMachine` for a model in which one layer has full attention and one has a sliding window.

    Pages and frames are both scarce: pools have up to 24 tokens and 2 to 12 frames. Otherwise samples and invariants are those of
    `EngineMachine`.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with a window of 3 tokens in layer 1.
        num_frames: Smallest and largest number of frames.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import MixedWindowMachine, SymbolicWorld
        >>> class WindowFirst(MixedWindowMachine):
        ...     world = SymbolicWorld(windows=(2, 0))
        >>> run_state_machine_as_test(WindowFirst, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    world = SymbolicWorld(windows=(0, 3))
    num_frames = (2, 12)
    max_tokens = 24


class WindowChunkMachine(ChunkMachine):
    """`ChunkMachine` for a model in which one layer has full attention and one has a sliding window.

    Every function that makes a chunk must also copy or share the frames of its sources. Pools have 4 to 24 frames. Otherwise samples and
    invariants are those of `ChunkMachine`.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with a window of 3 tokens in layer 1.
        num_frames: Smallest and largest number of frames.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import SymbolicWorld, WindowChunkMachine
        >>> class WindowFirst(WindowChunkMachine):
        ...     world = SymbolicWorld(windows=(2, 0))
        >>> run_state_machine_as_test(WindowFirst, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    world = SymbolicWorld(windows=(0, 3))
    num_frames = (4, 24)
