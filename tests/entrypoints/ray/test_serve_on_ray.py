"""Two replicas on a real Ray Serve: the library's replies, prefixes that find their replica, and a replica that dies in the middle."""

import asyncio
import doctest
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import nanovllm as nv
from nanovllm.entrypoints.ray import application
from nanovllm.entrypoints.ray.application import build_app, from_config
from nanovllm.errors import InvalidRequestError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own code has warnings
OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 512}
SYSTEM = "You are the keeper of a lighthouse. You answer in one short sentence, and you never speak of {}. "


def replica_names() -> list[str]:
    import ray.util

    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "#Replica#" in actor["name"]]


def kill(replica: str) -> None:
    import ray

    (name,) = [name for name in replica_names() if name.endswith(f"#{replica}")]
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)


@pytest.fixture(scope="module")
def served(cluster: Any) -> Iterator[str]:
    """The address of an application with two replicas."""
    from ray import serve

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app("tiny", num_replicas=2, deployment={"health_check_period_s": 1.0}, max_num_seqs=8, **OPTIONS))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture
def client(served: str) -> Iterator[httpx.Client]:
    """A client, once both replicas answer."""
    with httpx.Client(base_url=served, timeout=240) as made:
        seen, end = set[str](), time.monotonic() + 240
        while len(seen) < 2:
            assert time.monotonic() < end, f"only {seen} of {replica_names()} answer"
            answer = made.post("/v1/completions", json={"prompt": f"{time.monotonic_ns()}", "max_tokens": 1})
            seen |= {answer.headers["x-replica"]} & {name.rpartition("#")[2] for name in replica_names()}
        yield made


@pytest.fixture(scope="module")
def llm() -> nv.LLM:
    return nv.LLM("tiny", **OPTIONS)


def asked(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, **more}


def test_answers_and_streams_are_those_of_the_library(client: httpx.Client, llm: nv.LLM) -> None:
    prompts = [f"{n} Once upon a time" for n in range(8)]
    expected = [output.text for output in llm.generate(prompts, nv.SamplingParams(temperature=0, max_tokens=16))]
    answers = [client.post("/v1/completions", json=asked(prompt, 16)) for prompt in prompts]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    assert len({answer.headers["x-replica"] for answer in answers}) == 2
    messages: Any = [{"role": "user", "content": "What is 27 + 38?"}]
    reply = llm.chat(messages, nv.SamplingParams(temperature=0, max_tokens=40), enable_thinking=False).text
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        more: Any = {"model": "tiny", "temperature": 0, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        whole = api.chat.completions.create(messages=messages, **more)
        pieces = [*api.chat.completions.create(messages=messages, stream=True, **more)]
    assert whole.choices[0].message.content == reply
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == reply and len(pieces) > 3


def test_a_conversation_stays_with_the_replica_that_has_it(client: httpx.Client) -> None:
    homes, cached = list[set[str]](), list[int]()
    for topic in ("storms", "whales", "ships", "birds", "bread", "snow"):
        messages, home = [{"role": "system", "content": SYSTEM.format(topic) * 3}], set[str]()
        for turn in range(3):
            messages.append({"role": "user", "content": f"{topic}: question {turn}"})
            answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0})
            home.add(answer.headers["x-replica"])
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages.append({"role": "assistant", "content": "Yes."})
        homes.append(home)
    assert all(len(home) == 1 for home in homes), homes
    later = [count for place, count in enumerate(cached) if place % 3]
    assert min(later) >= 48, cached  # the system prompt, at least


def test_a_hot_prefix_spreads_under_load(client: httpx.Client) -> None:
    async def main() -> Counter[str]:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=240) as many:
            answers = (many.post("/v1/completions", json=asked(SYSTEM * 3 + f"{n}", 150, ignore_eos=True)) for n in range(16))
            return Counter(answer.headers["x-replica"] for answer in await asyncio.gather(*answers))

    counts = asyncio.run(main())
    assert len(counts) == 2 and max(counts.values()) <= 13, counts


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", asked("a", 4, temperature=-1), 400, None),
        ("/v1/completions", asked("a", 4, chunks=["a"]), 400, "unsupported_parameter"),
        ("/v1/completions", asked("a", 4, model="other"), 404, "model_not_found"),
        ("/v1/chunks", {}, 404, "not_found"),
        ("/metrics", {}, 404, "not_found"),
    ],
    ids=str,
)
def test_what_is_wrong_has_openais_errors(client: httpx.Client, path: str, body: dict[str, Any], status: int, code: str | None) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


async def read_stream(many: httpx.AsyncClient, body: dict[str, Any], started: asyncio.Queue[str]) -> tuple[str, str | None]:
    """The text of a stream, and the code of the error at its end."""
    text = ""
    async with many.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text, None
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return text, event["error"]["code"]
                text += event["choices"][0]["text"]
                started.put_nowait(answer.headers["x-replica"])
    raise AssertionError("the stream has no end")


def test_a_replica_that_dies_takes_only_its_running_streams(client: httpx.Client, llm: nv.LLM) -> None:
    """Eight long streams run, and sixteen whole requests run or wait, when one replica is killed."""
    streams = [asked(f"{n} One day,", 400, ignore_eos=True) for n in range(8)]
    wholes = [asked(f"{n} Once upon a time", 60, ignore_eos=True) for n in range(16)]
    expected = [
        output.text
        for body in (*streams, *wholes)
        for output in llm.generate(body["prompt"], nv.SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True))
    ]

    async def main() -> tuple[list[tuple[str, str | None]], list[httpx.Response], list[int], str]:
        started: asyncio.Queue[str] = asyncio.Queue()
        async with httpx.AsyncClient(base_url=client.base_url, timeout=240) as many:
            read = [asyncio.create_task(read_stream(many, body, started)) for body in streams]
            sent = [asyncio.create_task(many.post("/v1/completions", json=body)) for body in wholes]
            for _ in range(len(streams)):  # pieces of some of them
                victim = await started.get()
            kill(victim)
            health = list[int]()
            while not all(task.done() for task in (*read, *sent)):
                health.append((await many.get("/health")).status_code)
                await asyncio.sleep(0.1)
            return await asyncio.gather(*read), await asyncio.gather(*sent), health, victim

    read, sent, health, victim = asyncio.run(main())
    assert {*health} == {200}
    for answer, text in zip(sent, expected[len(streams) :], strict=True):
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == text
    assert any(answer.headers["x-replica"] != victim for answer in sent)
    for (text, error), whole in zip(read, expected, strict=False):
        assert text == whole if error is None else whole.startswith(text)
        assert error in (None, "replica_lost")
    assert any(error for _, error in read)


def test_requests_wait_while_no_replica_is_there(client: httpx.Client, llm: nv.LLM) -> None:
    for name in replica_names():
        kill(name.rpartition("#")[2])
    answer = client.post("/v1/completions", json=asked("Once upon a time", 12))
    (expected,) = llm.generate("Once upon a time", nv.SamplingParams(temperature=0, max_tokens=12))
    assert answer.json()["choices"][0]["text"] == expected.text


def test_the_examples_of_the_application() -> None:
    assert doctest.testmod(application).failed == 0


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="bound="):
        build_app(bound=0.5)
    with pytest.raises(InvalidRequestError, match="num_gpus="):
        build_app(tensor_parallel_size=2, num_gpus=1)
    with pytest.raises(InvalidRequestError, match="settings must be"):
        build_app(settings={"port": 1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequestError, match="colour"):
        from_config({"settings": {"colour": "red"}})


def test_a_configuration_names_hosts_and_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "keys").chmod(0o600)
    settings = {"allowed_hosts": ["chat.example"], "api_key_file": str(tmp_path / "keys")}
    app = from_config({"model": "folder/name", "num_replicas": 3, "device": "cpu", "settings": settings})
    ingress = app._bound_deployment
    replicas, told = ingress.init_args[0]._bound_deployment, ingress.init_args[1]
    assert (told.allowed_hosts, len(told.api_keys), told.model_name) == (("chat.example",), 1, "name")
    assert replicas.num_replicas == 3 and replicas.init_args[0] == "folder/name"


def test_a_replica_asks_ray_for_the_gpus_of_its_ranks() -> None:
    """A deployment of two ranks, looked at before it runs."""
    app: Any = build_app("tiny", tensor_parallel_size=2, deployment={"ray_actor_options": {"num_cpus": 3}})
    replicas = app._bound_deployment.init_args[0]._bound_deployment
    assert replicas.ray_actor_options == {"num_gpus": 2, "num_cpus": 3}
    assert replicas.init_args[2] == {"tensor_parallel_size": 2}
