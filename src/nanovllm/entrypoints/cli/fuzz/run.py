"""Runs the machines one after another, and reports."""

import argparse
import shlex
from dataclasses import dataclass, replace
from math import inf
from time import monotonic

import torch

from nanovllm.entrypoints.arguments import source
from nanovllm.entrypoints.cli.fuzz.progress import Progress
from nanovllm.entrypoints.display.tables import aligned
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.outputs import write
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model
from nanovllm.models.registry import REGISTRY
from nanovllm.testing.fuzz.hunt import Watch, hunt, shrunk
from nanovllm.testing.fuzz.program import Import
from nanovllm.testing.fuzz.story import Finding
from nanovllm.testing.fuzz.subjects import MACHINES, Subject, find_subject
from nanovllm.testing.models import random_model, tiny_config

RANDOM = "random:"


@dataclass(slots=True)
class Report:
    """What became of one machine."""

    subject: Subject
    watch: Watch
    finding: Finding | None = None
    interrupted: bool = False

    @property
    def result(self) -> str:
        """The result in a few words."""
        if self.finding is not None:
            return f"a failure: {self.finding.name}.py"
        return "interrupted, no failure until then" if self.interrupted else "no failure"


def listing() -> str:
    """The machines by name, and what each tests."""
    return "\n".join(aligned(("machine", "what it tests"), [(name, find_subject(name).about) for name in MACHINES], left=(0, 1)))


def run(options: argparse.Namespace, seconds: float) -> int:
    """Run the machines that the options name, for `seconds` in all.

    Returns:
        The exit code: 0, or 1 after a failure, or 130 after Ctrl-C.

    Raises:
        InvalidRequestError: A machine or a model is unknown, they do not fit, or a test cannot be written.
    """
    subjects, reports = subjects_of(options), list[Report]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the machines' tensors are small
    try:
        with Progress(len(subjects), seconds, options.examples) as progress:
            for left in range(len(subjects), 0, -1):
                reports.append(_run_one(subjects[-left], seconds / left, options, progress))
                seconds -= progress.spent
                if reports[-1].interrupted:
                    break
    finally:
        torch.set_num_threads(threads)
    rows = [(r.subject.name, f"{r.watch.examples:,}", f"{r.watch.calls:,}", r.result) for r in reports]
    rows += [(subject.name, "0", "0", "not run") for subject in subjects[len(reports) :]]
    print("\n".join(aligned(("machine", "examples", "calls", "result"), rows, left=(0, 3))))
    if reports[-1].interrupted:
        return 130
    return int(any(report.finding is not None for report in reports))


def _run_one(subject: Subject, seconds: float, options: argparse.Namespace, progress: Progress) -> Report:
    """Run a machine. A failure is printed and its test written, small or, after Ctrl-C, as it is."""
    watch = Watch(until=monotonic() + seconds, most=options.examples or inf, tell=progress.begin(subject.name))
    report = Report(subject, watch)
    try:
        failure = hunt(subject.machine, watch, seed=options.seed, steps=options.steps)
        progress.end()
        if failure is not None:
            report.finding = Finding.of(subject, failure)
            report.finding = Finding.of(subject, shrunk(subject.machine, failure, progress.shrinking))
    except KeyboardInterrupt:
        report.interrupted = True
    if (found := report.finding) is not None:
        path = options.out / f"{found.name}.py"
        write(path, found.test)
        many = f"{watch.examples:,} examples and {watch.calls:,} calls"
        size = "made small" if found.failure.shrunk else "not made small"
        lines = [f"{subject.name}: a failure after {many} with --seed {options.seed}, {size}:", *(f"  {line}" for line in found.story)]
        progress.write("\n".join([*lines, f"  Run it again: python -m pytest {shlex.quote(str(path))}", ""]))
    return report


def subjects_of(options: argparse.Namespace) -> list[Subject]:
    """The machines that `--machines` names, over `--model` if it is given.

    Raises:
        InvalidRequestError: A machine or the model is unknown, or a machine that the user named cannot run the model.
    """
    every = options.machines == "all"
    subjects = [find_subject(name) for name in (MACHINES if every else dict.fromkeys(options.machines.split(",")))]
    if options.model is None:
        return subjects
    model, code, imports = _model(options)
    found = list[Subject]()
    for subject in subjects:
        try:
            found.append(subject.over(model, code, imports))
        except InvalidRequestError as error:
            if not every:
                raise
            note(str(error))
    if all(one in subjects for one in found):
        raise InvalidRequestError(f"--model {options.model}: no machine of --machines {options.machines} runs a model, leave --model out")
    return found


def _model(options: argparse.Namespace) -> tuple[Model, str, list[Import]]:
    """The model of `--model`, the code that makes it, and what the code imports."""
    name = options.model
    if name.startswith(RANDOM):
        architecture = name.removeprefix(RANDOM)
        if architecture not in REGISTRY:
            raise InvalidRequestError(f"unknown architecture {architecture!r} in --model {name}; choose from {', '.join(REGISTRY)}")
        code, module = f"random_model(tiny_config({architecture!r}, vocab_size=16))", "nanovllm.testing.models"
        model = replace(random_model(tiny_config(architecture, vocab_size=16)), name=name)
        return model, code, [(module, "random_model"), (module, "tiny_config")]
    given = {key: value for key, value in source(options).items() if value and key != "download"}
    code = ", ".join([repr(name), "'cpu'", "'float32'", *(f"{key}={value!r}" for key, value in given.items())])
    return load_model(name, "cpu", "float32", **source(options)), f"load_model({code})", [("nanovllm", "load_model")]
