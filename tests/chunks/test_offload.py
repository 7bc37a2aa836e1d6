"""Chunks that are moved to host memory: what stays the same, what comes back, what is refused, and that failed calls change nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.chunks.offload import relieved, with_pages
from nanovllm.config import Mesh
from nanovllm.engine.requests import submit_many
from nanovllm.executor.executor import runtime_of
from nanovllm.ops.distributed.in_process import run_ranks
from nanovllm.state.digest import digest
from nanovllm.state.offload import HostPages, Rates, init_host
from nanovllm.testing.machines.engine_holder import kv_bytes
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.testing.shadows.memory import freeze

CONFIG = tiny_config("LlamaForCausalLM", vocab_size=64, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=2, head_dim=8)
MODEL = random_model(CONFIG)
GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ALWAYS = Rates(tokens_per_second=1.0, bytes_per_second=1e15)


def engine(model: nv.Model = MODEL, num_host_pages: int | None = None, **options: Any) -> nv.EngineState:
    """An engine with 12 pages of 4 tokens, and host memory from which it always loads."""
    state = nv.init_state(model, **{"num_pages": 12, "page_size": 4, "host_kv_gib": 1 / 256, **options})
    host = state.pool.host
    assert host is not None
    if num_host_pages is not None:
        host = init_host(num_host_pages, host.page_bytes, ALWAYS)
    return replace(state, pool=replace(state.pool, host=replace(host, rates=ALWAYS)))


def prompt(seed: int, length: int = 18) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def host_of(state: nv.EngineState) -> HostPages:
    assert state.pool.host is not None
    return state.pool.host


def use(name: str, model: nv.Model, state: nv.EngineState, chunk: nv.Chunk) -> tuple[nv.EngineState, Any]:
    """Use a chunk in one of the ways that need its KV. Returns what can be compared."""
    match name:
        case "prefill":
            state, longer = nv.prefill(model, state, prompt(1, 3), after=chunk)
            return state, kv_bytes(state, longer)
        case "compose":
            state, both = nv.compose(model, state, [chunk, chunk], recompute=1)
            return state, kv_bytes(state, both)
        case "drop":
            state, less = nv.drop(model, state, chunk, 3, 6, "shift")
            return state, kv_bytes(state, less)
        case "generate":
            state, reply = nv.generate(model, state, [chunk, prompt(1, 3)], GREEDY)
            return state, reply.token_ids
        case "generate_many":
            state, replies = nv.generate_many(model, state, [[chunk, prompt(1, 3)], [chunk, prompt(2, 2)]], GREEDY)
            return state, [reply.token_ids for reply in replies]
        case "begin":
            state, carry = nv.begin(model, state, [[chunk, prompt(1, 3)]], GREEDY, room=2)
            for _ in range(2):
                carry, _ = nv.decode_step(model.params, carry, model.config)
            state, (reply,) = nv.commit(model, state, carry)
            return state, reply.token_ids
        case "score":
            state, (score,) = nv.score(model, state, [chunk], [prompt(1, 3)])
            return state, [float(value) for value in score.logprobs]
        case "submit_many":
            state, (rid,) = submit_many(model, state, [[chunk, prompt(1, 3)]], [GREEDY])
        case _:
            state, rid = nv.submit(model, state, [chunk, prompt(1, 3)], GREEDY)
    tokens = list[int]()
    while state.running or state.waiting:
        state, outputs = nv.step(model, state)
        tokens += [token for out in outputs if out.request_id == rid for token in out.token_ids]
    return state, tokens


USES = ("prefill", "compose", "drop", "generate", "generate_many", "begin", "score", "submit_many", "submit")


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("name", USES)
def test_the_next_use_brings_a_chunk_back(name: str, kv_dtype: Any) -> None:
    told = []
    for moves in (False, True):
        state = engine(kv_dtype=kv_dtype, num_pages=16)
        state, chunk = nv.prefill(MODEL, state, prompt(0))
        content, kv = freeze(chunk), kv_bytes(state, chunk)
        if moves:
            state = nv.offload(state, chunk)
            nv.check(state)
            assert state.pool.num_available == 16 and not len(state.chunks[chunk.liveness].pages)
            assert kv_bytes(state, chunk) == kv
            state, other = nv.prefill(MODEL, state, prompt(9, 60))  # overwrites its pages of the device
            state = nv.release(state, other)
        state, seen = use(name, MODEL, state, chunk)
        nv.check(state)
        assert kv_bytes(state, chunk) == kv and freeze(chunk) == content
        assert len(state.chunks[chunk.liveness].pages) == 5
        told.append(seen)
    assert told[0] == told[1]


def test_handles_in_host_memory_share_its_pages(tmp_path) -> None:
    state, chunk = nv.prefill(MODEL, engine(), prompt(0))
    kv = kv_bytes(state, chunk)
    nv.save_chunk(state, chunk, tmp_path / "device.safetensors")
    state = nv.offload(state, chunk)
    used = host_of(state).used.num_used
    state, twin = nv.fork(state, chunk)
    state, short = nv.truncate(state, twin, 7)
    nv.check(state)
    assert host_of(state).used.num_used == used == 5 and len(host_of(state).moved[short.liveness].pages) == 2
    nv.save_chunk(state, twin, tmp_path / "host.safetensors")
    assert (tmp_path / "device.safetensors").read_bytes() == (tmp_path / "host.safetensors").read_bytes()
    state = nv.release(state, chunk)
    nv.check(state)
    state, both = nv.compose(MODEL, state, [short, twin])
    nv.check(state)
    assert kv_bytes(state, twin) == kv and len(both) == 25
    for one in (twin, short, both):
        state = nv.release(state, one)
    nv.check(state)
    assert not host_of(state).moved and state.pool.num_available == 12


@pytest.mark.parametrize("mode", ["gap", "shift"])
def test_approximate_chunks_are_copied_for_themselves(mode: Any) -> None:
    state, base = nv.prefill(MODEL, engine(), prompt(0))
    state, chunk = nv.drop(MODEL, state, base, 4, 8, mode)
    state = nv.release(state, base)
    kv = kv_bytes(state, chunk)
    state = nv.offload(state, chunk)
    nv.check(state)
    assert host_of(state).moved[chunk.liveness].num_keyed == 1  # the exact page before the gap
    state, other = nv.prefill(MODEL, state, prompt(8, 45))
    state = nv.release(state, other)
    state, _ = nv.prefill(MODEL, state, prompt(1, 2), after=chunk)
    assert kv_bytes(state, chunk) == kv
    nv.check(state)


def test_chunks_with_a_common_beginning_keep_it_once_in_both_memories() -> None:
    state, base = nv.prefill(MODEL, engine(), prompt(0, 16))
    longer = []
    for seed in (1, 2):
        state, one = nv.prefill(MODEL, state, prompt(seed, 4), after=base)
        longer.append(one)
    before = state.pool.num_available
    for one in (base, *longer):
        state = nv.offload(state, one)
    assert host_of(state).used.num_used == 6 and state.pool.num_available == 12
    state, other = nv.prefill(MODEL, state, prompt(8, 48))
    state = nv.release(state, other)
    for one in (base, *longer):
        state, twin = nv.prefill(MODEL, state, [*one.token_ids.tolist(), 1])
        state = nv.release(state, twin)
        state, reply = nv.generate(MODEL, state, one, nv.SamplingParams(temperature=0, max_tokens=1))
        state = nv.release(state, reply.chunk)
    nv.check(state)
    assert state.pool.num_available == before


def test_what_is_refused() -> None:
    state, chunk = nv.prefill(MODEL, engine(num_host_pages=4), prompt(0))
    content = freeze(state.pool)
    with pytest.raises(nv.OutOfPagesError, match="4 of 4 pages are available"):
        nv.offload(state, chunk)
    assert freeze(state.pool) == content
    plain, other = nv.prefill(MODEL, nv.init_state(MODEL, num_pages=8), prompt(0))
    with pytest.raises(nv.InvalidRequestError, match="host_kv_gib"):
        nv.offload(plain, other)
    with pytest.raises(nv.ForeignChunkError):
        nv.offload(state, other)
    later = nv.release(state, chunk)
    with pytest.raises(nv.DonatedStateError):
        nv.offload(state, chunk)
    with pytest.raises(nv.ReleasedChunkError):
        nv.offload(later, chunk)


def test_a_chunk_that_finds_no_room_stays_in_host_memory() -> None:
    state, chunk = nv.prefill(MODEL, engine(), prompt(0))
    state = nv.offload(state, chunk)
    state = nv.offload(state, chunk)  # is there already
    state, other = nv.prefill(MODEL, state, prompt(8, 40))
    content = freeze(state.pool)
    with pytest.raises(nv.OutOfPagesError, match="needs 5 pages to come back from host memory; 2 of 12 pages"):
        nv.prefill(MODEL, state, [1], after=chunk)
    with pytest.raises(nv.InvalidRequestError, match="at most 48"):  # said before anything is copied
        nv.prefill(MODEL, state, prompt(3, 40), after=chunk)
    assert freeze(state.pool) == content
    state = nv.release(state, other)
    state, _ = nv.prefill(MODEL, state, [1], after=chunk)
    nv.check(state)


@pytest.mark.parametrize("name", [name for name in USES if name != "drop"])
def test_a_call_that_fails_after_a_chunk_came_back_leaves_the_old_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, chunk = nv.prefill(MODEL, engine(num_host_pages=7, num_pages=16), prompt(0))
    kv = kv_bytes(state, chunk)
    state = nv.offload(state, chunk)
    state, other = nv.prefill(MODEL, state, prompt(8, 60))
    state = nv.release(state, other)
    executor, content = runtime_of(state).executor, freeze(state.pool)

    def failing(*args: Any, **options: Any) -> Any:
        raise RuntimeError("planted")

    for device_call in ("prefill", "decode", "score", "begin"):
        monkeypatch.setattr(executor, device_call, failing)
    if name in ("submit", "submit_many"):
        monkeypatch.setattr("nanovllm.engine.requests.commit_state", failing)
    with pytest.raises(RuntimeError, match="planted"):
        use(name, MODEL, state, chunk)
    monkeypatch.undo()
    assert freeze(state.pool) == content and kv_bytes(state, chunk) == kv
    state, again = nv.prefill(MODEL, state, prompt(8, 60))  # nothing that was overwritten is found
    expected, fresh = nv.prefill(MODEL, nv.init_state(MODEL, num_pages=16, page_size=4), prompt(8, 60))
    assert kv_bytes(state, again) == kv_bytes(expected, fresh)
    state = nv.release(state, again)
    state, _ = use(name, MODEL, state, chunk)
    nv.check(state)
    assert kv_bytes(state, chunk) == kv


def test_chunks_make_room_for_requests_that_could_not_run() -> None:
    state = engine()
    chunks = []
    for seed in range(2):
        state, chunk = nv.prefill(MODEL, state, prompt(seed, 18))
        chunks.append(chunk)
    state, rid = nv.submit(MODEL, state, prompt(7, 22), GREEDY)
    assert relieved(state, keep=[chunk.liveness for chunk in chunks]) is state
    state = relieved(state)
    assert sorted(host_of(state).moved) == [chunks[0].liveness]
    outputs = []
    while state.running or state.waiting:
        assert relieved(state) is state
        state, more = nv.step(MODEL, state)
        outputs += more
    assert outputs[-1].error is None and outputs[-1].finish_reason == "length" and len(outputs) == 4 and outputs[-1].request_id == rid
    nv.check(state)
    assert with_pages(state, 12) is not state and with_pages(nv.init_state(MODEL, num_pages=4), 9).pool.num_available == 4


def test_ranks_move_chunks_alike() -> None:
    def run(mesh: Mesh | None) -> Any:
        model = random_model(CONFIG, dtype="float64", mesh=mesh)
        state, chunk = nv.prefill(model, engine(model, num_pages=16), prompt(0))
        state = nv.offload(state, chunk)
        state, other = nv.prefill(model, state, prompt(9, 60))
        state = nv.release(state, other)
        state, reply = nv.generate(model, state, [chunk, prompt(1, 3)], GREEDY)
        state = nv.offload(state, chunk)
        nv.check(state)
        return reply.token_ids, state.stats, digest(state, whole=True)

    alone = run(None)
    one, two = run_ranks(run, 2)
    assert one == two and one[:2] == alone[:2]
