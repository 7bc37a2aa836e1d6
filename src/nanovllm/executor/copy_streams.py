"""Streams of copies beside the stream of the engine: on a GPU CUDA streams, on a CPU copies that are made at once."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Copies(Protocol):
    """A stream of copies beside the engine's stream. A *mark* is a point in one stream that another can wait for."""

    def run(self, copy: Callable[[], None]) -> None:
        """Add a copy to the stream."""
        ...

    def note_use(self, memory: torch.Tensor) -> None:
        """Note that copies use this memory of the device: nothing else gets it before they have ended, even if it is freed meanwhile."""
        ...

    def mark(self) -> Any:
        """The point after all copies so far."""
        ...

    def engine_mark(self) -> Any:
        """The point after all that the engine's stream was given so far."""
        ...

    def hold(self, mark: Any) -> None:
        """Let later copies wait for a mark of the engine's stream, or of another stream of copies."""
        ...

    def hold_engine(self, mark: Any) -> None:
        """Let later work of the engine's stream wait for a mark of this stream."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        ...

    def wait(self, mark: Any) -> None:
        """Let the calling thread wait for a mark of this stream."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether all copies before a mark of this stream have ended."""
        ...


class CopiesAtOnce:
    """Copies of a CPU, which have ended when they return."""

    def run(self, copy: Callable[[], None]) -> None:
        """Copy."""
        copy()

    def note_use(self, memory: torch.Tensor) -> None:
        """Nothing is used later."""

    def mark(self) -> None:
        """Nothing to wait for."""

    def engine_mark(self) -> None:
        """Nothing to wait for."""

    def hold(self, mark: None) -> None:
        """Wait for nothing."""

    def hold_engine(self, mark: None) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait(self, mark: None) -> None:
        """Wait for nothing."""

    def passed(self, mark: None) -> bool:
        """All copies have ended."""
        return True


class CopyStream:
    """A CUDA stream of copies. The engine's stream is the one that is current when a method is called."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, copy: Callable[[], None]) -> None:
        """Add a copy to the stream."""
        with torch.cuda.stream(self._stream):
            copy()

    def note_use(self, memory: torch.Tensor) -> None:
        """Note that copies use this memory of the device: nothing else gets it before they have ended, even if it is freed meanwhile."""
        memory.record_stream(self._stream)

    def mark(self) -> Any:
        """The point after all copies so far."""
        return self._stream.record_event()

    def engine_mark(self) -> Any:
        """The point after all that the engine's stream was given so far."""
        return torch.cuda.current_stream(self._stream.device).record_event()

    def hold(self, mark: Any) -> None:
        """Let later copies wait for a mark of the engine's stream, or of another stream of copies."""
        self._stream.wait_event(mark)

    def hold_engine(self, mark: Any) -> None:
        """Let later work of the engine's stream wait for a mark of this stream."""
        torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def synchronize(self) -> None:
        """Let the host wait for all copies."""
        self._stream.synchronize()

    def wait(self, mark: Any) -> None:
        """Let the calling thread wait for a mark of this stream."""
        mark.synchronize()

    def passed(self, mark: Any) -> bool:
        """Whether all copies before a mark of this stream have ended."""
        return mark.query()
