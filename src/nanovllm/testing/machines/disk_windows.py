"""Machines for models with sliding-window layers that keep KV on disk: pages and their frames (KV memory of those layers) in files."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from nanovllm.engine.disk_flush import flush_kv
from nanovllm.state.prefix_keys import is_frame
from nanovllm.testing.machines.disk import DiskMachine
from nanovllm.testing.machines.host_windows import HostFrameMachine, HostWindowMachine
from nanovllm.testing.strategies import token_ids


class _Restarts(DiskMachine):
    """A disk machine that serves prompts whose pages and frames are on disk alone, or of which some are missing."""

    @initialize(data=st.data(), num_host_pages=st.integers(2, 32), slowness=st.sampled_from([0.0, 0.0, 1.0, 2.0]))
    def start(self, data: st.DataObject, num_host_pages: int, slowness: float) -> None:
        """Start a fresh engine with host memory and an empty folder. Chunks may pin about half of its pool."""
        super().start(data, num_host_pages, slowness)

    @rule(
        data=st.data(),
        prompt=token_ids(min_size=6, max_size=16),
        more=token_ids(min_size=0, max_size=3),
        shared=st.integers(3, 16),
        num_left=st.sampled_from([0, 0, 0, 1, 2, 4]),
        num_gone=st.sampled_from([0, 0, 1, 2]),
        keep=st.sampled_from([False, False, True]),
        reads=st.lists(st.sampled_from([0, 1, 2, 8]), min_size=2, max_size=5),
    )
    def come_back_from_disk(
        self,
        data: st.DataObject,
        prompt: list[int],
        more: list[int],
        shared: int,
        num_left: int,
        num_gone: int,
        keep: bool,
        reads: list[int],
    ) -> None:
        """Fill a prompt and write its KV. Then submit it again, beside one that shares its first tokens, after most KV was lost elsewhere.

        Some indexed pages may be left, without frames if these were taken, and some files of pages and frames may be gone.
        """
        self._submit(None, prompt, replace(self._options(data), max_tokens=1), keep=False)
        self.step(16)
        flush_kv(self.state)
        host, idle = self.state.pool.host, self.state.prefix.idle_pages()
        assert host is not None
        self.state.runtime.lease.lose(idle[: max(0, len(idle) - num_left)], [*host.key_of])  # as after a failed call
        for _ in range(min(num_gone, len(self._stored()))):
            stored = self._stored()
            files = sorted(path for key, path in stored.items() if is_frame(key)) or sorted(stored.values())
            files[data.draw(st.integers(0, len(files) - 1))].unlink()
        self._submit(None, prompt + more, self._options(data), keep=keep)
        self._submit(None, [*prompt[:shared], 1 - prompt[0]], self._options(data), keep=False)
        for count in reads:
            self.step(1)
            self._disk.reads.run(count)


class DiskWindowMachine(_Restarts, HostWindowMachine):
    """`DiskMachine` for a model in which one layer has full attention and one has a sliding window.

    Pages and frames have files of their own. So a page may be on disk while its frame is not, because it was never written, was deleted
    to make room, or is damaged. Replies must equal those of a request alone in an engine without host memory and disk.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with a window of 3 tokens in layer 1.
        num_frames: Smallest and largest number of frames.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import DiskWindowMachine, SymbolicWorld
        >>> class WindowFirst(DiskWindowMachine):
        ...     world = SymbolicWorld(windows=(2, 0))
        >>> run_state_machine_as_test(WindowFirst, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """


class DiskFrameMachine(_Restarts, HostFrameMachine):
    """`DiskMachine` for a model in which every layer has a sliding window, so that the file of a page has its frame.

    Attributes:
        world: The engine and model under test, with their oracle. The default is a symbolic model with windows of 3 and 2 tokens.
        num_frames: Smallest and largest number of frames.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import DiskFrameMachine, SymbolicWorld
        >>> class LongWindows(DiskFrameMachine):
        ...     world, num_frames = SymbolicWorld(windows=(5, 5)), (3, 12)
        >>> run_state_machine_as_test(LongWindows, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """
