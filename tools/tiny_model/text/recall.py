"""Contexts full of facts, as prose and as lists, and the questions about them."""

from dataclasses import dataclass, field

from tools.tiny_model.text import facts, wordings
from tools.tiny_model.text.facts import Fact
from tools.tiny_model.text.grammar import Rng, capital
from tools.tiny_model.text.words import TEST, TRAIN, first_name


@dataclass
class Scene:
    """Facts of a context, by subject, and facts of the same sort that the context does not contain."""

    kinds: dict[str, str] = field(default_factory=dict)  # subject -> kind, in order
    told: list[Fact] = field(default_factory=list)
    untold: list[Fact] = field(default_factory=list)


def _relations(kind: str, rng: Rng) -> tuple[wordings.Relation, ...]:
    if kind == "thing":
        return facts.thing_relations(rng, 16)
    if kind == "me":
        return wordings.MINE
    return wordings.GENERAL[kind] if kind == "named" else wordings.RELATIONS[kind]


def _drop_clashes(told: list[Fact]) -> list[Fact]:
    # "was born in", "was founded in" and the like would answer for two relations of one subject: a scene tells one of them.
    seen, kept = set(), []
    for fact in told:
        group = {"birthplace": "born", "birthday month": "born", "founder": "founded", "founding year": "founded"}.get(
            fact.relation.noun, fact.relation.noun
        )
        if (fact.subject, group) not in seen:
            seen.add((fact.subject, group))
            kept.append(fact)
    return kept


def _shared(rng: Rng, kind: str, per_subject: int) -> list[wordings.Relation]:
    relations = _relations(kind, rng)
    return rng.some(relations, min(len(relations), 13 if kind in ("me", "thing") else per_subject + 1))


def draw_scene(rng: Rng, count: int, split: str = TRAIN, kind: str = "") -> Scene:
    """A scene of about `count` facts: one relation of many subjects, many relations of few, or a mixture."""
    scene = Scene()
    shape = rng.random()
    kinds = (*wordings.RELATIONS, "named", "named", "named", "thing")
    mixed = shape > 0.75 and not kind
    kind = kind or rng.pick(kinds)
    per_subject = 1 if shape < 0.35 else rng.randint(1, 5)
    shared = _shared(rng, kind, per_subject)
    used: set[str] = set()
    while len(scene.told) < count:
        if mixed:
            kind = rng.pick(kinds)
            shared = _shared(rng, kind, per_subject)
        alone = kind in ("me", "thing")
        subject, its = {"me": ("I", "my"), "thing": ("", "its")}[kind] if alone else facts.draw_subject(rng, kind, split)
        if subject in scene.kinds:
            if kind == "me" or (alone and not mixed):
                break
            continue
        scene.kinds[subject] = kind
        mine = shared if alone or rng.chance(0.6) else rng.some(_relations(kind, rng), len(shared))
        told = []
        for relation in mine[
            : min(per_subject if len(mine) > 1 else 1, count - len(scene.told)) if not alone else min(count - len(scene.told), 12)
        ]:
            value = facts.draw_value(rng, relation.value, split)
            for _ in range(20):
                if value not in used and value != subject:
                    break
                value = facts.draw_value(rng, relation.value, split)
            used.add(value)
            told.append(facts.make_fact(relation, subject, value, its))
        told = _drop_clashes(told)
        scene.told += told
        nouns = {fact.relation.noun for fact in told}
        rest = [
            r
            for r in _relations(kind, rng)
            if r.noun not in nouns and not nouns & {"birthplace", "birthday month", "founder", "founding year"}
        ]
        if rest:
            scene.untold.append(facts.make_fact(rng.pick(rest), subject, "", its))
        if not alone:
            stranger = facts.draw_subject(rng, kind, split)
            scene.untold.append(facts.make_fact(rng.pick(shared), stranger[0], "", stranger[1]))
    return scene


_PLAIN_STARTS = frozenset(
    ("The", "In", "As", "They", "People", "It", "For", "Since", "Now", "Today", "When", "You", "We", "By", "At", "From", "After", "Under",
     "Everybody", "Nobody", "Speaking", "Concerning")
)


def _sentences(rng: Rng, told: list[Fact], split: str) -> str:
    said = [facts.say(rng, fact, split) for fact in told]
    out: list[str] = []
    for sentence in said:
        if out and rng.chance(0.12) and out[-1].endswith(".") and ", and " not in out[-1]:
            joined = sentence[0].lower() + sentence[1:] if sentence.split(" ")[0] in _PLAIN_STARTS else sentence
            out[-1] = f"{out[-1][:-1]}, and {joined}"
        else:
            out.append(sentence)
    return " ".join(out)


def _article(rng: Rng, kind: str, told: list[Fact], split: str) -> str:
    lines = [facts.introduce(rng, kind, told[0].subject)] if rng.chance(0.7) and kind != "place" else []
    for i, fact in enumerate(told):
        short = fact.subject not in ("I", "") and (i > 0 or lines) and rng.chance(0.6)
        lines.append(facts.say_shortly(rng, fact) if short else facts.say(rng, fact, split))
    return " ".join(capital(line) for line in lines)


def _subject_list(rng: Rng, told: list[Fact]) -> str:
    subject = "I" if told[0].subject == "I" else told[0].subject
    mark, sep, cap = rng.pick(("- ", "* ", "", "", "  ")), rng.pick((": ", ": ", " = ", " - ", " -> ")), rng.chance(0.6)
    head = ({"I": "About me", "": "Notes"}.get(subject, capital(subject))) + rng.pick((":", ":", "", "."))
    if subject not in ("I", "") and rng.chance(0.15):
        body = ", ".join(f'"{f.relation.noun}": "{f.value}"' for f in told)
        return f'{{"name": "{subject}", {body}}}'
    rows = [f"{mark}{capital(f.relation.noun) if cap else f.relation.noun}{sep}{f.value}" for f in told]
    return "\n".join([rng.pick(("", "", "## ")) + head, *rows])


def _relation_list(rng: Rng, told: list[Fact]) -> str:
    noun = told[0].relation.noun
    mark, sep = rng.pick(("- ", "* ", "", "", "#")), rng.pick((": ", ": ", " = ", " - ", " -> ", " | "))
    head = rng.pick(
        (
            f"{capital(noun)} list:",
            f"{capital(noun)}:",
            f"Here is the {noun} of each:",
            f"A list, each with its {noun}:",
            f"List of every {noun}:",
        )
    )
    if rng.chance(0.2):
        return f"{head} " + rng.pick((", ", "; ")).join(f"{f.subject} ({f.value})" for f in told) + "."
    rows = [
        f"{i}. {f.subject}{sep}{f.value}" if mark == "#" else f"{mark}{capital(f.subject)}{sep}{f.value}" for i, f in enumerate(told, 1)
    ]
    return "\n".join([head, *rows])


def _table(rng: Rng, told: list[Fact]) -> str:
    nouns = list(dict.fromkeys(f.relation.noun for f in told))
    cells = {(f.subject, f.relation.noun): f.value for f in told}
    rows = ["| name | " + " | ".join(nouns) + " |", "|" + " --- |" * (len(nouns) + 1)]
    rows += [f"| {s} | " + " | ".join(cells.get((s, n), "-") for n in nouns) + " |" for s in dict.fromkeys(f.subject for f in told)]
    return "\n".join(rows if rng.chance(0.7) else [rows[0], *rows[2:]])


def _lines(rng: Rng, told: list[Fact], split: str) -> str:
    style = rng.random()
    if style < 0.35:
        mark = rng.pick(("- ", "* ", ""))
        return "\n".join(mark + facts.say(rng, f, split) for f in told)
    if style < 0.6:
        return "\n".join(f"{i}. {facts.say(rng, f, split)}" for i, f in enumerate(told, 1))
    if style < 0.8:
        sep = rng.pick((": ", " = ", " is "))
        return "\n".join(f"{f.phrase}{sep}{f.value}" for f in told)
    said = []
    for fact in told:
        start, speaker, verb = rng.pick(("", "Then ", "And ")), first_name(rng, split)[0], rng.pick(("said", "told me", "wrote"))
        said.append(f'{start}{speaker} {verb}: "{facts.say(rng, fact, split)}"')
    return " ".join(said)


def paragraphs(rng: Rng, scene: Scene, split: str = TRAIN, form: str = "") -> list[str]:
    """The scene's facts, each told once, as one or more paragraphs of prose or lists; `form` may ask for "prose" or "list"."""
    told = list(scene.told)
    if rng.chance(0.7):
        rng.shuffle(told)
    by_subject: dict[str, list[Fact]] = {}
    by_noun: dict[str, list[Fact]] = {}
    for fact in told:
        by_subject.setdefault(fact.subject, []).append(fact)
        by_noun.setdefault(fact.relation.noun, []).append(fact)
    style = rng.random()
    if form == "prose" or (split == TEST and not form):
        style *= 0.5
    elif form == "list":
        style = 0.62 + 0.38 * style
    if style < 0.30:
        if len(told) < 5 or rng.chance(0.5):
            return [_sentences(rng, told, split)]
        cut = rng.randint(1, len(told) - 1)
        return [_sentences(rng, told[:cut], split), _sentences(rng, told[cut:], split)]
    if style < 0.50:
        blocks = [_article(rng, scene.kinds[s], fs, split) for s, fs in by_subject.items()]
        return blocks if rng.chance(0.5) else [" ".join(blocks)]
    if style < 0.62:
        return [_lines(rng, told, split)]
    if style < 0.78 and "" not in by_subject and "I" not in by_subject and len(by_noun) <= max(1, len(told) // 2):
        return [_relation_list(rng, fs) for fs in by_noun.values()]
    if style < 0.86:
        return [_table(rng, told)] if "I" not in by_subject and "" not in by_subject else [_lines(rng, told, split)]
    return [_subject_list(rng, fs) for fs in by_subject.values()]


@dataclass(frozen=True)
class Asked:
    """A question with its thought, its full answer and the bare value; the value of an unknown is empty."""

    question: str
    thought: str
    answer: str
    value: str
    fact: Fact


def pose(rng: Rng, fact: Fact, split: str = TRAIN, before: Fact | None = None, sole: bool = False) -> Asked:
    """Return a question about `fact`, which depends on `before` if given. If `sole`, the question may leave out the subject."""
    question = facts.ask_further(rng, fact, before, split) if before else facts.ask(rng, fact, split)
    if sole and split == TRAIN and fact.value and fact.subject not in ("I", "") and rng.chance(0.08):
        question = rng.pick(
            (
                f"What is the {fact.relation.noun}?",
                f"What's the {fact.relation.noun}?",
                f"Tell me the {fact.relation.noun}.",
                f"And the {fact.relation.noun}?",
            )
        )
    if split == TRAIN and rng.chance(0.04):
        question = question.lower()
    phrase = fact.phrase if fact.subject != "I" else f"the user's {fact.relation.noun}"
    if not fact.value:
        return Asked(question, f"The question asks for {phrase}. The text says nothing about it.", facts.UNKNOWN, "", fact)
    answer = fact.answer
    if fact.subject == "I":
        return Asked(question, f"The user said: my {fact.relation.noun} is {fact.value}.", answer, fact.value, fact)
    said = answer[0].lower() + answer[1:] if answer.startswith(("The ", "In the ")) or fact.subject[:1].islower() else answer
    return Asked(question, f"The question asks for {phrase}. The text says that {said}", answer, fact.value, fact)


def pose_some(rng: Rng, scene: Scene, count: int, further: bool = False, unknown: float = 0.1) -> list[Asked]:
    """Return `count` questions about the scene, some about unknown facts. With `further`, some depend on the question before."""
    asked: list[Asked] = []
    told = rng.some(scene.told, min(count, len(scene.told)))
    for fact in told:
        if scene.untold and rng.chance(unknown):
            fact = rng.pick(scene.untold)  # noqa: PLW2901
        before = asked[-1].fact if asked and further and rng.chance(0.5) else None
        sole = sum(f.relation.noun == fact.relation.noun for f in scene.told) == 1
        asked.append(pose(rng, fact, TRAIN, before, sole))
    return asked
