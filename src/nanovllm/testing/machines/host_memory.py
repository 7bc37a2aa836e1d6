"""`HostMemoryMachine` and `HostChunkMachine`: test an engine that keeps the KV of evicted pages and of chunks in host memory."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.chunks.offload import offload
from nanovllm.engine.donation import enter
from nanovllm.errors import OutOfPagesError
from nanovllm.executor.executor import executor_of, runtime_of
from nanovllm.models.model import Model
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import bytes_by_group, bytes_per_page
from nanovllm.state.offload import Rates, init_host
from nanovllm.state.pool import addresses
from nanovllm.state.prefix_keys import keys_of
from nanovllm.testing.machines.chunks import ChunkMachine
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.machines.engine_holder import room_of
from nanovllm.testing.shadows.late_copies import FlakyHostMemory
from nanovllm.testing.shadows.memory import expect, freeze, indexed_runs
from nanovllm.testing.shadows.worlds import FlakyExecutor, ModelWorld, PlantedError
from nanovllm.testing.strategies import limits, token_ids

ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)  # running a token takes so long that it is always loaded


class HostMemoryMachine(EngineMachine):
    """`EngineMachine` for an engine with 1 to 12 pages of host memory, from which it loads whatever it finds there.

    Copies are made as late as they may be, through stages of one page, and some of them fail. The content of each host page is compared
    with that of the page it was copied from (invariant 16). Replies must equal those of a request alone in an engine without host memory.

    Attributes:
        world: The engine and model under test, with their oracle: a `World`. The default is `SymbolicWorld()`.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import HostMemoryMachine, SymbolicWorld
        >>> class InFp8(HostMemoryMachine):
        ...     world = SymbolicWorld(kv_dtype="fp8")
        >>> run_state_machine_as_test(InFp8, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    def __init__(self) -> None:
        super().__init__()
        self.images = dict[tuple[bytes, int], bytes]()  # by key and KV pool: the KV of a page or frame while it was indexed
        self.prefixes = dict[bytes, list[int]]()  # by key: the tokens

    @initialize(data=st.data(), num_host_pages=st.integers(1, 12), per_step=st.sampled_from([None, 1, 2]))
    def start(self, data: st.DataObject, num_host_pages: int, per_step: int | None) -> None:
        """Start a fresh engine with host memory. Chunks may pin about half of its pool.

        While replies go on, a step copies `per_step` pages in; None: all.
        """
        frames = None if self.num_frames is None else st.integers(*self.num_frames)
        limited = data.draw(limits(self.max_tokens, num_frames=frames))
        self.state = with_host_memory(self.world.init_state(limited), self.world.model, num_host_pages, per_step)
        self.most_pinned = max(2, room_of(self.state) // 2)

    @invariant()
    def memory_agrees(self) -> None:
        """Check device memory, and remember the KV of each indexed page."""
        super().memory_agrees()
        state = enter(self.state)
        held = np.array(state.prefix.pages(), np.int32)
        tokens_of = {page: tokens for tokens, page in indexed_runs(state.prefix)}
        tables = [None if table is None else table.tolist() for table in addresses(state.pool, held)]
        for place, (page, key) in enumerate(zip(held.tolist(), keys_of(state.prefix, held), strict=True)):
            for group, (pool, table) in enumerate(zip(state.kv.pools, tables, strict=False)):
                if table is not None and table[place] >= 0:
                    self.images[key, group] = as_bytes(pool)[:, table[place]].contiguous().numpy().tobytes()
            self.prefixes[key] = list(tokens_of[page])

    @precondition(lambda self: self.state.chunks)
    @rule(data=st.data(), count=st.integers(1, 3))
    def offload(self, data: st.DataObject, count: int) -> None:
        """Move live chunks to host memory, which may have too few pages for them."""
        for _ in range(count):
            chunk = self.state.chunks[data.draw(st.sampled_from(sorted(self.state.chunks)))]
            done = self._attempt(lambda chunk=chunk: (offload(self.state, chunk), None), OutOfPagesError)
            if isinstance(done, OutOfPagesError):
                require_full(self.state, chunk)
            elif done is not None:
                self.state = done[0]
            self.memory_agrees()

    @precondition(lambda self: self._known())
    @rule(more=token_ids(min_size=0, max_size=2), count=st.integers(1, 3), steps=st.integers(1, 4), data=st.data())
    def come_back(self, more: list[int], count: int, steps: int, data: st.DataObject) -> None:
        """Submit requests whose beginnings are in host memory, then run some steps."""
        options, known = self._options(data), self._known()
        for _ in range(count):
            tokens = self.prefixes[known[data.draw(st.integers(0, len(known) - 1))]]
            self._submit(None, tokens + more, options, keep=False)
        self.step(steps)

    @rule(ids=st.lists(token_ids(min_size=4, max_size=10), min_size=1, max_size=3), late=st.booleans())
    def fail_to_prefill(self, ids: list[list[int]], late: bool) -> None:
        """Let a call on chunks fail after others, whose pages it may evict, and use what it has pushed out."""
        for number, one in enumerate(ids):
            if number == len(ids) - 1:
                self._executor.arm(0, late)
            if isinstance(chunk := self._prefill(None, one), Chunk):
                self._release(chunk)
        if self._known():
            self.compare_host_memory()

    def _known(self) -> list[bytes]:
        """The keys of host memory whose tokens are known, in the order of their host pages."""
        host = self.state.pool.host
        return [] if host is None else [key for _, key in sorted(host.key_of.items()) if key in self.prefixes]

    @precondition(lambda self: self.state.pool.host is not None and self.state.pool.host.by_key)
    @rule()
    def compare_host_memory(self) -> None:
        """Make all copies, and compare the KV of each host page with that of the page it was copied from."""
        host, memory = enter(self.state).pool.host, runtime_of(self.state).host
        assert host is not None and memory is not None
        memory.synchronize()
        for key, at in host.by_key.items():
            for group, images in enumerate(memory.images[:1] if at in host.bare else memory.images):
                alike = self._is_image(key, group, as_bytes(images)[at].contiguous().numpy().tobytes(), images.dtype)
                expect(alike, f"host page {at} has other KV than its page had", invariant=16)

    def _is_image(self, key: bytes, group: int, found: bytes, dtype: torch.dtype) -> bool:
        """Whether these bytes are the KV of a page or frame. Tokens of a real model that ran again may have KV with other last bits."""
        wanted, world = self.images.get((key, group)), self.world
        if wanted is None or found == wanted or not isinstance(world, ModelWorld) or world.kv_dtype is not None:
            return wanted is None or found == wanted
        one, other = (torch.frombuffer(bytearray(image), dtype=dtype) for image in (found, wanted))
        return bool((one - other).abs().max() <= world.tolerance)

    def teardown(self) -> None:
        """Compare host memory a last time, and check that all requests and sessions end and all pages return."""
        if self.state.pool.host is not None:
            self.compare_host_memory()
        super().teardown()


class HostChunkMachine(ChunkMachine):
    """`ChunkMachine` for an engine with 1 to 24 pages of host memory, to which chunks are moved, and from which their next use brings them.

    The KV of a chunk in host memory is compared with that of the chunk when it was made. Approximate chunks, chunks with gaps and partly
    filled pages are moved, too.

    Attributes:
        world: The engine and model under test, with their oracle: a `ModelWorld` or a `SymbolicWorld` (the default).
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import HostChunkMachine, SymbolicWorld
        >>> class InFp8(HostChunkMachine):
        ...     world = SymbolicWorld(kv_dtype="fp8")
        >>> run_state_machine_as_test(InFp8, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    @initialize(data=st.data(), pinning=st.integers(0, 3), num_host_pages=st.integers(1, 24))
    def start(self, data: st.DataObject, pinning: int, num_host_pages: int) -> None:
        """Start two fresh engines, of which the first has host memory."""
        self._begin_engines(data, pinning)
        self.state = with_host_memory(self.state, self.world.model, num_host_pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 3))
    def offload(self, data: st.DataObject, count: int) -> None:
        """Move live chunks to host memory, which may have too few pages for them."""
        for _ in range(count):
            chunk = self.held[data.draw(st.sampled_from(sorted(self.held)))].chunk
            before, frozen = self.state, freeze(self.state.pool)
            try:
                self.state = offload(self.state, chunk)
            except (PlantedError, OutOfPagesError) as error:
                expect(freeze(before.pool) == frozen, "a failed call changed the pool")
                if isinstance(error, OutOfPagesError):
                    require_full(before, before.chunks[chunk.liveness])
            else:
                self._replaced(before)
            self._executor.disarm()
            self._require_all()

    @precondition(lambda self: self._moved())
    @rule(data=st.data(), ids=token_ids(min_size=0, max_size=4), countdown=st.integers(0, 1), late=st.booleans())
    def fail_to_come_back(self, data: st.DataObject, ids: list[int], countdown: int, late: bool) -> None:
        """Let a call fail that needs a chunk of host memory and evicts other pages, and then make it again."""
        chosen = data.draw(st.sampled_from(self._moved()))
        self.evict(data, data.draw(token_ids(min_size=1, max_size=6)), alone=False)
        self._executor.arm(countdown, late)
        for _ in range(2):
            if chosen in self.held:
                self._extend(self.held[chosen], ids)

    def _moved(self) -> list[int]:
        """The handles of the chunks in host memory."""
        host = self.state.pool.host
        return [] if host is None else [number for number, held in self.held.items() if held.chunk.liveness in host.moved]


def with_host_memory(state: EngineState, model: Model, num_host_pages: int, per_step: int | None = None) -> EngineState:
    """The first state of an engine whose executor is a `FlakyExecutor`, with pages of host memory that it always loads.

    While replies go on, it loads `per_step` pages in a step, and one for eight tokens of prompts beside them; None: all.
    """
    executor, runtime, page_size = executor_of(state), runtime_of(state), state.config.page_size
    assert isinstance(executor, FlakyExecutor)
    runtime.host = FlakyHostMemory(state.kv, num_host_pages, executor)
    sizes = {"page_size": page_size, "dtype": state.kv.pools[0].dtype}
    page, (_, frame) = bytes_per_page(model.config, **sizes), bytes_by_group(model.config, **sizes)
    beside = Rates(tokens_per_second=1.0, bytes_per_second=2.0 * page, step_seconds=(per_step or 0) / 2)  # faster than running a token, too
    rates = ALWAYS if per_step is None else beside
    return replace(state, pool=replace(state.pool, host=init_host(num_host_pages, page, rates, frame)))


def require_full(state: EngineState, chunk: Chunk) -> None:
    """Require that host memory has too few pages for a chunk, other than those of chunks."""
    host = state.pool.host
    assert host is not None
    room = host.used.num_free + host.ages.count
    expect(room < len(chunk.pages), f"{chunk!r} was refused, but {room} host pages are available")
