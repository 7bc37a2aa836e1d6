"""`DiskTier`: pages of KV that go from host memory to files and back, in threads beside the engine.

The engine's thread never waits for the disk, unless it asks to (`wait`, `drain`). Reads and writes are jobs of threads:

- A *read* fills a host page that the engine's state reserves for it. The engine learns at the beginning of a step which reads have ended
  (`ended`). Until then the engine neither copies the page nor gives it to another prefix. Only a call that has failed leaves
  reads into pages that the state does not reserve. They end before the engine writes one of these pages (`overwriting`).
- A *write* reads a host page while the engine may want to write it. Each host page has a number that increases before the engine writes
  it (`overwriting`). If the number changed before the file was complete, the file is thrown away.

Writes wait while the engine is busy, until `num_held` pages wait; then the oldest are written. So pages go to the disk some time before
host memory needs their room. If the folder has room for less than host memory has, they wait longer: the files of pages that leave host
memory must not have been deleted by then. A disk that does not keep up leaves out pages that are about to be replaced (`most_late`).

The frame of a page that is apart from it has a file of its own. A read has the page, and its frame if the state asks for it.

Both begin after all copies between the device and host memory that the engine had started before. An error of the disk is counted, and the
page is left out: requests never fail by it. After an error of a write, nothing is written for `REST` seconds. One line on stderr tells
that writes have begun to fail; the next one comes only after a write that did not.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nanovllm.executor.disk_counts import DiskCounts
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.executor.page_file import DamagedPageError, size_of
from nanovllm.executor.page_folder import PageFolder
from nanovllm.executor.unwritten import Unwritten
from nanovllm.executor.workers import Threads, Workers
from nanovllm.operator_lines import say
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.ops.kv_cache.page_images import gather_pages
from nanovllm.state.disk_reads import NOTHING, PAGE, WHOLE
from nanovllm.state.kv_cache import KVState
from nanovllm.state.prefix_keys import frame_key, is_frame
from nanovllm.types import Tensor

CPUS = len(os.sched_getaffinity(0))
READERS, WRITERS = max(2, min(8, CPUS)), max(2, min(4, CPUS // 4))  # threads; each makes digests of about 1.5 GB/s
REST = 30.0  # seconds without writes after a write failed: a disk that is full stays full for a while


class DiskTier:
    """The pages of an engine on disk, and the jobs that move them.

    Attributes:
        folder: The files.
        counts: What was done so far.
        todo: What is left to write by `flush_kv`.
        looked_at: The queue whose first requests were looked up last, and what they wait for.
        num_held: How many pages wait to be written while the engine is busy.
        most_late: A page behind which so many others wait is not written while the engine is busy: its host page is about to be replaced.

    Args:
        folder: The files.
        memory: The host memory of the engine.
        readers: Who runs the reads. None: threads.
        writers: Who runs the writes. None: threads, which wait while the engine is busy until `num_held` pages wait for them.
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
        num_files = min(memory.num_pages, folder.max_bytes // size_of(folder.page_bytes))
        self.num_held = memory.num_pages - num_files // 2
        self.most_late = memory.num_pages - num_files // 8
        self._is_small = 2 * num_files < memory.num_pages
        self._readers = readers or Threads(READERS, "kv-disk-read")
        self._writers = writers or Threads(WRITERS, "kv-disk-write", most_held=self.num_held)
        self._changed = threading.Condition()
        self._under_way = dict[int, bytes]()  # by host page the key that is being read into it
        self._ended = dict[int, tuple[int, bytes, int]]()  # by host page: the place of the read among all, its key, what has come
        self._versions = np.zeros(memory.num_pages, np.int64)  # of the host pages
        self._queued = dict[bytes, tuple[int, int] | None]()  # keys of pages that wait to be written, each with its host page and number
        self._num_reads = self._num_ended = self._num_told = 0
        self._num_kept = self._num_given_up = 0  # writes of host pages so far, and the first of them that is not given up
        self._is_busy = False
        self._rests_until = -1.0
        self._is_failing = False  # whether the last write failed
        for workers in (self._readers, self._writers):
            weakref.finalize(self, workers.close)

    # Reads

    def read(self, pairs: Seq[tuple[int, bytes]], framed: Container[int] = (), *, last_first: bool = False) -> None:
        """Begin to read pages of a prompt into host pages.

        Args:
            pairs: (host page, key) in the order of the prompt.
            framed: The host pages into which the frames are read, too.
            last_first: Whether the last page is read first.
        """
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
            job = partial(_run, weakref.ref(self), "_read", self._num_reads + place, at, key, at in framed, marks, now - place)
            if not self._readers.submit(job):
                self._count(errors=1)
                self._end_read(self._num_reads + place, at, key, NOTHING)
        self._num_reads += len(pairs)

    def ended(self, reading: Mapping[int, bytes]) -> list[tuple[int, int]]:
        """The reads that have ended, each with what has come: `NOTHING`, the `PAGE`, or the `WHOLE` with its frame.

        It tells of them as long as the state reserves their pages. Those of a prompt come in the order of its pages. A read that the
        engine's state does not know, because the call that began it has failed, is waited for and dropped.

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
        found = [(end[0], at, end[2]) if end and end[1] == reading[at] else (-1, at, NOTHING) for at, end in ended.items()]
        return [(at, part) for _, at, part in sorted(found)]

    def wait(self, seconds: float) -> None:
        """Let the engine's thread wait until a read ends of which `ended` has not told yet, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended > self._num_told or not self._under_way, seconds)

    def end_reads(self) -> None:
        """Wait until all reads have ended."""
        self._readers.drain()

    def _read(self, place: int, at: int, key: bytes, framed: bool, marks: Any, used: int) -> None:
        part = NOTHING
        try:
            self._memory.wait(marks)
            if self._fetch(key, at, used):
                part = WHOLE if framed and self._fetch(frame_key(key), at, used) else PAGE
        finally:
            self._end_read(place, at, key, part)

    def _fetch(self, key: bytes, at: int, used: int) -> bool:
        """Read one file into a host page. Returns whether its content has come."""
        image, kind = self._memory.view(at, is_frame(key)), _kind(key)
        try:
            if self.folder.read(key, image, used):
                self._count(**{f"{kind}_read": 1, "bytes_read": len(image)})
                return True
            self._count(**{f"{kind}_missed": 1})
        except DamagedPageError:
            self._count(**{f"{kind}_damaged": 1})
        except OSError:
            self._count(errors=1)
        return False

    def _end_read(self, place: int, at: int, key: bytes, part: int) -> None:
        """Note the end of a read."""
        with self._changed:
            del self._under_way[at]
            self._ended[at] = place, key, part
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

    def keep(self, pairs: Iterable[tuple[int, bytes]], used: int | None = None) -> None:
        """Write pages and frames later that the folder does not have; the copies that fill their host pages were begun before.

        Args:
            pairs: (host page, key).
            used: When the first one was used, in nanoseconds of Unix time; the others were used right before. None: all are used now.
        """
        fresh = [(place, at, key) for place, (at, key) in enumerate(pairs) if not self.has(key)]
        if not fresh:
            return
        marks, now = self._memory.marks(), time.time_ns()
        with self._changed:
            self._queued.update({key: (at, int(self._versions[at])) for _, at, key in fresh})
        for place, at, key in fresh:
            version, when = int(self._versions[at]), now if used is None else used - place
            job = partial(_run, weakref.ref(self), "_write_host_page", at, key, version, marks, when, self._num_kept)
            self._num_kept += 1
            if not self._writers.submit(job):
                self._count(errors=1)
                self._written(key, (at, version))

    def keep_images(self, keys: Seq[bytes], kv: KVState, pages: Seq[int], used: int | None = None) -> None:
        """Write pages and frames of the device later; they are copied to host memory now, and the engine's thread waits for that.

        If the device has no memory for the copy, they are left out, and one error is counted.

        Args:
            keys: The keys of pages, and of frames that are apart from pages.
            kv: The KV memory.
            pages: The pages and frames.
            used: As for `keep`. None: now.
        """
        images, used = dict[bytes, np.ndarray](), time.time_ns() if used is None else used
        try:
            for place, pool in enumerate(kv.pools):
                of_pool = {key: page for key, page in zip(keys, pages, strict=True) if is_frame(key) == place}
                images.update(zip(of_pool, _images_of(pool, [*of_pool.values()]), strict=True) if of_pool else ())
        except torch.OutOfMemoryError:
            self._count(errors=1)
            return
        with self._changed:
            self._queued.update(dict.fromkeys(keys))
        for place, key in enumerate(keys):
            if not self._writers.submit(partial(_run, weakref.ref(self), "_write", key, images[key].data, used - place)):
                self._count(errors=1)
                self._written(key, None)

    def touch(self, keys: Seq[bytes], used: int) -> None:
        """Note later when pages on disk were last used; what is given to `keep` and `keep_images` after this call does not replace them.

        Args:
            keys: The keys. Pages that are not on disk are ignored.
            used: When the first one was used, in nanoseconds of Unix time; the others were used right before.
        """
        if keys:
            self._writers.submit(partial(_run, weakref.ref(self), "_touch", keys, used))

    def hold(self, busy: bool) -> None:
        """Tell whether the engine has requests: then writes wait. If host memory has much more than the folder, they wait in any case.

        What an idle engine writes through such a folder would delete the files of what has left host memory.
        """
        self._is_busy = busy
        self._writers.hold(busy or self._is_small)

    def let_go(self) -> None:
        """Let all writes run that wait, whatever `hold` has told, until it is called again."""
        self._is_busy = False
        self._writers.hold(False)

    def give_up(self) -> None:
        """Write none of the host pages that wait to be written, unless `keep` is called for them again."""
        with self._changed:
            self._num_given_up = self._num_kept
            for key in [key for key, source in self._queued.items() if source is not None]:
                del self._queued[key]

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

    @property
    def num_late(self) -> int:
        """How many pages a disk that keeps up with the engine would have written by now."""
        return max(0, self.num_queued - self.num_held)

    def drain(self, left: int = 0) -> None:
        """Wait until at most `left` writes have not ended."""
        self._writers.drain(left)

    def _write_host_page(self, at: int, key: bytes, version: int, marks: Any, used: int, number: int) -> None:
        if number < self._num_given_up:
            return
        if self._is_busy and self._num_kept - number > self.most_late:
            self._count(**{f"{_kind(key)}_dropped": 1})
            self._written(key, (at, version))
            return
        try:
            self._memory.wait(marks)
        except Exception:
            self._written(key, (at, version))
            raise
        self._write(key, self._memory.view(at, is_frame(key)), used, (at, version))

    def _write(self, key: bytes, image: memoryview, used: int, source: tuple[int, int] | None = None) -> None:
        is_valid = None if source is None else lambda: int(self._versions[source[0]]) == source[1]
        try:
            if self.clock() < self._rests_until or (is_valid is not None and not is_valid()):
                self._count(**{f"{_kind(key)}_dropped": 1})
            elif self.folder.write(key, image, used, is_valid):
                self._count(**{f"{_kind(key)}_written": 1, "bytes_written": len(image)})
                self._is_failing = False
        except OSError as error:
            self._rests_until = self.clock() + REST
            self._count(errors=1)
            self._tell_of_failure(error)
        finally:
            self._written(key, source)

    def _tell_of_failure(self, error: OSError) -> None:
        """Say on stderr that writes have begun to fail, once."""
        with self._changed:
            known, self._is_failing = self._is_failing, True
        if not known:
            again = f"replies go on, and it is tried again after {REST:g} seconds"
            say(f"KV cannot be written to {self.folder.folder}: {error.strerror or error}; {again}")

    def _touch(self, keys: Seq[bytes], used: int) -> None:
        self.folder.touch(keys, used)

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


def _kind(key: bytes) -> str:
    """What a file has, as the counts of `DiskCounts` name it."""
    return "frames" if is_frame(key) else "pages"


def _images_of(pool: Tensor, pages: Seq[int]) -> np.ndarray:
    """The bytes of pages of a KV pool in host memory, uint8 `[n, page bytes]`."""
    images = torch.empty((len(pages), pool.shape[0], *pool.shape[2:]), dtype=pool.dtype, device=pool.device)
    gather_pages(pool, torch.tensor(pages, dtype=torch.int32, device=pool.device), images)
    return as_bytes(images).cpu().contiguous().view(len(pages), -1).view(torch.uint8).numpy()
