"""Requests of different namespaces share no KV, and those of one namespace share as if they were alone."""

from collections import defaultdict

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

import nanovllm as nv
from nanovllm.engine.requests import submit_many
from nanovllm.state.engine_state import EngineState
from nanovllm.state.prefix_cache import ROOT, follow, init_prefix, insert, match

MODEL = nv.load_model("tiny", device="cpu")
SIZE = 4
ONE = nv.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
runs = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(lambda parts: np.repeat(np.array(parts, np.int32) + 300, SIZE))
asked = st.lists(st.tuples(st.integers(0, 2), runs), min_size=1, max_size=8)


def engine() -> EngineState:
    return nv.init_state(MODEL, num_pages=128, page_size=SIZE, max_num_seqs=8)


def cached(state: EngineState, namespace: int, prompt: np.ndarray) -> tuple[EngineState, int]:
    """Run a request. Returns how many of its tokens were reused."""
    state, _ = submit_many(MODEL, state, [prompt], [ONE], namespace=namespace)
    while True:
        state, outputs = nv.step(MODEL, state)
        for out in outputs:
            if out.output is not None:
                return state, out.output.num_cached_tokens


@given(asked)
@settings(max_examples=15, deadline=None)
def test_each_namespace_is_an_engine_of_its_own(requests: list[tuple[int, np.ndarray]]):
    state, alone = engine(), defaultdict(engine)
    for namespace, prompt in requests:
        state, found = cached(state, namespace, prompt)
        alone[namespace], wanted = cached(alone[namespace], 0, prompt)
        assert found == wanted
        nv.check(state)


@given(asked)
@settings(max_examples=10, deadline=None)
def test_requests_that_run_together_share_only_within_their_namespace(requests: list[tuple[int, np.ndarray]]):
    state, of = engine(), dict[int, int]()
    for namespace, prompt in requests:
        state, (request_id,) = submit_many(MODEL, state, [prompt], [nv.SamplingParams(temperature=0, max_tokens=9)], namespace=namespace)
        of[request_id] = namespace
    while state.running or state.waiting:
        state, _ = nv.step(MODEL, state)
        nv.check(state)
        owners = defaultdict[int, set[int]](set)
        for sequence in state.running:
            for page in sequence.pages:
                owners[page].add(of[sequence.request.request_id])
        assert all(len(namespaces) == 1 for namespaces in owners.values())


@given(asked)
@settings(max_examples=100, deadline=None)
def test_the_index_finds_pages_by_namespace(requests: list[tuple[int, np.ndarray]]):
    index, shadow, fresh = init_prefix(256, SIZE), dict[tuple[int, bytes], int](), 0
    for namespace, tokens in requests:
        pages = np.arange(fresh, fresh := fresh + len(tokens) // SIZE, dtype=np.int32)
        index, _ = insert(index, tokens, pages, ROOT - namespace)
        for place, page in enumerate(pages.tolist()):
            shadow.setdefault((namespace, tokens[: (place + 1) * SIZE].tobytes()), page)
        for other in range(3):
            for _, run in requests:
                wanted = [shadow.get((other, run[: (place + 1) * SIZE].tobytes())) for place in range(len(run) // SIZE)]
                wanted = wanted[: wanted.index(None)] if None in wanted else wanted
                assert match(index, run, ROOT - other).tolist() == wanted


def test_a_request_over_a_chunk_of_another_namespace_is_not_indexed():
    """Its pages would be found after those of the chunk, by all who may use these."""
    state, chunk = nv.prefill(MODEL, engine(), list(range(300, 308)))
    long = nv.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    state, _ = submit_many(MODEL, state, [[chunk, list(range(400, 408))]], [long], namespace=1)
    while state.running or state.waiting:
        state, _ = nv.step(MODEL, state)
        nv.check(state)
    assert len(state.prefix.pages()) == 2
    assert len(follow(state.prefix, int(chunk.pages[1]), np.arange(400, 408, dtype=np.int32))) == 0
    state, again = cached(state, 1, np.arange(300, 308, dtype=np.int32))
    assert again == 0
    nv.check(nv.release(state, chunk))
