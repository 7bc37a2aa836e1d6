"""`nanovllm eval-reuse`: what is exact shows no loss, what is counted is what ran, and the report says the same every time."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.eval_reuse.composed import ALONE, LEANING, SEPARATED, cuts, separated
from nanovllm.entrypoints.cli.eval_reuse.conditions import Bench
from nanovllm.entrypoints.cli.eval_reuse.experiments import DROPPED, KEPT, evaluate
from nanovllm.entrypoints.cli.eval_reuse.facts import HEAD, MAX_FACTS, Passages, alone, draw_facts, leaning
from nanovllm.entrypoints.cli.eval_reuse.measure import Context, Engine, Question, Reading, compare, kl_divergence, refer
from nanovllm.entrypoints.cli.eval_reuse.plot import draw
from nanovllm.entrypoints.cli.eval_reuse.report import FULL, GUESSED, Report, Row, summarise, table
from nanovllm.entrypoints.cli.eval_reuse.settings import Settings
from nanovllm.models.model import Model
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

pytestmark = pytest.mark.unhooked  # the hook makes these ten times as slow

SMALL = Settings(chunks=(2, 3), facts=2, separators=("\n",), questions=2, recompute=(0, 8, 0.1, "all"), turns=(1, 2), reply_len=4)

TINY = Settings(chunks=(2,), separators=(" ",), questions=2, recompute=(0, "all"))


def model_of(architecture: str) -> Model:
    return random_model(tiny_config(architecture, max_position_embeddings=1024))


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", pytest.param("LlamaForCausalLM", marks=pytest.mark.long)])
def report(request: pytest.FixtureRequest) -> Report:
    return evaluate(model_of(request.param), SMALL, page_size=64)  # no page of characters that begins two contexts


@pytest.fixture(scope="module")
def tiny() -> Report:
    return evaluate(nv.load_model("tiny", "cpu"), replace(TINY, turns=(1, 2)))


def test_kl_by_hand() -> None:
    half, quarter = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    expected = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert kl_divergence(half, quarter + 3) == pytest.approx(expected, rel=1e-6)
    assert kl_divergence(quarter, quarter) == 0
    tail = torch.zeros(1, 4000)
    tail[0, 0] = 40  # in float32 these probabilities and logarithms would lose what differs
    assert kl_divergence(tail, tail + 1e-3) == pytest.approx(0, abs=1e-12)


def test_exact_ways_lose_nothing(report: Report) -> None:
    exact = [row for row in report.rows if row.method in ("recompute=all", "recompute")]
    assert len(exact) == 2 * len(SMALL.chunks) + 2
    assert all(row.kl is not None and abs(row.kl) < 1e-9 and row.diverged == 0 and row.diverged_at is None for row in exact)
    assert all(row.questions == SMALL.questions for row in report.rows)
    lossy = [row.kl for row in report.rows if row.method in ("recompute=0", "shift", "gap")]
    assert all(kl is not None and kl > 1e-6 for kl in lossy)
    assert report.skipped == (KEPT,)  # random weights never close a think block


def test_what_ran_is_counted(report: Report) -> None:
    """Characters are tokens here."""
    rows = {(row.experiment, row.group, row.method): row for row in report.rows}
    for name, drawn in ((ALONE, alone), (LEANING, leaning)):
        for count in SMALL.chunks:
            group = {method: row for (experiment, number, method), row in rows.items() if (experiment, number) == (name, f"{count} chunks")}
            full, asked = group[FULL].tokens_run, group[GUESSED].tokens_run
            assert group[FULL].cost == 1
            assert group["recompute=0"].tokens_run == asked
            assert group["recompute=8"].tokens_run == pytest.approx(asked + 8 * count)
            assert group["recompute=all"].tokens_run == pytest.approx(full - len(HEAD))
            assert all(row.tokens_full == full for row in group.values())
            tenth = group["recompute=10% by deviation"]
            moved = full - asked - len(HEAD)
            assert -1e-6 < tenth.tokens_run - asked - 0.1 * moved < 1
            assert tenth.cost * full == pytest.approx(tenth.tokens_run + moved)  # both layers of this model are run to choose
            assert drawn(Random(0), count, 2, 2) == drawn(Random(0), count, 2, 2)
    for group in ("alone", "leaning"):
        full, asked = rows[DROPPED, group, FULL], rows[DROPPED, group, GUESSED]
        assert rows[DROPPED, group, "shift"].tokens_run == rows[DROPPED, group, "gap"].tokens_run == asked.tokens_run
        assert asked.tokens_run < rows[DROPPED, group, "recompute"].tokens_run < full.tokens_run


def test_the_same_seed_gives_the_same_report() -> None:
    model, settings = model_of("Qwen3ForCausalLM"), replace(SMALL, chunks=(2,), questions=1, recompute=(0.1,))
    first, second = (json.dumps(evaluate(model, settings).as_json()) for _ in range(2))
    assert first == second
    other = evaluate(model, replace(settings, seed=1))
    assert [row.kl for row in other.rows] != [row["kl"] for row in json.loads(first)["rows"]]


def test_the_packaged_model_recalls_what_is_there(tiny: Report) -> None:
    assert tiny.skipped == ()
    recall: dict[str, list[float]] = {}
    for row in tiny.rows:
        recall.setdefault(row.method, []).append(row.recall)
    assert min(recall[FULL]) == 1
    assert max(recall[GUESSED]) == 0
    assert recall["recompute=all"] == [row.recall for row in tiny.rows if row.method == FULL and row.experiment in (ALONE, LEANING)]
    kept = {(row.group, row.method): row for row in tiny.rows if row.experiment == KEPT}
    assert {group for group, _ in kept} == {"1 turn", "2 turns"}
    for group in ("1 turn", "2 turns"):
        exact, shift = kept[group, "recompute"], kept[group, "shift"]
        assert abs(exact.kl or 0) < 1e-9 and exact.diverged == 0
        assert shift.kl is not None and 1e-6 < shift.kl < 0.1
        assert shift.tokens_run < exact.tokens_run < exact.tokens_full


def test_every_second_passage_leans(tiny: Report) -> None:
    passages = leaning(Random(1), 5, 3, 4)
    assert len(passages.texts) == 5
    subjects = {fact.subject for fact in passages.asked}
    for first, second in (passages.texts[0:2], passages.texts[2:4]):
        (subject,) = {subject for subject in subjects if subject in first} or {None}
        assert second.startswith(" Its ") and (subject is None or subject not in second)
    facts = draw_facts(Random(2), MAX_FACTS)
    more = draw_facts(Random(3), MAX_FACTS, about=facts)
    assert len({fact.noun for fact in (*facts, *more)}) == 2 * MAX_FACTS
    assert {fact.subject for fact in more} == {facts[0].subject}


@pytest.mark.parametrize("separator", [" ", "\n\n"])
@pytest.mark.parametrize("drawn", [alone, leaning])
def test_a_cut_before_a_separator_and_one_behind_it_part_the_same_text(drawn: Callable[..., Passages], separator: str) -> None:
    before, behind = (drawn(Random(4), 3, 1, 1, separator, behind=behind) for behind in (False, True))
    assert before.asked == behind.asked
    whole, other = ("".join((cut.head, *cut.texts, cut.lead)) for cut in (before, behind))
    assert whole == other
    assert (before.head, before.lead) == (HEAD, separator)
    assert (behind.head, behind.lead) == (HEAD + separator, "")
    assert all(text.startswith(separator) for text in before.texts[::2])
    assert all(not text[0].isspace() and text[-1].isspace() for text in behind.texts)


def test_every_cut_is_compared_on_as_many_questions(report: Report, tiny: Report) -> None:
    for found, settings in ((report, SMALL), (tiny, TINY)):
        names = [cut.name for cut in cuts(settings)]
        assert len(set(names)) == 6
        groups = {name: {row.method: row for row in found.separators if row.group == name} for name in names}
        assert sum(map(len, groups.values())) == len(found.separators)
        for group in groups.values():
            assert list(group) == [FULL, GUESSED, "recompute=0", "recompute=8"]
            assert {row.questions for row in group.values()} == {2}
            assert group["recompute=8"].tokens_run == pytest.approx(group["recompute=0"].tokens_run + 16)
    assert [len(cuts(settings)) for settings in (Settings(), Settings(facts=1))] == [14, 8]


def test_where_chunks_are_cut_decides_what_the_packaged_model_recalls() -> None:
    """A first token that no text in its training begins with draws little attention: what stands behind it looks for such a token."""
    model, settings = nv.load_model("tiny", "cpu"), Settings(facts=1, separators=(" ", "\n\n"), questions=8)
    engines = [Engine(model, 4, max_model_len=512) for _ in range(2)]
    bench = Bench(model=model, reference=engines[0], reuse=engines[1], settings=settings, moved=int)
    rows = {(row.group, row.method): row.recall for row in summarise(separated(bench))}
    for part in ('" " before', '" " behind', '"\\n\\n" before', '"\\n\\n" behind'):
        full, reused = (rows[f"1 fact a chunk, {part}", method] for method in (FULL, "recompute=0"))
        assert full >= 0.8, part
        assert reused <= 0.2 if part == '" " before' else reused >= 0.6, part


def test_chats_tell_two_facts_of_a_subject_at_least() -> None:
    model = nv.load_model("tiny", "cpu")
    found = evaluate(model, replace(TINY, facts=1, questions=1, recompute=(0,), turns=(1,)), progress=False)
    assert found.skipped == ()
    assert {row.recall for row in found.rows if row.experiment == KEPT and row.method == "recompute"} == {1}


def test_the_separator_stands_before_chunks_and_questions() -> None:
    model, settings = model_of("Qwen3ForCausalLM"), replace(SMALL, chunks=(2,), questions=1, recompute=(0,))
    short, long = (evaluate(model, replace(settings, separator=part)).rows for part in (" ", " " * 5))
    for one, other in zip(short, long, strict=True):
        chunks = {ALONE: 2, LEANING: 1, DROPPED: 1}[one.experiment]  # behind a separator; characters are tokens here
        assert other.tokens_full - one.tokens_full == 4 * (chunks + 1)


@pytest.mark.parametrize(
    ("reply", "anywhere", "right"),
    [
        (" Velmora.", False, True),
        ("\n\nVelmora", False, True),
        (" Velmorahaven.", False, False),
        (" the town Velmora", False, False),
        ("The capital is Velmora.", True, True),
        ("It is not told.\nVelmora", True, False),
        ("", True, False),
    ],
)
def test_an_answer_names_the_value(reply: str, anywhere: bool, right: bool) -> None:
    assert Question(token_ids=[1], value="Velmora", anywhere=anywhere).right(reply) is right


def test_a_divergence_is_where_greedy_replies_part() -> None:
    model = model_of("Qwen3ForCausalLM")
    engines = [Engine(model, 12, num_pages=128, max_num_seqs=24) for _ in range(2)]
    tokens = [[(7 * i + j) % 250 for i in range(30)] for j in (1, 2)]
    questions = [Question(token_ids=[5, 6, 7 + i], value="x") for i in range(3)]
    references = refer(engines[0], engines[0].prefill(tokens[0] + tokens[1]), questions)
    chunks = [engines[1].prefill(some) for some in tokens]
    whole, run, cost = engines[1].compose(chunks, 0)
    assert (run, cost) == (0, 0)
    (comparisons,) = compare(engines[1], [whole], references)
    replies = engines[1].replies([Context(chunk=whole, token_ids=question.token_ids) for question in questions])
    for reference, comparison, reply in zip(references, comparisons, replies, strict=True):
        same = [a == b for a, b in zip(reference.reply, reply.token_ids, strict=True)]
        assert comparison.diverged_at == (None if all(same) else same.index(False))
    for engine in engines:
        nv.check(engine.state)
    assert any(comparison.diverged_at is not None for comparison in comparisons)


def test_rows_are_medians_and_means() -> None:
    def reading(kl: float | None, place: int | None, right: bool) -> Reading:
        return Reading(experiment="e", group="g", method="m", right=right, kl=kl, diverged_at=place, tokens_run=1, tokens_full=4, cost=2)

    (row,) = summarise([reading(1.0, 3, True), reading(2.0, 1, False), reading(3.0, None, False)])
    assert row == Row(
        experiment="e", group="g", method="m", questions=3, recall=1 / 3, kl=2.0, diverged=2 / 3, diverged_at=3, tokens_run=1.0,
        tokens_full=4.0, cost=0.5,
    )  # fmt: skip
    (row,) = summarise([reading(1.0, 3, True), reading(2.0, None, True), reading(3.0, None, True)])
    assert row.diverged_at is None
    (row,) = summarise([reading(None, None, True)])
    assert (row.kl, row.diverged, row.recall) == (None, None, 1)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_hf_folder(tmp_path / "model", tiny_config(max_position_embeddings=1024)))
    given = ["--model", folder, "--device", "cpu", "--chunks", "2", "--facts", "1", "--questions", "1", "--recompute", "0, 0.5,all"]
    given += ["--separator", r"\n"]
    assert cli.main(["eval-reuse", *given, "--out", str(tmp_path / "new" / "quality")]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith('model, float32, seed 0, separator "\\n"\n')
    for part in (ALONE, LEANING, DROPPED, FULL, GUESSED, "recompute=50% by deviation", "recompute=all", f"skipped: {KEPT}"):
        assert part in captured.out
    written = json.loads((tmp_path / "new" / "quality.json").read_text())
    assert written["settings"]["recompute"] == [0, 0.5, "all"]
    assert written["settings"]["separator"] == "\n"
    assert {"schema", "model", "fingerprint", "dtype", "device", "versions", "rows", "separators", "skipped"} < set(written)
    assert set(written["rows"][0]) == set(Row.__dataclass_fields__)
    assert (tmp_path / "new" / "quality.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--chunks", "two"], "--chunks 'two'"),
        (["--chunks", "1"], r"chunks=1 must be an integer in \[2"),
        (["--chunks", "2,2"], "different values"),
        (["--facts", "7"], r"facts=7 must be an integer in \[1, 6\]"),
        (["--facts", "0"], "facts=0"),
        (["--questions", "0"], "questions=0"),
        (["--quick", "--questions", "5"], "--quick means --questions 12: give only one of --quick and --questions"),
        (["--recompute", "-1"], "recompute=-1"),
        (["--recompute", "1.5"], "recompute=1.5"),
        (["--recompute", "most"], "--recompute 'most' must be values, each 0, a number of tokens, a fraction between 0 and 1, or all, sep"),
        (["--seed", "-3"], "seed=-3"),
        (["--out", "/dev/null/x/y"], "Not a directory"),
        (["--model", "no-such-model"], "'no-such-model' is neither"),
        (["--chunks", "200", "--questions", "1"], "tokens; this engine holds at most"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval-reuse", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nanovllm: error: ") and captured.err.count("\n") == 1
    assert re.search(match, captured.err), captured.err


def test_bad_inputs_are_named(untyped: None, tmp_path: Path, tiny: Report) -> None:
    listed = ({"chunks": [2]}, {"chunks": ()}, {"turns": (0,)}, {"recompute": "all"}, {"recompute": ([],)})
    for wrong in (*listed, {"facts": 1.5}, {"questions": True}, {"thought_len": 0}, {"separator": None}, {"separators": (" ", 1)}):
        with pytest.raises(nv.InvalidRequestError, match=next(iter(wrong))):
            Settings(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(nv.InvalidRequestError, match="no tokenizer"):
        evaluate(random_model(tiny_config(vocab_size=20)))
    with pytest.raises(nv.InvalidRequestError, match="picture"):
        draw(tiny, tmp_path / "picture.such")


def test_the_table_is_aligned(tiny: Report) -> None:
    for part in table(tiny).split(SEPARATED):
        lines = part.splitlines()
        heads = [line for line in lines if ("questions" in line and "recall" in line) or (FULL in line and GUESSED in line)]
        assert len(set(heads)) == 1
        (end,) = {len(line) for line in lines if line.endswith("%")}
        assert end == len(heads[0])


def test_the_published_table_is_of_the_published_report() -> None:
    docs = Path(__file__).parents[4] / "docs/explanation"
    written = json.loads((docs / "reuse-quality.json").read_text())
    rows, separators = (tuple(Row(**row) for row in written[name]) for name in ("rows", "separators"))
    report = Report(metadata=written, rows=rows, separators=separators, skipped=tuple(written["skipped"]))
    assert f"```\n{table(report)}\n```" in (docs / "reuse-quality.md").read_text()
    settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in written["settings"].items()}
    assert Settings(**settings)


def test_the_published_figures_of_fp8_are_of_the_published_reports() -> None:
    """Beside the report without FP8, of the same questions."""
    docs = Path(__file__).parents[4] / "docs/explanation"
    plain, rounded = (json.loads((docs / f"reuse-quality{end}.json").read_text()) for end in ("", "-fp8"))
    assert rounded["kv_dtype"] == "fp8" and "kv_dtype" not in plain and rounded["settings"] == plain["settings"]
    lines, moved = ["| | | recall | in FP8 | KL, nats |", "| --- | --- | --- | --- | --- |"], []
    for one, other in zip(plain["rows"], rounded["rows"], strict=True):
        assert all(one[name] == other[name] for name in ("experiment", "group", "method", "questions"))
        if one["method"] in (FULL, GUESSED):
            assert one["recall"] == other["recall"]
        elif one["kl"] < 1e-9:
            lines.append(f"| {one['experiment']} | {one['group']} | {one['recall']:.1%} | {other['recall']:.1%} | {other['kl']:.1e} |")
        else:
            moved.append(abs(other["recall"] - one["recall"]) * one["questions"])
    page = (docs / "reuse-quality.md").read_text()
    assert "<!-- fp8 -->\n" + "\n".join(lines) + "\n<!-- /fp8 -->" in page
    assert (
        f"Of all {len(moved)} rows in which reuse is inexact, none moves by more than three questions of 96." in page
        and round(max(moved)) == 3
    )
