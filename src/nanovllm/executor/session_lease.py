"""`SessionLease`: what the host knows about the carries of one session, so that a step need not wait for the device.

The truth about a carry is on the device: `TokenLog.ran` counts the steps of the session, `TokenLog.num_steps` those that the carry has
seen. Reading them waits for the device. The lease remembers the newest carry that a step returned to the host. Traced code never touches
the lease, so a carry that the lease does not know is looked up on the device.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.state.lease import Lease
from nanovllm.types import Tensor


@dataclass(slots=True, eq=False)
class Place:
    """Memory that captured functions write, and the session whose carry is in it. Functions that share the memory share the place."""

    holder: "SessionLease | None" = None


@dataclass(slots=True, eq=False)
class SessionLease:
    """Mutable on purpose, like `state.lease.Lease`. `begin` makes one for each session.

    Attributes:
        session: The number of the session.
        num_steps: The steps that the newest known carry has seen.
        committed: Whether the session was committed.
        checked: False for carries that are being recorded in a CUDA graph, when nothing may wait for the device.
        engine: The lease of the engine, which knows whether the device is broken.
        place: Where the session's newest carry is, or would be if its first carry were captured.
    """

    session: int
    num_steps: int = 0
    committed: bool = False
    checked: bool = True
    engine: Lease | None = None
    place: Place = field(default_factory=Place)
    _newest: "weakref.ref[Tensor] | None" = None
    _version: int | None = 0
    _static: set[int] = field(default_factory=set)

    def note(self, num_steps: Tensor, counters: Iterable[Tensor], count: int) -> None:
        """Remember the newest carry by its tensor `num_steps`, whose value is `count`.

        `counters` are the tensors that every step of the session writes in place.
        """
        # Tensors count the writes to their memory, those of compiled code included. A write that is not known shows a step in traced code.
        # Tensors of `torch.inference_mode` do not count, so the device has to be asked.
        version = _version(counters)
        self._newest = None if version is None else weakref.ref(num_steps)
        self._version, self.num_steps = version, count

    def knows(self, num_steps: Tensor, counters: Iterable[Tensor]) -> bool:
        """Whether this is the newest known carry, and no traced step took it since."""
        return self._newest is not None and self._newest() is num_steps and _version(counters) == self._version

    def share(self, counters: Iterable[Tensor]) -> None:
        """Note counters whose memory several carries share, because a CUDA graph writes it. Of those carries only the newest is valid."""
        self._static.update(tensor.data_ptr() for tensor in counters)

    def outdated(self, num_steps: Tensor) -> bool:
        """Whether this counter's memory belongs to a CUDA graph that has written it since for a newer carry."""
        return bool(self._static) and num_steps.data_ptr() in self._static and (self._newest is None or self._newest() is not num_steps)


def _version(counters: Iterable[Tensor]) -> int | None:
    counters = tuple(counters)
    return None if any(counter.is_inference() for counter in counters) else sum(counter._version for counter in counters)
