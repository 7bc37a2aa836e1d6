"""Random calls are repeated by their bytes alone: both engines stay equal, whatever the calls return or raise."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.chunks.handles import detach
from nanovllm.engine.requests import submit_many
from nanovllm.entrypoints.conversation import Conversation, turn
from nanovllm.entrypoints.ranks.calls import CALLS
from nanovllm.executor.executor import runtime_of
from nanovllm.state.offload import Rates
from tests.entrypoints.ranks.hooks import with_rates
from tests.entrypoints.ranks.twins import Twins
from tools.layout import PACKAGE

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
TEXTS = ("Once upon a time", "The cat", "Hello", "The king of Aistonia is Oswin. The capital of Aistonia is Velmora.", "")
KINDS = (
    "submit", "submit", "submit_many", "step", "step", "step", "cancel", "prefill", "generate", "generate_many", "fork", "truncate",
    "release", "offload", "offload", "compose", "drop", "score", "save", "detach", "turn", "stale", "foreign",
)  # fmt: skip
OPTIONS = st.builds(
    nv.SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    max_tokens=st.integers(1, 12),
    logprobs=st.sampled_from([None, 1]),
    stop=st.sampled_from([(), (".",)]),
)


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return nv.load_model("tiny", device="cpu")


class Calls:
    """Random calls with one engine."""

    def __init__(self, model: nv.Model, folder: Path, data: st.DataObject) -> None:
        limits: dict[str, Any] = {"num_pages": 24, "page_size": 8, "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 16}
        limits["host_kv_gib"] = 1 / 64
        always = Rates(tokens_per_second=1.0, bytes_per_second=1e15)
        self.state, other = (with_rates(nv.init_state(model, **limits), always) for _ in range(2))
        self.model, self.data, self.folder = model, data, folder
        self.twins = Twins(model, self.state, other)
        self.chunks, self.old, self.kept = list[nv.Chunk](), self.state, list[int]()
        self.other = nv.prefill(model, nv.init_state(model, num_pages=4), "Hello")[1]

    def context(self) -> Any:
        """A text, ids, or a chunk with either."""
        text = self.data.draw(st.sampled_from(TEXTS))
        assert self.model.tokenizer is not None
        ids = self.model.tokenizer.encode(text)
        part = self.data.draw(st.sampled_from([text, ids, np.array(ids, np.int64), tuple(ids)]))
        return [self.chunk(), part] if self.chunks and self.data.draw(st.booleans()) else part

    def chunk(self) -> nv.Chunk:
        """A chunk, seldom one that was released."""
        return self.data.draw(st.sampled_from(self.chunks))

    def make(self, kind: str) -> None:
        """Make a call."""
        draw, model, state = self.data.draw, self.model, self.state
        if not self.chunks and kind in ("fork", "truncate", "release", "offload", "compose", "drop", "save"):
            return
        match kind:
            case "submit":
                self.state, _ = nv.submit(model, state, self.context(), draw(OPTIONS), priority=draw(st.integers(-1, 1)))
            case "submit_many":
                keep = draw(st.booleans())
                self.state, ids = submit_many(model, state, [self.context()] * 2, [draw(OPTIONS), None], keep=keep, namespace=1)
                self.kept += ids if keep else []
            case "step":
                self.state, _ = nv.step(model, state)
                if draw(st.booleans()):
                    list(self.state.running)  # reading a state changes nothing
            case "cancel":
                self.state = nv.cancel(state, draw(st.integers(0, state.next_id)))
            case "prefill":
                self.state, chunk = nv.prefill(model, state, self.context())
                self.chunks.append(chunk)
            case "generate":
                self.state, reply = nv.generate(model, state, self.context(), draw(OPTIONS))
                self.chunks.append(reply.chunk)
            case "generate_many":
                self.state, replies = nv.generate_many(model, state, [self.context(), self.context()], draw(OPTIONS))
                self.chunks += [reply.chunk for reply in replies]
            case "fork":
                self.state, chunk = nv.fork(state, self.chunk())
                self.chunks.append(chunk)
            case "truncate":
                self.state, chunk = nv.truncate(state, self.chunk(), draw(st.integers(0, 5)))
                self.chunks.append(chunk)
            case "release":
                self.state = nv.release(state, self.chunk())
            case "offload":
                self.state = nv.offload(state, self.chunk())
            case "compose":
                recompute = draw(st.sampled_from([0, 2, 0.5, "all"]))
                self.state, chunk = nv.compose(model, state, [self.chunk(), self.chunk()], recompute)
                self.chunks.append(chunk)
            case "drop":
                self.state, chunk = nv.drop(
                    model, state, self.chunk(), 1, draw(st.integers(1, 4)), draw(st.sampled_from(["shift", "gap", "recompute"]))
                )
                self.chunks.append(chunk)
            case "score":
                self.state, _ = nv.score(model, state, [self.context()], [" a time"], top_logprobs=draw(st.integers(0, 2)))
            case "save":
                nv.save_chunk(state, self.chunk(), self.folder / "chunk.safetensors")
                self.state, chunk = nv.load_chunk(model, state, self.folder / "chunk.safetensors")
                self.chunks.append(chunk)
            case "detach" if self.kept:
                self.state, chunk = detach(model, state, self.kept.pop())
                self.chunks += [] if chunk is None else [chunk]
            case "turn":
                asked = Conversation(messages=({"role": "user", "content": "Hello"},), thinking=False, retain="shift")
                self.state, after, _ = turn(model, state, asked, nv.SamplingParams(temperature=0, max_tokens=4), lambda piece: None)
                self.chunks += [] if after.chunk is None else [after.chunk]
            case "stale" if self.old is not state:
                nv.submit(model, self.old, "Hello")
                self.old = self.state
            case "foreign":
                nv.generate(model, state, [self.other, "Hello"])


@settings(max_examples=15)
@given(data=st.data(), kinds=st.lists(st.sampled_from(KINDS), min_size=6, max_size=30))
def test_engines_stay_equal(model: nv.Model, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kinds: list[str]) -> None:
    calls = Calls(model, tmp_path_factory.getbasetemp(), data)
    for kind in kinds:
        try:
            calls.make(kind)
        except nv.NanoVLLMError:
            continue
    while calls.state.running or calls.state.waiting:
        calls.state, _ = nv.step(model, calls.state)
    nv.check(calls.state)
    nv.check(calls.twins.second)


def test_a_donated_state_and_foreign_chunks_are_refused_here_alone(model: nv.Model) -> None:
    state = nv.init_state(model, num_pages=16)
    twins = Twins(model, state, nv.init_state(model, num_pages=16))
    later, chunk = nv.prefill(model, state, "Hello")
    with pytest.raises(nv.DonatedStateError):
        nv.prefill(model, state, "Hello")
    last = nv.release(later, chunk)
    with pytest.raises(nv.ReleasedChunkError):
        nv.fork(last, chunk)
    assert twins.sent == ["prefill", "release"]


def test_functions_and_sessions_of_the_caller_are_refused(model: nv.Model) -> None:
    state = nv.init_state(model, num_pages=16)
    Twins(model, state, nv.init_state(model, num_pages=16))
    with pytest.raises(nv.InvalidRequestError, match=r"process_logits: .* torchrun"):
        nv.submit(model, state, "Hello", process_logits=lambda logits: logits)
    with pytest.raises(nv.InvalidRequestError, match=r"begin: .* torchrun"):
        nv.begin(model, state, ["Hello"], room=2)
    with pytest.raises(nv.InvalidRequestError, match="unknown option 'priorty'"):
        nv.submit(model, state, "Hello", priorty=1)  # pyright: ignore[reportCallIssue]
    assert runtime_of(nv.release(*nv.prefill(model, state, "Hello"))).mirror is not None


# Refused, inside of a function that is repeated, or called only in engines of one rank.
COMMITS = {"begin", "_committed", "_abandoned", "place", "_generated", "_processed", "complete"}


def test_every_function_that_commits_is_repeated() -> None:
    found = set[str]()
    for path in PACKAGE.rglob("*.py"):
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.FunctionDef) and any(isinstance(n, ast.Name) and n.id == "commit_state" for n in ast.walk(one)):
                found.add(one.name)
    assert found - COMMITS <= set(CALLS)
    assert found >= COMMITS
