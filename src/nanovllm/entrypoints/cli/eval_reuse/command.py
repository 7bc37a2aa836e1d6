"""The options and the main function of `nanovllm eval-reuse`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nanovllm.entrypoints.cli.eval_reuse.experiments import evaluate
from nanovllm.entrypoints.cli.eval_reuse.plot import draw
from nanovllm.entrypoints.cli.eval_reuse.report import table
from nanovllm.entrypoints.cli.eval_reuse.settings import Recompute, Settings
from nanovllm.entrypoints.cli.load import load
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.outputs import naming, require_output, write
from nanovllm.errors import InvalidRequestError
from nanovllm.ops.backends import installed

T = TypeVar("T")
AMOUNTS = "values, each 0, a number of tokens, a fraction between 0 and 1, or all"
QUICK = 12  # questions per group with --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm eval-reuse`, without the options of the model."""
    default = Settings()
    group = parser.add_argument_group("measurement")
    numbers = "numbers of chunks to compose, separated by commas (default: %(default)s)"
    group.add_argument("--chunks", default=_joined(default.chunks), metavar="N,N", help=numbers)
    group.add_argument("--facts", type=int, default=default.facts, metavar="N", help="facts per chunk (default: %(default)s)")
    between = f"the text before every chunk and question, with \\n for a line break (default: {_escaped(default.separator)})"
    group.add_argument("--separator", default=_escaped(default.separator), metavar="TEXT", help=between)
    group.add_argument("--questions", type=int, metavar="N", help=f"questions per group (default: {default.questions})")
    group.add_argument("--quick", action="store_true", help=f"ask only {QUICK} questions per group, for a rough estimate")
    amounts = (
        "values of compose's argument recompute: a number of first tokens of each chunk, a fraction of all tokens chosen by deviation, or "
        "all (default: %(default)s)"
    )
    group.add_argument("--recompute", default=_joined(default.recompute), metavar="X,X", help=amounts)
    thought = "the most tokens of a chat reply with its thinking; models with long thinking need more (default: %(default)s)"
    group.add_argument("--thought-len", type=int, default=default.thought_len, metavar="N", help=thought)
    seed = "the same seed gives the same questions (default: %(default)s)"
    group.add_argument("--seed", type=int, default=default.seed, metavar="N", help=seed)
    group.add_argument("--out", type=Path, metavar="PREFIX", help="also write PREFIX.json and, with matplotlib, the picture PREFIX.svg")


def main(options: argparse.Namespace, limits: dict[str, Any]) -> int:
    """Measure, print the table, and write the files that were asked for. Returns 0.

    Raises `InvalidRequestError` for options that contradict each other or have an invalid value.
    """
    if options.quick and options.questions is not None:
        raise InvalidRequestError(f"--quick means --questions {QUICK}: give only one of --quick and --questions")
    settings = Settings(
        chunks=_values("--chunks", options.chunks, int, "integers"),
        facts=options.facts,
        separator=options.separator.replace("\\n", "\n"),
        questions=QUICK if options.quick else Settings().questions if options.questions is None else options.questions,
        recompute=_values("--recompute", options.recompute, _amount, AMOUNTS),
        thought_len=options.thought_len,
        seed=options.seed,
    )
    figures, picture = (None, None) if options.out is None else _files(options.out)
    require_output(figures)
    require_output(picture)
    model = load(options)
    report = evaluate(model, settings, **limits)
    print(table(report))
    if figures is not None and picture is not None:
        write(figures, json.dumps(report.as_json(), indent=1) + "\n")
        if installed("matplotlib"):
            with naming(picture):
                draw(report, picture)
        else:
            note("no picture was drawn: matplotlib is not installed (pip install matplotlib)")
    return 0


def _files(prefix: Path) -> tuple[Path, Path]:
    """The files of the figures and of the picture. Raises `InvalidRequestError` if the prefix has no file name."""
    if not prefix.name:
        raise InvalidRequestError(f"--out {prefix} does not end in a file name; give a prefix such as results/reuse")
    return prefix.with_name(prefix.name + ".json"), prefix.with_name(prefix.name + ".svg")


def _amount(text: str) -> Recompute:
    return text if text == "all" else int(text) if text.isdecimal() else float(text)


def _values(name: str, text: str, kind: Callable[[str], T], accepted: str) -> tuple[T, ...]:
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError:
        raise InvalidRequestError(f"{name} {text!r} must be {accepted}, separated by commas") from None


def _escaped(text: str) -> str:
    return text.replace("\n", "\\n")


def _joined(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))
