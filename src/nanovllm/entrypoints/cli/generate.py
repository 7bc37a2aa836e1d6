"""`nanovllm generate`: a reply to one prompt, or to each prompt of a file."""

import argparse
import json
import sys
import warnings
from pathlib import Path

from nanovllm.engine.donation import enter
from nanovllm.engine.requests import capacity, new_sequence
from nanovllm.entrypoints.arguments import add_model_options, add_ranks, add_sampling_options, engine_limits, freeze_if_alone, sampling
from nanovllm.entrypoints.cli.batch.run_batch import run_batch
from nanovllm.entrypoints.cli.load import load_engine
from nanovllm.entrypoints.display.terminal import View, dim, is_terminal, note
from nanovllm.entrypoints.llm import LLM, whole
from nanovllm.entrypoints.stream import Piece
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.tokenizer import check_text

DESCRIPTION = """\
Print the reply to one prompt, or to each prompt of a file. The model continues the text; with --chat it answers the text as a message.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm generate`."""
    parser.add_argument("prompt", nargs="*", help="the text to continue; several arguments are joined by spaces (default: read stdin)")
    prompts = "read one prompt per line and skip empty lines; print one JSON object per reply, in the same order"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=prompts)
    requests = (
        "answer the requests of a file in the form of OpenAI's batches, one JSON object per line; needs --output and the extra server"
    )
    parser.add_argument("--input", type=Path, metavar="IN.jsonl", help=requests)
    results = "the results of --input, one JSON object per line; an unfinished file is continued"
    parser.add_argument("--output", type=Path, metavar="OUT.jsonl", help=results)
    parser.add_argument("--stream", action="store_true", help="print the reply while it is generated")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a message to a chat model")
    parser.add_argument("--system", metavar="TEXT", help="the system message; needs --chat")
    parser.add_argument("--no-think", action="store_true", help="answer without thinking first; needs --chat")
    add_model_options(parser)
    add_ranks(parser)
    add_sampling_options(parser, max_tokens=256)


def run_generate(options: argparse.Namespace) -> int:
    """Run `nanovllm generate`. Returns the exit code. Raises `InvalidRequestError` for options that contradict each other."""
    if (options.input is None) != (options.output is None):
        raise InvalidRequestError("--input and --output belong together: give both")
    if options.input is not None:
        if options.prompts is not None or options.prompt or options.stream or options.chat or options.system or options.no_think:
            raise InvalidRequestError("--input cannot be combined with a prompt, --prompts, --stream or --chat: its lines say what to do")
        if given := [name for name in SamplingParams.__dataclass_fields__ if vars(options).get(name) is not None]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InvalidRequestError(f"{flags}: with --input, each line has its own: leave it out")
        return run_batch(options)
    if options.prompts is not None and (options.prompt or options.stream):
        raise InvalidRequestError("--prompts cannot be combined with a prompt or --stream: its prompts come from the file")
    if not options.chat and (options.system or options.no_think):
        raise InvalidRequestError("--system and --no-think need --chat: add --chat")
    lines = _lines(options.prompts) if options.prompts is not None else {}
    texts = list(lines.values()) if options.prompts is not None else [_prompt(options)]
    with load_engine(options, **engine_limits(options), max_num_seqs=256 if options.prompts is not None else 1) as llm:
        freeze_if_alone(options)
        return _generated(llm, options, lines, texts)


def _generated(llm: LLM, options: argparse.Namespace, lines: dict[int, str], texts: list[str]) -> int:
    """Generate and print the replies to `texts`, which are `lines` of a file by their numbers if there is one; returns the exit code."""
    params = sampling(options, llm.model)
    if options.prompts is not None:
        try:
            outputs = llm.generate([_as_prompt(llm, text, options) for text in texts], params)
        except NanoVLLMError as error:
            raise _with_line(error, llm, lines, params, options) from None
        for text, output in zip(texts, outputs, strict=True):
            told = {"prompt": text, "text": output.text, "finish_reason": output.finish_reason}
            print(json.dumps(told | ({} if output.error is None else {"error": str(output.error)}), ensure_ascii=False))
        _note_cut(outputs, params, llm.state)
        return 0 if all(output.error is None for output in outputs) else 2
    prompt = _as_prompt(llm, texts[0], options)
    styled = is_terminal(sys.stdout)
    if styled and not options.chat:
        print(dim(texts[0]), end="")
    view = View.of(sys.stdout, chat_prompt=_chat_text(llm, prompt))
    pieces = llm.stream(prompt, params) if options.stream else _pieces(whole(llm.generate([prompt], params)[0]))
    output = None
    for piece in pieces:
        view, shown = view.push(piece.text)
        print(shown, end="", flush=bool(shown))
        output = piece.output
    print(view.end(), flush=True)
    if output is not None:
        _note_cut([output], params, llm.state)
    if styled and output is not None:
        metrics = output.metrics
        note(
            f"[{len(output.prompt_token_ids)} prompt tokens, {len(output.token_ids)} tokens ({output.finish_reason}), "
            f"{metrics.time_to_first_token:.2f} s to the first, {metrics.decode_tokens_per_second:.0f} tokens/s]"
        )
    return 0


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt:
        return " ".join(options.prompt)
    if sys.stdin.isatty():
        note("Type the prompt, then Ctrl-D on a line of its own.")
    return check_text(sys.stdin.buffer.read()).removesuffix("\n")


def _lines(file: Path) -> dict[int, str]:
    """The lines of a file that are not empty, by number from 1. Warns if there is none."""
    try:
        lines = check_text(file.read_bytes()).replace("\r\n", "\n").split("\n")  # as editors count lines
    except OSError as error:
        raise InvalidRequestError(f"{file}: {error.strerror}") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{file}: {error}") from None
    found = {number: line for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        warnings.warn(f"no prompts in {file}", stacklevel=1)
    return found


def _with_line(error: NanoVLLMError, llm: LLM, lines: dict[int, str], params: SamplingParams, options: argparse.Namespace) -> NanoVLLMError:
    """The error of the first faulty line, with its number; `error` itself if all lines are equally faulty, or none is."""
    faults: dict[int, NanoVLLMError] = {}
    for number, text in lines.items():
        try:
            new_sequence(llm.model, enter(llm.state), _as_prompt(llm, text, options), params)  # only raises errors; nothing is committed
        except NanoVLLMError as fault:
            faults[number] = fault
    if not faults or (len(faults) == len(lines) > 1 and len({str(fault) for fault in faults.values()}) == 1):
        return next(iter(faults.values()), error)
    number, fault = next(iter(faults.items()))
    return type(fault)(f"{options.prompts}:{number}: {fault}")


def _as_prompt(llm: LLM, text: str, options: argparse.Namespace) -> str | list[int]:
    if not options.chat:
        return text
    if not text:
        raise InvalidRequestError("the prompt is empty: it must hold at least one token")
    opening = [{"role": "system", "content": options.system}] if options.system else []
    return llm.chat_tokens([*opening, {"role": "user", "content": text}], enable_thinking=not options.no_think)


def _note_cut(outputs: list[RequestOutput], params: SamplingParams, state: EngineState) -> None:
    """Say how many replies ended by their length, and why: on a terminal, and elsewhere those for which the KV memory was too small."""
    small = capacity(state, whole=False) < state.config.max_model_len
    cut = [len(output.token_ids) for output in outputs if output.finish_reason == "length"]
    full = sum(length < params.max_tokens for length in cut)
    why_full = "because the KV memory is full: a larger --num-pages gives more" if small else "because the context is full"
    told = {f"after {params.max_tokens} tokens (--max-tokens)": len(cut) - full, why_full: full}
    many = f" of {len(outputs)} replies " if len(outputs) > 1 else ""
    if cut and (sys.stderr.isatty() or (small and full)):
        note("; ".join(f"{many and f'{count}{many}'}stopped {why}" for why, count in told.items() if count))


def _chat_text(llm: LLM, prompt: str | list[int]) -> str | None:
    return None if isinstance(prompt, str) or llm.tokenizer is None else llm.tokenizer.decode(prompt, skip_special_tokens=False)


def _pieces(output: RequestOutput) -> list[Piece]:
    return [Piece(text=output.text, token_ids=output.token_ids, finish_reason=output.finish_reason, output=output)]
