"""Documents about the facts of a scene: plain text with questions, and chats, short or of a given length."""

from dataclasses import dataclass

from tools.tiny_model.text import facts
from tools.tiny_model.text.chat import ANSWER, CONTEXT, NOTED, SYSTEMS, Segment, Turn, chat, small_talk
from tools.tiny_model.text.grammar import Rng
from tools.tiny_model.text.recall import Asked, draw_scene, paragraphs, pose, pose_some
from tools.tiny_model.text.sums import draw_task

END = ("<|endoftext|>", ANSWER)


@dataclass(frozen=True)
class Fill:
    """A place for unrelated text of about so many tokens, which is inserted when the document is packed."""

    tokens: int


Document = list[Segment | Fill]


def _plain_answers(rng: Rng, asked: list[Asked]) -> list[Segment]:
    style = rng.random()
    # Without this heading a text has one question, so that one answer ends it.
    out: list[Segment] = [("Questions:\n\n", CONTEXT)] if len(asked) > 1 and style < 0.6 else []
    for item in asked:
        short = item.value or facts.UNKNOWN
        if style < 0.3:
            out += [(f"Question: {item.question}\nAnswer:", CONTEXT), (f" {short if style < 0.2 else item.answer}\n\n", ANSWER)]
        elif style < 0.5:
            out += [(f"Q: {item.question}\nA:", CONTEXT), (f" {short if style < 0.4 else item.answer}\n\n", ANSWER)]
        elif style < 0.55:
            out += [(f"{item.question}\n", CONTEXT), (f"{item.answer}\n\n", ANSWER)]
        elif style < 0.6:
            out += [(item.question, CONTEXT), (f" {item.answer}\n\n", ANSWER)]
        elif item.value:
            out += [(facts.restate(rng, item.fact), CONTEXT), (f" {item.value}.\n\n", ANSWER)]
    if out and rng.chance(0.5):  # the last answer may end the document at once
        out[-1] = (out[-1][0].rstrip("\n"), out[-1][1])
    return out


def _spread(rng: Rng, blocks: list[str], fill: int) -> Document:
    # The blocks with other text between them, most of it after the last, so that questions are far from their facts.
    segments: Document = [(block + "\n\n", CONTEXT) for block in blocks]
    if fill < 60:
        return segments
    parts = rng.pick((1, 1, 2, 3))
    for i in range(parts):
        place = len(segments) if i == 0 and rng.chance(0.6) else rng.randint(0, len(segments))
        segments.insert(place, Fill(fill // parts))
    return segments


def _fill_left(budget: int, blocks: list[str]) -> int:
    return budget - sum(len(b) for b in blocks) // 3 - 120


def recall(rng: Rng, budget: int = 0) -> Document:
    """Plain text: facts, then questions or sentences to complete; with a budget, a document of about so many tokens."""
    scene = draw_scene(rng, rng.pick((1, 1, 2, 3, 4, 6, 8, 10, 12) if not budget else (1, 2, 4, 6, 8, 10, 12, 16, 20)))
    blocks = paragraphs(rng, scene)
    asked = pose_some(rng, scene, rng.randint(3, 14) if budget else rng.pick((1, 1, 1, 3, 5, 6)))
    if not budget and rng.chance(0.12):  # the question comes before the text
        item = pose(rng, rng.pick(scene.told))
        return [(f"Question: {item.question}\n\n" + "\n\n".join(blocks) + "\n\nAnswer:", CONTEXT), (f" {item.answer}", ANSWER), END]
    body = _spread(rng, blocks, _fill_left(budget, blocks)) if budget else [("\n\n".join(blocks), CONTEXT)]
    if isinstance(body[0], Fill) or (budget and rng.chance(0.3)):
        body.insert(0, (rng.pick(("Text:\n\n", "Notes:\n\n", "Document 1:\n\n", "Here is a text.\n\n", "Context:\n\n")), CONTEXT))
    if not budget:
        prose = len(blocks) == 1 and blocks[0].endswith(".") and "\n" not in blocks[0]
        body.append((" " if prose and rng.chance(0.3) else rng.pick(("\n\n", "\n\n", "\n")), CONTEXT))
        body = _merge(body)
        if body[-1][0].endswith(" "):
            return _inline(rng, body[0][0], asked)
    return [*body, *_plain_answers(rng, asked), END]


def _merge(segments: Document) -> Document:
    return [("".join(s[0] for s in segments if not isinstance(s, Fill)), CONTEXT)]


def _inline(rng: Rng, context: str, asked: list[Asked]) -> Document:
    # "The capital of X is Y. What is the capital of X? The capital of X is Y."
    out: Document = [(context.rstrip(" "), CONTEXT)]
    for item in asked[: rng.pick((1, 1, 2))]:
        if item.value and rng.chance(0.5):
            out += [(" " + facts.restate(rng, item.fact), CONTEXT), (f" {item.value}.", ANSWER)]
        else:
            out += [(" " + item.question, CONTEXT), (f" {item.answer}", ANSWER)]
    return [*out, END]


_LEADS = (
    "",
    "",
    "",
    "Text:\n",
    "Read this text.\n\n",
    "Here is a text:\n\n",
    "Here is what I know.\n\n",
    "Context: ",
    "Notes:\n",
    "Please read this:\n\n",
    "Document 1:\n",
)
LATER = (
    "",
    "\n\nI will ask you about it.",
    "\n\nRemember this.",
    "\n\nPlease remember that.",
    "\n\nKeep this in mind.",
    "\n\nI have some questions.",
)


def user_text(rng: Rng, blocks: list[str], question: str, fill: int) -> Document:
    """The first message in pieces: a lead, the blocks with fill, the question; sometimes the question comes first."""
    if fill < 60:
        joined = "\n\n".join(blocks)
        if question and rng.chance(0.08):
            return [(f"{question}\n\n{joined}", CONTEXT)]
        breaks = ("\n", "\n\n", "\n\nQuestion: ") if "\n" in joined else (" ", " ", " ", "\n", "\n\n", "\n\nQuestion: ")
        return [(rng.pick(_LEADS) + joined + (rng.pick(breaks) + question if question else ""), CONTEXT)]
    body = _spread(rng, blocks, fill)
    return [*body, (question or "Remember this.", CONTEXT)]


def recall_chat(rng: Rng, budget: int = 0) -> Document:
    """A chat about facts that are told in its first message, in a system message, or turn by turn."""
    scene = draw_scene(rng, rng.pick((1, 1, 2, 3, 4, 6, 8, 8, 10, 12)))
    blocks = paragraphs(rng, scene)
    asked = pose_some(rng, scene, rng.pick((1, 2, 4, 6, 8) if budget else (1, 1, 2, 2, 3, 4)), further=True, unknown=0.14)
    style = rng.random()
    turns: list[Turn] = []
    head: Document = []
    if style < 0.62:
        turns.append(Turn("\0", asked[0].thought, asked[0].answer))
        head, asked = user_text(rng, blocks, asked[0].question, _fill_left(budget, blocks)), asked[1:]
    elif style < 0.85 or budget:
        turns.append(Turn("\0", "The user tells me something. I will remember it.", rng.pick(NOTED[:2])))
        head = user_text(rng, blocks, "", _fill_left(budget, blocks))
        if len(head) == 1:
            head = [(head[0][0] + rng.pick(LATER), CONTEXT)]
    else:
        for block in blocks[:4]:
            turns.append(Turn(block, "The user tells me something. I will remember it.", rng.pick(NOTED[:2])))
        heard = [f for f in scene.told if any(f.value in block for block in blocks[:4])]
        asked = [pose(rng, fact) for fact in rng.some(heard, min(len(heard), len(asked)))]
    for item in asked:
        if rng.chance(0.12):
            turns.append(small_talk(rng) if rng.chance(0.6) else sum_turn(rng))
        turns.append(Turn(item.question, item.thought, item.answer))
    return _with_head(chat(rng, turns, rng.pick(SYSTEMS) if rng.chance(0.3) else ""), head)


def _with_head(segments: list[Segment], head: Document) -> Document:
    # Puts the pieces of the long first message in the place of the mark.
    out: Document = []
    for text, weight in segments:
        if "\0" in text:
            before, after = text.split("\0")
            if len(head) == 1 and not isinstance(head[0], Fill):
                out.append((before + head[0][0] + after, weight))
                continue
            last = head[-1]
            assert not isinstance(last, Fill)
            out += [(before, weight), *head[:-1], (last[0] + after, weight)]
        else:
            out.append((text, weight))
    return out


def sum_turn(rng: Rng) -> Turn:
    """A sum as a turn of a chat."""
    task = draw_task(rng)
    return Turn(task.question, task.steps, task.answer)
