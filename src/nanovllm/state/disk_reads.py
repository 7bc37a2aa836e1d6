"""`DiskReads`: which host pages are being filled from the disk, and which requests wait for them. Persistent."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from immutables import Map

NOTHING, PAGE, WHOLE = range(3)  # what there is of a page that may have a frame: no part of it, the page without its frame, or both


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a request waits for, or meets while it runs.

    Attributes:
        until: When it waits no longer, in seconds of a monotonic clock.
        pages: The host pages into which its pages are read. Empty: none was worth reading.
        start: The place in its prompt of the first page that it meets: it runs the pages before that, and does not wait.
        stop: The place after the last of these pages. 0: it waits, and meets none.
    """

    until: float
    pages: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiskReads:
    """The reads of an engine that keeps KV on disk.

    Attributes:
        bytes_per_second: How fast pages are read, as measured.
        reading: By host page the key of the prefix whose page is being read into it.
        framed: Those of these host pages into which the frame is read, too. In a model without windows, or with windows alone, there are
            none.
        waits: By request what it waits for or meets. Requests that were not looked up yet are not in it.
        now: The time of the newest step, in seconds of a monotonic clock.
    """

    bytes_per_second: float
    reading: Map[int, bytes] = field(default_factory=Map)
    framed: Map[int, bool] = field(default_factory=Map)
    waits: Map[int, Wait] = field(default_factory=Map)
    now: float = 0.0

    def holds(self, request_id: int) -> bool:
        """Whether a request waits for a page that is still being read."""
        wait = self.waits.get(request_id)
        return wait is not None and not wait.stop and self.now < wait.until and any(at in self.reading for at in wait.pages)

    def begun(self, at: int, key: bytes, *, framed: bool) -> "DiskReads":
        """The reads, and one more: of a page, with or without its frame, into a host page."""
        return replace(self, reading=self.reading.set(at, key), framed=self.framed.set(at, True) if framed else self.framed)

    def without(self, pages: Iterable[int]) -> "DiskReads":
        """The reads without those into some host pages."""
        reading, framed = self.reading, self.framed
        for at in pages:
            reading, framed = reading.delete(at), framed.delete(at) if at in framed else framed
        return replace(self, reading=reading, framed=framed)
