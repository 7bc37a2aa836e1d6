"""Answer questions about documents: `python examples/rag.py [--documents FOLDER] [--store FOLDER] [QUESTION ...]`.

Each passage runs once and becomes a chunk, in the store also for the next start. For a question the chunks of the passages that fit best
are put together without running the model; only the question runs. Such a context is approximate, because no passage has read the one
before it: `--recompute N` runs the first N tokens of each again.
"""

import argparse
import math
import re
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import nanovllm as nv

EXAMPLE = """\
The king of Aistonia is Oswin. The capital of Aistonia is Velmora.

The home town of Otto is Halden. Otto is 47 years old. The favourite sport of Otto is rowing.

The king of Brumland is Harald. The capital of Brumland is Tessin.

Ruth is 12 years old. The favourite sport of Ruth is chess. The home town of Ruth is Velmora.

The king of Celvaria is Lucan. The capital of Celvaria is Morvane.
"""
QUESTIONS = ("Who is the king of Brumland?", "What is the favourite sport of Ruth?", "What is the capital of Celvaria?", "How old is Otto?")


class Retriever:
    """BM25 over passages."""

    def __init__(self, passages: list[str], k: float = 1.5, b: float = 0.75) -> None:
        self.bags, self.k, self.b = [Counter(words(text)) for text in passages], k, b
        self.common = Counter(word for bag in self.bags for word in bag)
        self.mean = sum(bag.total() for bag in self.bags) / len(self.bags)

    def best(self, question: str, count: int) -> list[int]:
        """The places of the passages that fit best, the best one last: next to the question."""
        return sorted(range(len(self.bags)), key=lambda place: self.score(question, place))[-count:]

    def score(self, question: str, place: int) -> float:
        """How well a passage fits."""
        bag, total = self.bags[place], 0.0
        for word in set(words(question)) & bag.keys():
            rarity = math.log(1 + (len(self.bags) - self.common[word] + 0.5) / (self.common[word] + 0.5))
            total += rarity * bag[word] * (self.k + 1) / (bag[word] + self.k * (1 - self.b + self.b * bag.total() / self.mean))
        return total


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def passages_of(folder: Path | None) -> list[str]:
    """The paragraphs of all text files of a folder."""
    texts = [EXAMPLE] if folder is None else [path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".md")]
    return [part.strip() for text in texts for part in re.split(r"\n\s*\n", text) if part.strip()]


def library(model: nv.Model, state: nv.EngineState, passages: list[str], store: nv.ChunkStore) -> tuple[nv.EngineState, list[nv.Chunk]]:
    """A chunk for each passage, from the store if it is there. A passage begins with a paragraph break, so that no line is cut."""
    assert model.tokenizer is not None
    chunks = []
    for text in passages:
        tokens = model.tokenizer.encode(f"\n\n{text}", add_special_tokens=False)
        state, chunk = store.load(model, state, tokens)
        if chunk is None:
            state, chunk = nv.prefill(model, state, tokens)
            store.save(state, chunk)
        chunks.append(chunk)
    return state, chunks


def main() -> None:
    """Answer the questions, and print where the answers are from and what ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--documents", type=Path, help="a folder of .txt and .md files (default: five passages)")
    parser.add_argument("--store", help="a folder for the chunks (default: a new one, for this run)")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--passages", type=int, default=2, help="how many passages go before a question")
    parser.add_argument("--recompute", type=int, default=0)
    options = parser.parse_args()

    model = nv.load_model(options.model)
    state = nv.init_state(model, num_pages=1024)
    passages = passages_of(options.documents)
    state, chunks = library(model, state, passages, nv.ChunkStore(options.store or mkdtemp(), max_bytes=10**9))
    print(f"{len(passages)} passages of {sum(map(len, chunks))} tokens, of which {state.stats.prefill_tokens} ran")
    retriever, before = Retriever(passages), state.stats.prefill_tokens
    for question in options.question:
        places = retriever.best(question, options.passages)
        state, context = nv.compose(model, state, [chunks[place] for place in places], recompute=options.recompute)
        state, reply = nv.generate(model, state, [context, f"\n\n{question}\n"], nv.SamplingParams(temperature=0, max_tokens=48, stop="\n"))
        print(f"{question} {reply.text.strip()}\n    from {passages[places[-1]][:60]!r}, {context.provenance}")
        for used in (context, reply.chunk):
            state = nv.release(state, used)
    print(f"{state.stats.prefill_tokens - before} prompt tokens ran for {len(options.question)} questions")


if __name__ == "__main__":
    main()
