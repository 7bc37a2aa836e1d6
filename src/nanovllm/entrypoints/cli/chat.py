"""`nanovllm chat`: a conversation that keeps its KV between turns, so that each turn runs only its new tokens."""

import argparse
import sys
from dataclasses import replace

from nanovllm.chunks.compose import MODES
from nanovllm.chunks.handles import release
from nanovllm.chunks.thinking import Retain, check_retain
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import capacity
from nanovllm.entrypoints.arguments import add_model_options, add_sampling_options, engine_limits, freeze_if_alone, sampling
from nanovllm.entrypoints.cli.load import load
from nanovllm.entrypoints.conversation import Conversation, Turn, turn
from nanovllm.entrypoints.display.terminal import View, note
from nanovllm.entrypoints.memory.report import memory
from nanovllm.entrypoints.process import noted_interrupts
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.engine_state import EngineState
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.tokenizer import check_text

HELP = """\
Type a message and press Enter. Ctrl-C stops a reply, Ctrl-D leaves.
  /reset      forget the conversation and start a new one
  /no_think   turn thinking off; at the end of a message, it asks the model not to think for that message only
  /think      turn thinking on
  /stats      show how many prompt tokens were run, and how many were reused
  /memory     show the owners of the pages of the KV memory
  /help       show this text
  /exit       leave"""


DESCRIPTION = "Chat with a model. The KV of the conversation stays, so each message runs only its new tokens."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm chat`."""
    parser.add_argument("--system", metavar="TEXT", help="the system message, which tells the model how to behave")
    parser.add_argument("--no-think", action="store_true", help="start with thinking turned off")
    parser.add_argument(
        "--retain",
        choices=("all", *MODES),
        default="recompute",
        help="how to keep an answer's KV without its thinking. recompute: run the answer again (exact). shift: move its keys to the new "
        "positions (fast, approximate). gap: leave it in place (fast, approximate). all: keep the thinking too (default: %(default)s)",
    )
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=2048)


def run(
    model: Model,
    state: EngineState,
    params: SamplingParams,
    *,
    system: str | None = None,
    thinking: bool = True,
    retain: Retain = "recompute",
) -> int:
    """The interactive program: read messages from stdin until its end or `/exit`. Returns the exit code."""
    check_retain(model, "all" if retain == "recompute" else retain)
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        note(f"{model.name} on {model.device}, {capacity(state)} tokens of conversation. /help shows the commands.")
    opening = ({"role": "system", "content": system},) if system else ()
    conversation, figures = Conversation(messages=opening, thinking=thinking, retain=retain), None
    while True:
        try:
            text = input(">>> " if interactive else "").strip()
        except KeyboardInterrupt:
            note("\n(Ctrl-C stops a reply; Ctrl-D or /exit leaves)")
            continue
        except (EOFError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise InvalidRequestError(f"the input is not valid UTF-8: {error}") from None
            if interactive:
                print()
            return 0
        match text.split():
            case []:
                continue
            case ["/exit" | "/quit"]:
                return 0
            case ["/help"]:
                note(HELP)
            case ["/reset"]:
                if conversation.chunk is not None:
                    state = release(state, conversation.chunk)
                conversation, figures = replace(conversation, messages=opening, chunk=None), None
                note("A new conversation.")
            case ["/no_think" | "/think" as command]:
                conversation = replace(conversation, thinking=command == "/think")
                note("Thinking is on." if conversation.thinking else "Thinking is off.")
            case ["/stats"]:
                note(f"last turn: {figures}" if figures else "no turn yet")
                note(f"since the start: {state.stats.prefill_tokens} prompt tokens run, {state.stats.reused_tokens} reused")
            case ["/memory"]:
                note(memory(state, names={"conversation": conversation.chunk} if conversation.chunk is not None else None).text())
            case [command, *_] if command.startswith("/") and command not in ("/think", "/no_think"):
                note(f"unknown command {command}; /help shows the commands")
            case _:
                try:
                    check_text(text)
                    with noted_interrupts(every=True):  # a Ctrl-C between the turn's end and this assignment would lose the state
                        state, conversation, figures = _show_turn(model, state, conversation, text, params)
                except NanoVLLMError as error:
                    note(f"error: {error}")


def _show_turn(
    model: Model, state: EngineState, conversation: Conversation, text: str, params: SamplingParams
) -> tuple[EngineState, Conversation, Turn]:
    asked = replace(conversation, messages=(*conversation.messages, {"role": "user", "content": text}))
    tokens = render(model.tokenizer, asked.messages, enable_thinking=asked.thinking)
    view = View.of(sys.stdout, chat_prompt="" if model.tokenizer is None else model.tokenizer.decode(tokens, skip_special_tokens=False))

    def show(piece: str) -> None:
        nonlocal view
        view, shown = view.push(piece)
        if shown:
            print(shown, end="", flush=True)

    state, answered, figures = turn(model, state, asked, params, show)
    print(view.end(), flush=True)
    if figures.finish_reason == "stopped":
        note("[stopped]")
    if figures.error is not None:
        note(f"error: {figures.error}")
    if not figures.reply:  # stopped before the first token: forget the message
        answered = replace(answered, messages=conversation.messages)
    return state, answered, figures


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  (its import gives `input` editing and a history)
    except ImportError:
        return


def run_chat(options: argparse.Namespace) -> int:
    """Run `nanovllm chat`: load the model, make an engine, start the conversation. Returns the exit code."""
    # Pages for two sequences: the conversation's chunk, and a reply that starts from a shorter prefix of it. A CPU runs prompts in
    # small pieces, because Ctrl-C waits for the end of a step.
    model = load(options)
    params = sampling(options, model)
    budget = 512 if model.device.type == "cpu" else 8192
    state = init_state(model, **engine_limits(options), max_num_seqs=2, max_num_batched_tokens=budget)
    freeze_if_alone(options)
    return run(model, state, params, system=options.system, thinking=not options.no_think, retain=options.retain)
