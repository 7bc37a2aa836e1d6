"""`benchmarks/router`: replicas of the package's own engine behind a router, on a clock that the machine does not move."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import write_docs
from benchmarks.router import simulate
from benchmarks.router.device import errors, fitted
from benchmarks.router.fleet import Fleet, Outcome, Plan
from benchmarks.router.policies import (
    FURTHER,
    KEY_PAGES,
    POLICIES,
    BoundedHash,
    Modulo,
    Policy,
    PrefixHash,
    RoundRobin,
    Sticky,
    Tree,
    key_of,
)
from benchmarks.router.replica import Limits
from benchmarks.router.workload import WORKLOADS, Request, Seen, Session, Sizes, chained

pytestmark = pytest.mark.unhooked  # thousands of steps

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
SMALL = Sizes(
    first=(100, 400), message=(20, 60), think=0.05, tenants=12, system=(100, 300), question=(20, 80), documents=30, document=(60, 150),
    tasks=3, examples=(150, 250), reply=(4, 12),
)  # fmt: skip
EVERY = {**POLICIES, **FURTHER}


def plan_of(num_pages: int = 400, **changes: Any) -> Plan:
    limits = Limits(num_pages=num_pages, max_num_seqs=8, max_prefill_tokens=256, context_doubling=fitted().doubling)
    plan = Plan(replicas=4, rate=200.0, until=0.4, window=(0.1, 0.4), limits=limits, device=fitted())
    return replace(plan, **changes)


def simulated(workload: str, policy: str, plan: Plan) -> Outcome:
    return Fleet(WORKLOADS[workload](120, 3, SMALL), EVERY[policy](5, plan.limits.num_pages), plan).run()


def told(outcome: Outcome) -> list[tuple[object, ...]]:
    return [(life.request.number, life.replica, life.arrival, life.first, life.end, life.cached) for life in outcome.lives]


def balanced(outcome: Outcome) -> bool:
    """Whether what ran is what was needed, less what was reused. The last token of a reply does not run."""
    needed = outcome.prompt_tokens + sum(life.request.reply - 1 for life in outcome.lives)
    return outcome.run_tokens + outcome.decode_tokens == needed - outcome.reused_tokens + outcome.rerun_tokens


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_request_ends_once_and_no_token_is_lost(workload: str, policy: str) -> None:
    outcome = simulated(workload, policy, plan_of())
    assert len({life.request.number for life in outcome.lives}) == len(outcome.lives) > 20
    for life in outcome.lives:
        assert life.first is not None and life.end is not None and life.arrival < life.first <= life.end
        assert life.received == life.request.reply and life.attempts == 1
        assert 0 <= life.cached < len(life.request.tokens)
    assert outcome.prompt_tokens == sum(len(life.request.tokens) for life in outcome.lives) and balanced(outcome)
    if not outcome.rerun_tokens:
        assert outcome.run_tokens + outcome.reused_tokens == outcome.prompt_tokens
        assert sum(life.cached for life in outcome.lives) == outcome.reused_tokens


@pytest.mark.parametrize("policy", ["random", "bounded prefix hash", "tree, by cost"])
def test_a_simulation_is_the_same_again(policy: str) -> None:
    first, second = (simulated("chats", policy, plan_of()) for _ in range(2))
    assert told(first) == told(second) and first.gaps == second.gaps and first.areas == second.areas


def test_preempted_requests_end_too() -> None:
    plan = plan_of(num_pages=40)
    long = replace(SMALL, reply=(60, 200))
    outcome = Fleet(WORKLOADS["tenants"](60, 3, long), POLICIES["random"](5, 40), plan).run()
    assert outcome.rerun_tokens and all(life.received == life.request.reply for life in outcome.lives)
    assert balanced(outcome)


def test_the_hit_rate_of_affinity_by_hand() -> None:
    """Two chats of two turns: 33 tokens and 4 of reply, then 12 more. Two full pages of 16 are known to the second turn of each."""
    random, sessions = np.random.default_rng(0), []
    for place in range(2):
        first = random.integers(1, 1000, 33, np.int32)
        second = np.concatenate([first, np.zeros(4, np.int32), random.integers(1, 1000, 12, np.int32)])
        turns = [Request(2 * place + turn, place, tokens, chained(tokens), 4) for turn, tokens in enumerate((first, second))]
        sessions.append(Session(0.1 * (place + 1), tuple(turns), (0.01,)))
    outcome = Fleet(sessions, Sticky(0, 400), plan_of(rate=1.0, until=9.0, window=(0.0, 9.0))).run()
    assert [life.cached for life in sorted(outcome.lives, key=lambda life: life.request.number)] == [0, 32, 0, 32]
    assert simulate.figures(outcome, plan_of(window=(0.0, 9.0)))["hit_rate"] == pytest.approx(2 * 32 / (2 * (33 + 49)), abs=1e-4)


def test_a_first_token_after_one_prompt_comes_when_the_device_says() -> None:
    device, tokens = fitted(), np.arange(1, 129, dtype=np.int32)
    one = [Session(1.0, (Request(0, 0, tokens, chained(tokens), 3),))]
    (life,) = Fleet(one, RoundRobin(0, 400), plan_of(rate=1.0, until=2.0, window=(0.0, 2.0))).run().lives
    first = device.launch + device.token * (128 + 128 * 64 / device.doubling)
    assert life.first is not None and life.end is not None
    assert life.first - life.arrival == pytest.approx(first)
    assert life.end - life.first == pytest.approx(2 * (device.base + device.row) + device.context * (129 + 130))


def test_the_device_is_near_what_was_recorded() -> None:
    assert all(now == pytest.approx(was, rel=0.1) for was, now in errors(fitted()).values())


@pytest.mark.parametrize("policy", EVERY)
def test_requests_of_a_replica_that_dies_end_elsewhere(policy: str) -> None:
    plan = plan_of(deaths=((0.15, 1),), births=(0.25,))
    outcome = simulated("chats", policy, plan)
    again = [life for life in outcome.lives if life.attempts > 1]
    assert again or policy == "prefix hash, 4 pages" or not any(life.replica == 1 for life in outcome.lives)
    assert all(life.received == life.request.reply and life.end is not None for life in outcome.lives)
    assert not any(life.replica == 1 and life.end is not None and life.end > 0.15 for life in outcome.lives)
    assert policy in ("prefix hash, 4 pages",) or any(life.replica == 4 for life in outcome.lives if life.arrival >= 0.25)
    assert simulate.failure_figures(outcome, plan)["sent_again"] == len(again)


def requests(count: int = 200) -> list[Request]:
    return [session.turns[0] for session in WORKLOADS["tenants"](count, 1, Sizes(tenants=150, system=(200, 300), question=(5, 9)))]


def placed(policy: Policy, loads: dict[int, int]) -> dict[int, int]:
    return {key_of(request, KEY_PAGES): policy.choose(request, loads) for request in requests()}


def test_rendezvous_moves_only_the_keys_of_a_replica_that_comes_or_goes() -> None:
    loads = dict.fromkeys(range(10), 0)
    before, hashed = placed(PrefixHash(0, 1), loads), placed(Modulo(0, 1), loads)
    del loads[3]
    after, modulo = placed(PrefixHash(0, 1), loads), placed(Modulo(0, 1), loads)
    assert {key for key in before if before[key] != after[key]} == {key for key in before if before[key] == 3} != set()
    assert sum(hashed[key] != modulo[key] for key in hashed) > 0.7 * len(hashed)
    loads[10] = 0
    more = placed(PrefixHash(0, 1), loads)
    moved = {key for key in after if after[key] != more[key]}
    assert moved and all(more[key] == 10 for key in moved)


def test_bounded_loads_stay_below_their_bound() -> None:
    policy, loads, random = BoundedHash(0, 1), dict.fromkeys(range(8), 0), Random(0)
    for request in requests(400):
        name = policy.choose(request, loads)
        loads[name] += 1
        assert loads[name] <= -(-1.25 * sum(loads.values()) // len(loads))
        if random.random() < 0.8:
            ended = random.choice([name for name, load in loads.items() if load])
            loads[ended] -= 1


def test_the_tree_knows_what_it_sent_and_forgets_the_rest() -> None:
    """A slow reference: a list of pages for each replica, the most recent last."""
    tree, loads, random, known = Tree(0, 60), dict.fromkeys(range(5), 0), Random(1), dict[int, list[int]]()
    for request in requests(300):
        expected = {}
        for name, pages in known.items():
            count = next((at for at, page in enumerate(request.chain) if page not in pages), len(request.chain))
            expected |= {name: count} if count else {}
        assert {name: count for name, count in tree.matches(request).items() if count} == expected
        name = tree.sent(request, random.randrange(5))
        kept = [page for page in known.get(name, []) if page not in request.chain]
        known[name] = [*kept, *reversed(request.chain)][-60:]
        if random.random() < 0.01:
            gone = random.randrange(5)
            tree.gone(gone)
            known.pop(gone, None)
    assert len(loads) == 5 and set(tree.owners) == {page for pages in known.values() for page in pages}


def test_the_tree_goes_where_the_prefix_is_until_that_is_too_busy() -> None:
    tree, loads = Tree(0, 1000), {0: 0, 1: 0, 2: 0}
    request = WORKLOADS["chats"](1, 0, Sizes(first=(2_000, 2_000)))[0].turns[0]  # 125 pages
    place = tree.choose(request, loads)
    loads[place] = 7
    assert 7 * tree.weight < 2_000 and tree.choose(request, loads) == place
    loads[place] = 8
    assert tree.choose(request, loads) != place


def test_what_could_be_reused() -> None:
    tokens = np.arange(1, 65, dtype=np.int32)
    request, longer = (Request(n, 0, one, chained(one), 1) for n, one in enumerate((tokens, np.concatenate([tokens, tokens]))))
    seen = Seen()
    assert [seen.reusable(request), seen.reusable(request), seen.reusable(longer)] == [0, 48, 64]


def test_the_command_writes_all_parts(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    few = ["--replicas", "4", "--time-scale", "0.15", "--loads", "0.5", "0.9", "--processes", "1", "--commit", "abc"]
    some = ["--policies", "least requests", "prefix hash", "--failure-policies", "prefix hash", "--workloads", "tenants"]
    simulate.main(["--output", str(file), *few, *some])
    result = json.loads(file.read_text())
    assert result["commit"] == "abc" and len(result["grid"]) == 4 and len(result["failures"]) == 1 and len(result["keys"]) == 2
    assert {one["policy"] for one in result["grid"]} == {"least requests", "prefix hash"}
    assert all(0 <= one["hit_rate"] <= 1 and one["ttft_p50_ms"] <= one["ttft_p99_ms"] for one in result["grid"])
    for show, part, rows in ((write_docs.failures, "failures", 1), (write_docs.keys, "keys", 2)):
        assert len(show(result).splitlines()) == 2 + rows and f"| tenants | {result[part][0]['policy']} |" in show(result)
    assert f"| offline (not fitted), tokens/s | {result['offline']['recorded_tok_s']:,.0f} |" in write_docs.fit(result)


def test_the_recorded_file_has_every_policy_workload_and_load() -> None:
    result = json.loads((RESULTS / "router-simulation.json").read_text())
    found = {(one["workload"], one["policy"], one["load"]) for one in result["grid"]}
    assert found == {(workload, policy, load) for workload in WORKLOADS for policy in POLICIES for load in simulate.LOADS}
    assert result["replicas"] == 100 and not result["commit"].endswith("+")


def test_the_page_shows_every_row_of_the_recorded_file() -> None:
    result = json.loads((RESULTS / "router-simulation.json").read_text())
    page = (RESULTS.parents[1] / "docs/explanation/past-these-machines.md").read_text(encoding="utf-8")
    for one in result["grid"]:
        figures = f"| {one['policy']} | {one['hit_rate']:.1%} | {one['ttft_p50_ms']:,.0f} | {one['ttft_p99_ms']:,.0f} |"
        assert figures in page
    picture = write_docs.fleet_picture(result)
    assert all(f">{policy}<" in picture for policy in POLICIES) and ElementTree.fromstring(picture).tag.endswith("svg")
