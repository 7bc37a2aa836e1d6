"""`hunt`: run a state machine until an example fails or its time is over, and `shrunk`: make the failing example small."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from time import monotonic
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import InvalidArgument, InvalidDefinition, UnsatisfiedAssumption
from hypothesis.internal.conjecture import engine
from hypothesis.reporting import with_reporter
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from nanovllm.errors import InvalidRequestError

ROUND = 100  # examples of one run of Hypothesis; each run has a seed of its own
SHRINKING = 60.0  # seconds
COUNTED = "counted_by_fuzz"  # the invariant that counts calls; Hypothesis names it among the others
Machine = type[RuleBasedStateMachine]


class OverError(BaseException):
    """The time or the examples of a hunt are used up. Hypothesis takes a `BaseException` for no failure, and passes it on."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """What a hunt has done so far, and when it is over.

    Attributes:
        until: The moment of `time.monotonic` after which no example begins.
        most: The largest number of examples.
        tell: Called after each example.
        examples: Examples run.
        calls: Rules called in them. If the machine has no rule that initializes it, its start counts as well.
        failing: Whether an example has failed. Hypothesis then runs it again, so that nothing may end the run.
    """

    until: float = float("inf")
    most: int | float = float("inf")
    tell: Callable[["Watch"], None] = field(default=lambda watch: None)
    examples: int = 0
    calls: int = 0
    failing: bool = False

    @property
    def over(self) -> bool:
        """Whether no further example may begin."""
        return self.examples >= self.most or monotonic() >= self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failing example.

    Attributes:
        error: What it raised. Its notes are Hypothesis's lines about the example.
        seed: The seed of the run of at most `ROUND` examples that has the example.
        steps: The number of calls of an example.
        shrunk: Whether Hypothesis has made the example small.
    """

    error: BaseException
    seed: int
    steps: int
    shrunk: bool = False

    @property
    def notes(self) -> Sequence[str]:
        """Hypothesis's lines about the example: the calls, as code, and what they drew."""
        return getattr(self.error, "__notes__", ())


def hunt(machine: Machine, watch: Watch, *, seed: int, steps: int) -> Failure | None:
    """Run examples of a machine until one fails or the watch is over.

    The examples depend on the seed, the machine's name and the number of steps, and on nothing else.

    Raises:
        InvalidRequestError: The machine cannot be run, for example because it has no rules.
    """
    for number in count():
        drawn = int.from_bytes(sha256(f"{seed} {machine.__name__} {number}".encode()).digest()[:6])
        error = _run(machine, watch, drawn, steps, Phase.generate)
        if error is not None or watch.over:
            return None if error is None else Failure(error=error, seed=drawn, steps=steps)
    raise AssertionError("unreachable")


def shrunk(machine: Machine, failure: Failure, tell: Callable[[Watch], None]) -> Failure:
    """The failure made small, for about `SHRINKING` seconds at most. The failure itself if it does not occur again."""
    with patch.object(engine, "MAX_SHRINKING_SECONDS", SHRINKING):  # Hypothesis lets users change it
        error = _run(machine, Watch(tell=tell), failure.seed, failure.steps, Phase.generate, Phase.shrink)
    return failure if error is None else replace(failure, error=error, shrunk=True)


def chosen_settings(steps: int, *phases: Phase) -> Any:  # beartype cannot read the name of `settings`
    """The settings of a run; they and the seed decide which examples run. Without `phases`, it ends with the first failure."""
    return settings(
        max_examples=ROUND,
        stateful_step_count=steps,
        phases=phases or (Phase.generate,),
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
        ],
    )


def _run(machine: Machine, watch: Watch, drawn: int, steps: int, *phases: Phase) -> Exception | None:
    watch.failing = False
    try:
        with with_reporter(lambda line: None):  # the error's notes have the lines that matter
            run_state_machine_as_test(seed(drawn)(_watched(machine, watch)), settings=chosen_settings(steps, *phases))
    except OverError:
        return None
    except (InvalidArgument, InvalidDefinition) as error:
        raise InvalidRequestError(f"{machine.__name__} cannot be run: {error}") from None
    except Exception as error:
        return error
    return None


def _watched(machine: Machine, watch: Watch) -> Machine:
    def counted_by_fuzz(self: Any) -> None:
        watch.calls += 1

    def teardown(self: Any) -> None:
        watch.examples += 1
        now = sys.exception()  # of the rule, while Hypothesis passes it on
        watch.failing |= isinstance(now, Exception) and not isinstance(now, UnsatisfiedAssumption)
        try:
            machine.teardown(self)
        except Exception:
            watch.failing = True
            raise
        watch.tell(watch)
        if watch.over and not watch.failing:
            raise OverError

    return type(machine.__name__, (machine,), {COUNTED: invariant()(counted_by_fuzz), "teardown": teardown})
