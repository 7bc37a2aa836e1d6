"""Experiments with composed chunks: passages are prefilled separately, composed after a heading, and then asked about.

Another experiment compares the separators between passages, and on which side of the cut a separator is.
"""

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
AMOUNTS: tuple[Recompute, ...] = (0, 8)  # values of `recompute` in the comparison of separators
QUESTIONS = 8  # most questions after one context


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way to separate two passages.

    Attributes:
        facts: Facts per passage.
        separator: The text between the passages.
        behind: Whether the separator belongs to the chunk before it. Otherwise it belongs to the chunk after it.
        leans: Whether the second passage refers to the first and follows a space. Otherwise both passages are self-contained.
    """

    facts: int
    separator: str
    behind: bool
    leans: bool = False

    @property
    def name(self) -> str:
        """The name of the group of questions."""
        kind = "leaning" if self.leans else f"{self.facts} fact{'s' if self.facts > 1 else ''} a chunk"
        return f"{kind}, {json.dumps(' ' if self.leans else self.separator)} {'behind' if self.behind else 'before'}"


def cuts(settings: Settings) -> list[Cut]:
    """The ways to compare: each separator, in the chunk after it and before it, with one fact and with `facts` facts per chunk.

    Two more have a second passage that refers to the first.
    """
    sizes, sides = dict.fromkeys((1, settings.facts)), (False, True)
    plain = [Cut(facts=facts, separator=part, behind=behind) for facts in sizes for behind in sides for part in settings.separators]
    return [*plain, *(Cut(facts=settings.facts, separator=PARAGRAPH, behind=behind, leans=True) for behind in sides)]


def composed(bench: Bench) -> list[Reading]:
    """Run the two experiments with composed chunks. The separator of the settings begins every chunk."""
    readings, settings = [], bench.settings
    for experiment, drawn, share in ((ALONE, alone, 1), (LEANING, leaning, 2)):
        for count in settings.chunks:
            random, group = bench.random(experiment, count), bench.group(experiment, f"{count} chunks")
            for questions in bench.batches(min(QUESTIONS, count // share * settings.facts)):
                passages = drawn(random, count, settings.facts, questions, settings.separator)
                readings += _composed(group, passages, settings.recompute)
    return readings


def separated(bench: Bench) -> list[Reading]:
    """Run the comparison of separators: the same facts with each of `cuts`."""
    readings = []
    for cut in cuts(bench.settings):
        random, group = bench.random(SEPARATED, cut.facts, cut.leans), bench.group(SEPARATED, cut.name)
        drawn, num_facts = (leaning, cut.facts) if cut.leans else (alone, 2 * cut.facts)
        for questions in bench.batches(min(QUESTIONS, num_facts)):
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
