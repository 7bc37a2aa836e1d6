"""Machines for models with sliding-window layers that keep KV in host memory: pages with their frames (KV memory of those layers)."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.host_memory import HostChunkMachine, HostMemoryMachine
from nanovllm.testing.shadows.worlds import SymbolicWorld


class HostWindowMachine(HostMemoryMachine):
    """`HostMemoryMachine` for a model in which one layer has full attention and one has a sliding window.

    Frames are scarce, so that they are taken from pages that stay on the device. They go to host memory at that moment, and come back to
    the same pages or to others. Otherwise samples and invariants are those of `HostMemoryMachine`.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with a window of 3 tokens in layer 1.
        num_frames: Smallest and largest number of frames.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import HostWindowMachine, SymbolicWorld
        >>> class WindowFirst(HostWindowMachine):
        ...     world = SymbolicWorld(windows=(2, 0))
        >>> run_state_machine_as_test(WindowFirst, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    world = SymbolicWorld(windows=(0, 3))
    num_frames = (2, 12)
    max_tokens = 24

    @precondition(lambda self: self._bare())
    @rule(target=EngineMachine.chunks, data=st.data())
    def move_over_a_bare_page(self, data: st.DataObject):
        """Prefill a chunk of a prefix whose host page has no frame, and move chunks to host memory."""
        bare = self._bare()
        made = self._prefill(None, self.prefixes[bare[data.draw(st.integers(0, len(bare) - 1))]])
        if self.state.chunks:
            self.offload(data, 1)
        return made

    def _bare(self) -> list[bytes]:
        """The keys of bare host pages whose tokens are known, in the order of their host pages."""
        host = self.state.pool.host
        return [] if host is None else [key for at in sorted(host.bare) if (key := host.key_of[at]) in self.prefixes]


class HostFrameMachine(HostMemoryMachine):
    """`HostMemoryMachine` for a model in which every layer has a sliding window, so that a page without a frame has no KV at all.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with windows of 3 and 2 tokens.
        num_frames: Smallest and largest number of frames.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import HostFrameMachine, SymbolicWorld
        >>> class LongWindows(HostFrameMachine):
        ...     world, num_frames = SymbolicWorld(windows=(5, 5)), (3, 12)
        >>> run_state_machine_as_test(LongWindows, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    world = SymbolicWorld(windows=(3, 2))
    num_frames = (2, 9)


class HostWindowChunkMachine(HostChunkMachine):
    """`HostChunkMachine` for a model in which one layer has full attention and one has a sliding window.

    A chunk that moves takes the frames of all of its pages with it, also where a host page of its prefix has none yet.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with a window of 3 tokens in layer 1.
        num_frames: Smallest and largest number of frames.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import HostWindowChunkMachine, SymbolicWorld
        >>> class WindowFirst(HostWindowChunkMachine):
        ...     world = SymbolicWorld(windows=(2, 0))
        >>> run_state_machine_as_test(WindowFirst, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    world = SymbolicWorld(windows=(0, 3))
    num_frames = (4, 24)
