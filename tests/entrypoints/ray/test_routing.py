"""Requests go to the replica that has their prefix, none runs more than its share, and little moves when a replica is lost."""

import math
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm.entrypoints.ray.prefixes import STEP, prefix_keys, prompt_bytes, request_keys
from nanovllm.entrypoints.ray.routing import MOST_HOLDERS, PrefixTable, most_running, rendezvous
from nanovllm.errors import InvalidRequestError

NAMES = [f"replica-{n}" for n in range(8)]
replicas = st.sets(st.sampled_from(NAMES), min_size=1).map(sorted)
keys = st.integers(0, 2**63 - 1)
prompts = st.binary(max_size=3000)


@given(keys, replicas)
def test_a_key_has_one_order_of_replicas_whatever_their_order_is(key: int, names: list[str]) -> None:
    order = rendezvous(key, names)
    assert sorted(order) == names and rendezvous(key, names[::-1]) == order


@given(st.lists(keys, min_size=1, max_size=20), replicas.filter(lambda names: len(names) > 1), st.data())
def test_only_the_prompts_of_a_lost_replica_move(some: list[int], names: list[str], data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(names))
    left = [name for name in names if name != lost]
    for key in some:
        first, *others = rendezvous(key, names)
        assert rendezvous(key, left)[0] == (others[0] if first == lost else first)


def test_prompts_are_spread_evenly() -> None:
    num_keys = 8000
    counts = Counter(rendezvous(key, NAMES)[0] for key in range(num_keys))
    mean, spread = num_keys / len(NAMES), math.sqrt(num_keys / len(NAMES))
    assert all(abs(counts[name] - mean) < 5 * spread for name in NAMES)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60), replicas, st.sampled_from([1.0, 1.25, 2.0]))
def test_no_replica_runs_more_than_its_share(arrivals: list[tuple[int, bool]], names: list[str], bound: float) -> None:
    """Each arrival is of one of six prompts; sometimes the oldest request ends before it."""
    table, running, load = PrefixTable(bound), list[tuple[str, str]](), Counter[str]()
    for number, (prompt, ends) in enumerate(arrivals):
        if ends and running:
            request, replica = running.pop(0)
            table.end(request)
            load[replica] -= 1
        most = most_running(bound, len(running), len(names))
        best = table.ranked((prompt, prompt + 100), names)[0]
        assert load[best] < most
        table.begin(str(number), (prompt, prompt + 100), best)
        running.append((str(number), best))
        load[best] += 1
        assert table.loads() == +load


@given(replicas, st.lists(keys, min_size=1, max_size=6, unique=True), st.data())
def test_the_longest_prefix_wins_while_there_is_room(names: list[str], prompt: list[int], data: st.DataObject) -> None:
    table, depths = PrefixTable(math.inf), dict.fromkeys(names, 0)
    for number, name in enumerate(data.draw(st.lists(st.sampled_from(names), max_size=MOST_HOLDERS, unique=True))):
        depths[name] = data.draw(st.integers(1, len(prompt)))
        table.begin(str(number), prompt[: depths[name]], name)
        table.end(str(number))
    order = table.ranked(prompt, names)
    assert sorted(order) == names
    assert [depths[name] for name in order] == sorted(depths.values(), reverse=True)
    if not any(depths.values()):
        assert order == rendezvous(prompt[-1], names)


def test_of_those_that_have_a_prefix_the_one_that_runs_least_is_first() -> None:
    table = PrefixTable(math.inf)
    for number, name in enumerate(["a", "b", "a"]):
        table.begin(str(number), (1, 2), name)
    assert table.ranked((1, 2, 3), ["a", "b", "c"]) == ["b", "a", "c"]


def test_a_prompt_that_nobody_has_does_not_follow_the_load() -> None:
    """Otherwise routers that send different requests would send it to different replicas."""
    table, names = PrefixTable(math.inf), ["a", "b", "c"]
    for number in range(3):
        table.begin(str(number), (1,), "a")
    for key in range(2, 20):
        assert table.ranked((key,), names) == rendezvous(key, names)


def test_a_hot_prefix_spreads_when_its_replica_has_its_share() -> None:
    table, names = PrefixTable(1.25), ["a", "b"]
    for number in range(40):
        table.begin(str(number), (1,), table.ranked((1,), names)[0])
    assert 15 <= min(table.loads().values()) <= max(table.loads().values()) <= 25


@given(replicas, st.lists(keys, max_size=3), st.data())
def test_those_that_failed_a_request_come_last(names: list[str], prompt: list[int], data: st.DataObject) -> None:
    avoid = data.draw(st.lists(st.sampled_from([*names, "gone"]), unique=True))
    order = PrefixTable().ranked(prompt, names, avoid)
    assert sorted(order) == names
    failed = [name in avoid for name in order]
    assert failed == sorted(failed)


def test_what_is_lost_is_forgotten_and_the_table_has_a_bound() -> None:
    of_b, other = (key for key in range(100) if rendezvous(key, ["a", "b"])[0] == "b"), 100
    first, second = next(of_b), next(of_b)
    table = PrefixTable(math.inf, most_keys=3)
    table.begin("1", (first, second), "a")
    table.begin("2", (other, other + 1), "b")
    assert table.ranked((second,), ["a", "b"])[0] == "a" and table.runs("1")
    assert table.ranked((first,), ["a", "b"])[0] == "b"  # the oldest of four prefixes is forgotten
    table.keep(["b"])
    assert table.loads() == {"b": 1} and not table.runs("1")
    assert table.ranked((second,), ["b"]) == ["b"]
    table.end("unknown")


@pytest.mark.parametrize("bound", [0.0, 0.99, -1.0, math.nan])
def test_a_bound_below_the_mean_is_refused(bound: float) -> None:
    with pytest.raises(InvalidRequestError, match="bound="):
        PrefixTable(bound)


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


@given(prompts, prompts, prompts)
@example(b"", b"", b"")
def test_prompts_that_begin_alike_have_their_first_numbers_in_common(start: bytes, first: bytes, second: bytes) -> None:
    a, b = prefix_keys(start + first), prefix_keys(start + second)
    if len(start) >= STEP:
        assert common(a, b) >= len(prefix_keys(start))
    if start + first != start + second and len(start + first) == len(start + second) == STEP:
        assert a != b
    assert len(a) <= 1 + len(start + first) / STEP and (len(a) > 0) == bool(start + first)
    assert common(a, prefix_keys(start + first, b"other")) == 0


def test_a_long_prompt_has_few_numbers() -> None:
    assert len(prefix_keys(bytes(16 << 20))) < 300


MESSAGES = [{"role": "system", "content": "You are kind. " * 20}, {"role": "user", "content": "Hello"}]


def test_a_conversation_that_goes_on_has_the_prefixes_that_it_had() -> None:
    longer = [*MESSAGES, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "What is 27 + 38?"}]
    before, after = request_keys({"messages": MESSAGES}), request_keys({"messages": longer, "temperature": 0})
    assert len(before) >= 4 and after[: len(before)] == before
    assert common(before, request_keys({"messages": MESSAGES, "tools": [{"type": "function"}]})) == 0


def test_what_must_not_share_kv_has_no_number_in_common() -> None:
    body = {"messages": MESSAGES}
    first = request_keys(body, b"Bearer one")
    assert request_keys(body, b"Bearer one") == first
    assert all(not set(first) & set(other) for other in (request_keys(body, b"Bearer two"), request_keys({**body, "cache_salt": "x"})))


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({"prompt": "Once"}, b"Once"),
        ({"prompt": ["Once", "Twice"]}, b"Once"),
        ({"prompt": [1, 23]}, b"1,23,"),
        ({"prompt": [[1, 23], [4]]}, b"1,23,"),
        ({"prompt": 5}, b""),
        ({"prompt": []}, b""),
        ({}, b""),
        ({"messages": None}, b""),
    ],
    ids=str,
)
def test_the_bytes_of_a_prompt(body: dict[str, object], same: bytes) -> None:
    assert prompt_bytes(body) == same


def test_responses_and_chats_are_read_alike() -> None:
    assert prompt_bytes({"input": "Once"}).endswith(b'"Once",')
    assert prompt_bytes({"input": MESSAGES}) == prompt_bytes({"messages": MESSAGES})
