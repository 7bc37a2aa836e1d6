"""`nanovllm chat`: a conversation that keeps its KV between turns, so that each turn runs only its new tokens."""

import argparse
import sys
from dataclasses import replace

from nanovllm.chunks.compose import MODES
from nanovllm.chunks.handles import release
from nanovllm.chunks.thinking import Retain, check_retain
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.requests import capacity
from nanovllm.entrypoints.arguments import add_model_options, add_ranks, add_sampling_options, engine_limits, freeze_if_alone, sampling
from nanovllm.entrypoints.cli.chat_loop import RETAIN, talk
from nanovllm.entrypoints.cli.load import load_engine
from nanovllm.entrypoints.cli.remote_chat import run_remote_chat
from nanovllm.entrypoints.cli.serve import KEYS
from nanovllm.entrypoints.conversation import Conversation, Turn, turn
from nanovllm.entrypoints.display.terminal import View, note
from nanovllm.entrypoints.memory.report import memory
from nanovllm.entrypoints.process import noted_interrupts
from nanovllm.loading.load_model import resolve_device
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.engine_state import EngineState
from nanovllm.tokenizer.messages import render

DESCRIPTION = "Chat with a model. The KV of the conversation stays, so each message runs only its new tokens."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm chat`."""
    parser.add_argument("--system", metavar="TEXT", help="the system message, which tells the model how to behave")
    parser.add_argument("--no-think", action="store_true", help="start with thinking turned off")
    server = f"talk to a running server, such as http://127.0.0.1:8000, and load no model; its key is the variable {KEYS}"
    parser.add_argument("--server", metavar="URL", help=server)
    parser.add_argument(
        "--retain",
        choices=("all", *MODES),
        default=RETAIN,
        help="how to keep an answer's KV without its thinking. recompute: run the answer again (exact). shift: move its keys to the new "
        "positions (fast, approximate). gap: leave it in place (fast, approximate). all: keep the thinking too (default: %(default)s)",
    )
    add_model_options(parser)
    add_ranks(parser)
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
    local = _LocalTalk(model, state, params, system, thinking, retain)
    code = talk(local)
    local.end()
    return code


class _LocalTalk:
    """A conversation with an engine in this process. It holds the engine's newest state."""

    def __init__(
        self, model: Model, state: EngineState, params: SamplingParams, system: str | None, thinking: bool, retain: Retain
    ) -> None:
        self._model, self._state, self._params = model, state, params
        self._opening = ({"role": "system", "content": system},) if system else ()
        self._conversation = Conversation(messages=self._opening, thinking=thinking, retain=retain)
        self._figures: Turn | None = None

    def about(self) -> str:
        return f"{self._model.name} on {self._model.device}, {capacity(self._state)} tokens of conversation. /help shows the commands."

    def say(self, text: str) -> None:
        with noted_interrupts(every=True):  # a Ctrl-C between the turn's end and this assignment would lose the state
            self._state, self._conversation, self._figures = _show_turn(self._model, self._state, self._conversation, text, self._params)

    def end(self) -> None:
        """Write the KV of the conversation to the disk, if the engine has a folder for it."""
        flush_kv(self._state)

    def reset(self) -> None:
        if self._conversation.chunk is not None:
            self._state = release(self._state, self._conversation.chunk)
        self._conversation, self._figures = replace(self._conversation, messages=self._opening, chunk=None), None

    def think(self, on: bool) -> None:
        self._conversation = replace(self._conversation, thinking=on)

    def stats(self) -> list[str]:
        stats = self._state.stats
        since = f"since the start: {stats.prefill_tokens} prompt tokens run, {stats.reused_tokens} reused"
        return [f"last turn: {self._figures}" if self._figures else "no turn yet", since]

    def memory(self) -> str:
        chunk = self._conversation.chunk
        return memory(self._state, names=None if chunk is None else {"conversation": chunk}).text()


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


def run_chat(options: argparse.Namespace) -> int:
    """Run `nanovllm chat`: load the model, make an engine, start the conversation. Returns the exit code."""
    if options.server is not None:
        return run_remote_chat(options)
    # Pages for two sequences: the conversation's chunk, and a reply that starts from a shorter prefix of it. A CPU runs prompts in
    # small pieces, because Ctrl-C waits for the end of a step.
    budget = 512 if resolve_device(options.device).type == "cpu" else 8192
    llm = load_engine(options, **engine_limits(options), max_num_seqs=2, max_num_batched_tokens=budget)
    params = sampling(options, llm.model)
    freeze_if_alone(options)
    return run(llm.model, llm.state, params, system=options.system, thinking=not options.no_think, retain=options.retain)
