"""The same questions to two engines: one reuses KV, the other never does. The difference is the loss from reuse."""

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from nanovllm.chunks.compose import PROBED, compose, drop
from nanovllm.chunks.generate import generate_many
from nanovllm.chunks.generation import Generation
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.session import begin, commit
from nanovllm.engine.init_state import init_state
from nanovllm.executor.decode import decode_step
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.types import Float, Tensor

BATCH = 24  # rows of a decode batch
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A question after a context, as token ids.

    A right reply begins with `value`. With `anywhere`, it contains `value` anywhere in its first line.
    """

    token_ids: list[int]
    value: str
    anywhere: bool = False

    def right(self, reply: str) -> bool:
        """Whether the reply names the value, as whole words."""
        line = reply.strip().split("\n")[0]
        pattern = rf"(?<!\w){re.escape(self.value)}(?!\w)"
        return (re.search if self.anywhere else re.match)(pattern, line) is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """A question after a full prefill: the greedy reply, and the logits `[n, V]` after every token of question and reply but the last."""

    question: Question
    reply: list[int]
    logits: Float[Tensor, "n V"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """The tokens of a question after a chunk, or without context."""

    chunk: Chunk | None = None
    token_ids: list[int]

    def parts(self, stop: int | None = None) -> list[Any]:
        """The context as a list for the engine, with the question up to token `stop`."""
        question = self.token_ids[:stop]
        return [question] if self.chunk is None else [self.chunk, question]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A question after reused KV, compared with its reference. `Reading` explains the fields."""

    right: bool
    kl: float
    diverged_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One question with one method.

    Attributes:
        experiment: The name of the experiment.
        group: The group of questions.
        method: The method of reuse.
        right: Whether the reply is right.
        kl: KL divergence from the full prefill in nats, the mean over the tokens of question and reference reply; None if not compared.
        diverged_at: The first token of the reply that differs from the full prefill's; None if none differs, or if not compared.
        tokens_run: Tokens of context and question that ran through the model.
        tokens_full: All tokens of context and question.
        cost: `tokens_run` plus the work of a choice by deviation, in tokens through all layers.
    """

    experiment: str
    group: str
    method: str
    right: bool
    kl: float | None = None
    diverged_at: int | None = None
    tokens_run: int
    tokens_full: int
    cost: int | float


def kl_divergence(reference: Float[Tensor, "n V"], other: Float[Tensor, "n V"]) -> float:
    """KL(reference || other) of the next-token distributions in nats, the mean over the n positions, computed in float64."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class Engine:
    """An engine for measurements: it keeps its state, and its calls also return how many tokens ran."""

    def __init__(self, model: Model, reply_len: int, **limits: Any):
        self.model, self.state = model, init_state(model, **limits)
        self.greedy = SamplingParams(temperature=0, max_tokens=reply_len)

    @property
    def num_run(self) -> int:
        """Prompt tokens run since the start of the engine."""
        return self.state.stats.prefill_tokens

    def prefill(self, token_ids: Seq[int], after: Chunk | None = None) -> Chunk:
        """Prefill tokens after a chunk, or as a new chunk. Returns the new chunk."""
        self.state, chunk = prefill(self.model, self.state, list(token_ids), after)
        return chunk

    def compose(self, chunks: list[Chunk], recompute: int | float | Literal["all"]) -> tuple[Chunk, int, float]:
        """Compose chunks. Returns the new chunk, the tokens that ran, and the cost.

        A choice by deviation also runs the first layers over all moved tokens; the cost includes that work.
        """
        before = self.state.stats
        self.state, whole = compose(self.model, self.state, chunks, recompute)
        run, layers = self.num_run - before.prefill_tokens, self.model.config.num_layers
        return whole, run, run + (self.state.stats.probed_tokens - before.probed_tokens) * min(PROBED, layers) / layers

    def drop(self, chunk: Chunk, start: int, stop: int, mode: Literal["recompute", "shift", "gap"]) -> tuple[Chunk, int]:
        """Drop a span of a chunk. Returns the new chunk and the number of tokens that ran."""
        before = self.num_run
        self.state, kept = drop(self.model, self.state, chunk, start, stop, mode)
        return kept, self.num_run - before

    def generate(self, contexts: list[list[Any]], params: SamplingParams | None = None) -> list[Generation]:
        """Generate a reply to each context, greedy by default."""
        self.state, generations = generate_many(self.model, self.state, contexts, params or self.greedy)
        return generations

    def replies(self, contexts: Seq[Context]) -> list[Generation]:
        """Generate a greedy reply to each context, and release the chunks."""
        generations = []
        for some in _batches(contexts):
            generations += self.generate([context.parts() for context in some])
        self.release(*(generation.chunk for generation in generations))
        return generations

    def logits(self, contexts: Seq[Context], replies: Seq[list[int]]) -> list[Float[Tensor, "n V"]]:
        """The logits after every token of each question and its given reply, but the last token."""
        rows = [context.token_ids + reply for context, reply in zip(contexts, replies, strict=True)]
        return [logits for some in _batches(list(zip(contexts, rows, strict=True))) for logits in self._logits(some)]

    def _logits(self, some: Seq[tuple[Context, list[int]]]) -> list[Float[Tensor, "n V"]]:
        longest = max(len(row) for _, row in some)
        padded = torch.tensor([row + [0] * (longest - len(row)) for _, row in some], dtype=torch.int32, device=self.model.device)
        begun = [context.parts(stop=1) for context, _ in some]
        self.state, carry = begin(self.model, self.state, begun, self.greedy, room=longest - 1)
        steps = []
        with torch.no_grad():
            for place in range(1, longest):
                carry, out = decode_step(self.model.params, carry, self.model.config, token_ids=padded[:, place])
                steps.append(out.logits)
        self.state, generations = commit(self.model, self.state, carry)
        self.release(*(generation.chunk for generation in generations))
        return [torch.stack([logits[i] for logits in steps[: len(row) - 1]]) for i, (_, row) in enumerate(some)]

    def release(self, *chunks: Chunk) -> None:
        """Release chunks."""
        for chunk in chunks:
            self.state = release(self.state, chunk)


def refer(engine: Engine, chunk: Chunk, questions: Seq[Question]) -> list[Reference]:
    """Ask the questions after an exact chunk. Returns a reference for each."""
    contexts = [Context(chunk=chunk, token_ids=question.token_ids) for question in questions]
    replies = [generation.token_ids for generation in engine.replies(contexts)]
    logits = engine.logits(contexts, replies)
    return [Reference(question=q, reply=r, logits=each) for q, r, each in zip(questions, replies, logits, strict=True)]


def compare(engine: Engine, chunks: Seq[Chunk], references: Seq[Reference]) -> list[list[Comparison]]:
    """Ask the same questions after other chunks of the same tokens. Returns, for each chunk, a comparison with each reference.

    A greedy reply equals the reference up to the first token that differs. The logits after the reference's tokens show this token, so
    only replies that differ are generated. The exact KV of the same tokens must not be in the engine's prefix index, or it would be
    reused.
    """
    asked = [(chunk, reference) for chunk in chunks for reference in references]
    contexts = [Context(chunk=chunk, token_ids=reference.question.token_ids) for chunk, reference in asked]
    logits = engine.logits(contexts, [reference.reply for _, reference in asked])
    places = [_diverged_at(reference, mine) for (_, reference), mine in zip(asked, logits, strict=True)]
    others = iter(engine.replies([context for context, place in zip(contexts, places, strict=True) if place is not None]))
    comparisons = []
    for (_, reference), mine, place in zip(asked, logits, places, strict=True):
        reply = reference.reply if place is None else next(others).token_ids
        right = reference.question.right(text_of(engine.model, reply))
        comparisons.append(Comparison(right=right, kl=kl_divergence(reference.logits, mine), diverged_at=place))
    return [comparisons[at : at + len(references)] for at in range(0, len(comparisons), len(references))]


def text_of(model: Model, token_ids: Seq[int]) -> str:
    """The text of a reply."""
    return "" if model.tokenizer is None else model.tokenizer.decode(list(token_ids))


def _diverged_at(reference: Reference, logits: Float[Tensor, "n V"]) -> int | None:
    reply = torch.tensor(reference.reply, device=logits.device)
    differ = (logits[-len(reply) :].argmax(-1) != reply).nonzero()
    return int(differ[0]) if len(differ) else None


def _batches(items: Seq[T]) -> list[Seq[T]]:
    return [items[at : at + BATCH] for at in range(0, len(items), BATCH)]
