"""All experiments: composed chunks (`composed.py`), a span dropped from a text, and chat answers kept without their thinking."""

from typing import Any

from nanovllm.chunks.thinking import think_spans
from nanovllm.engine.prompt import encode
from nanovllm.entrypoints.cli.eval_reuse.composed import ALONE, LEANING, composed, cuts, separated
from nanovllm.entrypoints.cli.eval_reuse.conditions import Bench, Group, Segment, asked, completed, guessed, referred, trimmed
from nanovllm.entrypoints.cli.eval_reuse.facts import HEAD, Fact, aside, draw_facts, lean, tell
from nanovllm.entrypoints.cli.eval_reuse.measure import BATCH, Engine, Question, Reading, text_of
from nanovllm.entrypoints.cli.eval_reuse.report import Report, metadata, summarise
from nanovllm.entrypoints.cli.eval_reuse.settings import Settings
from nanovllm.entrypoints.display.terminal import bar
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.chunk import Chunk
from nanovllm.tokenizer.messages import render

DROPPED = "an aside dropped, facts behind it kept"
KEPT = "answers of a chat kept without their thinking"
MAX_TOKENS = 1024  # default of max_model_len


def evaluate(model: Model, settings: Settings | None = None, *, progress: bool | None = None, **limits: Any) -> Report:
    """Measure the loss of quality from reused KV: recall, KL divergence, first divergence, tokens run.

    Every question is asked after a full prefill and after every kind of reuse, with greedy sampling, on the same tokens. The same model,
    settings and machine give the same report.

    Args:
        model: The model.
        settings: The settings; None for the defaults.
        progress: Whether to show a progress bar; None shows it at a terminal.
        **limits: Options of `init_state`. With `kv_dtype` the reference keeps its KV unrounded.

    Raises:
        InvalidRequestError: The model has no tokenizer, or its keys cannot be rotated, or the contexts are too long for it.
    """
    settings = Settings() if settings is None else settings
    if model.tokenizer is None:
        raise InvalidRequestError(f"{model.name} has no tokenizer, but the questions of eval-reuse are text")
    limits, chats = _limits(model, settings, limits), _chats(model)
    total = settings.questions * (2 * len(settings.chunks) + 2 + chats + len(cuts(settings)))
    with bar(total, "eval-reuse", "questions", progress=progress) as shown:
        unrounded = {**limits, "kv_dtype": None}  # the reference: so the figures also have the cost of KV in FP8
        engines = [Engine(model, settings.reply_len, **each) for each in (unrounded, limits)]
        bench = Bench(model=model, reference=engines[0], reuse=engines[1], settings=settings, moved=shown.update)
        readings = [*composed(bench), *dropped(bench), *(kept(bench) if chats else ())]
        parted = separated(bench)
    measured = {reading.experiment for reading in readings}
    skipped = tuple(name for name in (ALONE, LEANING, DROPPED, KEPT) if name not in measured)
    return Report(
        metadata=metadata(model, settings, limits.get("kv_dtype")), rows=summarise(readings), separators=summarise(parted), skipped=skipped
    )


def dropped(bench: Bench) -> list[Reading]:
    """Facts, an unrelated aside, facts: drop the aside, and ask for the facts after it, whose KV has attended to it."""
    readings, facts, separator, model = [], bench.settings.facts, bench.settings.separator, bench.model
    for leans in (False, True):
        group = bench.group(DROPPED, "leaning" if leans else "alone")
        random = bench.random(DROPPED, group.name)
        for questions in bench.batches(facts):
            first = draw_facts(random, facts)
            second = draw_facts(random, facts, about=first if leans else ())
            before = encode(model, HEAD + separator + tell(first), first=True).tolist()
            gone, later = (encode(model, f" {text}", first=False).tolist() for text in (aside(random), (lean if leans else tell)(second)))
            references, exact = referred(group, before + later, completed(model, second[:questions], separator))
            segment = Segment(token_ids=before + gone + later, start=len(before), stop=len(before) + len(gone))
            readings += [*exact, *trimmed(group, [segment], references)]
    return readings


def kept(bench: Bench) -> list[Reading]:
    """A chat with thinking, which is dropped after each turn. After some turns, ask for facts, for example "And its king?"."""
    readings, random, facts = [], bench.random(KEPT), max(2, bench.settings.facts)
    for questions in bench.batches(facts - 1):
        subjects = [draw_facts(random, facts) for _ in range(2)]
        wanted = [(random.choice(subjects), random.randrange(facts)) for _ in range(max(bench.settings.turns))]
        readings += _chatted(bench, subjects, wanted, questions)
    return readings


def _chatted(bench: Bench, subjects: list[tuple[Fact, ...]], wanted: list[tuple[tuple[Fact, ...], int]], count: int) -> list[Reading]:
    """Run one chat with the reference engine. The other engine prefills the same tokens and drops the thinking in each mode."""
    engine, messages, segments, readings = bench.reference, [], [], []
    chunk: Chunk | None = None
    for turn, (facts, place) in enumerate(wanted, 1):
        intro = "" if segments else " ".join(map(tell, subjects)) + " "
        messages.append({"role": "user", "content": intro + facts[place].question})
        result = _turn(bench.model, engine, chunk, messages, bench.settings.thought_len)
        if result is None:
            break
        engine.release(*([] if chunk is None else [chunk]))
        segment, answer, chunk = result
        segments.append(segment)
        messages.append({"role": "assistant", "content": answer})
        if turn in bench.settings.turns:
            group = bench.group(KEPT, f"{turn} turn{'s' if turn > 1 else ''}")
            others = [fact for fact in facts if fact is not facts[place]][:count]
            readings += _further(group, messages, segments, chunk, others)
    engine.release(*([] if chunk is None else [chunk]))
    return readings


def _turn(
    model: Model, engine: Engine, chunk: Chunk | None, messages: list[dict[str, str]], thought_len: int
) -> tuple[Segment, str, Chunk] | None:
    """Run one turn after `chunk`, the chunk of the earlier turns.

    Returns:
        The new tokens, the answer, and an exact chunk of all turns without the thinking. None if the model does not think and then answer,
        or if its chat template renders the earlier turns differently now.
    """
    assert model.tokenizer is not None
    tokens, length = render(model.tokenizer, messages), 0 if chunk is None else len(chunk)
    if chunk is not None and tokens[:length] != chunk.token_ids.tolist():
        return None
    context = [tokens] if chunk is None else [chunk, tokens[length:]]
    (reply,) = engine.generate([context], SamplingParams(temperature=0, max_tokens=thought_len))
    whole, without, span = reply.chunk.token_ids.tolist(), None, (0, 0)
    spans = think_spans(model.tokenizer, reply.chunk.token_ids, len(tokens), model.config.eos_token_ids)
    if reply.finish_reason == "stop" and len(spans) == 1 and spans[0][1] < len(whole):
        span = spans[0]
        without, _ = engine.drop(reply.chunk, *span, "recompute")
    engine.release(reply.chunk)
    if without is None:
        return None
    segment = Segment(token_ids=whole[length:], start=span[0] - length, stop=span[1] - length)
    return segment, text_of(model, whole[span[1] :]).strip(), without


def _further(group: Group, messages: list[dict[str, str]], segments: list[Segment], chunk: Chunk, facts: list[Fact]) -> list[Reading]:
    """The next turn, which asks for a fact by its noun only. Empty if the chat template renders the earlier turns differently now."""
    questions, bare = [], []
    for fact in facts:
        message = {"role": "user", "content": f"And its {fact.noun}?"}
        tokens = render(group.model.tokenizer, [*messages, message], enable_thinking=False)
        if tokens[: len(chunk)] != chunk.token_ids.tolist():
            return []
        questions.append(Question(token_ids=tokens[len(chunk) :], value=fact.value, anywhere=True))
        bare.append(Question(token_ids=render(group.model.tokenizer, [message], enable_thinking=False), value=fact.value, anywhere=True))
    references, readings = asked(group, chunk, questions)
    return [*readings, *guessed(group, bare, len(chunk)), *trimmed(group, segments, references)]


def _chats(model: Model) -> bool:
    """Whether the model can be asked to think in a chat."""
    if model.tokenizer is None or model.tokenizer.think_token_ids is None:
        return False
    try:
        render(model.tokenizer, [{"role": "user", "content": HEAD}])
    except InvalidRequestError:
        return False
    return True


def _limits(model: Model, settings: Settings, limits: dict[str, Any]) -> dict[str, Any]:
    """The options of `init_state`, with pages for a context in pieces and whole, once per method, and for the questions after it."""
    given = {name: value for name, value in limits.items() if value is not None}
    length, size = min(MAX_TOKENS, model.config.max_position_embeddings), 16
    each = -(-given.get("max_model_len", length) // size)
    pages = (max(len(settings.recompute), 2) + 3) * each + BATCH * (-(-2 * settings.reply_len // size) + 8)
    return {"max_model_len": length, "num_pages": pages, "max_num_seqs": BATCH, "page_size": size, **given}
