"""Simulate replicas of Qwen3-8B behind a router: hit rates and latencies by workload, routing policy and load.

    OMP_NUM_THREADS=1 python -m benchmarks.router.simulate --output benchmarks/results/router-simulation.json
    python -m benchmarks.write_docs

Each replica is the package's own engine: `submit`, `step`, its scheduler, pages and prefix index. Its executor runs nothing. The seconds of
a step are those of a modelled device (`device.py`), so the figures do not depend on the machine that simulates; they follow from the seeds.

- The grid: every workload, policy and load.
- The failures: at `--failure-load` a replica dies in the middle of a run, and an empty one is added later.
- The keys: what a prefix hash loses with a key that is too short, and gains from a wider bound.

The load is the share of a capacity: the replicas over the mean seconds of a request at a full batch, if all tokens are reused that any
earlier request had (`capacity`). A policy with fewer hits is overloaded earlier.
"""

import argparse
import gc
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.host import VOCABULARY
from benchmarks.router.device import RESULTS, Device, errors, fitted
from benchmarks.router.fleet import Fleet, Life, Outcome, Plan
from benchmarks.router.policies import FURTHER, KEY_PAGES, POLICIES
from benchmarks.router.replica import Limits, Replica
from benchmarks.router.workload import PAGE, WORKLOADS, Request, Seen, Session, Sizes
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import commit
from nanovllm.entrypoints.cli.bench.workloads import random_tokens

SECONDS = {"chats": 4.5, "tenants": 2.4, "shared": 2.4}  # the second after which nothing is sent
ROWS = 64  # the most requests that a replica runs at the same time
NUM_PAGES = {"chats": 6_144, "tenants": 4_096, "shared": 4_096}
WARM = 0.5  # the share of these seconds before the window that is measured
LONGER = 1.5  # how much longer the simulations of failures are
LOADS = (0.5, 0.7, 0.85, 0.95)
DEATH, BIRTH = 0.65, 0.82  # shares of the seconds
FAILING = ("least requests", "session affinity", "prefix hash", "hash modulo replicas", "bounded prefix hash", "tree, by cost")
WORKLOAD_SEED, POLICY_SEED = 7, 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation."""

    part: str
    workload: str
    policy: str
    load: float
    replicas: int
    seconds: float
    longest: float


def limits_of(device: Device, workload: str) -> Limits:
    """The limits of a replica, with the bound on prompts that an H200 measured for steps of 35 ms."""
    bound, doubling = device.max_prefill_tokens, device.doubling
    return Limits(num_pages=NUM_PAGES[workload], max_num_seqs=ROWS, max_prefill_tokens=bound, context_doubling=doubling)


def capacity(device: Device, sessions: Sequence[Session]) -> dict[str, float]:
    """The mean seconds of a request in a full batch, if all that earlier requests had is reused, and what these means are made of."""
    seen, requests = Seen(), [request for session in sessions for request in session.turns]
    seconds, reused = 0.0, 0
    for request in requests:
        found, length = seen.reusable(request), len(request.tokens)
        reused += found
        token = device.base / ROWS + device.row + device.context * (length + request.reply / 2)
        seconds += device.launch + device.prompt(found, length - found) + request.reply * token
    count, prompts = len(requests), sum(len(request.tokens) for request in requests)
    turns, reply = count / len(sessions), sum(request.reply for request in requests) / count
    return {
        "request_s": seconds / count, "ideal_hit_rate": reused / prompts, "turns": turns, "prompt_tokens": prompts / count,
        "reply_tokens": reply,
    }  # fmt: skip


@cache
def _sessions(workload: str, replicas: int, seconds: float) -> tuple[list[Session], dict[str, float]]:
    """The sessions of a workload, enough for every load and so many seconds, and its capacity."""
    device, make, sizes = fitted(), WORKLOADS[workload], Sizes()
    some = capacity(device, make(400, WORKLOAD_SEED, sizes))
    count = int(1.2 * replicas * seconds / (some["request_s"] * some["turns"])) + 50
    sessions = make(count, WORKLOAD_SEED, sizes)
    return sessions, capacity(device, sessions)


def run(job: Job) -> dict[str, Any]:
    """Run a simulation. Returns the job and its figures."""
    sessions, able = _sessions(job.workload, job.replicas, job.longest)
    device, until = fitted(), job.seconds
    limits, fails = limits_of(device, job.workload), job.part == "failures"
    window = (WARM * until, until)
    plan = Plan(
        replicas=job.replicas, rate=job.load * job.replicas / able["request_s"] / able["turns"], until=until, window=window,
        limits=limits, device=device, deaths=((DEATH * until, job.replicas // 3),) if fails else (), births=(BIRTH * until,) * fails,
    )  # fmt: skip
    gc.collect()
    gc.disable()
    try:
        fleet = Fleet(sessions, {**POLICIES, **FURTHER}[job.policy](POLICY_SEED, limits.num_pages), plan)
        outcome = fleet.run()
    finally:
        gc.enable()
    shown = {name: value for name, value in asdict(job).items() if name not in ("part", "replicas", "seconds", "longest")}
    return shown | (failure_figures(outcome, plan) if fails else figures(outcome, plan))


def figures(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    """What requests that arrived in the window saw, and how even the replicas were."""
    begin, end = plan.window
    lives = [life for life in outcome.lives if begin <= life.arrival < end]
    areas = np.array(list(outcome.areas.values())) / (end - begin)
    gaps = 1e3 * np.array([gap for _, gap in outcome.gaps])
    return {
        "requests": len(lives),
        **_seen(lives),
        "gap_p99_ms": _round(np.quantile(gaps, 0.99)),
        "requests_per_s": _round(sum(begin <= _end(life) < end for life in outcome.lives) / (end - begin)),
        "unanswered": _round(areas.mean()),
        "imbalance": _round(areas.max() / areas.mean(), 2),
        "steps": outcome.steps,
    }


def failure_figures(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    """The same before the death of a replica, from there to the birth of another, and from there to the end."""
    (death, _), birth, (begin, end) = plan.deaths[0], plan.births[0], plan.window
    parts = {"before": (begin, death), "after_death": (death, birth), "after_birth": (birth, end)}
    found: dict[str, Any] = {}
    for name, (low, high) in parts.items():
        found[name] = _seen([life for life in outcome.lives if low <= life.arrival < high])
    again = [life for life in outcome.lives if life.attempts > 1]
    late = [life for life in outcome.lives if life.arrival >= birth]
    on_new = sum(life.replica == plan.replicas for life in late)
    found["sent_again"] = len(again)
    found["longest_wait_of_these_ms"] = _round(1e3 * max((_end(life) - death for life in again), default=0.0))
    found["share_of_the_new_one"] = _round(on_new / max(1, len(late)) * plan.replicas, 2)
    return found


def _seen(lives: Sequence[Life]) -> dict[str, float]:
    first = 1e3 * np.array([_first(life) - life.arrival for life in lives])
    cached, prompts = sum(life.cached for life in lives), sum(len(life.request.tokens) for life in lives)
    p50, p99 = np.quantile(first, (0.5, 0.99))
    return {"hit_rate": _round(cached / prompts, 4), "ttft_p50_ms": _round(p50), "ttft_p99_ms": _round(p99)}


def _first(life: Life) -> float:
    assert life.first is not None
    return life.first


def _end(life: Life) -> float:
    assert life.end is not None
    return life.end


def _round(value: Any, digits: int = 1) -> float:
    return round(float(value), digits)


def offline(device: Device) -> dict[str, float]:
    """The rate of `nanovllm bench --which offline` on one replica, and the recorded one, which the fit did not use."""
    draw = Random(0)
    prompts = [random_tokens(draw, draw.randint(100, 1024), 151_936) for _ in range(256)]  # the requests of the recorded run
    replica = Replica(0, Limits(num_pages=40_000, max_num_seqs=256, max_prefill_tokens=None), device)
    for number, prompt in enumerate(prompts):
        tokens = (np.array(prompt) % VOCABULARY).astype(np.int32)
        replica.inbox.append(Request(number, 0, tokens, (), draw.randint(100, 1024)))
    clock, replies = 0.0, sum(request.reply for request in replica.inbox)
    while replica.unfinished:
        clock += replica.step()[0]
    recorded = json.loads((RESULTS / "h200-8b.json").read_text(encoding="utf-8"))["offline_tok_s"]
    return {"simulated_tok_s": _round(replies / clock), "recorded_tok_s": recorded}


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """All simulations of the options."""
    scale = options.time_scale

    def job(part: str, workload: str, policy: str, load: float) -> Job:
        longest = LONGER * scale * SECONDS[workload]
        seconds = longest if part == "failures" else scale * SECONDS[workload]
        return Job(
            part=part, workload=workload, policy=policy, load=load, replicas=options.replicas, seconds=seconds, longest=longest
        )  # fmt: skip

    for load in options.loads:
        for workload in options.workloads:
            yield from (job("grid", workload, policy, load) for policy in options.policies)
    for workload in options.workloads:
        if workload in options.failure_workloads:
            yield from (job("failures", workload, policy, options.failure_load) for policy in options.failure_policies)
        yield from (job("keys", workload, policy, options.failure_load) for policy in options.key_policies)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run all simulations. Returns the whole result."""
    device, todo = fitted(), list(jobs(options))
    able = {job.workload: _sessions(job.workload, job.replicas, job.longest)[1] for job in todo}  # processes inherit the sessions
    result: dict[str, Any] = {
        "commit": options.commit or commit(),
        "command": " ".join(["python -m benchmarks.router.simulate", *options.words]),
        "replicas": options.replicas,
        "device": asdict(device),
        "fit_ms": errors(device),
        "offline": offline(device),
        "limits": {workload: asdict(limits_of(device, workload)) for workload in options.workloads},
        "sizes": asdict(Sizes()),
        "key_tokens": KEY_PAGES * PAGE,
        "seconds": {name: SECONDS[name] * options.time_scale for name in options.workloads},
        "warm_share": WARM,
        "failure_load": options.failure_load,
        "capacity": {name: {key: round(value, 4) for key, value in one.items()} for name, one in able.items()},
        "grid": [],
        "failures": [],
        "keys": [],
    }
    gc.freeze()
    if options.processes == 1:
        found = map(run, todo)
        return result | _by_part(todo, found)
    with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=4) as pool:
        return result | _by_part(todo, pool.imap(run, todo))


def _by_part(todo: Sequence[Job], found: Any) -> dict[str, list[dict[str, Any]]]:
    parts: dict[str, list[dict[str, Any]]] = {"grid": [], "failures": [], "keys": []}
    for place, (job, one) in enumerate(zip(todo, found, strict=True)):
        parts[job.part].append(one)
        print(f"{place + 1}/{len(todo)} {job.part} {one}", file=sys.stderr, flush=True)
    return parts


def main(words: Sequence[str] | None = None) -> None:
    """Run the simulations and write their result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--replicas", type=positive, default=100)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="*", choices=tuple(POLICIES), default=list(POLICIES))
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="shares of the capacity")
    parser.add_argument("--failure-policies", nargs="*", choices=(*POLICIES, *FURTHER), default=list(FAILING))
    parser.add_argument("--failure-workloads", nargs="*", choices=tuple(WORKLOADS), default=["chats", "tenants"])
    parser.add_argument("--failure-load", type=float, default=0.7)
    keys = [name for name in FURTHER if name != "hash modulo replicas"]
    parser.add_argument("--key-policies", nargs="*", choices=keys, default=keys)
    parser.add_argument("--time-scale", type=float, default=1.0, help="how much longer to simulate (default: %(default)s)")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--commit", help="what to record as the commit")
    options = parser.parse_args(words)
    options.words = sys.argv[1:] if words is None else list(words)
    result = measured(options)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
