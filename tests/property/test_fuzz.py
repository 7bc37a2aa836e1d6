"""What fails in a hunt is told as calls, and written as a test that fails as long as the fault is there, and no longer."""

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any
from unittest import SkipTest

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm.errors import InvalidRequestError
from nanovllm.testing import Draws, PageMachine
from nanovllm.testing.fuzz import hunt as hunting
from nanovllm.testing.fuzz.hunt import Failure, Watch, hunt, shrunk
from nanovllm.testing.fuzz.program import Call, Program, UnwrittenError, program_of
from nanovllm.testing.fuzz.story import Finding
from nanovllm.testing.fuzz.subjects import MACHINES, Subject, find_subject
from nanovllm.testing.models import random_model, tiny_config
from tests.property.faults.chunks import CHUNK_FAULTS
from tests.property.faults.engine import FAULTS, Fault, planted
from tests.property.faults.windows import WINDOW_FAULTS

# Machines run without the hook, as in test_machines.py. An example that fails leaves its folder to the garbage collector.
pytestmark = [pytest.mark.unhooked, pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")]

NAMES = {machine: name for name, machine in MACHINES.items()}
FIRST = {fault.machine: fault for fault in (*WINDOW_FAULTS, *CHUNK_FAULTS[::-1], *FAULTS[::-1]) if fault.machine in NAMES}
LATE = ("ahead", "frames", "windows")  # machines whose first fault takes many examples
SEEDS = {"window-chunks": 1}  # where seed 0 finds the first fault late


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A failing example leaves its folder to the garbage collector, which must not find it while a later test draws."""
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def found(subject: Subject, *, small: bool = False) -> Finding:
    failure = hunt(subject.machine, Watch(most=600), seed=SEEDS.get(subject.name, 0), steps=50)
    assert failure is not None
    return Finding.of(subject, shrunk(subject.machine, failure, lambda watch: None) if small else failure)


def run_written(finding: Finding) -> None:
    names: dict[str, Any] = {}
    exec(compile(finding.test, "<written>", "exec"), names)
    with suppress(SkipTest):  # the call that failed goes on, and draws more
        names[finding.name]()


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=NAMES[m], marks=[pytest.mark.long] * (NAMES[m] in LATE)) for m, fault in FIRST.items()]
)
def test_a_written_test_fails_with_the_fault_alone(fault: Fault) -> None:
    with planted(fault):
        finding = found(find_subject(NAMES[fault.machine]))
        assert finding.program is not None, finding.test
        with pytest.raises(type(finding.error)):
            run_written(finding)
    run_written(finding)


def test_a_failure_is_made_small_and_told() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "a double free")
    with planted(fault):
        finding = found(find_subject("pages"), small=True)
    assert finding.failure.shrunk
    *calls, message = finding.story
    assert calls == [
        "1. start(num_pages=1)",
        "   Start with an empty pool.",
        "2. release_free(page=0)",
        "   A double free raises, also if valid pages come before it in the call.",
        "Call 2 failed:",
    ]
    assert message == "   ShadowMismatchError: faulty((0,)) should have raised BrokenInvariantError; owners are {}"


def test_a_seed_draws_the_same_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunting, "ROUND", 4)  # so that several rounds run
    drawn: list[list[int]] = []

    class Recorder(RuleBasedStateMachine):
        @rule(number=st.integers(0, 10**6))
        def record(self, number: int) -> None:
            """Keep what is drawn."""
            drawn[-1].append(number)

    for seed in (0, 0, 1):
        drawn.append([])
        watch = Watch(most=10)
        assert hunt(Recorder, watch, seed=seed, steps=5) is None
        assert (watch.examples, watch.calls) == (10, 10 + len(drawn[-1]))
    assert drawn[0] == drawn[1] != drawn[2]


def test_time_ends_a_hunt() -> None:
    watch = Watch(until=0.0)
    assert hunt(PageMachine, watch, seed=0, steps=5) is None
    assert watch.examples == 1


class Box:
    """A value without a literal."""


class DrawsBoxes(RuleBasedStateMachine):
    """Fails in the second call, after it has drawn an object."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Open a box."""
        data.draw(st.sampled_from([Box()]))
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("two boxes")


def test_draws_without_a_literal_are_drawn_again() -> None:
    subject = Subject(name="boxes", machine=DrawsBoxes, imports=frozenset({(__name__, "DrawsBoxes")}), code="DrawsBoxes")
    sys.modules.setdefault(__name__, ModuleType(__name__)).DrawsBoxes = DrawsBoxes  # pyright: ignore[reportAttributeAccessIssue]
    finding = found(subject)
    assert finding.program is None
    assert list(finding.story) == ["The example failed:", "   RuntimeError: two boxes"]
    with pytest.raises(RuntimeError, match="two boxes"):
        run_written(finding)


def test_lines_that_are_no_code_are_refused() -> None:
    notes = ["state = PageMachine()", "state.start(num_pages=<object>)"]
    with pytest.raises(UnwrittenError, match="<object>"):
        program_of(PageMachine, notes)
    with pytest.raises(UnwrittenError, match="Unheard"):
        program_of(PageMachine, ["Draw 1: Unheard(1)", "state.release_any(data=data(...))"])


def test_calls_that_do_not_fail_by_themselves_are_drawn_again() -> None:
    error = ValueError("once")
    error.add_note("state.start(num_pages=1)")
    finding = Finding.of(find_subject("pages"), Failure(error=error, seed=3, steps=5))
    assert finding.program is None and finding.error is error
    assert "seed(3)" in finding.test


def test_a_failure_over_a_model_is_written_with_the_model() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "pages lost on cancel")
    model, module = random_model(tiny_config("LlamaForCausalLM", vocab_size=16)), "nanovllm.testing.models"
    code = "random_model(tiny_config('LlamaForCausalLM', vocab_size=16))"
    subject = find_subject("engine").over(model, code, [(module, "random_model"), (module, "tiny_config")])
    with planted(fault):
        finding = found(subject)
        assert f"class FuzzedEngineMachine(EngineMachine):\n    world = ModelWorld({code})\n" in finding.test
        with pytest.raises(type(finding.error)):
            run_written(finding)
    run_written(finding)


def test_models_that_a_machine_cannot_run_are_refused() -> None:
    def over(name: str, architecture: str) -> Subject:
        return find_subject(name).over(random_model(tiny_config(architecture, vocab_size=16)), "model", [])

    with pytest.raises(InvalidRequestError, match="windows needs a model with sliding windows"):
        over("windows", "LlamaForCausalLM")
    for architecture, why in {
        "Gemma2ForCausalLM": "does not know",
        "GPT2LMHeadModel": "rope kind",
        "Qwen3MoeForCausalLM": "experts",
    }.items():
        with pytest.raises(InvalidRequestError, match=f"chunks cannot run .*{why}"):
            over("chunks", architecture)
    assert over("pages", "LlamaForCausalLM") == find_subject("pages")


def test_draws_end() -> None:
    data = Draws(3)
    assert data.draw(st.integers()) == 3
    with pytest.raises(SkipTest, match="after the 1 draws"):
        data.draw(st.integers())


class DrawsAtStart(RuleBasedStateMachine):
    """Draws twice before its first call."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Start."""
        assert data.draw(st.just({"a": [1, 2]}), label="the (only) label") == data.draw(st.just("Draw 1: x")) or True
        raise RuntimeError("at once\n" * 30)

    @rule()
    def never(self) -> None:
        """Not reached."""


def test_labels_and_long_messages() -> None:
    subject = Subject(name="my:DrawsAtStart", machine=DrawsAtStart, imports=frozenset(), code="DrawsAtStart")
    finding = found(subject)
    assert finding.program is not None
    assert [call.code for call in finding.program.calls] == ["state.start(data=Draws({'a': [1, 2]}, 'Draw 1: x'))", "state.teardown()"]
    assert finding.story[-1] == "   ..." and len(finding.story) < 20
    assert finding.name.startswith("test_fuzz_drawsatstart_")


class Shelf(RuleBasedStateMachine):
    """Fails where a book is taken from a shelf that was dusted."""

    def __init__(self) -> None:
        super().__init__()
        self.books, self.dusted = 0, 0

    @rule()
    def put(self) -> None:
        """Put a book on the shelf."""
        self.books += 1

    @rule()
    def dust(self) -> None:
        """Dust the shelf."""
        self.dusted += 1

    @precondition(lambda self: self.books)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Take a book."""
        data.draw(st.integers(0, self.books - 1))
        assert not self.dusted

    @invariant()
    def stands(self) -> None:
        """Look at the shelf."""


def test_calls_that_a_failure_does_not_need_are_left_out() -> None:
    steps = ["put()", "dust()", "put()", "dust()"]
    calls = [Call(name, f"state.{name}()") for step in steps for name in (step[:-2], "stands")]
    program = Program(calls=[*calls, Call("take", "state.take(data=Draws(0))"), Call("teardown", "state.teardown()")], imports=frozenset())
    ran = program.run(Shelf)
    assert ran is not None and (ran.at, ran.drew[-1]) == (8, ["integers(min_value=0, max_value=1)"])
    program, ran = program.smaller(Shelf, ran)
    # Without a book, `take` would draw from other numbers, and without any it could not be called.
    assert [call.name for call in program.calls] == ["put", "stands", "dust", "stands", "put", "stands", "take", "teardown"]
    assert ran.at == 6
