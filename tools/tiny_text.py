"""The text that the tiny model learns from: documents of every kind, drawn without end from a seed, and packed into rows of tokens.

python tools/tiny_text.py --documents 20 --seed 3      # prints documents
"""

import argparse
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import tiny_facts as facts
from tiny_chat import ANSWER, CONTEXT, NOTED, SYSTEMS, TEXT, Segment, Turn, chat, repetition, small_talk, story_request
from tiny_events import draw_told
from tiny_grammar import Rng
from tiny_reason import draw_reasoned
from tiny_recall import Asked, draw_scene, paragraphs, pose, pose_some
from tiny_stories import Story
from tiny_sums import draw_task
from tiny_words import COLOURS, anything

END = ("<|endoftext|>", ANSWER)


@dataclass(frozen=True)
class Fill:
    """Other text of about so many tokens, put in when the document is packed."""

    tokens: int


Document = list[Segment | Fill]


def _plain_answers(rng: Rng, asked: list[Asked]) -> list[Segment]:
    style = rng.random()
    # Without this heading a text has one question, so that one answer ends it.
    out: list[Segment] = [("Questions:\n\n", CONTEXT)] if len(asked) > 1 and style < 0.74 else []
    for item in asked:
        short = item.value or facts.UNKNOWN
        if style < 0.3:
            out += [(f"Question: {item.question}\nAnswer:", CONTEXT), (f" {short if style < 0.2 else item.answer}\n\n", ANSWER)]
        elif style < 0.5:
            out += [(f"Q: {item.question}\nA:", CONTEXT), (f" {short if style < 0.4 else item.answer}\n\n", ANSWER)]
        elif style < 0.62:
            out += [(f"{item.question}\n", CONTEXT), (f"{item.answer}\n\n", ANSWER)]
        elif style < 0.74:
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
    if not budget and rng.chance(0.12):  # the question stands before the text
        item = pose(rng, rng.pick(scene.told))
        return [(f"Question: {item.question}\n\n" + "\n\n".join(blocks) + "\n\nAnswer:", CONTEXT), (f" {item.answer}", ANSWER), END]
    body = _spread(rng, blocks, _fill_left(budget, blocks)) if budget else [("\n\n".join(blocks), CONTEXT)]
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
_LATER = (
    "",
    "\n\nI will ask you about it.",
    "\n\nRemember this.",
    "\n\nPlease remember that.",
    "\n\nKeep this in mind.",
    "\n\nI have some questions.",
)


def _user_text(rng: Rng, blocks: list[str], question: str, fill: int) -> Document:
    # The first message in pieces: lead, blocks with fill, question (or, now and then, the question first).
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
    asked = pose_some(rng, scene, rng.pick((1, 2, 4, 6, 8) if budget else (1, 1, 2, 2, 3, 4)), further=True, unknown=0.2)
    style = rng.random()
    turns: list[Turn] = []
    head: Document = []
    if style < 0.62:
        turns.append(Turn("\0", asked[0].thought, asked[0].answer))
        head, asked = _user_text(rng, blocks, asked[0].question, _fill_left(budget, blocks)), asked[1:]
    elif style < 0.85 or budget:
        turns.append(Turn("\0", "The user tells me something. I will remember it.", rng.pick(NOTED[:2])))
        head = _user_text(rng, blocks, "", _fill_left(budget, blocks))
        if len(head) == 1:
            head = [(head[0][0] + rng.pick(_LATER), CONTEXT)]
    else:
        for block in blocks[:4]:
            turns.append(Turn(block, "The user tells me something. I will remember it.", rng.pick(NOTED[:2])))
        heard = [f for f in scene.told if any(f.value in block for block in blocks[:4])]
        asked = [pose(rng, fact) for fact in rng.some(heard, min(len(heard), len(asked)))]
    for item in asked:
        if rng.chance(0.12):
            turns.append(small_talk(rng) if rng.chance(0.6) else _sum_turn(rng))
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


def about_me(rng: Rng) -> Document:
    """A chat in which the user tells about himself, and asks later."""
    scene = draw_scene(rng, rng.randint(1, 4), kind="me")
    turns = []
    for fact in scene.told:
        said = facts.say(rng, fact)
        told_before = bool(turns) and turns[-1].thought.startswith("The user tells")
        if told_before and rng.chance(0.25):
            joined = said if said.startswith(("I ", "I'")) or said.startswith(fact.value) else said[0].lower() + said[1:]
            turns[-1] = Turn(f"{turns[-1].user[:-1]} and {joined}", turns[-1].thought, turns[-1].answer)
            continue
        answer = f"Nice to meet you, {fact.value}." if fact.relation.noun == "name" else "Noted."
        if told_before and rng.chance(0.3):
            turns[-1] = Turn(f"{turns[-1].user} {said}", turns[-1].thought, turns[-1].answer)
        else:
            turns.append(Turn(said, "The user tells me something. I will remember it.", answer))
        if rng.chance(0.2):
            turns.append(small_talk(rng))
    for item in pose_some(rng, scene, rng.randint(1, 3), unknown=0.15):
        turns.append(Turn(item.question, item.thought, item.answer))
    if len(turns) == 2 and rng.chance(0.3):
        turns = [Turn(f"{turns[0].user} {turns[1].user}", turns[1].thought, turns[1].answer)]
    return list(chat(rng, turns))


def story(rng: Rng) -> Document:
    """A story alone, or with questions about it."""
    tale = Story(rng)
    text = tale.text(rng)
    if rng.chance(0.75):
        return [(text, TEXT), END]
    out: Document = [(text + "\n\n", TEXT)]
    short = rng.chance(0.5)
    questions = tale.questions(rng)
    for question, full, bare in rng.some(questions, min(len(questions), rng.randint(1, 3))):
        out += [(f"Question: {question}\nAnswer:", CONTEXT), (f" {bare if short else full}\n\n", ANSWER)]
    out[-1] = (out[-1][0].rstrip("\n"), ANSWER)
    return [*out, END]


def story_chat(rng: Rng) -> Document:
    """A chat in which a story is told, or is given and asked about."""
    if rng.chance(0.6):
        wish, thought, holds = story_request(rng)
        tale = Story(rng, **holds)
        turns = [Turn(wish, thought, tale.text(rng))]
    else:
        tale = Story(rng)
        turns = [
            Turn(
                tale.text(rng) + rng.pick(("", "\n\nRemember this story.")),
                "The user tells me a story.",
                rng.pick(("A good story.", "What a nice story.")),
            )
        ]
    questions = tale.questions(rng)
    for question, full, _ in rng.some(questions, rng.pick((0, 1, 1, 2))) if len(questions) > 1 else []:
        turns.append(Turn(question, f"The story says: {full}", full))
    if len(turns) > 1 and rng.chance(0.4):
        first = turns[0]
        if first.thought == "The user tells me a story.":
            turns = [Turn(f"{first.user}\n\n{turns[1].user}", turns[1].thought, turns[1].answer), *turns[2:]]
    if rng.chance(0.15):
        turns.append(small_talk(rng))
    return list(chat(rng, turns, rng.pick(SYSTEMS[:3]) if rng.chance(0.15) else ""))


def _sum_turn(rng: Rng) -> Turn:
    task = draw_task(rng)
    return Turn(task.question, task.steps, task.answer)


def told(rng: Rng) -> Document:
    """Who did what, when and where: plain text or a chat, and a question or two."""
    found = draw_told(rng, rng.pick((1, 1, 2, 3, 3, 4, 6, 8)), questions=rng.pick((1, 1, 2)))
    if rng.chance(0.35):
        item = found[0]
        style = rng.random()
        lead, answer = ("Question: ", "\nAnswer:") if style < 0.5 else (("Q: ", "\nA:") if style < 0.7 else ("", ""))
        gap = " " if not lead and "\n" not in item.text else rng.pick(("\n\n", "\n"))
        if lead:
            return [(f"{item.text}{gap}{lead}{item.question}{answer}", CONTEXT), (f" {item.answer}", ANSWER), END]
        return [(f"{item.text}{gap}{item.question}", CONTEXT), (f" {item.answer}", ANSWER), END]
    (text, _), *_ = _user_text(rng, [found[0].text], found[0].question, 0)
    turns = [Turn(text, found[0].thought, found[0].answer), *(Turn(f.question, f.thought, f.answer) for f in found[1:])]
    if rng.chance(0.2):
        turns = [
            Turn(found[0].text + rng.pick(_LATER), "The user tells me something. I will remember it.", "Noted."),
            *(Turn(f.question, f.thought, f.answer) for f in found),
        ]
    return list(chat(rng, turns, rng.pick(SYSTEMS) if rng.chance(0.15) else ""))


def reasoning(rng: Rng) -> Document:
    """A chat whose question needs two facts of its text."""
    found = draw_reasoned(rng)
    (text, _), *_ = _user_text(rng, found.blocks, found.question, 0)
    return list(chat(rng, [Turn(text, found.thought, found.answer)], rng.pick(SYSTEMS) if rng.chance(0.15) else ""))


def sums_chat(rng: Rng) -> Document:
    """A chat about a few sums."""
    return list(chat(rng, [_sum_turn(rng) for _ in range(rng.pick((1, 1, 1, 2, 3)))], rng.pick(SYSTEMS[:1]) if rng.chance(0.1) else ""))


def sums(rng: Rng) -> Document:
    """Plain sums, with or without steps."""
    out: Document = []
    style = rng.random()
    for _ in range(rng.randint(1, 5)):
        task = draw_task(rng)
        if style < 0.4:
            out += [(f"{task.question}\n", CONTEXT), (f"{task.answer}\n\n", ANSWER)]
        elif style < 0.7:
            out += [(f"Question: {task.question}\nAnswer:", CONTEXT), (f" {task.answer}\n\n", ANSWER)]
        else:
            out += [(f"{task.question}\n", CONTEXT), (f"{task.steps}\n\n", ANSWER)]
    out[-1] = (out[-1][0].rstrip("\n"), ANSWER)
    return [*out, END]


def talk(rng: Rng) -> Document:
    """Small talk, and requests to repeat something."""
    turns = [
        small_talk(rng) if rng.chance(0.5) else repetition(rng, rng.pick(_said(rng)) if rng.chance(0.4) else "")
        for _ in range(rng.pick((1, 1, 2, 3)))
    ]
    return list(chat(rng, turns, rng.pick(SYSTEMS[:3]) if rng.chance(0.1) else ""))


def _said(rng: Rng) -> list[str]:
    return [facts.say(rng, fact) for fact in draw_scene(rng, 3).told]


def copies(rng: Rng) -> Document:
    """A row of names, then the same row again: copying, and nothing else."""
    row = ", ".join(anything(rng) if rng.chance(0.7) else rng.pick(COLOURS) for _ in range(rng.randint(3, 14)))
    return [
        (rng.pick(("The list: ", "", "First: ", "Names: ")) + row + ".\n", CONTEXT),
        (rng.pick(("The same again: ", "Again: ")) + row + ".", ANSWER),
        END,
    ]


def mixed_chat(rng: Rng) -> Document:
    """A chat that goes from one thing to another and comes back to its facts."""
    scene = draw_scene(rng, rng.randint(1, 4), kind="me" if rng.chance(0.3) else "")
    turns = [Turn("\n".join(paragraphs(rng, scene)), "The user tells me something. I will remember it.", "Noted.")]
    for _ in range(rng.randint(1, 3)):
        style = rng.random()
        if style < 0.35:
            wish, thought, holds = story_request(rng)
            turns.append(Turn(wish, thought, Story(rng, **holds).text(rng)))
        else:
            turns.append(rng.pick((small_talk, repetition, _sum_turn))(rng))
    turns += [Turn(a.question, a.thought, a.answer) for a in pose_some(rng, scene, rng.randint(1, 3))]
    return list(chat(rng, turns))


_KINDS = (
    (story, 22),
    (story_chat, 10),
    (recall, 22),
    (recall_chat, 26),
    (about_me, 5),
    (sums_chat, 14),
    (sums, 4),
    (talk, 5),
    (copies, 3),
    (mixed_chat, 4),
    (reasoning, 10),
    (told, 22),
)
_DRAW = tuple(kind for kind, share in _KINDS for _ in range(share))


def draw_document(rng: Rng) -> Document:
    """A short document of any kind."""
    return rng.pick(_DRAW)(rng)


def filler(rng: Rng) -> str:
    """A paragraph that serves as other text: a story or facts about other things."""
    style = rng.random()
    if style < 0.55:
        return Story(rng, opening=rng.chance(0.8)).text(rng)
    if style < 0.7:
        return draw_told(rng, rng.randint(3, 9))[0].text
    return "\n\n".join(paragraphs(rng, draw_scene(rng, rng.randint(2, 8))))


def plain_text(rng: Rng, document: Document) -> str:
    """The document as text, its fills drawn fresh."""
    out = []
    for part in document:
        if isinstance(part, Fill):
            left = part.tokens
            while left > 60:
                out.append(filler(rng) + "\n\n")
                left -= len(out[-1]) // 4
        else:
            out.append(part[0])
    return "".join(out)


def _tokenized(tokenizer, documents: list[Document]) -> list[list[tuple[list[int], int] | Fill]]:
    texts = [part[0] for doc in documents for part in doc if not isinstance(part, Fill)]
    ids = iter(e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    return [[part if isinstance(part, Fill) else (next(ids), part[1]) for part in doc] for doc in documents]


def draw_batch(tokenizer, seed: int, step: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (uint16) and their weights in the loss (uint8), both [rows, length + 1]; a pure function of its arguments.

    Long rows hold documents whose questions are far from their facts; short rows hold short documents only.
    """
    rng = Rng(crc32(f"{seed}/{step}/{length}".encode()))
    need = rows * (length + 1)
    long = length > 1000
    documents: list[Document] = []
    if long:
        for _ in range(rows):
            budget = rng.randint(400, 1900) if rng.chance(0.6) else rng.randint(1500, 1950)
            documents.append(recall(rng, budget) if rng.chance(0.5) else recall_chat(rng, budget))
    first_short = len(documents)
    documents += [draw_document(rng) for _ in range(need // (220 if long else 110))]
    pool_texts: list[Document] = [[(filler(rng) + "\n\n", CONTEXT)] for _ in range(rows if long else 0)]
    encoded = _tokenized(tokenizer, documents + pool_texts)
    pool = [doc[0][0] for doc in encoded[len(documents) :]]
    shorts = iter(encoded[first_short : len(documents)])
    tokens, weights = np.zeros((rows, length + 1), np.uint16), np.zeros((rows, length + 1), np.uint8)
    for row in range(rows):
        ids: list[int] = []
        marks: list[int] = []
        if long:
            if rng.chance(0.3):
                _append(rng, next(shorts), pool, ids, marks)
            _append(rng, encoded[row], pool, ids, marks)
        while len(ids) <= length:
            document = next(shorts, None)
            if document is None:
                document = _tokenized(tokenizer, [draw_document(rng)])[0]
            _append(rng, document, pool, ids, marks)
        tokens[row], weights[row] = ids[: length + 1], marks[: length + 1]
    return tokens, weights


def _append(rng: Rng, document: list, pool: list[list[int]], ids: list[int], marks: list[int]) -> None:
    order = rng.some(range(len(pool)), min(len(pool), 40)) if any(isinstance(p, Fill) for p in document) else []
    for part in document:
        if isinstance(part, Fill):
            left = part.tokens
            while order and left > 0:
                piece = pool[order.pop()]
                if len(piece) > left + 60:
                    continue
                ids += piece
                marks += [CONTEXT] * len(piece)
                left -= len(piece)
        else:
            piece, weight = part
            ids += piece
            marks += [weight] * len(piece) if weight >= 0 else [0] + [-weight] * (len(piece) - 1)


def sample_texts(seed: int, count: int) -> list[str]:
    """`count` documents as text, short and long; the tokenizer is trained on such."""
    rng = Rng(seed)
    texts = []
    for _ in range(count):
        document = draw_document(rng) if rng.chance(0.95) else rng.pick((recall, recall_chat))(rng, 800)
        texts.append(plain_text(rng, document))
    return texts


def main() -> None:
    """Prints documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for text in sample_texts(args.seed, args.documents):
        print(text, end="\n" + "=" * 100 + "\n")


if __name__ == "__main__":
    main()
