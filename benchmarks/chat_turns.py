"""Prompt tokens that a chat with thinking runs, turn by turn: its KV kept as a chunk, beside its history sent as text.

    python benchmarks/chat_turns.py --output benchmarks/results/chat-turns.json
    python benchmarks/chat_turns.py --model Qwen/Qwen3-0.6B --max-tokens 1000 --max-model-len 32768

Every figure is a difference of `state.stats` around the calls of a turn. Kept as a chunk, a turn is `nv.generate` with the chunk of the
last one and the new tokens; `retain` says how the reply stays without its thinking ("all": with it). As text, a turn is the whole
conversation through the chat template, which leaves the thinking of earlier turns out. It goes to one engine, which finds in its prefix
index what it can, in whole pages of 16 tokens, or each time to a new one.

The token that ends a reply is drawn and not run: a chunk runs it with the reply, text with the next prompt.
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
    """What the user says, and what the answer must name."""

    text: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: tokens of its prompt that ran, tokens run again to keep its answer, reply tokens run, tokens of the chunk after it."""

    prompt: int
    again: int
    reply: int
    held: int
    text: str
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat held in one way, as far as the context goes, and the pages at its end: a chunk's, and those that only the index has."""

    turns: tuple[Turn, ...]
    pages_held: int
    pages_index: int

    def total(self, *names: str) -> int:
        """The sum over the turns."""
        return sum(getattr(turn, name) for turn in self.turns for name in names)

    def alike(self, other: "Chat") -> int:
        """The turns whose replies are the same."""
        return sum(mine.text == its.text for mine, its in zip(self.turns, other.turns, strict=False))


def questions(count: int) -> list[Question]:
    """Sums of two numbers of two digits; the first turns tell a fact each, and every fifth turn asks for one."""
    random, asked = Random(0), []
    for turn in range(count):
        noun, name = FACTS[(turn // 5) % len(FACTS)]
        if turn % 5 == 4:
            asked.append(Question(text=f"What is the {noun} of Aistonia?", value=name))
            continue
        left, right = random.randint(11, 89), random.randint(11, 89)
        told = f"The {FACTS[turn][0]} of Aistonia is {FACTS[turn][1]}. " if turn < len(FACTS) else ""
        asked.append(Question(text=f"{told}What is {left} + {right}?", value=str(left + right)))
    return asked


def is_right(reply: str, question: Question) -> bool:
    """Whether the answer behind the thinking names the value."""
    _, closed, answer = reply.rpartition("</think>")
    return bool(closed) and re.search(rf"\b{question.value}\b", answer) is not None


def new_tokens(model: nv.Model, text: str, chunk: nv.Chunk | None) -> list[int]:
    """What a turn adds to the chunk: the end of the last answer where it is missing, the user's words, the head of the reply."""
    if chunk is None:
        return render(model.tokenizer, [{"role": "user", "content": text}])
    assert model.tokenizer is not None
    pair = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": MARK}, {"role": "user", "content": text}]
    tail = model.tokenizer.apply_chat_template(pair).partition(MARK)[2]
    tokens = model.tokenizer.encode(tail, add_special_tokens=False)
    return tokens[1:] if tokens[0] == chunk.token_ids[-1] else tokens


def limits(model: nv.Model, max_model_len: int | None) -> dict[str, Any]:
    """Options of every engine: pages for two contexts of full length, so that nothing has to be evicted in between."""
    length = min(max_model_len or model.config.max_position_embeddings, model.config.max_position_embeddings)
    plain = False if model.device.type == "cuda" else None  # what is counted is the same, and a new engine need not compile
    return {"num_pages": 2 * pages_for(length, 16), "page_size": 16, "max_model_len": length, "max_num_seqs": 1, "compile": plain}


def turn_of(before: Stats, after: Stats, question: Question, reply: str, *, held: int, own: int | None = None) -> Turn:
    """A turn from the statistics around it. `own` are the tokens given behind a chunk: what ran beyond them ran to keep the answer."""
    run = after.prefill_tokens - before.prefill_tokens
    again = 0 if own is None else max(0, run - own)
    drawn = after.decode_tokens - before.decode_tokens
    return Turn(prompt=run - again, again=again, reply=drawn, held=held, text=reply, right=is_right(reply, question))


def chat_of(state: nv.EngineState, turns: list[Turn]) -> Chat:
    """What a chat came to, with its last state."""
    report = nv.memory(state)
    return Chat(turns=tuple(turns), pages_held=report.num_held, pages_index=report.num_idle)


def kept(model: nv.Model, asked: Sequence[Question], params: nv.SamplingParams, retain: Any, options: dict[str, Any]) -> Chat:
    """The chat as calls of `nv.generate`, each over the chunk of the last; it ends where the context has no room for a turn."""
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
    """The chat as whole conversations, to one engine or each to a new one; it ends where the context has no room for a turn."""
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
    """The same questions in every way."""
    asked, options = questions(count), limits(model, max_model_len)
    params = nv.SamplingParams(temperature=0, max_tokens=max_tokens)
    chats = {way: kept(model, asked, params, way, options) for way in RETAINED}
    return chats | {way: texted(model, asked, params, way == "reuse", options) for way in TEXT}


def table(chats: dict[str, Chat], count: int) -> str:
    """Turn by way, and what each way came to."""

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
    """A chat for the record, beside the one whose history is run anew."""
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
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="one with think tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128, help="of a reply with its thinking")
    parser.add_argument("--max-model-len", type=int, help="tokens of the context (default: the model's)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.turns < 1:
        parser.error("--turns must be at least 1")
    model = nv.load_model(options.model, device=options.device)
    if model.tokenizer is None or model.tokenizer.think_token_ids is None:
        parser.error(f"{model.name} has no think tokens")
    chats = measure(model, options.turns, max_tokens=options.max_tokens, max_model_len=options.max_model_len)
    print(table(chats, options.turns))
    command = f"python benchmarks/chat_turns.py --model {options.model} --turns {options.turns} --max-tokens {options.max_tokens}"
    result = record(model, {"page_size": 16, "ways": {way: figures(chat, chats["anew"]) for way, chat in chats.items()}}, command)
    if options.output:
        text = json.dumps(result, indent=2)
        options.output.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
