"""The conditions under which a question is asked: after a full prefill, without context, and after each kind of reused KV."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from nanovllm.engine.prompt import encode
from nanovllm.entrypoints.cli.eval_reuse.facts import Fact
from nanovllm.entrypoints.cli.eval_reuse.measure import Context, Engine, Question, Reading, Reference, compare, refer, text_of
from nanovllm.entrypoints.cli.eval_reuse.report import FULL, GUESSED
from nanovllm.entrypoints.cli.eval_reuse.settings import Settings
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk

Mode = Literal["recompute", "shift", "gap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of questions, which becomes one row per method, and the two engines that answer them."""

    model: Model
    reference: Engine
    reuse: Engine
    experiment: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """The two engines, the settings, and `moved`, which advances the progress bar by a number of questions."""

    model: Model
    reference: Engine
    reuse: Engine
    settings: Settings
    moved: Callable[[int], Any]

    def group(self, experiment: str, name: str) -> Group:
        """A group of questions for the two engines."""
        return Group(model=self.model, reference=self.reference, reuse=self.reuse, experiment=experiment, name=name)

    def random(self, *names: object) -> Random:
        """A random generator that depends on the seed and on `names`."""
        return Random("/".join(map(str, (self.settings.seed, *names))))

    def batches(self, size: int) -> Iterator[int]:
        """Split the questions of a group into batches of at most `size`. Yields the size of each, and advances the progress bar."""
        for done in range(0, self.settings.questions, size):
            count = min(size, self.settings.questions - done)
            yield count
            self.moved(count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """A chunk made from reused KV, the number of tokens that ran for it, and their cost as in `Reading`."""

    method: str
    chunk: Chunk
    tokens_run: int
    cost: int | float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Tokens that follow a context, and their span `[start, stop)` that is dropped after the prefill."""

    token_ids: list[int]
    start: int
    stop: int


def completed(model: Model, facts: Seq[Fact], lead: str) -> list[Question]:
    """A question for each fact: `lead`, then the beginning of a sentence that the value completes."""
    return [Question(token_ids=encode(model, lead + fact.beginning, first=False).tolist(), value=fact.value) for fact in facts]


def referred(group: Group, token_ids: list[int], questions: Seq[Question]) -> tuple[list[Reference], list[Reading]]:
    """Ask the questions after a full prefill of `token_ids`, and without any context."""
    chunk = group.reference.prefill(token_ids)
    references, readings = asked(group, chunk, questions)
    group.reference.release(chunk)
    return references, [*readings, *guessed(group, questions, len(token_ids))]


def asked(group: Group, chunk: Chunk, questions: Seq[Question]) -> tuple[list[Reference], list[Reading]]:
    """Ask the questions after an exact chunk of the reference engine. All its tokens count as run."""
    references, readings = refer(group.reference, chunk, questions), []
    for reference in references:
        total = len(chunk) + len(reference.question.token_ids)
        right = reference.question.right(text_of(group.model, reference.reply))
        readings.append(
            Reading(
                experiment=group.experiment, group=group.name, method=FULL, right=right, tokens_run=total, tokens_full=total, cost=total
            )
        )
    return references, readings


def guessed(group: Group, questions: Seq[Question], num_tokens: int) -> list[Reading]:
    """Ask the questions without the `num_tokens` tokens of context that contain the answers."""
    readings = []
    replies = group.reference.replies([Context(token_ids=question.token_ids) for question in questions])
    for question, reply in zip(questions, replies, strict=True):
        count = len(question.token_ids)
        readings.append(
            Reading(experiment=group.experiment, group=group.name, method=GUESSED, right=question.right(reply.text), tokens_run=count,
                    tokens_full=num_tokens + count, cost=count)
        )  # fmt: skip
    return readings


def compared(group: Group, ways: Seq[Way], references: Seq[Reference]) -> list[Reading]:
    """Ask the questions after each chunk, then release the chunk.

    Call it with approximate chunks first, and with exact chunks of the same tokens in a later call. The KV of exact chunks enters the
    prefix index, and questions after approximate chunks would reuse it.
    """
    readings = []
    for way, comparisons in zip(ways, compare(group.reuse, [way.chunk for way in ways], references), strict=True):
        for reference, comparison in zip(references, comparisons, strict=True):
            count = len(reference.question.token_ids)
            readings.append(
                Reading(
                    experiment=group.experiment, group=group.name, method=way.method, right=comparison.right, kl=comparison.kl,
                    diverged_at=comparison.diverged_at, tokens_run=way.tokens_run + count, tokens_full=len(way.chunk) + count,
                    cost=way.cost + count,
                )
            )  # fmt: skip
        group.reuse.release(way.chunk)
    return readings


def trimmed(group: Group, segments: Seq[Segment], references: Seq[Reference]) -> list[Reading]:
    """Prefill the segments one after another, drop the span of each, and ask the questions; once for each mode of `drop`."""
    approximate: tuple[Mode, ...] = ("shift", "gap")
    readings = compared(group, [_trimmed_by(group.reuse, segments, mode) for mode in approximate], references)
    return [*readings, *compared(group, [_trimmed_by(group.reuse, segments, "recompute")], references)]


def _trimmed_by(engine: Engine, segments: Seq[Segment], mode: Mode) -> Way:
    chunk, run = None, 0
    for segment in segments:
        length = 0 if chunk is None else len(chunk)
        whole = engine.prefill(segment.token_ids, chunk)
        after, more = engine.drop(whole, length + segment.start, length + segment.stop, mode)
        engine.release(whole, *([] if chunk is None else [chunk]))
        chunk, run = after, run + more
    assert chunk is not None
    return Way(method=mode, chunk=chunk, tokens_run=run, cost=run)
