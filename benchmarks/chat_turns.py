"""Count the prompt tokens per turn of a chat with thinking, with its KV kept as a chunk or its history sent as text.

    python benchmarks/chat_turns.py --output benchmarks/results/chat-turns.json
    python benchmarks/chat_turns.py --model Qwen/Qwen3-0.6B --max-tokens 1000 --max-model-len 32768

Each number is a difference of `state.stats` before and after the calls of a turn.

With a chunk, a turn calls `nv.generate` with the previous turn's chunk and the new tokens. `retain` says how the reply is kept without its
thinking; "all" keeps the thinking.

As text, a turn sends the whole conversation through the chat template, which leaves out the thinking of earlier turns. Either one engine
gets all turns and reuses its prefix index, in whole pages of 16 tokens. Or each turn gets a new engine.

The last token of a reply is sampled but not run. With a chunk it runs together with the reply, as text with the next prompt.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.state.engine_state import Stats
from nanovllm.state.kv_cache import pages_for
from nanovllm.tokenizer.messages import render

RETAINED, TEXT = ("shift", "gap", "recompute", "all"), ("reuse", "anew")
HEADINGS = {"recompute": "recompute (again)", "reuse": "text, prefix reused", "anew": "text, run anew"}
FACTS = (("capital", "Velmora"), ("king", "Oswin"), ("currency", "Taler"), ("language", "Ostrian"))
MARK = "An answer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The user's words, and the value that the answer must contain."""

    text: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a chat.

    Attributes:
        prompt: Prompt tokens that ran.
        again: Tokens that ran again to keep the answer.
        reply: Reply tokens that ran.
        held: Tokens of the chunk after the turn.
        text: The reply.
        right: Whether the answer is right.
    """

    prompt: int
    again: int
    reply: int
    held: int
    text: str
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat in one way, up to the end of the context. `pages_held` and `pages_index` are the chunk's pages and the index's at its end."""

    turns: tuple[Turn, ...]
    pages_held: int
    pages_index: int

    def total(self, *names: str) -> int:
        """Return the sum of these fields over all turns."""
        return sum(getattr(turn, name) for turn in self.turns for name in names)

    def alike(self, other: "Chat") -> int:
        """Return the number of turns with equal replies."""
        return sum(mine.text == its.text for mine, its in zip(self.turns, other.turns, strict=False))


def questions(count: int) -> list[Question]:
    """Return questions: sums of two numbers of two digits. The first turns also state a fact each, and every fifth turn asks for a fact."""
    random, asked = Random(0), []
    for turn in range(count):
        noun, name = FACTS[(turn // 5) % len(FACTS)]
        if turn % 5 == 4:
            asked.append(Question(text=f"What is the {noun} of Aistonia?", value=name))
            continue
        left, right = random.randint(11, 89), random.randint(11, 89)
        fact = f"The {FACTS[turn][0]} of Aistonia is {FACTS[turn][1]}. " if turn < len(FACTS) else ""
        asked.append(Question(text=f"{fact}What is {left} + {right}?", value=str(left + right)))
    return asked


def is_right(reply: str, question: Question) -> bool:
    """Return whether the answer after the thinking contains the value."""
    _, closed, answer = reply.rpartition("</think>")
    return bool(closed) and re.search(rf"\b{question.value}\b", answer) is not None


def new_tokens(model: nv.Model, text: str, chunk: nv.Chunk | None) -> list[int]:
    """Return the tokens that a turn adds to the chunk: the last answer's end if it is missing, the user's words, the reply's header."""
    if chunk is None:
        return render(model.tokenizer, [{"role": "user", "content": text}])
    assert model.tokenizer is not None
    pair = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": MARK}, {"role": "user", "content": text}]
    tail = model.tokenizer.apply_chat_template(pair).partition(MARK)[2]
    tokens = model.tokenizer.encode(tail, add_special_tokens=False)
    return tokens[1:] if tokens[0] == chunk.token_ids[-1] else tokens


def limits(model: nv.Model, max_model_len: int | None) -> dict[str, Any]:
    """Return the options of all engines: pages for two contexts of full length, so that no page is evicted."""
    length = min(max_model_len or model.config.max_position_embeddings, model.config.max_position_embeddings)
    plain = False if model.device.type == "cuda" else None  # the counts are the same, and new engines need not compile
    return {"num_pages": 2 * pages_for(length, 16), "page_size": 16, "max_model_len": length, "max_num_seqs": 1, "compile": plain}


def turn_of(before: Stats, after: Stats, question: Question, reply: str, *, held: int, own: int | None = None) -> Turn:
    """Return a turn from the statistics before and after it.

    `own` is the number of tokens given after a chunk. Further prompt tokens ran to keep the answer.
    """
    run = after.prefill_tokens - before.prefill_tokens
    again = 0 if own is None else max(0, run - own)
    drawn = after.decode_tokens - before.decode_tokens
    return Turn(prompt=run - again, again=again, reply=drawn, held=held, text=reply, right=is_right(reply, question))


def chat_of(state: nv.EngineState, turns: list[Turn]) -> Chat:
    """Return the chat of these turns, with the pages of its last state."""
    report = nv.memory(state)
    return Chat(turns=tuple(turns), pages_held=report.num_held, pages_index=report.num_idle)


def kept(model: nv.Model, asked: Sequence[Question], params: nv.SamplingParams, retain: Any, options: dict[str, Any]) -> Chat:
    """Run the chat as calls of `nv.generate`, each with the previous chunk, until the context has no room for a turn."""
    state, chunk, turns = nv.init_state(model, **options), None, []
    for question in asked:
        words, before = new_tokens(model, question.text, chunk), state.stats
        try:
            state, reply = nv.generate(model, state, words if chunk is None else [chunk, words], params, retain=retain)
        except nv.InvalidRequestError:
            break
        state = state if chunk is None else nv.release(state, chunk)
        chunk = reply.chunk
        turns.append(turn_of(before, state.stats, question, reply.text, held=len(chunk), own=len(words)))
    return chat_of(state, turns)


def texted(model: nv.Model, asked: Sequence[Question], params: nv.SamplingParams, reuse: bool, options: dict[str, Any]) -> Chat:
    """Run the chat as whole conversations, in one engine or in a new engine per turn, until the context has no room for a turn."""
    llm, messages, turns = nv.LLM(model, **options), [], []
    for question in asked:
        llm = llm if reuse else nv.LLM(model, **options)
        messages.append({"role": "user", "content": question.text})
        before = llm.state.stats
        try:
            reply = llm.chat(messages, params)
        except nv.InvalidRequestError:
            break
        messages.append({"role": "assistant", "content": reply.text})
        turns.append(turn_of(before, llm.state.stats, question, reply.text, held=0))
    return chat_of(llm.state, turns)


def measure(model: nv.Model, count: int, *, max_tokens: int = 128, max_model_len: int | None = None) -> dict[str, Chat]:
    """Ask the same questions in every way."""
    asked, options = questions(count), limits(model, max_model_len)
    params = nv.SamplingParams(temperature=0, max_tokens=max_tokens)
    chats = {way: kept(model, asked, params, way, options) for way in RETAINED}
    return chats | {way: texted(model, asked, params, way == "reuse", options) for way in TEXT}


def table(chats: dict[str, Chat], count: int) -> str:
    """Return a table with a row per turn and a column per way, and the totals of each way."""

    def ran(way: str, prompt: int, again: int) -> str:
        return f"{prompt:,} ({again:,})" if way == "recompute" else f"{prompt + again:,}"

    def line(name: str, cell: Callable[[str, Chat], str]) -> list[str]:
        return [name, *(cell(way, chat) for way, chat in chats.items())]

    def of_turn(at: int) -> Callable[[str, Chat], str]:
        return lambda way, chat: ran(way, chat.turns[at].prompt, chat.turns[at].again) if at < len(chat.turns) else "no room"

    rows = [["turn", *(HEADINGS.get(way, way) for way in chats)], *(line(str(at + 1), of_turn(at)) for at in range(count))]
    rows += [
        line("prompt tokens run", lambda way, chat: ran(way, chat.total("prompt"), chat.total("again"))),
        line("a turn", lambda way, chat: f"{chat.total('prompt', 'again') / max(1, len(chat.turns)):.1f}"),
        line("reply tokens run", lambda way, chat: f"{chat.total('reply'):,}"),
        line("right answers", lambda way, chat: f"{chat.total('right')} of {count}"),
        line("replies as run anew", lambda way, chat: f"{chat.alike(chats['anew'])} of {count}"),
        line("tokens held", lambda way, chat: f"{chat.turns[-1].held if chat.turns else 0:,}"),
        line("pages held", lambda way, chat: f"{chat.pages_held}"),
        line("pages in the index", lambda way, chat: f"{chat.pages_index}"),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *rest = widths
    lines = [row[0].ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], rest, strict=True)) for row in rows]
    return "\n".join([lines[0], *lines[1 : count + 1], "", *lines[count + 1 :]])


def figures(chat: Chat, anew: Chat) -> dict[str, Any]:
    """Return the numbers of a chat for the JSON file; `anew` is the chat with a new engine per turn, for comparison."""
    run = chat.total("prompt", "again")
    return {
        "prompt_tokens_run": run,
        "of_these_again": chat.total("again"),
        "prompt_tokens_a_turn": round(run / max(1, len(chat.turns)), 1),
        "reply_tokens_run": chat.total("reply"),
        "turns": len(chat.turns),
        "right": chat.total("right"),
        "replies_as_run_anew": chat.alike(anew),
        "tokens_held": chat.turns[-1].held if chat.turns else 0,
        "pages_held": chat.pages_held,
        "pages_only_in_the_index": chat.pages_index,
        "prompt": [turn.prompt for turn in chat.turns],
        "again": [turn.again for turn in chat.turns],
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model with think tokens (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=20, help="number of turns (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per reply, thinking included (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, help="tokens of the context (default: the model's)")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    if options.turns < 1:
        parser.error(f"--turns must be at least 1, got {options.turns}")
    model = nv.load_model(options.model, device=options.device)
    if model.tokenizer is None or model.tokenizer.think_token_ids is None:
        parser.error(f"{model.name} has no think tokens; choose a model whose tokenizer has them")
    chats = measure(model, options.turns, max_tokens=options.max_tokens, max_model_len=options.max_model_len)
    print(table(chats, options.turns))
    command = f"python benchmarks/chat_turns.py --model {options.model} --turns {options.turns} --max-tokens {options.max_tokens}"
    result = record(model, {"page_size": 16, "ways": {way: figures(chat, chats["anew"]) for way, chat in chats.items()}}, command)
    if options.output:
        text = json.dumps(result, indent=2)
        options.output.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
