"""An engine of two processes gives exactly the replies of one: both ranks hold the same state after every call."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import nanovllm as nv
from nanovllm.chunks.storage import reserved
from nanovllm.executor.executor import runtime_of
from nanovllm.state.digest import digest
from nanovllm.state.offload import Rates
from tests.entrypoints.ranks.engines import LIMITS, pids_of, ranks_of, started
from tests.entrypoints.ranks.hooks import with_rates

pytestmark = pytest.mark.unhooked
GREEDY = nv.SamplingParams(temperature=0, max_tokens=12)
DRAWN = nv.SamplingParams(temperature=1, max_tokens=12, logprobs=2)
FACTS = "The king of Aistonia is Oswin."


@pytest.fixture(scope="module")
def two() -> Iterator[nv.LLM]:
    with started("joined", grouped=True) as llm:
        yield llm


@pytest.fixture
def both(two: nv.LLM) -> tuple[nv.LLM, nv.LLM]:
    """An engine of one process whose state has come as far as that of two, and that of two."""
    one = nv.LLM("tiny", **LIMITS)
    return one, two


def require_alike(some: Any, others: Any) -> None:
    """Require the same replies. Two ranks sum in another order than one, so that log-probabilities differ in their last digits."""
    told, expected = ([(out.token_ids, out.text, out.finish_reason) for out in outputs] for outputs in (some, others))
    assert told == expected
    assert numbers([out.logprobs for out in some]) == pytest.approx(numbers([out.logprobs for out in others]), rel=1e-3, abs=1e-4)


def numbers(value: Any) -> list[float]:
    """All numbers of a value in words."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-\d+)?", str(value))]


def test_replies_are_those_of_one_process(both: tuple[nv.LLM, nv.LLM]) -> None:
    one, two = both
    prompts = ["Once upon a time", "The cat", "Hello", [858, 974], "The cat sat", "A"]
    require_alike(two.generate(prompts, GREEDY), one.generate(prompts, GREEDY))
    seeded = [nv.SamplingParams(temperature=1, max_tokens=9, seed=seed, logprobs=2, stop=".") for seed in range(len(prompts))]
    require_alike(two.generate(prompts, seeded), one.generate(prompts, seeded))
    assert [p.text for p in two.stream("Hello", GREEDY)] == [p.text for p in one.stream("Hello", GREEDY)]
    asked = [{"role": "user", "content": "Hello"}]
    assert two.chat(asked, GREEDY, enable_thinking=False).text == one.chat(asked, GREEDY, enable_thinking=False).text
    a, b = (llm.score(["Once upon a time"], [" there was"], top_logprobs=2) for llm in both)
    assert numbers([each.entries for each in a]) == pytest.approx(numbers([each.entries for each in b]), rel=1e-3, abs=1e-4)


def test_ranks_exclude_their_engine_from_garbage_collections() -> None:
    with started("collects_little") as llm:
        assert len(llm.generate(["Hello"], GREEDY)) == 1


def test_chunks_are_those_of_one_process(both: tuple[nv.LLM, nv.LLM], tmp_path: Path) -> None:
    told, files = [], []
    for llm in both:
        model = llm.model
        llm.state, king = nv.prefill(model, llm.state, FACTS)
        llm.state, city = nv.prefill(model, llm.state, "\n\nThe capital of Aistonia is Velmora.")
        llm.state, whole = nv.compose(model, llm.state, [king, city], recompute=2)
        llm.state, less = nv.drop(model, llm.state, whole, 2, 5, "shift")
        path = tmp_path / f"{llm is both[0]}.safetensors"
        nv.save_chunk(llm.state, less, path)
        llm.state, loaded = nv.load_chunk(model, llm.state, path)
        with path.open("rb") as file:
            llm.state, later = reserved.reserve(model, llm.state, file.fileno(), path)
            llm.state = reserved.fill(model, llm.state, file.fileno(), path, later)
        nv.save_chunk(llm.state, later, tmp_path / "later")
        assert (tmp_path / "later").read_bytes() == path.read_bytes()
        store = nv.ChunkStore(tmp_path / str(llm is both[0]), max_bytes=1e9)
        key = store.save(llm.state, king)
        llm.state, stored = store.load(model, llm.state, key)
        llm.state, missing = store.load(model, llm.state, "missing")
        llm.state, reply = nv.generate(model, llm.state, [whole, "\n\nThe capital of Aistonia is"], GREEDY)
        assert stored is not None and missing is None
        told.append((reply.text, loaded.token_ids.tolist(), stored.token_ids.tolist(), key, str(loaded.provenance)))
        files.append(load_file(path))
        for chunk in (king, city, whole, less, loaded, later, stored, reply.chunk):
            llm.state = nv.release(llm.state, chunk)
    assert told[0] == told[1]
    assert files[0]["kv"].shape == files[1]["kv"].shape == (8, len(files[0]["tokens"]), 2, 2, 64), "a file has the heads of all ranks"
    torch.testing.assert_close(files[0]["kv"], files[1]["kv"], rtol=1e-3, atol=1e-4)


def test_a_stream_that_is_left_is_cancelled_on_all_ranks(two: nv.LLM) -> None:
    stream = two.stream("Once upon a time", nv.SamplingParams(temperature=0, max_tokens=64))
    assert next(stream).text == ","
    stream.close()
    assert not two.state.running
    mirror = runtime_of(two.state).mirror
    assert mirror is not None
    mirror.compare(two.state)
    (other,) = ranks_of(two).all
    assert other.outcome.digest == digest(two.state, whole=True).hex()


def test_refused_calls_leave_all_ranks_as_they_were(two: nv.LLM, tmp_path: Path) -> None:
    (tmp_path / "wrong.safetensors").write_bytes(b"12345678901234567890")
    for call in (
        lambda: two.generate(""),
        lambda: two.generate([[10**6]]),
        lambda: two.generate("x " * 600),
        lambda: nv.load_chunk(two.model, two.state, tmp_path / "wrong.safetensors"),
        lambda: nv.cancel(two.state, 10**6),
        lambda: two.generate("Hello", process_logits=lambda logits: logits),
        lambda: nv.begin(two.model, two.state, ["Hello"], room=2),
        lambda: nv.generate_many(two.model, two.state, ["Hello"] * 4, nv.SamplingParams(max_tokens=200)),
    ):
        with pytest.raises(nv.NanoVLLMError) as caught:
            call()
        assert not isinstance(caught.value, nv.EngineDeadError)
    assert two.generate("Hello", GREEDY)[0].text == "! How can I help you?"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True must be an integer"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"tensor_parallel_size": -2}, "tensor_parallel_size=-2"),
        ({"tensor_parallel_size": 1.0}, r"tensor_parallel_size=1\.0"),
        ({"tensor_parallel_size": 2, "devices": ["cpu"]}, "must be a list of 2 devices"),
        ({"tensor_parallel_size": 2, "devices": "cpu"}, "must be a list of 2 devices"),
        ({"tensor_parallel_size": 2, "rank_timeout": 0}, "rank_timeout=0"),
        ({"tensor_parallel_size": 2, "tuning": object()}, "cannot be sent"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.LLM("tiny", **({} if "devices" in options else {"device": "cpu"}), **options)


def test_a_loaded_model_cannot_be_sent() -> None:
    with pytest.raises(nv.InvalidRequestError, match="already loaded on one device"):
        nv.LLM(nv.load_model("tiny", device="cpu"), tensor_parallel_size=2)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    with pytest.raises(nv.InvalidRequestError, match="tensor_parallel_size=4 needs 4 GPUs, but torch sees 2"):
        nv.LLM("tiny", tensor_parallel_size=4)


def test_two_processes_keep_kv_in_host_memory_alike() -> None:
    """After each call the ranks' whole digests are compared, with what is in host memory."""
    prompts = [text * 12 for text in ("Once upon a time, there was a cat. ", "A dog went to the market. ", "The king has a beard. ")]
    limits = {**LIMITS, "num_pages": 24, "host_kv_gib": 0.25}
    one = nv.LLM("tiny", **limits)
    one.state = with_rates(one.state, Rates(tokens_per_second=1.0, bytes_per_second=1e15))
    with started("always_loading", grouped=True, limits=limits) as two:
        for prompt in prompts * 2:
            require_alike(two.generate(prompt, GREEDY), one.generate(prompt, GREEDY))
        assert two.state.stats.loaded_tokens == one.state.stats.loaded_tokens > 0
        assert two.state.stats == one.state.stats
        replies = []
        for llm in (two, one):  # a chunk goes there and comes back
            llm.state, chunk = nv.prefill(llm.model, llm.state, FACTS * 4)
            llm.state = nv.offload(llm.state, chunk)
            llm.state, other = nv.prefill(llm.model, llm.state, prompts[1])
            llm.state = nv.release(llm.state, other)
            llm.state, reply = nv.generate(llm.model, llm.state, [chunk, " The king"], GREEDY)
            replies.append(reply.token_ids)
            llm.state = nv.offload(llm.state, reply.chunk)
            assert len(llm.generate([prompts[2] * 2], GREEDY)[0].token_ids) == 12
            assert llm.state.pool.host is not None and llm.state.pool.host.moved
            llm.state = nv.release(nv.release(llm.state, chunk), reply.chunk)
        assert replies[0] == replies[1]
        (host, alone) = (each.state.pool.host for each in (two, one))
        assert host is not None and alone is not None
        assert 2 * host.page_bytes == alone.page_bytes and host.num_pages == alone.num_pages


def test_two_processes_keep_kv_on_disk(tmp_path: Path) -> None:
    """An engine that begins later reads what both ranks of an earlier one have written when it was closed."""
    text, told = "Once upon a time, there was a cat. " * 12, []
    limits = {**LIMITS, "host_kv_gib": 0.25, "kv_dir": tmp_path, "kv_dir_gib": 1}
    for _ in range(2):
        with started("always_loading", grouped=True, limits=limits) as two:
            told.append(two.generate(text, GREEDY)[0])
            assert nv.flush_kv(two.state)
            files = [path.parent.parent.name for path in tmp_path.rglob("*.kv")]
            assert len({*files}) == 2 and 2 * len({*files}) < len(files)
    first, second = told
    assert first.token_ids == second.token_ids and first.num_cached_tokens == 0 < second.num_cached_tokens


def test_an_engine_that_has_died_is_closed_without_its_kv(tmp_path: Path) -> None:
    with started(limits={**LIMITS, "host_kv_gib": 0.25, "kv_dir": tmp_path, "kv_dir_gib": 1}) as two:
        two.generate("Hello", GREEDY)
        os.kill(pids_of(two)[0], signal.SIGKILL)
        with pytest.raises(nv.EngineDeadError):
            while True:
                two.generate("Hello", GREEDY)


def test_the_model_of_an_engine_with_ranks_serves_it_alone(two: nv.LLM) -> None:
    with pytest.raises(nv.InvalidRequestError, match="its ranks have an engine"):
        nv.init_state(two.model, num_pages=8)
    with pytest.raises(nv.InvalidRequestError, match="the other ranks repeat calls with a state alone"):
        nv.forward(two.model.params, None, nv.Batch.of_prompts([[5, 6]]), two.model.config)
    assert two.generate("Hello", GREEDY)[0].text


def test_a_forked_process_that_ends_leaves_the_engine(two: nv.LLM) -> None:
    child = os.fork()
    if not child:
        two.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert two.generate("Hello", GREEDY)[0].text


@pytest.mark.parametrize(("options", "told"), [({"rank_timeout": "x"}, "rank_timeout='x'"), ({"tensor_parallel_size": 3}, "num_heads=4")])
def test_wrong_options_start_no_process(options: dict[str, Any], told: str) -> None:
    with pytest.raises(nv.InvalidRequestError, match=told):
        nv.LLM("tiny", device="cpu", **options)


def test_what_is_no_prompt_is_refused_as_by_one_process(both: tuple[nv.LLM, nv.LLM]) -> None:
    """Types arrive as they were sent, so that all ranks say the same of them."""
    ids = torch.tensor([858, 974])
    for prompt in (ids, [ids], np.array([858, 974]), np.array([[858]]), torch.tensor([1.5]), [858.0], ["a", 3], {"a": 1}, range(3), (1, 2)):
        told = []
        for llm in both:
            try:
                told.append(llm.generate(prompt, GREEDY)[0].token_ids)
            except nv.InvalidRequestError:
                told.append("refused")
        assert told[0] == told[1], prompt
