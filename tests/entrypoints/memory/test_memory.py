"""`memory`: its figures against a count over the handles that a test keeps itself, its tree, its text and its picture."""

import re
import time
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.engine.requests import submit_many
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.display.tables import size
from nanovllm.entrypoints.memory.pages import ranges
from nanovllm.entrypoints.memory.text import BRANCHES, LINES, WIDTH, cells_of, outline
from nanovllm.state.kv_cache import bytes_per_page, pages_for
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODEL = random_model(tiny_config(**SMALL, max_position_embeddings=4096))
RUN = [7 * i % 50 for i in range(1, 2000)]


def greedy(count):
    return nv.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def engine(**limits):
    return nv.init_state(MODEL, **{"num_pages": 64, "page_size": 4, **limits})


def requests_of(state):
    sessions = [sequence for session in state.sessions.values() for sequence in session.sequences]
    return [*state.running, *state.waiting, *state.kept.values(), *sessions]


def right(state, chunks):
    """The report of a state, every figure of it counted again from the chunks that are alive and the requests under way."""
    nv.check(state)
    report, held = nv.memory(state), [list(chunk.pages) for chunk in chunks]
    asked = [list(sequence.pages) for sequence in requests_of(state)]
    owned = Counter(page for pages in (*held, *asked) for page in pages)
    assert report.num_pages == state.config.num_pages == report.num_used + report.num_free
    assert report.num_free == state.pages.num_free
    assert report.idle == {page for page in state.prefix.pages() if state.pages.refcount(page) == 1}
    assert report.num_idle == state.prefix.num_idle == state.pool.num_available - report.num_free
    assert report.num_held == len(owned) == report.num_used - report.num_idle
    assert report.num_shared == sum(count > 1 for count in owned.values())
    assert report.num_references == owned.total() == report.num_saved + len(owned)
    assert report.num_chunk == len({page for pages in held for page in pages})
    assert report.num_request == len({page for pages in asked for page in pages})
    assert report.num_indexed == len(state.prefix.pages())
    assert report.saved_share == pytest.approx(1 - len(owned) / owned.total() if owned else 0)
    assert report.page_bytes == bytes_per_page(MODEL.config, page_size=report.page_size, dtype=MODEL.dtype)
    assert [len(owners) for owners in report.page_owners] == [owned[page] for page in range(report.num_pages)]
    told = [(owner.kind == "chunk", owner.id, list(owner.pages)) for owner in report.owners]
    mine = [(True, chunk.liveness, pages) for chunk, pages in zip(chunks, held, strict=True)]
    mine += [(False, sequence.request.request_id, pages) for sequence, pages in zip(requests_of(state), asked, strict=True)]
    assert sorted(told) == sorted(mine)
    for owner in report.owners:
        assert owner.num_own == sum(owned[page] == 1 for page in owner.pages) == len(owner.pages) - owner.num_shared
    right_tree(report)
    drawn(report)
    return report


def right_tree(report):
    """A way from a root to an end is an owner's pages in their order; a run's owners are those whose pages lead through it."""
    ways, children = [], Counter()
    for run in report.runs:
        way = (*(() if run.parent is None else ways[run.parent]), *run.pages)
        assert run.start == len(way) - len(run.pages)
        assert set(map(id, run.owners)) == {id(owner) for owner in report.owners if owner.pages[: len(way)] == way}
        assert {id(owner) for owner in run.ends} == {id(owner) for owner in report.owners if owner.pages == way}
        ways.append(way)
        children[run.parent, run.pages[0]] += 1
    assert all(count == 1 for count in children.values())  # two branches differ in their first page
    assert sum(len(run.ends) for run in report.runs) == sum(bool(owner.pages) for owner in report.owners)
    held = {page for page, owners in enumerate(report.page_owners) if owners}
    assert {page for run in report.runs for page in run.pages} == held | report.idle


def drawn(report):
    """Text and picture of a report: whole, well-formed, and true where that is easily counted."""
    text, picture = report.text(), report.svg()
    assert str(report) == text
    assert f"{report.num_used:,} of {report.num_pages:,} page" in text
    cells = cells_of(report, 64 * 32, WIDTH)
    assert [cell.start for cell in cells[1:]] == [cell.stop for cell in cells[:-1]]
    rest = re.search(r"\.\.\. ([\d,]+) more free page", text)
    assert report.num_pages - cells[-1].stop == (int(rest[1].replace(",", "")) if rest else 0)
    if cells[0].stop == 1:
        rows = "".join(re.findall(r"^ *\d+  ([-.cr#2-9]+)$", text, re.M))
        counted = [len(owners) for owners in report.page_owners[: len(rows)]]
        assert [2 if c in "23456789#" else int(c in "cr") for c in rows] == [min(count, 2) for count in counted]
        assert {page for page, c in enumerate(rows) if c == "-"} == report.idle
    lines, shown = outline(report), []
    for line in lines:
        shown += [line.run] if line.run is not None else line.hidden
    assert sorted(map(id, shown)) == sorted(map(id, report.runs))
    assert len(lines) <= LINES + 1
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert report._repr_svg_() == picture


# Random handles


OPERATIONS = ("prefill", "extend", "fork", "truncate", "release", "generate", "compose", "drop", "submit", "step", "cancel", "begin")


@pytest.mark.unhooked
@given(data=st.data(), page_size=st.sampled_from([1, 2, 4]), num_pages=st.sampled_from([12, 40]))
@settings(max_examples=60)
def test_figures_are_what_the_handles_say(data, page_size, num_pages):
    state, chunks = engine(num_pages=num_pages, page_size=page_size, max_num_batched_tokens=6), []
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(OPERATIONS))
        chunk = data.draw(st.sampled_from(chunks)) if chunks else None
        context, more = data.draw(tokens), None
        try:
            match name:
                case "prefill":
                    state, more = nv.prefill(MODEL, state, context)
                case "submit":
                    kept, parts = data.draw(st.booleans()), [chunk, context] if chunk else context
                    state, _ = submit_many(MODEL, state, [parts], [greedy(4)], keep=kept)
                case "step":
                    state, _ = nv.step(MODEL, state)
                case "cancel" if state.waiting:
                    state = nv.cancel(state, next(iter(state.waiting)).request.request_id)
                case "begin":
                    state, _ = nv.begin(MODEL, state, [context, context], greedy(2), room=2)
                case _ if chunk is None:
                    continue
                case "extend":
                    state, more = nv.prefill(MODEL, state, context, after=chunk)
                case "fork":
                    state, more = nv.fork(state, chunk)
                case "truncate":
                    state, more = nv.truncate(state, chunk, data.draw(st.integers(1, len(chunk))))
                case "generate":
                    state, gen = nv.generate(MODEL, state, [chunk, context], greedy(3))
                    more = gen.chunk
                case "compose":
                    state, more = nv.compose(MODEL, state, [chunk, data.draw(st.sampled_from(chunks))])
                case "drop" if len(chunk) > 1:
                    start = data.draw(st.integers(1, len(chunk) - 1))
                    state, more = nv.drop(MODEL, state, chunk, start - 1, start, data.draw(st.sampled_from(["gap", "shift", "recompute"])))
                case "release":
                    state = nv.release(state, chunk)
                    chunks.remove(chunk)
        except (nv.OutOfPagesError, nv.InvalidRequestError):  # too long for now, or for ever
            pass
        if more is not None:
            chunks.append(more)
        right(state, chunks)


# Known figures


def test_an_empty_pool():
    report = right(engine(num_pages=3), [])
    assert (report.num_used, report.num_free, report.saved_share, report.owners, report.runs) == (0, 3, 0.0, (), ())
    assert "0 of 3 pages used" in report.text()


def test_a_prompt_of_1024_tokens_below_64_requests_of_64():
    """320 of 4,352 pages: the prompt's 64 once, and 4 of each request's own."""
    state = nv.init_state(MODEL, num_pages=4352, max_num_seqs=64)
    state, system = nv.prefill(MODEL, state, RUN[:1024])
    for i in range(64):
        state, _ = nv.submit(MODEL, state, [system, [i % 50, i // 50] * 31], greedy(2))
    state = nv.release(state, system)
    state, _ = nv.step(MODEL, state)
    report = nv.memory(state)
    assert (report.num_used, report.num_references, report.num_saved, report.num_shared) == (320, 4352, 4032, 64)
    assert f"{report.saved_share:.2%}" == "92.65%"
    assert (report.num_request, report.num_chunk, report.num_free) == (320, 0, 4032)
    assert "4,032 of 4,352 pages saved (92.65%)" in report.text()
    assert "... 56 more runs: 224 pages" in report.text()
    drawn(report)


@pytest.mark.unhooked
def test_a_thousand_branches_from_one_chunk_cost_what_differs():
    """A fork costs no page; a branch costs the pages of its own tokens, the partly filled page that it goes on from among them."""
    state, branches = nv.init_state(MODEL, num_pages=2200, max_num_seqs=1000), 1000
    state, base = nv.prefill(MODEL, state, RUN[:1000])
    base_pages, whole_pages = pages_for(1000, 16), 1000 // 16
    assert nv.memory(state).num_used == base_pages == 63
    twins = []
    for _ in range(branches):
        state, twin = nv.fork(state, base)
        twins.append(twin)
    report = nv.memory(state)
    assert (report.num_used, report.num_references) == (63, 63 * 1001)
    for twin in twins:
        state = nv.release(state, twin)
    before = state.stats
    state, gens = nv.generate_many(MODEL, state, [[base, [i % 50, i // 50]] for i in range(branches)], greedy(10))
    report = nv.memory(state)
    own = pages_for(1000 + 12, 16) - whole_pages
    assert own == 2
    assert report.num_held == base_pages + branches * own
    assert report.num_shared == whole_pages
    assert [owner.num_own for owner in report.owners] == [1, *[own] * branches]
    assert report.num_saved == whole_pages * branches
    assert state.stats.prefill_tokens - before.prefill_tokens == 2 * branches  # and nothing of the 1,000 runs again
    assert state.stats.reused_tokens - before.reused_tokens == 1000 * branches
    for gen in gens:
        state = nv.release(state, gen.chunk)
    assert nv.memory(state).num_held == base_pages
    nv.check(state)


def test_a_gap_stands_behind_pages_that_it_shares_with_another_way():
    state, whole = nv.prefill(MODEL, engine(), RUN[:24])
    state, gap = nv.drop(MODEL, state, whole, 4, 12, "gap")
    report = right(state, [whole, gap])
    assert (report.num_used, report.num_references, report.num_shared) == (6, 10, 4)
    assert [run.pages for run in report.runs] == [(0,), (1, 2, 3, 4, 5), (3, 4, 5)]
    assert [owner.num_own for owner in report.owners] == [2, 0]
    assert "(3 also held elsewhere): chunk 0 (24 tokens)" in report.text()
    state = nv.release(state, whole)
    report = right(state, [gap])
    assert report.idle == {1, 2}


def test_owners_say_what_they_are():
    state, base = nv.prefill(MODEL, engine(max_num_seqs=1), RUN[:6])
    state, both = nv.compose(MODEL, state, [base, base])
    state, first = nv.submit(MODEL, state, [base, [1]], greedy(30))
    state, _ = nv.step(MODEL, state)
    state, second = nv.submit(MODEL, state, [2, 3], greedy(4))
    state, carry = nv.begin(MODEL, state, [base], greedy(4), room=4)
    state, (ended,) = submit_many(MODEL, state, [[5]], [greedy(1)], keep=True)
    report = nv.memory(state, names={"base": base, "the first": first, "a\nlate\x1b[31m one": second})
    kinds = {owner.id: owner.kind for owner in report.owners}
    assert [kinds[i] for i in (base.liveness, first, second, ended)] == ["chunk", "running", "waiting", "waiting"]
    assert sorted(kinds.values()) == ["chunk", "chunk", "running", "session", "waiting", "waiting"]
    text = report.text()
    for told in (
        "base (chunk 0, 6 tokens)",
        "chunk 1 (12 tokens, approximate: composed, recompute=0)",
        "the first (request 2, running, 8 tokens, 7 filled)",
        "without pages: a late\ufffd[31m one (request 3, waiting, 2 tokens, 0 filled); request",
        "session, 6 tokens",
    ):
        assert told in text
    assert "\x1b" in report.text(color=True) and "\x1b" not in text + report.svg()
    drawn(report)
    state, gens = nv.commit(MODEL, state, carry)
    right(state, [base, both, *(gen.chunk for gen in gens)])


def test_a_chunk_in_host_memory_is_listed_there():
    state, base = nv.prefill(MODEL, engine(host_kv_gib=0.001), RUN[:6])
    state = nv.offload(state, base)
    state, _ = nv.submit(MODEL, state, [1, 2], greedy(4))
    report = nv.memory(state, names={"base": base})
    told = ["in host memory: base (chunk 0, 6 tokens)", "without pages: request 1 (waiting, 2 tokens, 0 filled)"]
    assert report.text().splitlines()[-2:] == told and all(line in report.svg() for line in told)
    drawn(report)


def test_pages_of_chunks_and_requests_add_up():
    state, base = nv.prefill(MODEL, engine(), RUN[:9])
    assert "3 of 64 pages used (3 held by chunks, 0 by requests, 0 only in the index)" in nv.memory(state).text()
    state, _ = nv.submit(MODEL, state, [base, RUN[9:14]], nv.SamplingParams(max_tokens=8))
    state, _ = nv.step(MODEL, state)
    report = nv.memory(state)
    assert report.num_both == 2 and report.num_chunk + report.num_request - report.num_both == report.num_held
    assert "(3 held by chunks, 4 by requests, 2 of these by both, 0 only in the index)" in report.text()


def test_a_report_stays_as_it_is():
    state, base = nv.prefill(MODEL, engine(), RUN[:9])
    report, old = nv.memory(state), state
    text = report.text()
    state = nv.release(state, base)
    assert report.text() == text
    assert nv.memory(state).num_idle == 2
    assert repr(report) == "MemoryReport(3 of 64 pages used, 0 of 3 saved)"
    assert repr(report.owners) == "(PageOwner(chunk 0 (9 tokens), 3 pages),)"
    assert repr(report.runs) == "(PageRun(pages 0-2 after 0, 1 owners),)"
    with pytest.raises(nv.DonatedStateError):
        nv.memory(old)


def test_pages_whose_kv_was_lost_are_free(monkeypatch):
    state, gone = nv.prefill(MODEL, engine(num_pages=4), RUN[:16])
    state = nv.release(state, gone)
    with monkeypatch.context() as patch:
        patch.setattr(state.runtime.executor, "prefill", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            nv.prefill(MODEL, state, [3] * 4)
    report = nv.memory(state)
    assert (report.num_idle, report.num_free) == (3, 1)
    drawn(report)


# Large pools, and names of every kind


@pytest.mark.unhooked
def test_a_large_pool_is_drawn_in_little_time_and_space():
    state = engine(num_pages=6000, page_size=1)
    state, base = nv.prefill(MODEL, state, RUN[:1500])
    chunks = [base]
    for i in range(60):
        state, chunk = nv.prefill(MODEL, state, [i % 50] * (i + 1), after=chunks[i // 3])
        chunks.append(chunk)
    start = time.perf_counter()
    report = nv.memory(state)
    text, picture = report.text(), report.svg()
    assert time.perf_counter() - start < 20
    assert len(text.splitlines()) < 32 + LINES + 10
    assert len(picture) < 1_000_000
    assert "each character is" in text
    drawn(report)


@pytest.mark.unhooked
def test_a_long_chain_and_a_wide_row_are_cut_short():
    state, chunk = nv.prefill(MODEL, engine(num_pages=512, page_size=1), RUN[:200])
    state, wide = nv.prefill(MODEL, state, [49])
    chunks = [chunk, wide]
    for length in range(1, 200):
        state, head = nv.truncate(state, chunk, length)
        state, branch = nv.prefill(MODEL, state, [length % 50], after=wide)
        chunks += [head, branch]
    report = right(state, chunks)
    text = report.text()
    assert text.count("more run") == 1
    assert len(report.runs) > 249
    assert text.count("owners") >= LINES - BRANCHES


@pytest.mark.parametrize("name", ["<b>&\"'", "]]>", "\x00\x07", "\udc80", "\ufffe", "𝄞 é", "x" * 500])
def test_a_name_cannot_break_the_picture(name):
    state, chunk = nv.prefill(MODEL, engine(), RUN[:5])
    report = nv.memory(state, names={name: chunk})
    root = ElementTree.fromstring(report.svg())
    titles = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert any("(chunk 0, 5 tokens)" in (title or "") for title in titles)
    assert name not in ("<b>&\"'", "]]>", "𝄞 é") or any(name in (title or "") for title in titles)
    report.svg().encode()
    report.text().encode()


@pytest.mark.parametrize("names", [["a"], {"": 0}, {" ": 0}, {1: 0}, {"a": None}, {"a": True}, {"a": 77}, {"a": [0]}, {"a": "b"}])
def test_bad_names_are_refused(names, untyped):
    state, _ = nv.prefill(MODEL, engine(), RUN[:5])
    with pytest.raises(nv.InvalidRequestError, match="names"):
        nv.memory(state, names=names)


def test_chunks_that_are_not_there_are_refused(untyped):
    state, chunk = nv.prefill(MODEL, engine(), RUN[:5])
    _, foreign = nv.prefill(MODEL, engine(), RUN[:5])
    with pytest.raises(nv.ForeignChunkError):
        nv.memory(state, names={"a": foreign})
    state = nv.release(state, chunk)
    with pytest.raises(nv.ReleasedChunkError):
        nv.memory(state, names={"a": chunk})
    with pytest.raises(nv.InvalidRequestError, match="EngineState"):
        nv.memory(None)  # pyright: ignore[reportArgumentType]


def test_small_words():
    assert [size(count) for count in (0, 1023, 1024, 1 << 20, 3 << 29, 1 << 40, 1 << 60)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.5 GiB", "1.0 TiB", "1048576.0 TiB",
    ]  # fmt: skip
    assert ranges([1, 2, 3, 7, 9, 8], 2) == "1-3, 7, ..."
    assert ranges([5], 3) == "5"


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_hf_folder(tmp_path_factory.mktemp("model"), tiny_config(max_position_embeddings=2048)))


@pytest.mark.unhooked
def test_the_demonstration_has_pages_of_every_kind(capsys, tmp_path):
    out = tmp_path / "memory.svg"
    assert cli.main(["memory", "--device", "cpu", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"the picture is in {out}\n"
    for told in ("system prompt", "fork of question 1", "cut", "with a gap", "composed", "in the index", "running", "waiting", "├─", "└─"):
        assert told in captured.out
    assert ElementTree.fromstring(out.read_text(encoding="utf-8")).tag.endswith("svg")
    rows = "".join(re.findall(r"^ *\d+  ([-.cr#2-9]+)$", captured.out, re.M))
    assert set(rows) >= set("#-.cr2")


def test_texts_and_chunk_files(folder, capsys, tmp_path):
    base = ["memory", "--model", folder, "--device", "cpu"]
    text = "the same beginning of thirty-two"
    assert cli.main([*base, text, "--branch", " one", "--branch", " two", "--max-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "[0-1] 2 pages, 3 owners: text 'the same beginning of...' (chunk 0, 32 tokens)" in out
    assert "branch 1 'one' (chunk" in out and "39 tokens" in out
    assert cli.main([*base, text, "--branch", " one"]) == 0
    assert "36 tokens" in capsys.readouterr().out
    model = nv.load_model(folder, "cpu")
    state, chunk = nv.prefill(model, nv.init_state(model, num_pages=8), text)
    state, longer = nv.prefill(model, state, " and more", after=chunk)
    files = [str(tmp_path / name) for name in ("one.safetensors", "two.safetensors")]
    for file, part in zip(files, (chunk, longer), strict=True):
        nv.save_chunk(state, part, file)
    assert cli.main([*base, "--load", files[0], "--load", files[1], "--num-pages", "16"]) == 0
    out = capsys.readouterr().out
    assert "3 of 16 pages used" in out
    assert f"[0-1] 2 pages, 2 owners: {files[0]} (chunk 0, 32 tokens)" in out
    assert cli.main([*base, "--load", files[0], "--load", files[0], "--load", files[0]]) == 0
    out = capsys.readouterr().out
    assert f"3 owners: {files[0]} (chunk 0, 32 tokens); {files[0]} (2) (chunk 1, 32 tokens); 1 more" in out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--branch", "x"], "give the text too"),
        (["x", "--max-tokens", "-1"], "--max-tokens -1"),
        (["x", "--out", "memory.png"], "ends with .svg"),
        (["x", "--out", "/proc/no/memory.svg"], "/proc/no/memory.svg cannot be written (No such file"),
        (["x", "--load", "/no/such/file"], "/no/such/file"),
        (["--num-pages", "0"], "--num-pages 0"),
        (["x", "--num-frames", "4"], "--num-frames 4"),
        (["long" * 10, "--max-model-len", "20"], "at most 20"),
        (["x", "--branch", ""], None),
        ([""], "the prompt is empty"),
        (["long" * 100, "--num-pages", "4"], "at most 64"),
    ],
)
def test_errors_are_one_line_and_exit_2(folder, capsys, arguments, match):
    code = cli.main(["memory", "--model", folder, "--device", "cpu", *arguments])
    captured = capsys.readouterr()
    if match is None:
        assert code == 0
        return
    assert (code, captured.out) == (2, "")
    assert re.fullmatch(r"nanovllm: error: .*\n", captured.err)
    assert match in captured.err


def test_the_pictures_of_two_equal_states_are_equal():
    reports = []
    for _ in range(2):
        state, base = nv.prefill(MODEL, engine(), RUN[:9])
        reports.append(nv.memory(state, names={"base": base}))
    assert reports[0].svg() == reports[1].svg()
    assert replace(reports[0], idle=frozenset({9})).num_used == reports[0].num_used + 1
