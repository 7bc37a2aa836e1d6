"""`Finding`: a failure told as a story of calls, and as a test that shows it again."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from nanovllm.testing.fuzz.hunt import Failure
from nanovllm.testing.fuzz.program import Program, UnwrittenError, import_lines, is_check, program_of
from nanovllm.testing.fuzz.subjects import Subject, first_line

LINES = 12  # of an error's message
AGAIN = {  # what a test imports that draws the examples again
    ("hypothesis", "seed"),
    ("hypothesis.stateful", "run_state_machine_as_test"),
    ("nanovllm.testing.fuzz.hunt", "chosen_settings"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A failure of a subject.

    Attributes:
        subject: The machine.
        failure: The failing example.
        program: Its calls as code. None: they cannot be written as code, or they do not fail when they run by themselves. The test then
            draws the examples again.
        at: The index of the call that fails.
        error: What it raises.
    """

    subject: Subject
    failure: Failure
    program: Program | None
    at: int
    error: BaseException

    @staticmethod
    def of(subject: Subject, failure: Failure) -> "Finding":
        """Read the calls of a failure, run them by themselves, and leave out those that are not needed."""
        try:
            program = program_of(subject.machine, failure.notes)
            ran = program.run(subject.machine)
        except UnwrittenError:
            ran = program = None
        if program is None or ran is None or type(ran.error) not in {type(error) for error in _chain(failure.error)}:
            return Finding(subject=subject, failure=failure, program=None, at=0, error=failure.error)
        program, ran = program.smaller(subject.machine, ran)
        return Finding(subject=subject, failure=failure, program=program, at=ran.at, error=ran.error)

    @cached_property
    def name(self) -> str:
        """The name of the test, which depends on the calls."""
        return f"test_fuzz_{self.subject.label}_{sha256(self._body.encode()).hexdigest()[:8]}"

    @cached_property
    def story(self) -> Sequence[str]:
        """The calls in plain English, numbered, and what failed."""
        lines, number, failed = [], 0, "The example"
        for i, call in enumerate(self.program.calls if self.program is not None else ()):
            method = getattr(self.subject.machine, call.name)
            about = first_line(method)
            ruled = call.name != "teardown" and not is_check(self.subject.machine, call.name)
            if ruled:
                number += 1
                lines += [f"{number}. {call.code.replace('state.', '')}", f"   {about}"]
            if i == self.at:
                failed = f"Call {number}" if ruled else f"After call {number}, the check `{call.name}` ({about.rstrip('.')})"
                break
        raised = f"{type(self.error).__name__}: {self.error}".splitlines()
        error = [*raised[:LINES], *["..."] * (len(raised) > LINES)]
        return [*lines, f"{failed} failed:", *(f"   {line}" for line in error)]

    @cached_property
    def test(self) -> str:
        """The text of a file with a test for pytest that shows the failure."""
        imports = import_lines(self.subject.imports | (self.program.imports if self.program is not None else AGAIN))
        told = "\n".join(f"# {line}".rstrip() for line in self.story)
        head = f'"""What `nanovllm fuzz` found with {self.subject.code}."""\n\n{told}\n\n' + "\n".join(imports)
        definition = f"\n\n\n{self.subject.definition}" if self.subject.definition else ""
        return f"{head}{definition}\n\n\ndef {self.name}() -> None:\n{self._body}\n"

    @cached_property
    def _body(self) -> str:
        if self.program is None:
            again = f"seed({self.failure.seed})(type({self.subject.machine.__name__!r}, ({self.subject.code},), {{}}))"
            return f"    run_state_machine_as_test({again}, settings=chosen_settings({self.failure.steps}))"
        return "\n".join([f"    state = {self.subject.code}()", *(f"    {call.code}" for call in self.program.calls)])


def _chain(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__context__
    return found
