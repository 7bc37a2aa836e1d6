"""`DiskTier`: pages of KV that go from host memory to files and back, in threads beside the engine.

The engine's thread never waits for the disk, unless it asks to (`wait`, `drain`). Reads and writes are jobs of threads:

- A *read* fills a host page that the engine's state reserves for it. The engine learns at the beginning of a step which reads have ended
  (`ended`). Until then the engine neither copies the page nor gives it to another prefix. Only a call that has failed leaves
  reads into pages that the state does not reserve. They end before the engine writes one of these pages (`overwriting`).
- A *write* reads a host page while the engine may want to write it. Each host page has a number that increases before the engine writes
  it (`overwriting`). If the number changed before the file was complete, the file is thrown away.

Both begin after all copies between the device and host memory that the engine had started before. An error of the disk is counted, and the
page is left out: requests never fail by it. After an error of a write, nothing is written for `REST` seconds.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nanovllm.executor.kv_offload import HostMemory
from nanovllm.executor.page_file import DamagedPageError
from nanovllm.executor.page_folder import PageFolder
from nanovllm.executor.workers import Threads, Workers
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.ops.kv_cache.page_images import gather_pages
from nanovllm.state.kv_cache import KVState

READERS, WRITERS = 4, 2  # threads
REST = 30.0  # seconds without writes after a write failed: a disk that is full stays full for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounts:
    """What a disk tier has done since its start.

    Attributes:
        pages_written: Pages that were written.
        bytes_written: Their bytes.
        pages_read: Pages that were read and whole.
        bytes_read: Their bytes.
        pages_missed: Pages that were not there any more when they were read.
        pages_damaged: Pages whose file was damaged. The files are deleted.
        pages_dropped: Pages that left host memory before they were written.
        errors: Reads and writes that failed, such as on a full disk, or for which the system gave no thread.

    Examples:
        >>> from nanovllm.executor.kv_disk import DiskCounts
        >>> DiskCounts(pages_read=2).pages_read
        2
    """

    pages_written: int = 0
    bytes_written: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    pages_missed: int = 0
    pages_damaged: int = 0
    pages_dropped: int = 0
    errors: int = 0


@dataclass(slots=True, eq=False)
class Unwritten:
    """What is left of a prefix index and of host memory to write.

    Attributes:
        version: What the index is that of: the epoch of the state, and the pages that failed calls have lost since.
        index: The prefix index.
        host_pages: Host pages that were not looked at yet.
        pages: Pages of the index that were not looked at yet.
        missing: The (key, page) pairs that are not on disk.
    """

    version: Any = None
    index: Any = None
    host_pages: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    missing: list[tuple[bytes, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.host_pages or self.pages or self.missing)


class DiskTier:
    """The pages of an engine on disk, and the jobs that move them.

    Attributes:
        folder: The files.
        counts: What was done so far.
        todo: What is left to write by `flush_kv`.
        looked_at: The queue whose first requests were looked up last, and what they wait for.

    Args:
        folder: The files.
        memory: The host memory of the engine.
        readers: Who runs the reads. None: threads.
        writers: Who runs the writes. None: threads, which wait while the engine is busy until half of host memory waits for them.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        folder: PageFolder,
        memory: HostMemory,
        readers: Workers | None = None,
        writers: Workers | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.folder, self.counts, self.clock = folder, DiskCounts(), clock
        self.todo = Unwritten()
        self.looked_at: tuple[Any, Any] = None, None
        self._memory = memory
        self._readers = readers or Threads(READERS, "kv-disk-read")
        self._writers = writers or Threads(WRITERS, "kv-disk-write", most_held=memory.num_pages // 2)
        self._changed = threading.Condition()
        self._under_way = dict[int, bytes]()  # by host page the key that is being read into it
        self._ended = dict[int, tuple[int, bytes, bool]]()  # by host page: the place of the read among all, its key, whether the page came
        self._versions = np.zeros(memory.num_pages, np.int64)  # of the host pages
        self._queued = dict[bytes, tuple[int, int] | None]()  # keys of pages that wait to be written, each with its host page and number
        self._num_reads = self._num_ended = self._num_told = 0
        self._rests_until = -1.0
        for workers in (self._readers, self._writers):
            weakref.finalize(self, workers.close)

    # Reads

    def read(self, pairs: Seq[tuple[int, bytes]], *, last_first: bool = False) -> None:
        """Begin to read pages of a prompt into host pages, the first or the last one first; `pairs` are (host page, key) in order."""
        if not pairs:
            return
        self.overwriting(at for at, _ in pairs)
        marks, now = self._memory.marks(), time.time_ns()
        with self._changed:
            for at, key in pairs:
                self._under_way[at] = key
        order = [*enumerate(pairs)]
        for place, (at, key) in reversed(order) if last_first else order:
            # the first page of a prompt was used last: its later pages are of no use without it
            job = partial(_run, weakref.ref(self), "_read", self._num_reads + place, at, key, marks, now - place)
            if not self._readers.submit(job):
                self._count(errors=1)
                self._end_read(self._num_reads + place, at, key, whole=False)
        self._num_reads += len(pairs)

    def ended(self, reading: Mapping[int, bytes]) -> list[tuple[int, bool]]:
        """The reads that have ended, each with whether its page is there. It tells of them as long as the state reserves their pages.

        Those of a prompt come in the order of its pages. A read that the engine's state does not know, because the call that began it has
        failed, is waited for and dropped.

        Args:
            reading: The host pages that the state reserves for reads, with their keys.
        """
        if not reading and not self._under_way and not self._ended:
            return []
        if any(reading.get(at) != key for at, key in [*self._under_way.items()]):
            self._readers.drain()
        with self._changed:
            self._num_told = self._num_ended
            ended = {at: self._ended.get(at) for at in reading if at not in self._under_way}
            for at in [at for at in self._ended if at not in reading]:
                del self._ended[at]
        found = [(end[0], at, end[2]) if end and end[1] == reading[at] else (-1, at, False) for at, end in ended.items()]
        return [(at, whole) for _, at, whole in sorted(found)]

    def wait(self, seconds: float) -> None:
        """Let the engine's thread wait until a read ends of which `ended` has not told yet, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended > self._num_told or not self._under_way, seconds)

    def end_reads(self) -> None:
        """Wait until all reads have ended."""
        self._readers.drain()

    def _read(self, place: int, at: int, key: bytes, marks: Any, used: int) -> None:
        whole = False
        try:
            self._memory.wait(marks)
            whole = self.folder.read(key, self._memory.view(at), used)
            self._count(pages_read=1, bytes_read=self.folder.page_bytes) if whole else self._count(pages_missed=1)
        except DamagedPageError:
            self._count(pages_damaged=1)
        except OSError:
            self._count(errors=1)
        finally:
            self._end_read(place, at, key, whole)

    def _end_read(self, place: int, at: int, key: bytes, whole: bool) -> None:
        """Note the end of a read."""
        with self._changed:
            del self._under_way[at]
            self._ended[at] = place, key, whole
            self._num_ended += 1
            self._changed.notify_all()

    # Writes

    def overwriting(self, pages: Iterable[int]) -> None:
        """Note that the engine is about to write some host pages: writes to disk that have not read them yet are dropped.

        A read of a failed call that is under way there ends first.
        """
        pages = [*pages]
        if self._under_way and any(at in self._under_way for at in pages):
            self._readers.drain()
        for at in pages:
            self._versions[at] += 1

    def keep(self, pairs: Iterable[tuple[int, bytes]]) -> None:
        """Write pages later that the folder does not have; `pairs` are (host page, key). The copies that fill them were begun before."""
        fresh = [(at, key) for at, key in pairs if not self.has(key)]
        if not fresh:
            return
        marks, now = self._memory.marks(), time.time_ns()
        for at, key in fresh:
            version = int(self._versions[at])
            with self._changed:
                self._queued[key] = at, version
            if not self._writers.submit(partial(_run, weakref.ref(self), "_write_host_page", at, key, version, marks, now)):
                self._count(errors=1)
                self._written(key, (at, version))

    def keep_images(self, keys: Seq[bytes], kv: KVState, pages: Seq[int]) -> None:
        """Write pages of the device later; they are copied to host memory now, and the engine's thread waits for that.

        If the device has no memory for the copy, the pages are left out, and one error is counted.

        Args:
            keys: The keys of the pages.
            kv: The KV memory.
            pages: The pages.
        """
        try:
            images, now = _images_of(kv, pages), time.time_ns()
        except torch.OutOfMemoryError:
            self._count(errors=1)
            return
        with self._changed:
            self._queued.update(dict.fromkeys(keys))
        for place, key in enumerate(keys):
            if not self._writers.submit(partial(_run, weakref.ref(self), "_write", key, images[place].data, now - place)):
                self._count(errors=1)
                self._written(key, None)

    def hold(self, busy: bool) -> None:
        """Tell whether the engine has requests: then writes wait."""
        self._writers.hold(busy)

    def has(self, key: bytes) -> bool:
        """Whether a page is on disk, or waits to be written. A host page that was overwritten since is not written any more."""
        if key in self.folder:
            return True
        source = self._queued.get(key, ())
        return source is None or (len(source) == 2 and int(self._versions[source[0]]) == source[1])

    @property
    def num_queued(self) -> int:
        """The number of pages that wait to be written."""
        return len(self._queued)

    def drain(self) -> None:
        """Wait until all writes have ended."""
        self._writers.drain()

    def _write_host_page(self, at: int, key: bytes, version: int, marks: Any, used: int) -> None:
        try:
            self._memory.wait(marks)
        except Exception:
            self._written(key, (at, version))
            raise
        self._write(key, self._memory.view(at), used, (at, version))

    def _write(self, key: bytes, image: memoryview, used: int, source: tuple[int, int] | None = None) -> None:
        is_valid = None if source is None else lambda: int(self._versions[source[0]]) == source[1]
        try:
            if self.clock() < self._rests_until or (is_valid is not None and not is_valid()):
                self._count(pages_dropped=1)
            elif self.folder.write(key, image, used, is_valid):
                self._count(pages_written=1, bytes_written=self.folder.page_bytes)
        except OSError:
            self._rests_until = self.clock() + REST
            self._count(errors=1)
        finally:
            self._written(key, source)

    def _written(self, key: bytes, source: tuple[int, int] | None) -> None:
        """Note the end of a write, unless the page waits to be written from elsewhere by now."""
        with self._changed:
            if key in self._queued and self._queued[key] == source:
                del self._queued[key]

    def _count(self, **more: int) -> None:
        with self._changed:
            self.counts = replace(self.counts, **{name: getattr(self.counts, name) + count for name, count in more.items()})


def _run(owner: "weakref.ref[DiskTier]", name: str, *arguments: Any) -> None:
    """Run a job of a tier, if it is still there: a queue of jobs does not keep an engine alive."""
    if (tier := owner()) is not None:
        try:
            getattr(tier, name)(*arguments)
        except Exception:  # such as that of a GPU that has failed, which the engine's own calls tell about
            tier._count(errors=1)


def _images_of(kv: KVState, pages: Seq[int]) -> np.ndarray:
    """The bytes of pages in host memory, uint8 `[n, page bytes]`."""
    (pool,) = kv.pools
    images = torch.empty((len(pages), pool.shape[0], *pool.shape[2:]), dtype=pool.dtype, device=pool.device)
    gather_pages(pool, torch.tensor(pages, dtype=torch.int32, device=pool.device), images)
    return as_bytes(images).cpu().contiguous().view(len(pages), -1).view(torch.uint8).numpy()
