"""A discrete-event simulation of replicas behind a router. Time is that of the modelled device, so a run is the same on every machine."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.router.device import Device
from benchmarks.router.policies import Policy
from benchmarks.router.replica import Limits, Replica
from benchmarks.router.workload import Request, Session


@dataclass(slots=True)
class Life:
    """What happened to a request.

    Attributes:
        request: The request.
        arrival: When the router got it.
        first: When its first token came; None before.
        end: When its last token came; None before.
        cached: Prompt tokens that were reused, in the attempt that ended.
        attempts: How many replicas it was sent to: more than one only if a replica died.
        replica: The last one.
        received: Tokens that came.
        latest: When the last of them came.
        position: Tokens of this attempt.
    """

    request: Request
    arrival: float
    first: float | None = None
    end: float | None = None
    cached: int = 0
    attempts: int = 0
    replica: int = -1
    received: int = 0
    latest: float = 0.0
    position: int = 0


@dataclass(slots=True)
class Outcome:
    """What a simulation gives.

    Attributes:
        lives: Every request that was sent, in order of arrival.
        gaps: When a token came, and how long after the token before it.
        areas: For each replica the integral of its unanswered requests over time, from `begin` to `end` of the measured window.
        prompt_tokens: Prompt tokens that were sent to replicas.
        run_tokens: Prompt tokens that these ran.
        reused_tokens: Prompt tokens that these reused.
        decode_tokens: Reply tokens that these ran.
        rerun_tokens: Tokens that preempted requests ran again.
        steps: Steps of all replicas.
    """

    lives: list[Life] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    areas: dict[int, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    run_tokens: int = 0
    reused_tokens: int = 0
    decode_tokens: int = 0
    rerun_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a simulation runs.

    Attributes:
        replicas: Their number at the start.
        rate: Sessions that start per second.
        until: The second after which nothing is sent. What was sent runs to its end.
        window: The seconds that are measured.
        limits: Those of each replica's engine.
        device: The modelled device.
        deaths: When which replica dies. The router knows at once, and sends its requests to others.
        births: When a replica is added.
    """

    replicas: int
    rate: float
    until: float
    window: tuple[float, float]
    limits: Limits
    device: Device
    deaths: tuple[tuple[float, int], ...] = ()
    births: tuple[float, ...] = ()


class Fleet:
    """Replicas, a router and a clock."""

    def __init__(self, sessions: Sequence[Session], policy: Policy, plan: Plan) -> None:
        self.policy, self.plan, self.out = policy, plan, Outcome()
        self.replicas = {name: Replica(name, plan.limits, plan.device) for name in range(plan.replicas)}
        self.all = dict(self.replicas)
        self.loads = dict.fromkeys(self.replicas, 0)
        self.since = dict.fromkeys(self.replicas, 0.0)
        self.lives: dict[int, Life] = {}
        self.follows: dict[int, tuple[Session, int]] = {}  # by request: its session and turn, if another turn follows
        self.order, self.events = count(), list[tuple[float, int, Any, Any]]()
        for session in sessions:
            if (start := session.start / plan.rate) < plan.until:
                self._at(start, self._arrive, (session, 0))
        for time, name in plan.deaths:
            self._at(time, self._die, name)
        for time in plan.births:
            self._at(time, self._add, None)

    def run(self) -> Outcome:
        """Run until every request has ended."""
        while self.events:
            time, _, act, what = heapq.heappop(self.events)
            act(time, what)
        for name in self.all:
            self._load(name, 0, max(self.plan.window[1], self.since[name]))
            stats = self.all[name].state.stats
            self.out.run_tokens += stats.prefill_tokens
            self.out.reused_tokens += stats.reused_tokens
            self.out.decode_tokens += stats.decode_tokens
            self.out.rerun_tokens += stats.rerun_tokens
        return self.out

    def _at(self, time: float, act: Any, what: Any) -> None:
        heapq.heappush(self.events, (time, next(self.order), act, what))

    def _arrive(self, time: float, what: tuple[Session, int]) -> None:
        session, turn = what
        life = Life(session.turns[turn], time)
        self.lives[life.request.number] = life
        self.out.lives.append(life)
        if turn + 1 < len(session.turns):
            self.follows[life.request.number] = what
        self._send(time, life)

    def _send(self, time: float, life: Life) -> None:
        name = self.policy.choose(life.request, self.loads)
        life.replica, life.position = name, 0
        life.attempts += 1
        self._load(name, 1, time)
        self.out.prompt_tokens += len(life.request.tokens)
        replica = self.replicas[name]
        replica.inbox.append(life.request)
        if not replica.stepping:
            self._step(time, replica)

    def _step(self, time: float, replica: Replica) -> None:
        seconds, tokens = replica.step()
        assert seconds > 0, "a replica with requests ran nothing"
        self.out.steps += 1
        replica.stepping = True
        self._at(time + seconds, self._stepped, (replica, tokens))

    def _stepped(self, time: float, what: Any) -> None:
        replica, tokens = what
        if replica.name not in self.replicas:
            return
        replica.stepping = False
        lives, gaps, (begin, end) = self.lives, self.out.gaps, self.plan.window
        for token in tokens:
            life = lives[token.request.number]
            life.position += 1
            if life.position > life.received:
                if life.first is None:
                    life.first = time
                elif begin <= time < end:
                    gaps.append((time, time - life.latest))
                life.received, life.latest = life.position, time
            if token.last:
                life.end, life.cached = time, token.cached
                del lives[token.request.number]
                self._load(replica.name, -1, time)
                self._follow(time, token.request.number)
        if replica.unfinished:
            self._step(time, replica)

    def _follow(self, time: float, number: int) -> None:
        if (what := self.follows.pop(number, None)) is not None:
            session, turn = what
            if (then := time + session.thinks[turn]) < self.plan.until:
                self._at(then, self._arrive, (session, turn + 1))

    def _load(self, name: int, change: int, time: float) -> None:
        """Change the unanswered requests of a replica, and add to their integral over the window."""
        begin, end = self.plan.window
        span = max(0.0, min(time, end) - max(self.since[name], begin))
        self.out.areas[name] = self.out.areas.get(name, 0.0) + span * self.loads.get(name, 0)
        self.since[name] = time
        if change:
            self.loads[name] += change

    def _die(self, time: float, name: int) -> None:
        self._load(name, 0, time)
        del self.replicas[name]
        del self.loads[name]
        self.policy.gone(name)
        for life in [life for life in self.lives.values() if life.replica == name]:  # also those that its last step would have ended
            self._send(time, life)

    def _add(self, time: float, _: None) -> None:
        name = len(self.all)
        self.all[name] = self.replicas[name] = Replica(name, self.plan.limits, self.plan.device)
        self.loads[name], self.since[name] = 0, time
