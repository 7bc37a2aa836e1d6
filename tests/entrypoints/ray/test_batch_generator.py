"""Rows get the replies of `LLM`; a bad row fails alone."""

import doctest
import importlib
import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.entrypoints.ray import require
from nanovllm.entrypoints.ray.batch_generator import BatchGenerator
from nanovllm.entrypoints.ray.batch_rows import plain
from nanovllm.entrypoints.ray.require import gpus_of, require_ray
from nanovllm.errors import InvalidRequestError

pytestmark = pytest.mark.unhooked
OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 128}
GREEDY = nv.SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Once upon a time", "The cat", [1, 2, 3]]
CHAT = [{"role": "user", "content": "What is 27 + 38?"}]


@pytest.fixture(scope="module")
def llm() -> nv.LLM:
    return nv.LLM("tiny", **OPTIONS)


def test_rows_get_the_replies_of_the_library(llm: nv.LLM) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    rows = BatchGenerator("tiny", sampling=GREEDY, **OPTIONS)({"prompt": PROMPTS, "n": np.arange(3)})
    assert rows["reply"] == [output.text for output in expected]
    assert rows["reply_token_ids"] == [[*output.token_ids] for output in expected]
    assert rows["finish_reason"] == [output.finish_reason for output in expected] and rows["error"] == [None] * 3
    assert rows["prompt"] == PROMPTS and [*rows["n"]] == [0, 1, 2]


def test_conversations_in_columns_of_arrays(llm: nv.LLM) -> None:
    expected = llm.chat(CHAT, GREEDY, enable_thinking=False).text
    column = np.empty(2, object)
    column[:] = [np.array([{**CHAT[0], "name": None}], object), CHAT]
    rows = BatchGenerator("tiny", sampling=GREEDY, messages_column="chat", enable_thinking=False, **OPTIONS)({"chat": column})
    assert rows["reply"] == [expected] * 2


def test_bad_rows_fail_alone(llm: nv.LLM) -> None:
    prompts = [None, "", "Once upon a time", 5, [1, "a"], {"a": 1}, [-1], "x" * 100_000, "\ud800", [[]]]
    rows = BatchGenerator("tiny", sampling=GREEDY, **OPTIONS)({"prompt": prompts})
    assert [reason for reason in rows["finish_reason"] if reason != "error"] == ["length"]
    assert rows["reply"][2] == llm.generate("Once upon a time", GREEDY)[0].text
    assert [error is None for error in rows["error"]] == [n == 2 for n in range(len(prompts))]
    assert all("Error: " in error for error in rows["error"] if error)


def test_a_row_may_have_options_of_its_own() -> None:
    changes = [{"max_tokens": 2}, None, {"stop": np.array(["girl"])}, {"max_tokens": "x"}, {"colour": 1}, 7, {"temperature": -1}]
    rows = BatchGenerator("tiny", sampling=GREEDY, sampling_column="how", **OPTIONS)({"prompt": ["Once"] * 7, "how": changes})
    assert [len(ids) for ids in rows["reply_token_ids"]][:2] == [2, 12]
    assert [error is None for error in rows["error"]] == [True] * 3 + [False] * 4
    assert "'colour'" in rows["error"][4]


def test_threads_share_the_engine() -> None:
    generate = BatchGenerator("tiny", sampling=GREEDY, **OPTIONS)
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: generate({"prompt": [f"{n} cats"] * 3})})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n]["reply"] == generate({"prompt": [f"{n} cats"]})["reply"] * 3 for n in range(4))


def test_columns_that_do_not_fit_are_named() -> None:
    generate = BatchGenerator("tiny", **OPTIONS)
    with pytest.raises(InvalidRequestError, match="no column 'prompt': there are 'text'"):
        generate({"text": ["a"]})
    with pytest.raises(InvalidRequestError, match="'reply', which is the name of a result"):
        generate({"prompt": ["a"], "reply": ["b"]})
    with pytest.raises(InvalidRequestError, match="both given"):
        BatchGenerator("tiny", prompt_column="a", messages_column="b", **OPTIONS)
    assert generate({"prompt": []})["reply"] == []


def test_values_of_columns_become_plain() -> None:
    nested = np.array([{"a": np.int64(1), "b": None, "c": (np.float32(0.5), np.array([[1, 2]]))}], object)
    assert plain(nested) == [{"a": 1, "c": [0.5, [[1, 2]]]}]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match=r"need ray, pyarrow: pip install 'nanovllm\[ray\]'"):
        require_ray("pyarrow")


@pytest.mark.parametrize(
    ("options", "asked", "expected"),
    [
        ({}, None, 1),
        ({"tensor_parallel_size": 4}, None, 4),
        ({"device": "cpu"}, None, 0),
        ({"device": "cpu", "tensor_parallel_size": 2}, None, 0),
        ({"device": "cuda"}, 0.5, 0.5),
        ({"tensor_parallel_size": 2}, 3, 3),
    ],
    ids=str,
)
def test_a_replica_has_a_gpu_for_each_rank(options: dict[str, Any], asked: float | None, expected: float) -> None:
    assert gpus_of(options, asked) == expected


@pytest.mark.parametrize(("options", "asked"), [({"tensor_parallel_size": 2}, 1), ({}, -1)], ids=str)
def test_too_few_gpus_are_refused(options: dict[str, Any], asked: float) -> None:
    with pytest.raises(InvalidRequestError, match="num_gpus="):
        gpus_of(options, asked)


MODULES = ["batch_generator", "batch_rows", "batch_units", "failover", "generate_files", "local_server", "prefixes", "require", "routing"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_the_lines_that_they_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"nanovllm.entrypoints.ray.{name}")
    assert inspect.getdoc(module) and doctest.testmod(module).failed == 0
