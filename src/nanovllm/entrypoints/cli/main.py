"""The command line: `nanovllm generate`, `chat`, `memory`, `models`, `check`, `tune`, `bench`, `profile` and `eval-reuse`."""

import argparse
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanovllm import collector
from nanovllm.chunks.compose import MODES
from nanovllm.engine.init_state import init_state
from nanovllm.entrypoints.arguments import TUNING, CommandParser, Parser, add_source, source, tuning
from nanovllm.entrypoints.cli import chat
from nanovllm.entrypoints.cli import memory as memory_demo
from nanovllm.entrypoints.cli.check import command as check_command
from nanovllm.entrypoints.cli.models import command as models_command
from nanovllm.entrypoints.display.terminal import View, dim, is_terminal, note
from nanovllm.entrypoints.llm import LLM, Piece
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.loading.load_model import Model, load_model
from nanovllm.sampling.params import SamplingParams, from_generation_config
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.tokenizer import check_text

EXAMPLES = """\
examples:
  nanovllm generate --stream "Once upon a time,"          continue a text with the packaged tiny model
  nanovllm generate --chat --stream "What is 3 + 4?"      one question, answered
  nanovllm chat                                           a conversation
  nanovllm chat --model Qwen/Qwen3-0.6B                   with a model out of the Hugging Face cache
  nanovllm chat --model Qwen/Qwen3-0.6B --download        the same, fetched from the Hub where the cache lacks it
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

    generate = commands.add_parser("generate", help="reply to one prompt, or to a file of prompts")
    generate.add_argument("prompt", nargs="*", help="the text to continue; several words are joined; without any, stdin is read")
    prompts = "a prompt a line, empty lines left out; prints a JSON object a reply, in the same order"
    generate.add_argument("--prompts", type=Path, metavar="FILE", help=prompts)
    generate.add_argument("--stream", action="store_true", help="print the reply while it is made")
    generate.add_argument("--chat", action="store_true", help="take the prompt as a question to a chat model")
    generate.add_argument("--system", metavar="TEXT", help="the system message, with --chat")
    generate.add_argument("--no-think", action="store_true", help="with --chat: answer without thinking first")
    _add_model_options(generate)
    _add_sampling_options(generate, max_tokens=256)
    generate.set_defaults(run=run_generate)

    talk = commands.add_parser("chat", help="talk with a model", epilog=chat.HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    talk.add_argument("--system", metavar="TEXT", help="the system message, which tells the model how to behave")
    talk.add_argument("--no-think", action="store_true", help="begin with thinking off")
    talk.add_argument(
        "--retain",
        choices=("all", *MODES),
        default="recompute",
        help="how an answer's KV is kept without the thinking before it: run again (exact), or moved or left in place (fast, approximate); "
        "all keeps the thinking too, for the model to see (default %(default)s)",
    )
    _add_model_options(talk)
    _add_sampling_options(talk, max_tokens=2048)
    talk.set_defaults(run=run_chat)

    memory = commands.add_parser("memory", help="show who holds the pages of the KV memory", description=memory_demo.DESCRIPTION)
    memory_demo.add_arguments(memory)
    _add_model_options(memory, num_pages=f"{memory_demo.NUM_PAGES}; {memory_demo.DEMO_PAGES} for the demonstration")
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
        from nanovllm.entrypoints.cli import bench as module
        from nanovllm.entrypoints.cli.bench import profile
        from nanovllm.entrypoints.cli.eval_reuse import command
        from nanovllm.entrypoints.cli.tune import command as tune_command

        tuned.description = tune_command.DESCRIPTION
        tune_command.add_arguments(tuned)
        tuned.set_defaults(run=tune_command.main)
        module.add_arguments(bench)
        bench.set_defaults(run=lambda options: module.main(options, options.arguments))
        profile.add_arguments(profiled)
        profiled.set_defaults(run=lambda options: profile.main(options, options.arguments))
        command.add_arguments(quality)
        _add_model_options(quality, num_pages="what the measurement needs")
        quality.set_defaults(run=lambda options: command.main(options, _limits(options)))
    return parser


def run_generate(options: argparse.Namespace) -> int:
    """`nanovllm generate`."""
    if options.prompts is not None and (options.prompt or options.stream):
        raise InvalidRequestError("--prompts takes its prompts from the file: give no prompt and no --stream beside it")
    if not options.chat and (options.system or options.no_think):
        raise InvalidRequestError("--system and --no-think are for questions to a chat model: add --chat")
    texts = _lines(options.prompts) if options.prompts is not None else [_prompt(options)]
    model = load_model(options.model, options.device, options.dtype, max_model_len=options.max_model_len, **source(options))
    llm = LLM(model, **_limits(options), max_num_seqs=256 if options.prompts is not None else 1)
    _settle(options)
    params = sampling(options, llm.model)
    prompts = [_as_prompt(llm, text, options) for text in texts]
    if options.prompts is not None:
        for text, output in zip(texts, llm.generate(prompts, params), strict=True):
            print(json.dumps({"prompt": text, "text": output.text, "finish_reason": output.finish_reason}, ensure_ascii=False))
        return 0
    styled = is_terminal(sys.stdout)
    if styled and not options.chat:
        print(dim(texts[0]), end="")
    view = View.of(sys.stdout, chat_prompt=_chat_text(llm, prompts[0]))
    pieces = llm.stream(prompts[0], params) if options.stream else _whole(llm.generate([prompts[0]], params)[0])
    output = None
    for piece in pieces:
        view, shown = view.push(piece.text)
        print(shown, end="", flush=bool(shown))
        output = piece.output
    print(view.end(), flush=True)
    if styled and output is not None:
        metrics = output.metrics
        note(
            f"[{len(output.prompt_token_ids)} prompt tokens, {len(output.token_ids)} tokens ({output.finish_reason}), "
            f"{metrics.time_to_first_token:.2f} s to the first, {metrics.decode_tokens_per_second:.0f} tokens/s]"
        )
    return 0


def run_chat(options: argparse.Namespace) -> int:
    """`nanovllm chat`."""
    # Two sequences' pages: the conversation's chunk, and a reply over a shorter head of it. A CPU runs prompts in small
    # chunks, because Ctrl-C waits for the end of a step.
    model = load_model(options.model, options.device, options.dtype, max_model_len=options.max_model_len, **source(options))
    params = sampling(options, model)
    budget = 512 if model.device.type == "cpu" else 8192
    state = init_state(model, **_limits(options), max_num_seqs=2, max_num_batched_tokens=budget)
    _settle(options)
    return chat.run(model, state, params, system=options.system, thinking=not options.no_think, retain=options.retain)


def _settle(options: argparse.Namespace) -> None:
    """The engine stands: what is alive now stays, where this process is ours alone."""
    if options.alone:
        collector.freeze()


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    limits = {name: getattr(options, name) for name in ("num_pages", "num_frames", "max_model_len", "memory_fraction", "tuning")}
    return {**limits, "compile": False if options.eager else None}


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt:
        return " ".join(options.prompt)
    if sys.stdin.isatty():
        note("Type the prompt, then Ctrl-D on a line of its own.")
    return check_text(sys.stdin.buffer.read()).removesuffix("\n")


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in check_text(file.read_bytes()).splitlines() if line.strip()]
    except OSError as error:
        raise InvalidRequestError(f"{file}: {error.strerror}") from None


def _as_prompt(llm: LLM, text: str, options: argparse.Namespace) -> str | list[int]:
    if not options.chat:
        return text
    opening = [{"role": "system", "content": options.system}] if options.system else []
    return llm.chat_tokens([*opening, {"role": "user", "content": text}], enable_thinking=not options.no_think)


def _chat_text(llm: LLM, prompt: str | list[int]) -> str | None:
    return None if isinstance(prompt, str) or llm.tokenizer is None else llm.tokenizer.decode(prompt, skip_special_tokens=False)


def _whole(output: RequestOutput) -> list[Piece]:
    return [Piece(text=output.text, token_ids=output.token_ids, finish_reason=output.finish_reason, output=output)]


def sampling(options: argparse.Namespace, model: Model) -> SamplingParams:
    """The model's own options, with those that were given on the command line in their place."""
    names = set(SamplingParams.__dataclass_fields__)
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return replace(from_generation_config(model.generation_config), **given)


POOL = "what requests of full length need, at most 4 GiB on a CPU and what --memory-fraction leaves on a GPU"


def _add_model_options(parser: argparse.ArgumentParser, num_pages: str = POOL) -> None:
    group = parser.add_argument_group("model")
    where = "a folder, a repository in the Hugging Face cache such as Qwen/Qwen3-0.6B, or tiny, the packaged model (default)"
    group.add_argument("--model", default="tiny", metavar="NAME", help=where)
    add_source(group)
    group.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU where there is one)")
    group.add_argument("--dtype", metavar="T", help="float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)")
    group.add_argument("--num-pages", type=int, metavar="N", help=f"KV memory in pages of 16 tokens (default: {num_pages})")
    frames = "pages that have KV in layers with a sliding window too (default: enough for all that runs); for models that have some"
    group.add_argument("--num-frames", type=int, metavar="N", help=frames)
    group.add_argument("--max-model-len", type=int, metavar="N", help="the most tokens of prompt and reply together (default: the model's)")
    group.add_argument("--memory-fraction", type=float, default=0.9, metavar="X", help="the share of a GPU's memory to use (default 0.9)")
    group.add_argument("--tuning", type=tuning, metavar="FILE", help=TUNING)
    group.add_argument("--eager", action="store_true", help="plain function calls, on a GPU too: starts sooner, runs far slower")


def _add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling", "What is not given is as the model's generation_config.json says.")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"the longest reply (default {max_tokens})")
    group.add_argument("--temperature", type=float, metavar="X", help="0 takes the likeliest token each time; higher is more varied")
    group.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens; 0: all")
    group.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest tokens that make up this probability")
    group.add_argument("--min-p", type=float, metavar="X", help="leave out tokens below this share of the likeliest one's probability")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same reply")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the reply before this text; may be given several times")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: against tokens that stood before (1: none)")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="above 0: against tokens that the reply has already")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="above 0: the same, the more the oftener they occurred")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not end where the model would")
