"""The options and the main function of `nanovllm fuzz`."""

import argparse
import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from nanovllm.entrypoints.arguments import add_source, positive
from nanovllm.entrypoints.outputs import require_output
from nanovllm.errors import InvalidRequestError

SEED = 0
STEPS = 50
MINUTES = 1.0
DESCRIPTION = """\
Call the engine at random with Hypothesis state machines, and compare every result with a simple model of the same thing. A machine of your
own runs as module:ClassName. A failure is made small for about a minute, told as a story of calls, and written as a test file that shows it
again under pytest. The examples depend only on --seed, --steps and the machine; --minutes and --examples say how many of them run.
Exit code 0: no failure. Exit code 1: a failure was found. Exit code 2: an error. Exit code 130: Ctrl-C; what was done is printed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm fuzz`."""
    which = "machines to run, separated by commas: names that --list prints, module:ClassName, or all (default: all)"
    parser.add_argument("--machines", default="all", metavar="NAMES", help=which)
    parser.add_argument("--list", action="store_true", help="list the machines and what each tests; run nothing")
    minutes = (
        f"minutes for all machines together, without those for making failures small (default: {MINUTES:g}, or no limit with --examples)"
    )
    parser.add_argument("--minutes", type=_minutes, metavar="X", help=minutes)
    parser.add_argument("--examples", type=positive, metavar="N", help="examples of each machine at most (default: no limit)")
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N", help=f"calls of an example at most (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"the same seed gives the same examples (default: {SEED})")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help="where tests are written (default: this folder)")
    model = (
        "run the machines of engines and chunks over this model, on the CPU in float32: tiny, a folder, a repository in the Hugging Face "
        "cache, or random:ARCHITECTURE for two layers of random weights, such as random:LlamaForCausalLM (default: what each machine has)"
    )
    parser.add_argument("--model", metavar="NAME", help=model)
    add_source(parser)


def main(options: argparse.Namespace) -> int:
    """Run the machines, print a table and the failures, and write their tests.

    Returns:
        The exit code. 0: no failure. 1: a failure was found. 130: Ctrl-C.

    Raises:
        InvalidRequestError: Hypothesis is not installed, an option is wrong, or the folder cannot be written.
    """
    if find_spec("hypothesis") is None:
        raise InvalidRequestError('fuzz needs hypothesis, which is not installed: pip install "nanovllm[testing]"')
    from nanovllm.entrypoints.cli.fuzz import run  # imports hypothesis

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where module:ClassName is looked for, as `python -m` does
    if options.list:
        print(run.listing())
        return 0
    require_output(options.out / "test_fuzz.py", replaced=True)
    return run.run(options, 60 * (options.minutes or (math.inf if options.examples else MINUTES)))


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of minutes above 0")
    return minutes
