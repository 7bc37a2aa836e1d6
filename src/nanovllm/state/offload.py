"""`HostPages`: which pages of host memory hold the KV of which prefix. Persistent: a call never changes an older value.

When the prefix index evicts an idle page, a page of host memory (a *host page*) may keep its KV. It is found later by the digest of
`prefix_keys.py`, which commits to the whole prefix. The host page that was used least recently is replaced first.

A step plans before it copies: `Moves` says which pages are copied out and in. Host pages that are copied in stay where they are, and are
not replaced within the plan. All copies out come before all copies in, and both before anything else that the step writes. Pages that are
likely to be evicted soon are kept at the end of a step already (`kept_ahead.py`); their eviction then copies nothing.

A host page has room for a page and its frame (the KV of layers with a sliding window). It is *bare* if the page had no frame when it left.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from immutables import Map

from nanovllm.state import lru
from nanovllm.state import pages as page_ops
from nanovllm.state.disk_reads import DiskReads
from nanovllm.state.lru import Ages, init_ages
from nanovllm.state.pages import PageState, init_pages
from nanovllm.state.prefix_keys import keys_from

Pair = tuple[int, int]
BESIDE = 4  # copies take one of so many parts of the time in which prompts run
LATENCY = 100e-6  # seconds that the first page of a copy takes, whatever its size


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast this engine runs prompts and copies pages, as measured at its start.

    Attributes:
        tokens_per_second: Prompt tokens that it runs per second, as if none had a context.
        bytes_per_second: Bytes that it copies from host memory per second.
        step_seconds: Seconds of a decode step in which copies go on beside it. Infinity: pages are copied all at once.
        context_doubling: The tokens of context with which a prompt token takes twice as long as without. Infinity: context costs nothing.
        most_context: How many tokens before it a token attends to, at most: the widest window, if every layer has one.
    """

    tokens_per_second: float
    bytes_per_second: float
    step_seconds: float = math.inf
    context_doubling: float = math.inf
    most_context: float = math.inf

    def seconds_to_run(self, start: int, stop: int) -> float:
        """Seconds in which the tokens of a prompt from place `start` on run, up to the one before place `stop`."""
        context = self._context(stop) - self._context(start)
        return (stop - start + context / self.context_doubling) / self.tokens_per_second

    def _context(self, count: int) -> float:
        """How many tokens of context the first `count` tokens of a prompt have together."""
        seen = min(count, self.most_context)
        return seen * (count - seen / 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """The copies of one step between the device and host memory.

    Pages are named by where they lie in the first KV pool: if every layer has a window, these are frames.

    Attributes:
        out: For each host page that is written the page whose KV it gets.
        into: (host page, page) pairs: the page gets the KV of the host page.
        frames_out: For each host page whose frame is written the frame whose KV it gets, if the frames have a pool of their own.
        frames_into: (host page, frame) pairs: the frame gets the KV of the host page's frame.
        reads: The host pages that the plan reads, each as often as it reads it.
    """

    out: Map[int, int] = field(default_factory=Map)
    into: tuple[Pair, ...] = ()
    frames_out: Map[int, int] = field(default_factory=Map)
    frames_into: tuple[Pair, ...] = ()
    reads: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any((self.out, self.into, self.frames_out, self.frames_into))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The host pages of a live chunk that is in host memory.

    Attributes:
        pages: Its host pages, in order; the last one may be partly filled.
        num_keyed: How many of the first ones the prefix index held in the device, so that they have keys.
        namespace: The namespace in which it held them.
    """

    pages: tuple[int, ...]
    num_keyed: int
    namespace: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPages:
    """Which host pages hold the KV of which prefix.

    Attributes:
        page_bytes: The bytes of a page over all layers, its frame included.
        frame_bytes: The bytes of its frame.
        rates: How fast the engine runs prompts and copies pages.
        used: The owners of host pages: one if the host page has a key, and one more for each chunk in host memory that has it, and for
            each copy of the plan that reads it.
        by_key: The host pages by the key of their prefix.
        key_of: The keys by host page.
        bare: The host pages without the KV of their frame. In a model without windows there are none.
        ages: The host pages that may be replaced, those that were used least recently first.
        moves: The copies that the plan under construction needs. None: no plan is made, and evicted pages are not kept.
        moved: The live chunks in host memory, by `liveness`; see `moved_chunks.py`.
        held: Host pages that the call gave up, each as often as it had them. They keep their content until its commit.
        ahead: Up to this place in the order of eviction pages were kept ahead of it: a time, and the last page of its group, or -1.
        behind: Whether there were more such pages than one call may keep.
        disk: The host pages that are being read from the disk; each has one owner and no key. None: nothing is kept on disk.
    """

    page_bytes: int
    frame_bytes: int
    rates: Rates
    used: PageState
    by_key: Map[bytes, int]
    key_of: Map[int, bytes]
    ages: Ages
    bare: Map[int, bool] = field(default_factory=Map)
    moves: Moves | None = None
    moved: Map[int, Moved] = field(default_factory=Map)
    held: tuple[int, ...] = ()
    ahead: tuple[int, int] = (0, -1)
    behind: bool = False
    disk: DiskReads | None = None

    def __repr__(self) -> str:
        return f"HostPages({self.used.num_used} of {self.used.num_pages} host pages used)"

    @property
    def num_pages(self) -> int:
        """The number of host pages."""
        return self.used.num_pages

    @property
    def apart(self) -> bool:
        """Whether frames are apart from pages, because some layers have a window and some have none."""
        return 0 < self.frame_bytes < self.page_bytes

    def loaded_beside(self, prompt_seconds: float) -> int | None:
        """The pages that a step in which replies go on may copy in, at least one. None: as many as there are.

        Args:
            prompt_seconds: Seconds in which its prompts run. Their inputs wait for copies, which get a part of this time. 0: it runs none.
        """
        rates = self.rates
        if rates.step_seconds == math.inf:
            return None
        seconds = prompt_seconds / BESIDE if prompt_seconds else rates.step_seconds
        return max(1, int(rates.bytes_per_second * seconds) // self.page_bytes)

    def bytes_of(self, framed: bool) -> int:
        """The bytes of a page, with or without its frame."""
        return self.page_bytes if framed or not self.apart else self.page_bytes - self.frame_bytes


def init_host(num_pages: int, page_bytes: int, rates: Rates, frame_bytes: int = 0) -> HostPages:
    """`num_pages` host pages, all of them free."""
    return HostPages(
        page_bytes=page_bytes, frame_bytes=frame_bytes, rates=rates, used=init_pages(num_pages), by_key=Map(), key_of=Map(),
        ages=init_ages(num_pages),
    )  # fmt: skip


def worth_loading(num_tokens: int, num_bytes: int, rates: Rates, start: int = 0) -> bool:
    """Whether it is faster to copy KV from host memory than to run its tokens.

    Args:
        num_tokens: The tokens.
        num_bytes: The bytes of their KV.
        rates: How fast the engine does both.
        start: The number of tokens before them.

    Examples:
        >>> rates = Rates(tokens_per_second=200_000.0, bytes_per_second=50e9)
        >>> worth_loading(16384, 16384 * 112 * 1024, rates), worth_loading(16, 16 * 112 * 1024, rates)
        (True, False)
    """
    return num_tokens > 0 and LATENCY + num_bytes / rates.bytes_per_second < rates.seconds_to_run(start, start + num_tokens)


def planning(host: HostPages) -> HostPages:
    """The host pages at the beginning of a plan: from now on evicted pages are kept."""
    return replace(host, moves=Moves())


def find(
    host: HostPages, tokens: np.ndarray, start: int, page_size: int, namespace: int = 0, num_held: int = 0, most: int | None = None
) -> list[int]:
    """The host pages that hold the pages of `tokens` (int32) from page number `start` on, as many as there are in a row, or `most`.

    The first `num_held` of these pages are on the device too. Where one of them has no host page, the list has -1.
    """
    found = list[int]()
    for key in islice(keys_from(tokens, start, page_size, namespace), most):
        at = host.by_key.get(key, -1)
        if at < 0 and len(found) >= num_held:
            break
        found.append(at)
    return found


def keep(host: HostPages, pages: np.ndarray, keys: list[bytes], frames: np.ndarray | None = None) -> HostPages:
    """Keep the KV of pages that leave the device, in the order of their eviction: the first one is replaced first.

    A prefix that has a host page already is not copied again; only its frame is, if the host page is bare. If there are too few host pages,
    the last pages given are kept, which come first in their prompts.

    Args:
        host: The host pages.
        pages: The pages.
        keys: Their keys.
        frames: Their frames, -1 for a page without one. None: frames have no pool of their own.
    """
    if (moves := host.moves) is None:
        return host
    found = [host.by_key.get(key) for key in keys]
    host = replace(host, ages=lru.remove(host.ages, _array(at for at in found if at is not None)))
    fresh = found.count(None)
    host = replaced(host, fresh - host.used.num_free)
    # Host pages that were replaced are all taken again below. The maps are changed as a whole: thousands of pages may leave at once.
    used, taken = page_ops.allocate(host.used, min(host.used.num_free, fresh)) or (host.used, ())
    if frames is None and fresh == len(keys):
        stay = slice(fresh - len(taken), None)
        moves = replace(moves, out=moves.out.update(zip(taken, pages[stay].tolist(), strict=True)))
        by_key, key_of = host.by_key.update(zip(keys[stay], taken, strict=True)), host.key_of.update(zip(taken, keys[stay], strict=True))
        return replace(host, used=used, by_key=by_key, key_of=key_of, ages=lru.add(host.ages, _array(taken)), moves=moves)
    by_key, key_of, out = host.by_key.mutate(), host.key_of.mutate(), moves.out.mutate()
    bare, frames_out = host.bare.mutate(), moves.frames_out.mutate()
    skipped, free, order = fresh - len(taken), iter(taken), list[int]()
    each = [None] * len(keys) if frames is None else frames.tolist()
    for page, frame, key in zip(pages.tolist(), each, keys, strict=True):
        at = by_key.get(key)
        if at is None and skipped:
            skipped -= 1
            continue
        if at is None:
            at = next(free)
            by_key[key], key_of[at], out[at] = at, key, page
            if frame is not None:
                bare[at] = True
                frames_out.pop(at, None)
        if frame is not None and frame >= 0 and at in bare:
            del bare[at]
            frames_out[at] = frame
        order.append(at)
    held = _array(dict.fromkeys(order))
    ages = lru.add(host.ages, held[used.owners(held) == 1])  # the others are read
    moves = replace(moves, out=out.finish(), frames_out=frames_out.finish())
    return replace(host, used=used, by_key=by_key.finish(), key_of=key_of.finish(), bare=bare.finish(), ages=ages, moves=moves)


def read(host: HostPages, held: Iterable[int]) -> HostPages:
    """The host pages of which the plan reads some, which it must not replace."""
    held = _array(held)
    return replace(host, used=page_ops.retain(host.used, held), ages=lru.remove(host.ages, held))


def needed_soon(host: HostPages, held: Iterable[int]) -> HostPages:
    """The host pages of which these are replaced last: the next steps will read them."""
    held = _array(dict.fromkeys(held))
    alone = held[host.used.owners(held) == 1]  # the others are not replaced
    return replace(host, ages=lru.add(lru.remove(host.ages, alone), alone))


def load(host: HostPages, held: Iterable[int], into: Iterable[Pair], frames_into: Iterable[Pair] = ()) -> HostPages:
    """Note that the plan copies host pages `held`, which it reads, into pages of the device, and their frames into frames."""
    moves = host.moves
    assert moves is not None
    into, frames_into = (*moves.into, *into), (*moves.frames_into, *frames_into)
    return replace(host, moves=replace(moves, into=into, frames_into=frames_into, reads=(*moves.reads, *held)))


def settled(host: HostPages) -> tuple[HostPages, Moves]:
    """The host pages at the end of a plan, and its copies. Those that were read may be replaced again, after all others."""
    assert host.moves is not None
    if not host.moves.reads:
        return replace(host, moves=None), host.moves
    held = _array(host.moves.reads)
    once = _array(dict.fromkeys(held[::-1].tolist()))  # the last page of a prompt is replaced first
    used = page_ops.release(host.used, held)
    alone = once[used.owners(once) == 1]  # no chunk has them
    unread = _array(at for at in alone.tolist() if at in host.key_of)
    return replace(host, used=used, ages=lru.add(host.ages, unread), moves=None), host.moves


def forget(host: HostPages, lost: Iterable[int]) -> HostPages:
    """Take host pages whose content was lost out of the index."""
    if host.disk is not None and (read := [at for at in lost if at in host.disk.reading]):
        host = replace(host, used=page_ops.release(host.used, _array(read)), disk=host.disk.without(read))
    host = _dropped(host, [at for at in lost if at in host.key_of])
    return replace(host, ahead=(0, -1))  # what was kept ahead may be among them


def make_room(host: HostPages, count: int) -> HostPages:
    """The host pages of which `count` are free, or as many as can be: those that were used least recently lose their keys."""
    return replaced(host, count - host.used.num_free)


def replaced(host: HostPages, count: int) -> HostPages:
    """The host pages without the `count` keys that were used least recently, or as many as there are."""
    if count <= 0 or not host.ages.count:
        return host
    ages, gone = lru.take(host.ages, min(count, host.ages.count))
    return _dropped(replace(host, ages=ages), gone.tolist())


def _dropped(host: HostPages, held: list[int]) -> HostPages:
    if not held:
        return host
    by_key, key_of, bare, gone = host.by_key.mutate(), host.key_of.mutate(), host.bare.mutate(), _array(held)
    for at in held:
        del by_key[key_of[at]], key_of[at]
        bare.pop(at, None)
    used, ages = page_ops.release(host.used, gone), lru.remove(host.ages, gone)
    return replace(host, used=used, by_key=by_key.finish(), key_of=key_of.finish(), bare=bare.finish(), ages=ages)


def _array(held: Iterable[int]) -> np.ndarray:
    return np.fromiter(held, np.int32)
