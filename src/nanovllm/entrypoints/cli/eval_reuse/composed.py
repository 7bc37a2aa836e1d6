"""Passages filled alone and composed behind a heading, then asked about; and how much hangs on where they are cut."""

import json
from dataclasses import dataclass

from nanovllm.engine.prompt import encode
from nanovllm.entrypoints.cli.eval_reuse.conditions import Bench, Group, Way, compared, completed, referred
from nanovllm.entrypoints.cli.eval_reuse.facts import PARAGRAPH, Passages, alone, leaning
from nanovllm.entrypoints.cli.eval_reuse.measure import Reading
from nanovllm.entrypoints.cli.eval_reuse.settings import Recompute, Settings

ALONE = "chunks composed, each understood alone"
LEANING = "chunks composed, every second leaning on the one before"
SEPARATED = "recall of two chunks composed, by what parts them"
AMOUNTS: tuple[Recompute, ...] = (0, 8)  # what is run again where the separators are compared
QUESTIONS = 8  # after one context, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Two passages of `facts` parted by `separator`, which goes with what stands behind it, or `behind` what stands before it.

    `leans`: the second passage leans on the first, behind a space; otherwise both stand alone.
    """

    facts: int
    separator: str
    behind: bool
    leans: bool = False

    @property
    def name(self) -> str:
        """The group of questions in words."""
        told = "leaning" if self.leans else f"{self.facts} fact{'s' if self.facts > 1 else ''} a chunk"
        return f"{told}, {json.dumps(' ' if self.leans else self.separator)} {'behind' if self.behind else 'before'}"


def cuts(settings: Settings) -> list[Cut]:
    """What is compared: each separator before a chunk and behind it, in short chunks and longer ones, and both cuts where a chunk leans."""
    sizes, sides = dict.fromkeys((1, settings.facts)), (False, True)
    plain = [Cut(facts=facts, separator=part, behind=behind) for facts in sizes for behind in sides for part in settings.separators]
    return [*plain, *(Cut(facts=settings.facts, separator=PARAGRAPH, behind=behind, leans=True) for behind in sides)]


def composed(bench: Bench) -> list[Reading]:
    """The two experiments, with the separator of the settings before every chunk."""
    readings, settings = [], bench.settings
    for experiment, drawn, share in ((ALONE, alone, 1), (LEANING, leaning, 2)):
        for count in settings.chunks:
            random, group = bench.random(experiment, count), bench.group(experiment, f"{count} chunks")
            for questions in bench.batches(min(QUESTIONS, count // share * settings.facts)):
                passages = drawn(random, count, settings.facts, questions, settings.separator)
                readings += _composed(group, passages, settings.recompute)
    return readings


def separated(bench: Bench) -> list[Reading]:
    """The same facts, told and asked for with each cut."""
    readings = []
    for cut in cuts(bench.settings):
        random, group = bench.random(SEPARATED, cut.facts, cut.leans), bench.group(SEPARATED, cut.name)
        drawn, told = (leaning, cut.facts) if cut.leans else (alone, 2 * cut.facts)
        for questions in bench.batches(min(QUESTIONS, told)):
            readings += _composed(group, drawn(random, 2, cut.facts, questions, cut.separator, behind=cut.behind), AMOUNTS)
    return readings


def _composed(group: Group, passages: Passages, amounts: tuple[Recompute, ...]) -> list[Reading]:
    model, engine = group.model, group.reuse
    head = encode(model, passages.head, first=True).tolist()
    runs = [head, *(encode(model, text, first=False).tolist() for text in passages.texts)]
    questions = completed(model, passages.asked, passages.lead)
    references, readings = referred(group, [token for run in runs for token in run], questions)
    chunks = [engine.prefill(run) for run in runs]
    for exact in (False, True):
        ways = []
        for amount in amounts:
            if (amount == "all") == exact:
                whole, run, cost = engine.compose(chunks, amount)
                ways.append(Way(method=f"recompute={_shown(amount)}", chunk=whole, tokens_run=run, cost=cost))
        readings += compared(group, ways, references)
    engine.release(*chunks)
    return readings


def _shown(amount: Recompute) -> str:
    return f"{100 * amount:.3g}% by deviation" if isinstance(amount, float) else str(amount)
