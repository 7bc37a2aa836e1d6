"""`HostMemory`: the KV of pages in host memory, and the copies between it and the device.

A copy passes through a *stage*, a small block of device memory in which each page is contiguous. Pages are gathered into the stage, or
scattered from it, on the stream of the engine; so nothing that the engine runs later can change what was gathered, and all that it runs
later reads what was scattered. Between the stages and host memory, two streams copy at the rate of the bus, one per direction. Events
order the three streams:

- A stage is filled again only after the copy of its last content has ended. There are two for copies out, so that one is filled while
  the other is copied. Four for copies in hold what is copied while the host plans a step.
- A host page is read only after all earlier copies that write it, and is written only after all earlier copies that read it. Copies that
  began before the plan (`Begun`) may read a host page while the plan writes it: what they have read is then thrown away.
- Pages that were copied in are scattered only after their copy has ended: the engine's stream waits for the event, and the host does not.
- A page that is copied out and in is gathered before it is scattered. The copies in are sorted so that they begin while others go out.

Pages that a step copies in but does not read may be scattered after its work (`Landing`): then nothing in it waits for their copies.
Copies in may begin before a step is planned (`Begun`): the plan then says which pages get what the stages have.

Copies *ahead* of an eviction have a third stream, which gathers, too, so that nothing waits for them. A page is written only after it was
gathered there (`let_write`), and a host page is read or written again only after the copy that writes it.

Frames that have a pool of their own are copied after the pages, through the same stages. A host page has two images then.

On a CPU all of this is done at once, without streams.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from immutables import Map

from nanovllm.executor.copy_streams import Copies, CopiesAtOnce, CopyStream
from nanovllm.executor.pinned_memory import pinned_memory
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.ops.kv_cache.page_images import gather_pages, scatter_pages
from nanovllm.state.kv_cache import KVState
from nanovllm.state.offload import Moves, Pair
from nanovllm.types import Tensor

STAGE_BYTES = 64 << 20  # of one stage
NUM_STAGES = 7  # two for copies out, four for copies in, one for copies ahead
LANDING_BYTES = 2 * STAGE_BYTES  # that can be on their way while a step runs


@dataclass(slots=True, eq=False)
class Stage:
    """A block of device memory for the images of a few pages. `free` is the mark after which it may be filled again; None: at once."""

    memory: Tensor
    free: Any = None

    def images(self, like: Tensor, count: int) -> Tensor:
        """The first images in the stage, which have the shape of those of `like`."""
        each = like[0].numel() * like.itemsize
        return self.memory[: count * each].view(like.dtype).view(count, *like.shape[1:])


@dataclass(slots=True, eq=False)
class Landing:
    """Pages whose copies into stages have begun, and which are not scattered yet.

    Attributes:
        left: Scatters the pages of a stage, in the order of the stages.
    """

    left: deque[Callable[[], None]] = field(default_factory=deque)

    def land(self) -> None:
        """Scatter the pages. The engine's stream waits for their copies."""
        while self.left:
            self.left.popleft()()


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """Host pages whose copies into stages have begun before it is known which pages of the device get them.

    Attributes:
        parts: For each stage the host pages, in order, and the mark after their copies.
        before: The mark before all of these copies.
    """

    parts: tuple[tuple[tuple[int, ...], Any], ...]
    before: Any


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Some copies of one pool that are made ahead.

    Attributes:
        place: The place of the KV pool.
        pages: The pages.
        held: The host pages that get their KV.
        gathered: The mark after which the pages may be written.
        ended: The mark after which the host pages may be read and written.
    """

    place: int
    pages: tuple[int, ...]
    held: tuple[int, ...]
    gathered: Any
    ended: Any


class HostMemory:
    """The KV of host pages, and the copies between them and the device.

    Args:
        kv: The KV memory of the engine.
        num_pages: The number of host pages.
        stream: Makes a stream of copies. None: one of the device.
        stage_bytes: The size of a stage, at least one page.

    Attributes:
        images: For each KV pool the images of the host pages, `[num_pages, L, 2, K, S, D]`.

    Raises:
        OutOfPagesError: The machine has too little memory.
    """

    def __init__(self, kv: KVState, num_pages: int, stream: Callable[[], Copies] | None = None, stage_bytes: int = STAGE_BYTES) -> None:
        device, dtype = kv.pools[0].device, kv.pools[0].dtype
        shapes = [(pool.shape[0], *pool.shape[2:]) for pool in kv.pools]
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        memory, starts = pinned_memory(num_pages * sum(sizes), device, num_pages), [num_pages * sum(sizes[:at]) for at in range(len(sizes))]
        self.images = tuple(
            memory[start : start + num_pages * size].view(dtype).view(num_pages, *shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=True)
        )
        stream = stream or ((lambda: CopyStream(device)) if device.type == "cuda" else CopiesAtOnce)
        self._outward, self._inward, self._aside = stream(), stream(), stream()
        self._ahead = deque[Ahead]()  # those that may not have ended, in their order
        self._staged = [min(num_pages, max(1, stage_bytes // size)) for size in sizes]  # images of each pool that fit into a stage
        stage = max(count * size for count, size in zip(self._staged, sizes, strict=True))
        stages = [Stage(torch.empty(stage, dtype=torch.uint8, device=device)) for _ in range(NUM_STAGES)]
        self._out, self._into, (self._stage_aside,) = stages[:2], stages[2:6], stages[6:]
        for each in self._into:
            self._inward.note_use(each.memory)
        self._aside.note_use(self._stage_aside.memory)
        self._ids_aside = torch.empty(max(self._staged), dtype=torch.int32, device=device)  # so that copies ahead need no memory
        self._aside.note_use(self._ids_aside)

    @property
    def num_at_once(self) -> int:
        """The host pages that `begin` can copy."""
        return self._staged[0] * len(self._into)

    def begin(self, held: Seq[int]) -> Begun:
        """Begin to copy host pages of a model without windows into stages.

        Args:
            held: The host pages, at most `num_at_once`. They have the KV that is wanted.

        Returns:
            What the next `move` may be given. Without it the copies are lost, and nothing else is.
        """
        self._forget_ended()
        self._inward.hold(self._outward.mark())
        self._hold_for_ahead(self._inward, {*held})
        before, parts, size = self._inward.mark(), list[tuple[tuple[int, ...], Any]](), self._staged[0]
        for stage, start in zip(self._into, range(0, len(held), size), strict=False):
            part = sorted(held[start : start + size])
            parts.append((tuple(part), self._fetch(self.images[0], part, stage)))
        return Begun(tuple(parts), before)

    def move(self, kv: KVState, moves: Moves, landing: Landing | None = None, begun: Begun | None = None) -> KVState:
        """Donates `kv`. Copy pages out and in, on the engine's stream and the streams of copies. The host waits for nothing.

        Args:
            kv: The KV memory.
            moves: The copies.
            landing: Gets the last pages that are copied in, as many as the stages hold. They are there after `Landing.land`, which must
                come before anything else reads or writes them, and before the next copies. None: all pages are there.
            begun: Copies of this call that have begun already. They are made again if they do not fit to the others.

        Returns:
            The KV memory, in which pages that were copied out may be written from now on.
        """
        self._forget_ended()
        # What has begun may read host pages that are written now: none of it is used then.
        before = self._outward.mark(), self._inward.mark() if begun is None else begun.before
        self._outward.hold(before[1])
        self._inward.hold(before[0])
        self._hold_for_ahead(self._outward, moves.out, moves.frames_out)
        self._hold_for_ahead(self._inward, dict(moves.into), dict(moves.frames_into))
        copies = (moves.out, moves.into), (moves.frames_out, moves.frames_into)
        for place, (pool, (out, into)) in enumerate(zip(kv.pools, copies, strict=False)):
            if not (out or into):
                continue
            self._move(place, pool, out, into, landed := Landing(), None if place else begun)
            if landing is None or place:  # pools share the stages
                landed.land()
            else:
                landing.left = landed.left
        return kv

    def move_ahead(self, kv: KVState, moves: Moves) -> KVState:
        """Donates `kv`. Copy pages out that stay where they are, while the engine's stream goes on. It takes no memory of the device.

        Args:
            kv: The KV memory. `let_write` must be told of pages that the engine writes later.
            moves: The copies, of which there are none into the device.

        Returns:
            The KV memory.
        """
        self._forget_ended()
        self._aside.hold(self._aside.engine_mark())  # after all copies in that are used, for which the engine's stream has waited
        self._aside.hold(self._outward.mark())
        for place, (pool, out) in enumerate(zip(kv.pools, (moves.out, moves.frames_out), strict=False)):
            pairs, size = sorted(out.items()), self._staged[place]  # by host page: neighbours are copied at once
            for start in range(0, len(pairs), size):
                self._ahead.append(self._store_aside(place, pool, pairs[start : start + size]))
        return kv

    def let_write(self, *addresses: Seq[int]) -> None:
        """Let the engine's stream wait until pages were read that are copied ahead, because it is about to write them.

        Args:
            addresses: For each KV pool the pages that may be written.
        """
        self._forget_ended()
        for place, pages in enumerate(addresses) if self._ahead else ():
            self._let_write(pages, self._gathers(place))

    def synchronize(self) -> None:
        """Let the host wait until all copies have ended."""
        for copies in (self._outward, self._inward, self._aside):
            copies.synchronize()

    @property
    def num_pages(self) -> int:
        """The number of host pages."""
        return len(self.images[0])

    def marks(self) -> tuple[Any, Any, Any]:
        """The point after all copies so far, for `wait`."""
        return self._outward.mark(), self._inward.mark(), self._aside.mark()

    def wait(self, marks: tuple[Any, Any, Any]) -> None:
        """Let the calling thread, which may be any, wait until all copies before `marks` have ended."""
        for copies, mark in zip((self._outward, self._inward, self._aside), marks, strict=True):
            copies.wait(mark)

    def view(self, at: int, place: int = 0) -> memoryview:
        """The bytes of a host page in the KV pool with this place, to be read or written."""
        return as_bytes(self.images[place])[at].view(-1).view(torch.uint8).numpy().data

    def _store_aside(self, place: int, pool: Tensor, pairs: Seq[Pair]) -> Ahead:
        """Copy pages out beside the engine's stream; `pairs` are (host page, page)."""
        held, pages, copies = [at for at, _ in pairs], [page for _, page in pairs], self._aside
        memory = self.images[place]
        images = self._stage_aside.images(memory, len(pairs))
        copies.run(lambda: gather_pages(pool, _ids(pages, pool.device, self._ids_aside), images))
        gathered = copies.mark()
        copies.run(lambda: _copy(images, memory, held, out=True))
        return Ahead(place, tuple(pages), tuple(held), gathered, copies.mark())

    def _hold_for_ahead(self, copies: Copies, *held: Collection[int]) -> None:
        """Let copies wait until copies ahead have written the host pages that they read or write in each KV pool."""
        for each in reversed(self._ahead):
            if any(at in held[each.place] for at in each.held):
                copies.hold(each.ended)
                return

    def _gathers(self, place: int) -> dict[int, int]:
        """For each page of a KV pool that is copied ahead the place of these copies among all."""
        return {page: at for at, each in enumerate(self._ahead) if each.place == place for page in each.pages}

    def _let_write(self, pages: Iterable[int], gathers: Mapping[int, int]) -> None:
        """Let the engine's stream wait until pages are gathered that are copied ahead; `gathers` is that of their pool."""
        if gathers and (last := max((gathers.get(page, -1) for page in pages), default=-1)) >= 0:
            self._aside.hold_engine(self._ahead[last].gathered)

    def _forget_ended(self) -> None:
        while self._ahead and self._aside.passed(self._ahead[0].ended):
            self._ahead.popleft()

    def _move(self, place: int, pool: Tensor, moved_out: Map[int, int], moved_in: Seq[Pair], landing: Landing, begun: Begun | None) -> None:
        """Copy pages of one KV pool, which has this place among all. `landing` gets the last of those that are copied in."""
        out, stored, size = sorted(moved_out.items()), 0, self._staged[place]  # by host page: neighbours are copied at once
        gathered = {page: count + 1 for count, (_, page) in enumerate(out)}  # how many pages are gathered before a page may be written
        ahead, memory = self._gathers(place), self.images[place]
        fetched, into = self._usable(begun, moved_out, moved_in, gathered, size)
        # First those that need the fewest stages to be gathered before, and of these, neighbours in host memory together.
        into.sort(key=lambda pair: (-(-gathered.get(pair[1], 0) // size), ahead.get(pair[1], -1), pair[0]))
        parts = [*(part for part, _ in fetched), *(into[start : start + size] for start in range(0, len(into), size))]
        # Uploaded at once, before the copies that have not begun: each later upload would wait for a copy, and a stage for it.
        ids = _ids([page for part in (out, *parts) for _, page in part], pool.device)
        ids_out, ids_in = ids[: len(out)], ids[len(out) :].split([len(part) for part in parts])
        for turn, part in enumerate(parts):
            fresh = any(at in moved_out for at, _ in part)  # this plan writes what it reads
            wanted = len(out) if fresh else max(gathered.get(page, 0) for _, page in part)
            stored = self._store_until(pool, memory, out, ids_out, stored, wanted, size)
            if fresh:
                self._inward.hold(self._outward.mark())
            self._let_write([page for _, page in part], ahead)
            if len(landing.left) == len(self._into):
                landing.left.popleft()()
            stage = self._into[turn % len(self._into)]
            copied = fetched[turn][1] if turn < len(fetched) else self._fetch(memory, [at for at, _ in part], stage)
            landing.left.append(self._landing(pool, ids_in[turn], stage, memory, copied))
        self._store_until(pool, memory, out, ids_out, stored, len(out), size)

    def _usable(
        self, begun: Begun | None, out: Map[int, int], into: Seq[Pair], gathered: Mapping[int, int], size: int
    ) -> tuple[list[tuple[list[Pair], Any]], list[Pair]]:
        """The copies that have begun, as (pairs, mark) for each stage, and the other pairs.

        None of them is used if a page gets no copy, or if the plan writes a host page. The same holds if their pages are gathered so late
        that they would wait for copies out.
        """
        to = dict(into)
        if begun is None or len(to) != len(into):
            return [], list(into)
        held = [at for part, _ in begun.parts for at in part]
        if any(at not in to or at in out or gathered.get(to[at], 0) > size * len(self._out) for at in held):
            return [], list(into)
        fetched = [([(at, to.pop(at)) for at in part], copied) for part, copied in begun.parts]
        return fetched, list(to.items())

    def _store_until(self, pool: Tensor, memory: Tensor, out: Seq[Pair], ids: Tensor, stored: int, count: int, size: int) -> int:
        """Copy pages out, `size` at a time, until at least `count` are. Returns how many are; `stored` are already."""
        while stored < count:
            stage = self._out[stored // size % len(self._out)]
            self._store(pool, memory, [at for at, _ in out[stored : stored + size]], ids[stored : stored + size], stage)
            stored += size
        return stored

    def _store(self, pool: Tensor, memory: Tensor, held: Seq[int], ids: Tensor, stage: Stage) -> None:
        """Copy pages out to host pages; `ids` are the pages, on the device."""
        images, copies = stage.images(memory, len(held)), self._outward
        if stage.free is not None:
            copies.hold_engine(stage.free)
        gather_pages(pool, ids, images)
        copies.hold(copies.engine_mark())
        copies.run(lambda: _copy(images, memory, held, out=True))
        stage.free = copies.mark()

    def _fetch(self, memory: Tensor, held: Seq[int], stage: Stage) -> Any:
        """Copy host pages into a stage. Returns the mark after that."""
        images, copies = stage.images(memory, len(held)), self._inward
        if stage.free is not None:
            copies.hold(stage.free)
        copies.run(lambda: _copy(images, memory, held, out=False))
        return copies.mark()

    def _landing(self, pool: Tensor, ids: Tensor, stage: Stage, memory: Tensor, copied: Any) -> Callable[[], None]:
        """What scatters the pages in a stage after the mark `copied`; `ids` are the pages, on the device."""
        images, copies = stage.images(memory, len(ids)), self._inward

        def land() -> None:
            copies.hold_engine(copied)
            scatter_pages(pool, ids, images)
            stage.free = copies.engine_mark()

        return land


def _copy(images: Tensor, memory: Tensor, held: Seq[int], *, out: bool) -> None:
    """Copy images to host pages, or back; host pages that are next to each other at once."""
    staged, memory, start = as_bytes(images), as_bytes(memory), 0
    for stop in range(1, len(held) + 1):
        if stop < len(held) and held[stop] == held[stop - 1] + 1:
            continue
        host = memory[held[start] : held[start] + stop - start]
        target, source = (host, staged[start:stop]) if out else (staged[start:stop], host)
        target.copy_(source, non_blocking=True)
        start = stop


def _ids(pages: Seq[int], device: torch.device, into: Tensor | None = None) -> Tensor:
    ids = torch.tensor(pages, dtype=torch.int32)
    ids = ids.pin_memory() if device.type == "cuda" else ids
    return ids.to(device, non_blocking=True) if into is None else into[: len(pages)].copy_(ids, non_blocking=True)
