"""`nanovllm memory`: fill the pages of an engine with texts, chunk files or a demonstration, and show the owners of the pages."""

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

import torch

from nanovllm.chunks.compose import compose, drop
from nanovllm.chunks.generate import generate_many
from nanovllm.chunks.handles import fork, release, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.storage.file import load_chunk
from nanovllm.engine.init_state import init_state
from nanovllm.engine.requests import submit
from nanovllm.engine.step import step
from nanovllm.entrypoints.arguments import kept_kv
from nanovllm.entrypoints.cli.load import load
from nanovllm.entrypoints.display.terminal import is_terminal, note
from nanovllm.entrypoints.memory.report import memory
from nanovllm.entrypoints.outputs import require_output, write
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState

Named: TypeAlias = "dict[str, Chunk | int]"
DESCRIPTION = """\
Fill pages of KV memory with a text and its continuations, or with chunk files, and show the owners of the pages. The report has
figures, a map with one character per page, and the tree of shared prefixes. Without a text and without --load, a demonstration runs.
It has a system prompt, questions, a fork, a truncated chunk, a chunk with a gap, and a composed chunk. It also has pages that only the
prefix index holds, a running request and a waiting request."""
NUM_PAGES, DEMO_PAGES = 256, 96
SYSTEM = (
    "You are the guide of an old harbour town by the sea. The town is Velmora, and it is the capital of Aistonia. The king of Aistonia is "
    "Oswin. The ships come in the morning with fish, salt and apples, and they leave in the evening with cloth and honey. The market "
    "is behind the church, the baker lives next to the mill, and the lamp on the tower burns all night. Be kind. "
)
QUESTIONS = ("Who is the king of Aistonia?", "What is the capital of Aistonia?", "What do the ships bring in the morning?")
NOTES = "A note on the weather: in autumn the wind comes from the north, the sea is rough, and the small boats stay in the harbour. "
GREETING = "A greeting for guests: be welcome in the town, have some bread, and tell us where you come from and what you have seen there."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm memory`, without the options of the model."""
    parser.add_argument("text", nargs="?", help="the prefix that all branches share, for example a system prompt")
    parser.add_argument("--branch", action="append", default=[], metavar="TEXT", help="a continuation of the text; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="generate up to N tokens after every branch (default: 0)")
    parser.add_argument("--load", action="append", default=[], type=Path, metavar="FILE", help="load a chunk file; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="also draw the report as an SVG picture")


def run(options: argparse.Namespace) -> int:
    """Run `nanovllm memory`. Returns the exit code. Raises `InvalidRequestError` for options that contradict each other."""
    if options.branch and options.text is None:
        raise InvalidRequestError("--branch continues a text: give the text too")
    if options.max_tokens < 0:
        raise InvalidRequestError(f"--max-tokens {options.max_tokens} must be at least 0")
    if options.out is not None and options.out.suffix != ".svg":
        raise InvalidRequestError(f"--out {options.out}: the picture is an SVG file; give a name that ends with .svg")
    require_output(options.out)
    model = load(options)
    shows_demo = options.text is None and not options.load
    num_pages = options.num_pages if options.num_pages is not None else DEMO_PAGES if shows_demo else NUM_PAGES
    limits = {"num_frames": options.num_frames, "max_model_len": options.max_model_len, "kv_dtype": options.kv_dtype}
    state = init_state(model, num_pages=num_pages, **kept_kv(options), **limits, compile=False)
    if shows_demo:
        state, names = demonstration(model, state)
    else:
        state, names = loaded(model, state, options.load)
        if options.text is not None:
            state, more = branches(model, state, options.text, options.branch, options.max_tokens)
            names |= more
    report = memory(state, names=names)
    if options.out is not None:
        write(options.out, report.svg())
    print(report.text(color=is_terminal(sys.stdout)))
    if options.out is not None:
        note(f"the picture is in {options.out}")
    return 0


def branches(model: Model, state: EngineState, text: str, more: list[str], max_tokens: int) -> tuple[EngineState, Named]:
    """Prefill the text and every branch, with a reply of up to `max_tokens` tokens. Returns the state and the chunks by name."""
    state, trunk = prefill(model, state, text)
    named: Named = {_quoted("text", text): trunk}
    contexts = [[trunk, part] for part in more]
    if max_tokens:
        state, gens = generate_many(model, state, contexts, SamplingParams(temperature=0, max_tokens=max_tokens))
        return state, named | {_quoted(f"branch {i + 1}", part): gen.chunk for i, (part, gen) in enumerate(zip(more, gens, strict=True))}
    for i, part in enumerate(more):
        state, named[_quoted(f"branch {i + 1}", part)] = prefill(model, state, part, after=trunk)
    return state, named


def loaded(model: Model, state: EngineState, files: list[Path]) -> tuple[EngineState, Named]:
    """Load chunk files. Chunks with a common prefix share its pages. Returns the state and the chunks by name."""
    named: Named = {}
    for i, path in enumerate(files):
        again = files[:i].count(path)
        state, named[f"{path} ({again + 1})" if again else str(path)] = load_chunk(model, state, path)
    return state, named


@torch.no_grad()
def demonstration(model: Model, state: EngineState) -> tuple[EngineState, Named]:
    """Fill pages in every way that the report shows. Returns the state, and the chunks and request numbers by name."""
    size, greedy = state.config.page_size, SamplingParams(temperature=0, max_tokens=2 * state.config.page_size, ignore_eos=True)
    state, system = prefill(model, state, SYSTEM)
    state, notes = prefill(model, state, NOTES)
    state, gens = generate_many(model, state, [[system, text] for text in QUESTIONS], greedy)
    first, second, third = (gen.chunk for gen in gens)
    state, twin = fork(state, first)
    state, short = truncate(state, second, len(second) - size)
    state, gap = drop(model, state, third, size, 4 * size, mode="gap")
    state, both = compose(model, state, [system, notes])
    state, gone = prefill(model, state, GREETING, after=system)
    state = release(state, gone)
    state, running = submit(model, state, [system, "Where is the market?"], greedy)
    for _ in range(size):
        state, _ = step(model, state)
    state, waiting = submit(model, state, [system, "Where does the baker live?"], greedy)
    return state, {
        "system prompt": system,
        "weather": notes,
        "question 1": first,
        "question 2": second,
        "question 3": third,
        "fork of question 1": twin,
        "question 2, cut": short,
        "question 3, with a gap": gap,
        "system prompt + weather": both,
        "question 4": running,
        "question 5": waiting,
    }


def _quoted(name: str, text: str, most: int = 24) -> str:
    line = " ".join(text.split())
    return f"{name} '{line if len(line) <= most else line[: most - 3] + '...'}'"
