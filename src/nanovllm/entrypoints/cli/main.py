"""The command line `nanovllm`: the parser of all commands, exit codes and one-line errors."""

import argparse
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from nanovllm.entrypoints.arguments import CommandParser, Parser, add_model_options, as_typed, engine_limits
from nanovllm.entrypoints.cli import chat, chat_loop, generate, quantize, serve
from nanovllm.entrypoints.cli import memory as memory_demo
from nanovllm.entrypoints.cli.check import command as check_command
from nanovllm.entrypoints.cli.fuzz import command as fuzz_command
from nanovllm.entrypoints.cli.models import command as models_command
from nanovllm.errors import NanoVLLMError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # without the name of a file: from a write to stdout
EXAMPLES = """\
examples:
  nanovllm generate --stream "Once upon a time,"           continue a text with the packaged tiny model
  nanovllm generate --chat --stream "What is 3 + 4?"       answer one question with the packaged tiny model
  nanovllm generate --prompts prompts.txt > replies.jsonl  run many prompts at once, one prompt per line
  nanovllm chat                                            chat with the packaged tiny model
  nanovllm chat --model Qwen/Qwen3-0.6B --download         chat with a larger model; downloads it the first time
  nanovllm chat --model Qwen/Qwen3-0.6B                    the same afterwards, from the Hugging Face cache
  nanovllm memory --out memory.svg                         draw the owners of the pages of the KV memory
  nanovllm models                                          list the supported architectures, and how each runs
  nanovllm check Qwen/Qwen3-0.6B --download                say whether a model will run, and compare its fast kernels with plain PyTorch
  nanovllm quantize Qwen/Qwen3-0.6B q8 --format fp8        write a quantised copy, which vLLM and transformers read too
  nanovllm tune --model Qwen/Qwen3-0.6B                    find the fastest tile configurations for this GPU, once per model
  nanovllm fuzz --minutes 10                               look for bugs with random calls, and write those that fail as a test

A model name such as Qwen/Qwen3-0.6B is looked up in the local Hugging Face cache. Give --download the first time, to any command that
takes a model.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The arguments after `nanovllm`. None: use `sys.argv`.

    Returns:
        0: success. 1: a finding of `check`, `fuzz` or `tune`, as their `--help` says. 2: an error, printed as one line on stderr.
        130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack a character of the reply
    measures = arguments[:1] in (["tune"], ["bench"], ["profile"], ["eval-reuse"])
    options = build_parser(with_bench=measures).parse_args(arguments, argparse.Namespace(arguments=arguments[1:], alone=argv is None))
    try:
        with one_line_warnings():
            code = options.run(options)
            print(end="", flush=True)  # an error of the last write shows here, not at exit
            return code
    except NanoVLLMError as error:
        print(f"nanovllm: error: {' '.join(as_typed(str(error), options).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 0
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        print(f"nanovllm: error: the output could not be written: {error.strerror}", file=sys.stderr)
        _drop_stdout()
        return 2


def _drop_stdout() -> None:
    """Send the buffered rest of stdout to /dev/null, or the flush at exit would fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings like errors inside this block: one line, without the position in the source."""

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
    """The parser of all commands. `with_bench`: with the options of `tune`, `bench`, `profile` and `eval-reuse`, whose imports are slow."""
    parser = Parser(
        prog="nanovllm",
        description="Run language models in pure PyTorch, and fork, edit and recombine their KV cache.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, parser_class=CommandParser)

    reply = commands.add_parser(
        "generate", help="generate a reply to one prompt, or to each prompt of a file", description=generate.DESCRIPTION
    )
    generate.add_arguments(reply)
    reply.set_defaults(run=generate.run_generate)

    talk = commands.add_parser(
        "chat",
        help="chat with a model",
        description=chat.DESCRIPTION,
        epilog=chat_loop.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chat.add_arguments(talk)
    talk.set_defaults(run=chat.run_chat)

    server = commands.add_parser("serve", help="serve a model over HTTP, with OpenAI's interface", description=serve.DESCRIPTION)
    serve.add_arguments(server)
    server.set_defaults(run=serve.run)

    memory = commands.add_parser("memory", help="show the owners of the pages of the KV memory", description=memory_demo.DESCRIPTION)
    memory_demo.add_arguments(memory)
    add_model_options(memory, num_pages=f"{memory_demo.NUM_PAGES}; {memory_demo.DEMO_PAGES} for the demonstration")
    memory.set_defaults(run=memory_demo.run)

    models = commands.add_parser(
        "models", help="list the supported architectures, and how each runs", description=models_command.DESCRIPTION
    )
    models_command.add_arguments(models)
    models.set_defaults(run=models_command.main)

    purpose = "say whether a model will run here, and compare its fast kernels with its plain layers"
    check = commands.add_parser("check", help=purpose, description=check_command.DESCRIPTION)
    check_command.add_arguments(check)
    check.set_defaults(run=check_command.main)

    quantized = commands.add_parser("quantize", help="write a quantised copy of a checkpoint", description=quantize.DESCRIPTION)
    quantize.add_arguments(quantized)
    quantized.set_defaults(run=quantize.run)

    fuzz = commands.add_parser(
        "fuzz", help="look for bugs with random calls, and write those that fail as a test", description=fuzz_command.DESCRIPTION
    )
    fuzz_command.add_arguments(fuzz)
    fuzz.set_defaults(run=fuzz_command.main)

    tuned = commands.add_parser("tune", help="find the fastest tile configurations of the kernels on this GPU, and keep them in a file")
    bench = commands.add_parser("bench", help="measure the speed of a model on this machine")
    profiled = commands.add_parser("profile", help="show the time of each kernel in a step")
    quality = commands.add_parser("eval-reuse", help="measure the loss of quality from approximate reuse of KV")
    if with_bench:
        from nanovllm.entrypoints.cli.bench import command as bench_command
        from nanovllm.entrypoints.cli.bench import profile
        from nanovllm.entrypoints.cli.eval_reuse import command as eval_command
        from nanovllm.entrypoints.cli.tune import command as tune_command

        tuned.description = tune_command.DESCRIPTION
        tune_command.add_arguments(tuned)
        tuned.set_defaults(run=tune_command.main)
        bench.description = bench_command.DESCRIPTION
        bench_command.add_arguments(bench)
        bench.set_defaults(run=lambda options: bench_command.main(options, options.arguments))
        profiled.description = profile.DESCRIPTION
        profile.add_arguments(profiled)
        profiled.set_defaults(run=lambda options: profile.main(options, options.arguments))
        eval_command.add_arguments(quality)
        add_model_options(quality, num_pages="enough for the measurement")
        quality.set_defaults(run=lambda options: eval_command.main(options, engine_limits(options)))
    commands.metavar = f"{{{','.join(commands.choices)}}}"
    return parser
