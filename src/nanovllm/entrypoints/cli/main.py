"""The command line: `nanovllm generate`, `chat`, `memory`, `models`, `check`, `tune`, `bench`, `profile` and `eval-reuse`."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from nanovllm.entrypoints.arguments import CommandParser, Parser, add_model_options, engine_limits
from nanovllm.entrypoints.cli import chat, generate
from nanovllm.entrypoints.cli import memory as memory_demo
from nanovllm.entrypoints.cli.check import command as check_command
from nanovllm.entrypoints.cli.models import command as models_command
from nanovllm.errors import NanoVLLMError

EXAMPLES = """\
examples:
  nanovllm generate --stream "Once upon a time,"          continue a text with the packaged tiny model
  nanovllm generate --chat --stream "What is 3 + 4?"      one question, answered
  nanovllm chat                                           a conversation
  nanovllm chat --model Qwen/Qwen3-0.6B --download        with a model of the Hugging Face Hub, which is kept in the cache
  nanovllm chat --model Qwen/Qwen3-0.6B                   the same from the cache, without a network
  nanovllm generate --prompts prompts.txt > replies.jsonl many prompts at once, one a line
  nanovllm memory --out memory.svg                        who holds the pages of the KV memory, and what is shared
  nanovllm models                                         what is supported, and how it runs
  nanovllm check Qwen/Qwen3-0.6B                          whether it will run and how, and whether the fast kernels compute what they should
  nanovllm tune --model Qwen/Qwen3-0.6B                   measure how the kernels are cut fastest on this GPU, once
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for what cannot be understood or served (one line on stderr), 130 after Ctrl-C.

    `check` returns 1 where a layer falls back.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack a character of the reply
    measures = arguments[:1] in (["tune"], ["bench"], ["profile"], ["eval-reuse"])
    options = build_parser(with_bench=measures).parse_args(arguments, argparse.Namespace(arguments=arguments[1:], alone=argv is None))
    try:
        with one_line_warnings():
            return options.run(options)
    except NanoVLLMError as error:
        print(f"nanovllm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away; what is still buffered must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Warnings of the block look like errors do: one line, without the place in the source."""

    def formatted(message: Warning | str, *_: object, **__: object) -> str:
        return f"nanovllm: warning: {' '.join(str(message).split())}\n"

    before, warnings.formatwarning = warnings.formatwarning, formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def _version() -> str:
    try:
        return version("nanovllm")
    except PackageNotFoundError:
        return "(run from a source tree)"


def build_parser(*, with_bench: bool = True) -> argparse.ArgumentParser:
    """The parser of all commands; options of `tune`, `bench`, `profile`, `eval-reuse` cost imports and are left out unless asked for."""
    parser = Parser(
        prog="nanovllm", description="Run language models.", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {_version()}")
    names = "{generate,chat,memory,models,check,tune,bench,profile,eval-reuse}"
    commands = parser.add_subparsers(title="commands", required=True, metavar=names, parser_class=CommandParser)

    reply = commands.add_parser("generate", help="reply to one prompt, or to a file of prompts")
    generate.add_arguments(reply)
    reply.set_defaults(run=generate.run_generate)

    talk = commands.add_parser("chat", help="talk with a model", epilog=chat.HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    chat.add_arguments(talk)
    talk.set_defaults(run=chat.run_chat)

    memory = commands.add_parser("memory", help="show who holds the pages of the KV memory", description=memory_demo.DESCRIPTION)
    memory_demo.add_arguments(memory)
    add_model_options(memory, num_pages=f"{memory_demo.NUM_PAGES}; {memory_demo.DEMO_PAGES} for the demonstration")
    memory.set_defaults(run=memory_demo.run)

    models = commands.add_parser("models", help="list what is supported, and how it runs", description=models_command.DESCRIPTION)
    models_command.add_arguments(models)
    models.set_defaults(run=models_command.main)

    told = "say whether a model will run here, and compare its fast kernels with its plain layers"
    check = commands.add_parser("check", help=told, description=check_command.DESCRIPTION)
    check_command.add_arguments(check)
    check.set_defaults(run=check_command.main)

    tuned = commands.add_parser("tune", help="measure how the kernels of a GPU are cut fastest, and keep it")
    bench = commands.add_parser("bench", help="measure the speed of this machine")
    profiled = commands.add_parser("profile", help="show which kernels a step is made of")
    quality = commands.add_parser("eval-reuse", help="measure what reuse of KV costs in quality")
    if with_bench:
        from nanovllm.entrypoints.cli.bench import command as bench_command
        from nanovllm.entrypoints.cli.bench import profile
        from nanovllm.entrypoints.cli.eval_reuse import command as eval_command
        from nanovllm.entrypoints.cli.tune import command as tune_command

        tuned.description = tune_command.DESCRIPTION
        tune_command.add_arguments(tuned)
        tuned.set_defaults(run=tune_command.main)
        bench_command.add_arguments(bench)
        bench.set_defaults(run=lambda options: bench_command.main(options, options.arguments))
        profile.add_arguments(profiled)
        profiled.set_defaults(run=lambda options: profile.main(options, options.arguments))
        eval_command.add_arguments(quality)
        add_model_options(quality, num_pages="what the measurement needs")
        quality.set_defaults(run=lambda options: eval_command.main(options, engine_limits(options)))
    return parser
