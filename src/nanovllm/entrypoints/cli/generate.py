"""`nanovllm generate`: a reply to one prompt, or to each prompt of a file."""

import argparse
import json
import sys
from pathlib import Path

from nanovllm.entrypoints.arguments import add_model_options, add_sampling_options, engine_limits, freeze_if_alone, sampling
from nanovllm.entrypoints.cli.load import load
from nanovllm.entrypoints.display.terminal import View, dim, is_terminal, note
from nanovllm.entrypoints.llm import LLM, Piece
from nanovllm.errors import InvalidRequestError
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.tokenizer import check_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm generate`."""
    parser.add_argument("prompt", nargs="*", help="the text to continue; several arguments are joined by spaces (default: read stdin)")
    prompts = "read one prompt per line and skip empty lines; print one JSON object per reply, in the same order"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=prompts)
    parser.add_argument("--stream", action="store_true", help="print the reply while it is generated")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a message to a chat model")
    parser.add_argument("--system", metavar="TEXT", help="the system message; needs --chat")
    parser.add_argument("--no-think", action="store_true", help="answer without thinking first; needs --chat")
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=256)


def run_generate(options: argparse.Namespace) -> int:
    """Run `nanovllm generate`. Returns the exit code. Raises `InvalidRequestError` for options that contradict each other."""
    if options.prompts is not None and (options.prompt or options.stream):
        raise InvalidRequestError("--prompts cannot be combined with a prompt or --stream: its prompts come from the file")
    if not options.chat and (options.system or options.no_think):
        raise InvalidRequestError("--system and --no-think need --chat: add --chat")
    texts = _lines(options.prompts) if options.prompts is not None else [_prompt(options)]
    model = load(options)
    llm = LLM(model, **engine_limits(options), max_num_seqs=256 if options.prompts is not None else 1)
    freeze_if_alone(options)
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
