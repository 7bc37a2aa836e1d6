"""`best_of`: of the replies that run, those with the highest mean log-probability per token are returned, and all are counted."""

from typing import Any

import numpy as np
import pytest

from nanovllm.entrypoints.server.api.best_of import best, mean_logprob
from nanovllm.entrypoints.server.wire import Ended, Scored
from tests.entrypoints.server.live import Live

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.2, "seed": 7}


def means(choices: list[Any]) -> list[float]:
    return [float(np.mean(choice["logprobs"]["token_logprobs"])) for choice in choices]


@pytest.mark.parametrize("prompt", ["Once upon a time", ["Once upon a time", "The cat"]])
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"stop": ["."], "include_stop_str_in_output": True}])
def test_the_best_of_all_replies_come_back_in_order(live: Live, prompt: Any, more: dict[str, Any]) -> None:
    body, count = BODY | {"prompt": prompt, "stop": None} | more, 1 if isinstance(prompt, str) else len(prompt)
    every = live.post(PATH, body | {"n": 6, "logprobs": more.get("logprobs", 0), "echo": False}).json()
    wanted = []
    for first in range(0, 6 * count, 6):
        group = every["choices"][first : first + 6]
        if "stop" not in more:  # the tokens of a stop string count, and are not listed
            order = np.argsort(-np.array(means(group)), kind="stable")[:2]
            wanted += [group[place]["text"] for place in order]
    answer = live.post(PATH, body | {"n": 2, "best_of": 6}).json()
    assert [choice["index"] for choice in answer["choices"]] == [*range(2 * count)]
    texts = [choice["text"] for choice in answer["choices"]]
    if wanted:
        assert [text.removeprefix("Once upon a time" if at < 2 else "The cat") for at, text in enumerate(texts)] == wanted
    assert {*texts} <= {choice["text"] for choice in every["choices"]} or "echo" in more
    assert [choice["logprobs"] is not None for choice in answer["choices"]] == ["logprobs" in more] * 2 * count
    assert answer["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    assert answer["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]


def test_the_prompt_runs_once_for_all(live: Live) -> None:
    live.wait_until_idle()
    prompt = [*range(300, 400)]
    before = live.engine.state.stats
    assert live.post(PATH, BODY | {"prompt": prompt, "best_of": 8, "max_tokens": 2}).status == 200
    live.wait_until_idle()
    ran = live.engine.state.stats.prefill_tokens - before.prefill_tokens
    assert 100 <= ran < 100 + 8 * live.engine.state.config.page_size  # beside the full pages, each runs what is left of the prompt


def test_a_stream_has_all_replies(live: Live) -> None:
    answer = live.post(PATH, BODY | {"best_of": 2, "stream": True})
    assert answer.status == 400 and answer.json()["error"]["param"] == "best_of"
    assert {event["choices"][0]["index"] for event in live.events(PATH, BODY | {"n": 2, "best_of": 2, "stream": True})} == {0, 1}


def test_it_is_bounded_with_all_prompts(live: Live) -> None:
    error = live.post(PATH, BODY | {"prompt": ["a"] * 17, "n": 1, "best_of": 128}).json()["error"]
    assert error["param"] == "best_of" and "best_of=128" in error["message"]
    assert live.post(PATH, BODY | {"best_of": 2, "keep": "one"}).json()["error"]["param"] == "keep"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_other_routes_do_not_have_it(live: Live, path: str) -> None:
    body = (
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        if "chat" in path
        else {"input": "Hello", "max_output_tokens": 2}
    )
    assert live.post(path, body | {"best_of": 1}).status == 200
    error = live.post(path, body | {"best_of": 2}).json()["error"]
    assert (error["param"], error["code"]) == ("best_of", "unsupported_parameter")


def ended(number: int, *values: float) -> Ended:
    return Ended(number, "length", "", 0, b"", len(values), scored=Scored(np.array(values, "<f4").tobytes()) if values else None)


def test_means_decide_and_equals_keep_their_order() -> None:
    ends = [ended(0, -1.0, -3.0), ended(1, -1.5), ended(2, -2.0, -1.0, -1.5), ended(3, -9.0, -0.1), ended(4, -5.0), ended(5, -4.0)]
    assert [end.id for end in best(ends, 3, 2)] == [1, 2, 5, 3]
    assert [end.id for end in best(ends, 3, 3)] == [0, 1, 2, 3, 4, 5]
    assert mean_logprob(ended(0)) == 0.0
