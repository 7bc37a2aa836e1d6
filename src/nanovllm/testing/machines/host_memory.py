"""`HostMemoryMachine`: test an engine that keeps the KV of evicted pages in host memory."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.engine.donation import enter
from nanovllm.executor.executor import runtime_of
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.state.offload import Rates, init_host
from nanovllm.state.prefix_keys import keys_of
from nanovllm.testing.machines.engine import EngineMachine
from nanovllm.testing.shadows.late_copies import FlakyHostMemory
from nanovllm.testing.shadows.memory import expect, indexed_runs
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
        self.images = dict[bytes, bytes]()  # by key: the KV of a page when it was indexed
        self.prefixes = dict[bytes, list[int]]()  # by key: the tokens

    @initialize(data=st.data(), num_host_pages=st.integers(1, 12))
    def start(self, data: st.DataObject, num_host_pages: int) -> None:
        """Start a fresh engine with host memory. Chunks may pin about half of its pool."""
        self.state = self.world.init_state(data.draw(limits(self.max_tokens)))
        kv, config, runtime = self.state.kv, self.state.config, runtime_of(self.state)
        runtime.host = FlakyHostMemory(kv, num_host_pages, self._executor)
        page = bytes_per_page(self.world.model.config, page_size=config.page_size, dtype=kv.pools[0].dtype)
        self.state = replace(self.state, pool=replace(self.state.pool, host=init_host(num_host_pages, page, ALWAYS)))
        self.most_pinned = max(2, config.num_pages // 2)

    @invariant()
    def memory_agrees(self) -> None:
        """Check device memory, and remember the KV of each indexed page."""
        super().memory_agrees()
        state = enter(self.state)
        pool, held = as_bytes(state.kv.pools[0]), state.prefix.pages()
        tokens_of = {page: tokens for tokens, page in indexed_runs(state.prefix)}
        for page, key in zip(held, keys_of(state.prefix, np.array(held, np.int32)), strict=True):
            self.images[key] = pool[:, page].contiguous().numpy().tobytes()
            self.prefixes[key] = list(tokens_of[page])

    @precondition(lambda self: self._known())
    @rule(more=token_ids(min_size=0, max_size=2), count=st.integers(1, 3), steps=st.integers(1, 4), data=st.data())
    def come_back(self, more: list[int], count: int, steps: int, data: st.DataObject) -> None:
        """Submit requests whose beginnings are in host memory, then run some steps."""
        options, known = self._options(data), self._known()
        for _ in range(count):
            tokens = self.prefixes[known[data.draw(st.integers(0, len(known) - 1))]]
            self._submit(None, tokens + more, options, keep=False)
        self.step(steps)

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
        images = as_bytes(memory.images)
        for key, at in host.by_key.items():
            alike = key not in self.images or images[at].contiguous().numpy().tobytes() == self.images[key]
            expect(alike, f"host page {at} has other KV than its page had", invariant=16)

    def teardown(self) -> None:
        """Compare host memory a last time, and check that all requests and sessions end and all pages return."""
        if self.state.pool.host is not None:
            self.compare_host_memory()
        super().teardown()
