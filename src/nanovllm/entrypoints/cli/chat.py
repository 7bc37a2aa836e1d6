"""`nanovllm chat`: a conversation whose KV stays between turns, so that a turn runs only the tokens that are new in it."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nanovllm.chunks.handles import release, truncate
from nanovllm.chunks.thinking import Retain, check_retain, think_spans, without_thinking
from nanovllm.engine.step import capacity, commit_state, enter, guarded, new_sequence, step
from nanovllm.entrypoints.display.terminal import View, note
from nanovllm.entrypoints.memory.report import memory
from nanovllm.entrypoints.process import noted_interrupts
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.loading.load_model import Model
from nanovllm.requests import detach, submit_many
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.tokenizer import check_text

HELP = """\
Type a message and press Enter. Ctrl-C stops a reply, Ctrl-D leaves.
  /reset      forget the conversation and start a new one
  /no_think   answer without thinking first; as the last word of a message, the model is asked so for that message
  /think      think first again
  /stats      how many prompt tokens ran, and how many were there already
  /memory     who holds the pages of the KV memory
  /help       this text
  /exit       leave"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversation:
    """The messages so far, and a chunk with the KV of what the last turn ran (None before the first).

    `retain` says how an answer is kept without the thinking before it (see `drop`): with `recompute`, the next turn runs it again.
    With `all` the thinking stays in the chunk, though the messages' prompt has none, as long as there is room for it.
    """

    messages: tuple[dict[str, str], ...] = ()
    chunk: Chunk | None = None
    thinking: bool = True
    retain: Retain = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn in figures: prompt tokens, those of them run and reused, tokens of the reply, seconds to the first and of all."""

    prompt: int
    run: int
    reused: int
    reply: int
    first: float
    total: float
    finish_reason: str  # "stop", "length", "stopped" by Ctrl-C, or "error"
    error: str | None = None

    def __str__(self) -> str:
        speed = f", {(self.reply - 1) / (self.total - self.first):.0f} tokens/s" if self.reply > 1 and self.total > self.first else ""
        return (
            f"{self.prompt} prompt tokens: {self.run} run, {self.reused} reused; {self.reply} reply tokens ({self.finish_reason}), "
            f"{self.first:.2f} s to the first{speed}"
        )


def turn(
    model: Model, state: EngineState, asked: Conversation, params: SamplingParams, show: Callable[[str], None]
) -> tuple[EngineState, Conversation, Turn]:
    """The reply to a conversation, which `show` gets piece by piece. Ctrl-C ends it, and so does an error of the engine, which the turn
    then names; what there is of the reply stays in the conversation.

    Raises `InvalidRequestError` for a conversation that cannot be served, before the state changes.
    """
    tokens = np.asarray(render(model, asked.messages, enable_thinking=asked.thinking), np.int32)
    if len(tokens) >= capacity(state):
        raise InvalidRequestError(f"the conversation has {len(tokens)} tokens and the engine holds {capacity(state)}: /reset starts anew")
    new_sequence(model, enter(state), tokens, params)  # for its errors alone: nothing is committed
    stream, before, start = TextStream.of(model, params), state.stats, time.perf_counter()
    token_ids: list[int] = []
    output: RequestOutput | None = None
    error: str | None = None
    with noted_interrupts(every=True) as came:
        # No exception leaves between here and `detach`, or the only live state would be lost with it.
        state, context = _continued(state, asked.chunk, tokens, _hidden(model, asked))
        prompt = sum(map(len, context)) if isinstance(context, tuple) else len(context)
        state, (request,) = submit_many(model, state, [context], [params], keep=True)
        if isinstance(context, tuple):
            state = release(state, context[0])
        first = start
        while output is None and error is None and not came:
            try:
                state, outputs = step(model, state)
            except NanoVLLMError as failure:
                error, outputs = str(failure), []
            for out in outputs:
                first = first if token_ids else time.perf_counter()
                token_ids.extend(out.token_ids)
                output = out.output
                if output is None:
                    stream, piece = stream.push(out.token_ids)
                    show(piece)
        state, chunk = detach(model, state, request)
        after = state.stats
        if chunk is not None and asked.retain in ("shift", "gap"):
            state, chunk = _answer(model, state, chunk, min(len(tokens), len(chunk)), asked.retain)
    if output is not None:
        reply, reason = output.text, output.finish_reason
        show(stream.end(reply))
    else:
        reply = "" if model.tokenizer is None else model.tokenizer.decode(token_ids)
        reason = "stopped" if error is None else "error"
    figures = Turn(
        prompt=prompt,
        run=after.prefill_tokens - before.prefill_tokens,
        reused=after.reused_tokens - before.reused_tokens,
        reply=len(token_ids),
        first=first - start,
        total=time.perf_counter() - start,
        finish_reason=reason,
        error=error,
    )
    return state, replace(asked, messages=(*asked.messages, {"role": "assistant", "content": reply}), chunk=chunk), figures


def _answer(model: Model, state: EngineState, chunk: Chunk, start: int, retain: Retain) -> tuple[EngineState, Chunk]:
    """The conversation's chunk without the think blocks of its last reply, which begins at token `start`.

    As it is where pages are short: the next turn then runs the answer again.
    """
    try:
        with guarded(state) as taken:
            after, kept = without_thinking(model, enter(state), chunk, start, retain, taken)
            return commit_state(after), kept
    except NanoVLLMError:
        return state, chunk


def _hidden(model: Model, asked: Conversation) -> np.ndarray | None:
    """Which tokens of the conversation's chunk are thinking to be kept, where the messages' prompt has none."""
    if asked.chunk is None or asked.retain != "all" or model.tokenizer is None:
        return None
    hidden = np.zeros(len(asked.chunk), bool)
    for begin, end in think_spans(model.tokenizer, asked.chunk.token_ids):
        hidden[begin:end] = True
    return hidden


def _continued(
    state: EngineState, chunk: Chunk | None, tokens: np.ndarray, hidden: np.ndarray | None = None
) -> tuple[EngineState, tuple[Chunk, np.ndarray] | np.ndarray]:
    """The prompt as a context over what the chunk has of it; the chunk goes, a shorter one takes its place where it has other tokens.

    `hidden` tokens of the chunk may stand in the context although the prompt lacks them.
    """
    if chunk is None:
        return state, tokens
    room = capacity(state, chunk)
    heads = [_head(chunk.token_ids, tokens, left_out) for left_out in ([None] if hidden is None else [None, hidden])]
    fitting = [(kept, shared) for kept, shared in heads if kept + len(tokens) - shared < room]
    kept, shared = max(fitting, default=(0, 0))
    if kept == len(chunk):
        return state, (chunk, tokens[shared:])
    if not kept:  # or its gaps leave too few positions
        return release(state, chunk), tokens
    state, head = truncate(state, chunk, kept)
    return release(state, chunk), (head, tokens[shared:])


def _head(token_ids: np.ndarray, tokens: np.ndarray, hidden: np.ndarray | None) -> tuple[int, int]:
    """How much of a chunk can stand before the rest of a prompt, and how many of the prompt's tokens that spares."""
    seen = np.arange(len(token_ids)) if hidden is None else np.flatnonzero(~hidden)
    both = min(len(seen), len(tokens))
    differ = np.flatnonzero(token_ids[seen[:both]] != tokens[:both])
    shared = int(differ[0]) if len(differ) else both
    # No hidden tokens at the end: what follows them may be the prompt's own form of the same.
    return (int(seen[shared - 1]) + 1 if shared else 0), shared


def run(
    model: Model,
    state: EngineState,
    params: SamplingParams,
    *,
    system: str | None = None,
    thinking: bool = True,
    retain: Retain = "recompute",
) -> int:
    """The interactive program: reads messages from stdin until its end or `/exit`. Returns the exit code."""
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
                    with noted_interrupts(every=True):  # between the turn's end and this assignment too
                        state, conversation, figures = _show_turn(model, state, conversation, text, params)
                except NanoVLLMError as error:
                    note(f"error: {error}")


def _show_turn(
    model: Model, state: EngineState, conversation: Conversation, text: str, params: SamplingParams
) -> tuple[EngineState, Conversation, Turn]:
    asked = replace(conversation, messages=(*conversation.messages, {"role": "user", "content": text}))
    tokens = render(model, asked.messages, enable_thinking=asked.thinking)
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
    if not figures.reply:  # ended before the first token: as if the message had not been sent
        answered = replace(answered, messages=conversation.messages)
    return state, answered, figures


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  (its import gives `input` editing and a history)
    except ImportError:
        return
