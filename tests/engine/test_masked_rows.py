"""Masks of many rows at once are those of one row after another, and matchers are at the ends of replies whatever happened before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.engine.constrained import compiled_for
from nanovllm.engine.masked_rows import MaskedRows
from nanovllm.sampling.matchers import FEW, Matcher, Matchers, NotAllowedError, finish_together
from nanovllm.sampling.token_masks import all_tokens
from nanovllm.state.request import Request
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
pytest.importorskip("llguidance")

MODEL = random_model(tiny_config(vocab_size=300, eos_token_ids=(256, 258)), tokenizer=byte_tokenizer())
GRAMMARS = [
    nv.Grammar.regex("a{0,3}"),
    nv.Grammar.regex("(ab|ac)+x?"),
    nv.Grammar.choice(["abc", "axy", "b"]),
    nv.Grammar.json_schema({"type": "array", "items": {"type": "string", "maxLength": 2}}),
]
WORDS = len(all_tokens(300))
A, B, C = byte_tokenizer().encode("abc")


def tokens_of(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def mask_of(matcher: Matcher) -> np.ndarray:
    words = np.zeros((1, WORDS), np.int32)
    Matchers().fill([matcher], words, [0])
    return words[0]


def walked(data: st.DataObject) -> Matcher:
    """A matcher somewhere in its grammar, or one that has failed."""
    matcher = Matcher(compiled_for(MODEL, data.draw(st.sampled_from(GRAMMARS))))
    for _ in range(data.draw(st.integers(0, 4))):
        if not (going := [token for token in tokens_of(mask_of(matcher)) if token < 256]):
            break
        matcher.read(data.draw(st.sampled_from(going)))
    if data.draw(st.integers(0, 5)) == 0:
        with pytest.raises(NotAllowedError):
            matcher.read(7)
    return matcher


@settings(max_examples=60)
@given(data=st.data())
def test_masks_finished_together_are_those_finished_one_by_one(data: st.DataObject) -> None:
    matchers = [walked(data) for _ in range(data.draw(st.integers(1, 3 * FEW)))]
    lines = data.draw(st.permutations(range(len(matchers) + 2)))[: len(matchers)]
    may_end = np.array(data.draw(st.lists(st.booleans(), min_size=len(matchers), max_size=len(matchers))))
    words = np.full((len(matchers) + 2, WORDS), 5, np.int32)
    Matchers().fill(matchers, words, lines)
    for line in lines:  # what a grammar gives rarely or never
        match data.draw(st.sampled_from(["as it is", "as it is", "nothing", "ends alone", "a late token"])):
            case "nothing":
                words[line] = 0
            case "ends alone":
                words[line] = 0
                words[line, 8] = 0b101
            case "a late token":
                words[line] = 0
                words[line, 9] = 1
    wanted, errors = words.copy(), dict[int, str]()
    for place, (matcher, line) in enumerate(zip(matchers, lines, strict=True)):
        try:
            matcher.finish(wanted[line], may_end=bool(may_end[place]))
        except NotAllowedError as error:
            errors[place] = str(error)
    for place in finish_together(matchers, words, lines, may_end):
        try:
            matchers[place].finish(words[lines[place]], may_end=bool(may_end[place]))
        except NotAllowedError as error:
            assert errors.pop(place) == str(error)
    assert not errors and np.array_equal(words, wanted)


def test_only_masks_that_need_it_are_finished_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    matchers = [Matcher(compiled_for(MODEL, GRAMMARS[0])) for _ in range(FEW + 2)]
    monkeypatch.setattr("nanovllm.sampling.matchers.FIRST", 1)  # the letter is later
    for _ in range(3):
        assert matchers[1].read(A) == (len(matchers[1].token_ids) == 3)
    with pytest.raises(NotAllowedError):
        matchers[2].read(7)
    words, lines = np.zeros((FEW + 2, WORDS), np.int32), range(FEW + 2)
    Matchers().fill(matchers, words, lines)
    assert finish_together(matchers, words, lines, np.zeros(FEW + 2, bool)) == [1, 2]


def requests(data: st.DataObject) -> list[Request]:
    state = nv.init_state(MODEL, num_pages=8)
    for _ in range(data.draw(st.integers(1, 3))):
        grammar = data.draw(st.sampled_from([*GRAMMARS, None]))
        state, _ = nv.submit(MODEL, state, [1], nv.SamplingParams(min_tokens=2, max_tokens=9, grammar=grammar))
    return [sequence.request for sequence in state.waiting]


@settings(max_examples=60)
@given(data=st.data())
def test_matchers_are_at_the_ends_of_replies_whatever_happened_before(data: st.DataObject) -> None:
    """Steps, steps that are run again, other tokens, interrupts, dropped matchers, and others who move them."""
    matchers, owners = Matchers(), requests(data)
    rows, replies = MaskedRows(range(len(owners)), owners), [list[int]() for _ in owners]

    def follow(rows: MaskedRows) -> list[Matcher]:
        lengths = np.array([len(reply) for reply in replies], np.int64)
        newest = np.array([reply[-1] if reply else 1 for reply in replies], np.int32)
        return rows.follow(matchers, lengths, newest, lambda row, start: replies[row][start:])

    for _ in range(data.draw(st.integers(1, 8))):
        used, others = follow(rows), dict[int, int]()
        assert [owners[place].grammar for place in rows.bound] == [matcher.compiled for matcher in used]
        drawn = [A] * len(owners)
        for place, matcher in zip(rows.bound, used, strict=True):
            compiled = owners[place].grammar
            assert compiled is not None
            fresh = Matcher(compiled)
            for token in replies[place]:
                fresh.read(token)
            assert matcher.token_ids == replies[place] and np.array_equal(mask_of(matcher), mask_of(fresh))
            allowed = tokens_of(mask_of(matcher))
            drawn[place] = data.draw(st.sampled_from(allowed[-3:]))
            others[place] = allowed[0]
        if 256 in drawn or 258 in drawn:  # a reply is at its end: all go back
            replies = [reply[: data.draw(st.integers(0, len(reply)))] for reply in replies]
            continue
        happens = data.draw(st.sampled_from(["step", "step", "again", "other tokens", "interrupt", "drop", "others", "other rows"]))
        if happens == "interrupt":
            done = len(used) // 2
            with pytest.raises(IndexError):
                rows.read(matchers, drawn[: rows.bound[done]] if used else [])
            continue
        ends = rows.read(matchers, drawn)
        assert set(ends.values()) <= {None}
        match happens:
            case "again":
                continue
            case "other tokens":
                drawn = [others.get(place, token) for place, token in enumerate(drawn)]
            case "drop":
                matchers.forget(data.draw(st.sampled_from(owners)))
            case "others" if rows.bound:
                owner = owners[data.draw(st.sampled_from(rows.bound))]
                assert owner.grammar is not None
                matchers.of(owner, owner.grammar).follow(0, lambda _: [])
            case "other rows":
                follow(MaskedRows(range(len(owners)), owners))
        replies = [[*reply, token] for reply, token in zip(replies, drawn, strict=True)]


def test_replies_are_not_looked_at_while_nobody_else_moves_the_matchers() -> None:
    state = nv.init_state(MODEL, num_pages=8)
    state, _ = nv.submit(MODEL, state, [1], nv.SamplingParams(grammar=GRAMMARS[1]))
    matchers, rows = Matchers(), MaskedRows([0], [sequence.request for sequence in state.waiting])
    (first,) = rows.follow(matchers, np.array([0]), np.array([1], np.int32), lambda row, start: [])
    for length, token in enumerate((A, B, A, C), 1):
        assert rows.read(matchers, [token]) == {}
        (found,) = rows.follow(matchers, np.array([length]), np.array([token], np.int32), lambda row, start: pytest.fail("looked at"))
        assert found is first and len(found.token_ids) == length
