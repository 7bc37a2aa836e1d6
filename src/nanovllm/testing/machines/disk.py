"""`DiskMachine`: test an engine that keeps KV in host memory and on disk."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.donation import enter
from nanovllm.engine.requests import cancel, submit
from nanovllm.engine.step import step
from nanovllm.executor.executor import runtime_of
from nanovllm.executor.page_file import size_of
from nanovllm.executor.page_folder import key_in
from nanovllm.state.disk_reads import DiskReads
from nanovllm.state.engine_state import EngineState
from nanovllm.state.offload import HostPages
from nanovllm.state.prefix_keys import KEY_BYTES, frame_key, is_frame, is_full, keys_from, keys_of
from nanovllm.testing.machines.engine_holder import in_memory, room_of
from nanovllm.testing.machines.host_memory import HostMemoryMachine, with_host_memory
from nanovllm.testing.shadows.late_disk import FlakyFolder, LateDiskTier
from nanovllm.testing.shadows.memory import expect
from nanovllm.testing.strategies import Limits, limits, token_ids


class DiskMachine(HostMemoryMachine):
    """`HostMemoryMachine` for an engine that also has a folder for 1 to 16 pages, from which it reads whatever it finds there.

    Requests wait for what they read, or run the front of their prompts until they meet it. Reads and writes end late. Files are changed,
    cut and deleted, and the disk is full or broken for a while. The disk tier forgets what it was doing and starts again, as after a
    crash, and other engines share the folder. Chunks are moved to host memory, also while reads of a failed call go on. The content of
    each whole file is compared with that of the page it was written from. Replies must equal those of a request alone in an engine
    without host memory and disk.

    Attributes:
        world: The engine and model under test, with their oracle: a `World`. The default is `SymbolicWorld()`.
        max_tokens: The largest number of tokens that a pool has room for.

    Examples:
        >>> from hypothesis import settings
        >>> from hypothesis.stateful import run_state_machine_as_test
        >>> from nanovllm.testing import DiskMachine, SymbolicWorld
        >>> class InFp8(DiskMachine):
        ...     world = SymbolicWorld(kv_dtype="fp8")
        >>> run_state_machine_as_test(InFp8, settings=settings(max_examples=2, stateful_step_count=5, deadline=None))
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None
        self.limits: Limits | None = None
        self.max_bytes = 0
        self.slowness = 0.0

    @initialize(data=st.data(), num_host_pages=st.integers(2, 12), slowness=st.sampled_from([0.0, 1.0, 2.0]))
    def start(self, data: st.DataObject, num_host_pages: int, slowness: float) -> None:
        """Start a fresh engine with host memory and an empty folder. Chunks may pin about half of its pool.

        While replies go on, a step copies one page from host memory, or all.

        A page takes `slowness` times as long to read as to run. If that is 0, requests wait for all that they can read; if not, they run
        the front of their prompts meanwhile.
        """
        self.slowness = slowness
        frames = None if self.num_frames is None else st.integers(*self.num_frames)
        self.limits = data.draw(limits(self.max_tokens, num_frames=frames))
        self.folder = Path(tempfile.mkdtemp(prefix="nanovllm-kv-", dir=in_memory()))
        self.max_bytes = data.draw(st.integers(1, 16))  # pages, until the size of one is known
        self.per_step = data.draw(st.sampled_from([None, 1]))
        self.state = self._engine(num_host_pages)
        self.most_pinned = max(2, room_of(self.state) // 2)

    def _engine(self, num_host_pages: int) -> EngineState:
        """An engine of this machine's limits that uses the folder."""
        assert self.limits is not None
        state = with_host_memory(self.world.init_state(self.limits), self.world.model, num_host_pages, self.per_step)
        host, runtime = state.pool.host, runtime_of(state)
        assert host is not None and runtime.host is not None
        runtime.disk = LateDiskTier(self._open(host), runtime.host)
        rate = host.page_bytes / (self.slowness * state.config.page_size) if self.slowness else 1e15  # ALWAYS runs a token per second
        return replace(state, pool=replace(state.pool, host=replace(host, disk=DiskReads(bytes_per_second=rate))))

    def _open(self, host: HostPages) -> FlakyFolder:
        assert self.folder is not None
        return FlakyFolder(self.folder, self.max_bytes * size_of(host.page_bytes), host.bytes_of(framed=False), {"machine": "disk"})

    @property
    def _disk(self) -> LateDiskTier:
        disk = runtime_of(self.state).disk
        assert isinstance(disk, LateDiskTier)
        return disk

    def _known(self) -> list[bytes]:
        """The keys of host memory and of the folder whose tokens are known."""
        return sorted(key for key in {*super()._known(), *self._stored()} if key in self.prefixes)

    def _stored(self) -> dict[bytes, Path]:
        """The files by key."""
        if self.folder is None:
            return {}
        files = (Path(top, name) for top, _, names in os.walk(self.folder) for name in names if name.endswith(".kv"))
        return {key_in(path.name): path for path in files}

    @rule(reads=st.integers(0, 4), writes=st.integers(0, 8), copied=st.booleans())
    def work(self, reads: int, writes: int, copied: bool) -> None:
        """Let some reads and writes end, with or without the copies between the device and host memory."""
        memory = runtime_of(self.state).host
        if copied and memory is not None:
            memory.synchronize()
        self._disk.writes.run(writes)
        self._disk.reads.run(reads)

    @rule(everything=st.booleans(), writes=st.integers(0, 8))
    def flush(self, everything: bool, writes: int) -> None:
        """Write what is not on disk, or some of it."""
        done = flush_kv(self.state, max_bytes=None if everything else 1)
        expect(done or not everything, "flush_kv has left some pages")
        self._disk.writes.run(writes)

    @precondition(lambda self: self._away())
    @rule(data=st.data(), more=token_ids(min_size=0, max_size=2), damaged=st.booleans(), fails=st.booleans(), cancelled=st.booleans())
    def read_back(self, data: st.DataObject, more: list[int], damaged: bool, fails: bool, cancelled: bool) -> None:
        """Submit a request whose beginning is on disk alone, beside another one. The step that begins to read may fail."""
        host, away = self.state.pool.host, self._away()
        assert host is not None
        self.state.runtime.lease.lose([], [host.by_key[key] for key in away if key in host.by_key])  # as after a failed call
        key = away[data.draw(st.integers(0, len(away) - 1))]
        if damaged:
            self._change(self._file_of(data, key), data.draw(st.integers(0, 255)))
        options, before = self._options(data), {*self.pending}
        self._submit(None, [0], options, keep=False)
        self._submit(None, self.prefixes[key] + more, options, keep=False)
        if fails:
            self._executor.arm(0, late=damaged)
        self.step(1)
        self._executor.disarm()
        if fails and self.state.chunks:
            self.offload(data, 1)
        if cancelled:
            self._observe()
            for rid in sorted({*self.pending} - before):
                self.state = cancel(self.state, rid)
                self.needed += self.pending.pop(rid).most_filled
        self._disk.reads.run(data.draw(st.integers(0, 2)))
        self.step(2)

    @rule(
        data=st.data(),
        prompt=token_ids(min_size=7, max_size=13),
        more=token_ids(min_size=0, max_size=3),
        damaged=st.sampled_from([False, False, True]),
        reads=st.lists(st.sampled_from([0, 1, 1, 2, 8]), min_size=3, max_size=6),
    )
    def meet(self, data: st.DataObject, prompt: list[int], more: list[int], damaged: bool, reads: list[int]) -> None:
        """Submit a request whose first pages, which an earlier one has filled, are on disk alone; let reads end between its steps."""
        self._submit(None, prompt, replace(self._options(data), max_tokens=1), keep=False)
        self.step(12)
        flush_kv(self.state)
        host, idle, stored = self.state.pool.host, self.state.prefix.idle_pages(), self._stored()
        keys = keys_from(np.array(prompt, np.int32), 0, self.state.config.page_size)
        away = [key for key in keys if key in stored]
        if host is None or not away:
            return
        self.state.runtime.lease.lose(idle, [*host.key_of])  # as after a failed call
        if damaged:
            self._change(self._file_of(data, away[data.draw(st.integers(0, len(away) - 1))]), 0)
        self._submit(None, prompt + more, self._options(data), keep=False)
        for count in reads:
            self.step(1)
            self._disk.reads.run(count)

    def _away(self) -> list[bytes]:
        """The keys of pages that are on disk and not on the device, whose tokens are known."""
        held = self.state.prefix.pages()
        there = {*keys_of(self.state.prefix, np.array(held, np.int32))} if held else set()
        return sorted(key for key in self._stored() if key in self.prefixes and key not in there)

    @precondition(lambda self: self.state.pool.host is not None and self.state.pool.host.used.num_used)
    @rule()
    def lose_host_memory(self) -> None:
        """Distrust all host pages, those that are being read too, as after a failed call."""
        host = self.state.pool.host
        assert host is not None and host.disk is not None
        self.state.runtime.lease.lose([], [*host.key_of, *host.disk.reading])

    @rule()
    def crash(self) -> None:
        """The disk tier starts again in the middle of its reads and writes."""
        memory, host = runtime_of(self.state).host, self.state.pool.host
        assert memory is not None and host is not None
        runtime_of(self.state).disk = LateDiskTier(self._open(host), memory)

    @rule(failing=st.booleans())
    def break_disk(self, failing: bool) -> None:
        """Let reads and writes fail from now on, or no more."""
        assert isinstance(self._disk.folder, FlakyFolder)
        self._disk.folder.failing = failing

    @precondition(lambda self: self._stored())
    @rule(kind=st.sampled_from(["flip", "cut", "lose"]), data=st.data())
    def damage(self, kind: str, data: st.DataObject) -> None:
        """Change, cut or delete a file."""
        path = sorted(self._stored().values())[data.draw(st.integers(0, len(self._stored()) - 1))]
        at = data.draw(st.integers(0, 1 << 16))
        match kind:
            case "flip":
                self._change(path, at)
            case "cut":
                os.truncate(path, at % (path.stat().st_size + 1))
            case "lose":
                path.unlink()

    def _file_of(self, data: st.DataObject, key: bytes) -> Path:
        """The file of a page, or that of its frame if there is one."""
        stored = self._stored()
        frame = stored.get(frame_key(key))
        return stored[key] if frame is None or data.draw(st.booleans()) else frame

    def _change(self, path: Path, at: int) -> None:
        """Change a bit of a file."""
        if content := bytearray(path.read_bytes()):
            content[at % len(content)] ^= 1 << at % 8
            path.write_bytes(content)

    @precondition(lambda self: self._known())
    @rule(data=st.data(), num_host_pages=st.integers(2, 8), more=token_ids(min_size=0, max_size=2))
    def other_engine(self, data: st.DataObject, num_host_pages: int, more: list[int]) -> None:
        """Another engine uses the folder: it serves a prompt whose KV may be there, and writes its own."""
        known = self._known()
        prompt = [*self.prefixes[known[data.draw(st.integers(0, len(known) - 1))]], *more]
        state = self._engine(num_host_pages)
        if len(prompt) + 1 >= state.config.max_model_len or (len(prompt) + 1) // state.config.page_size + 1 > room_of(state):
            return
        params = replace(self._options(data), max_tokens=1, ignore_eos=True)
        state, rid = submit(self.world.model, state, prompt, params)
        request, drawn, disk = state.waiting.items[rid].request, list[int](), runtime_of(state).disk
        for _ in range(20 * (len(prompt) + 2)):
            if not (state.running or state.waiting):
                break
            state, outputs = step(self.world.model, state)
            for out in outputs:
                drawn += out.token_ids
                self.world.require_reply(prompt, drawn, request)
        expect(not (state.running or state.waiting), f"another engine did not serve {prompt}", invariant=6)
        assert disk is not None
        flush_kv(state)

    @precondition(lambda self: self._stored())
    @rule()
    def compare_disk(self) -> None:
        """Compare the content of each whole file with that of the page it was written from, and the size of all with the limit."""
        host, most, size = self.state.pool.host, self._disk.folder.max_bytes, 0
        assert host is not None
        for key, path in self._stored().items():
            framed = is_frame(key)
            expect(is_full(key) or framed, f"file {path} has a page that is partly filled")
            size += path.stat().st_size
            image = bytearray(host.frame_bytes if framed else host.bytes_of(framed=False))
            try:
                whole = self._open(host).read(key, memoryview(image))
            except Exception:  # damaged by this machine
                continue
            alike = not whole or self._is_image(key[:KEY_BYTES], framed, bytes(image), self.state.kv.pools[0].dtype)
            expect(alike, f"file {path} has other KV than its {'frame' if framed else 'page'} had", invariant=16)
        expect(size <= most, f"{size} bytes are on disk, and at most {most} may be")

    def teardown(self) -> None:
        """Compare the files a last time, and check that all requests and sessions end and all pages return."""
        try:
            if self.folder is not None and self._stored():
                self.compare_disk()
            super().teardown()
            enter(self.state)
        finally:
            if self.folder is not None:
                shutil.rmtree(self.folder)
