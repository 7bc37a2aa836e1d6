"""The training text of the tiny model: an endless sequence of documents of all kinds, generated from a seed.

    python -m tools.tiny_model.text.documents --documents 20 --seed 3      # prints documents
"""

import argparse

from tools.tiny_model.text import facts
from tools.tiny_model.text.asking import END, LATER, Document, Fill, recall, recall_chat, sum_turn, user_text
from tools.tiny_model.text.chat import ANSWER, CONTEXT, SYSTEMS, TEXT, Turn, chat, repetition, small_talk, story_request
from tools.tiny_model.text.compare import compare
from tools.tiny_model.text.events import draw_told
from tools.tiny_model.text.grammar import Rng
from tools.tiny_model.text.reason import chain
from tools.tiny_model.text.recall import draw_scene, paragraphs, pose_some
from tools.tiny_model.text.stories import Story
from tools.tiny_model.text.sums import comparison, draw_task
from tools.tiny_model.text.words import COLOURS, anything


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
    if rng.chance(0.85):
        return [(text, TEXT), END]
    # A heading says that questions follow; a story without one ends by itself.
    out: Document = [(rng.pick(("Story:\n\n", "Read this story.\n\n", "A story:\n\n", "Text:\n\n")), CONTEXT), (text + "\n\n", CONTEXT)]
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
    (text, _), *_ = user_text(rng, [found[0].text], found[0].question, 0)
    turns = [Turn(text, found[0].thought, found[0].answer), *(Turn(f.question, f.thought, f.answer) for f in found[1:])]
    if rng.chance(0.2):
        turns = [
            Turn(found[0].text + rng.pick(LATER), "The user tells me something. I will remember it.", "Noted."),
            *(Turn(f.question, f.thought, f.answer) for f in found),
        ]
    return list(chat(rng, turns, rng.pick(SYSTEMS) if rng.chance(0.15) else ""))


def reasoning(rng: Rng) -> Document:
    """A chat whose question needs two facts of its text."""
    found = chain(rng)
    (text, _), *_ = user_text(rng, found.blocks, found.question, 0)
    return list(chat(rng, [Turn(text, found.thought, found.answer)], rng.pick(SYSTEMS) if rng.chance(0.15) else ""))


def comparing(rng: Rng) -> Document:
    """Which of two is more or less: plain text or a chat; the numbers in the question or among the facts of a text."""
    if rng.chance(0.35):
        tasks = [comparison(rng) for _ in range(rng.pick((1, 1, 2)))]
        if rng.chance(0.3):
            return [(f"Question: {tasks[0].question}\nAnswer:", CONTEXT), (f" {tasks[0].answer}", ANSWER), END]
        return list(chat(rng, [Turn(task.question, task.steps, task.answer) for task in tasks]))
    found = compare(rng, questions=rng.pick((1, 1, 1, 2)), short=rng.chance(0.2))
    first, text = found[0], "\n\n".join(found[0].blocks)
    style = rng.random()
    if style < 0.15:
        lead, answer = rng.pick((("Question: ", "\nAnswer:"), ("Q: ", "\nA:")))
        return [(f"{text}\n\n{lead}{first.question}{answer}", CONTEXT), (f" {first.answer}", ANSWER), END]
    (joined, _), *_ = user_text(rng, first.blocks, first.question, 0)
    turns = [Turn(joined, first.thought, first.answer)]
    if style < 0.3:
        told_first = Turn(text + rng.pick(LATER), "The user tells me something. I will remember it.", "Noted.")
        turns = [told_first, Turn(first.question, first.thought, first.answer)]
    turns += [Turn(f.question, f.thought, f.answer) for f in found[1:]]
    return list(chat(rng, turns, rng.pick(SYSTEMS) if rng.chance(0.15) else ""))


def sums_chat(rng: Rng) -> Document:
    """A chat about a few sums."""
    return list(chat(rng, [sum_turn(rng) for _ in range(rng.pick((1, 1, 1, 2, 3)))], rng.pick(SYSTEMS[:1]) if rng.chance(0.1) else ""))


def sums(rng: Rng) -> Document:
    """Plain sums, with or without steps."""
    out: Document = []
    style = rng.random()
    count = rng.pick((1, 1, 1, 3, 5))
    if count > 1:
        out.append((rng.pick(("Sums:\n\n", "Exercises:\n\n", "Questions:\n\n")), CONTEXT))
    for _ in range(count):
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
            turns.append(rng.pick((small_talk, repetition, sum_turn))(rng))
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
    (reasoning, 6),
    (comparing, 16),
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
        # It breaks off before its ending, after which a story, and so the text, is over.
        return " ".join(Story(rng, opening=rng.chance(0.8)).sentences[: -rng.randint(2, 4)])
    if style < 0.7:
        return draw_told(rng, rng.randint(3, 9))[0].text
    return "\n\n".join(paragraphs(rng, draw_scene(rng, rng.randint(2, 8))))


def plain_text(rng: Rng, document: Document) -> str:
    """Return the document as text, with new unrelated text in its fills."""
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
