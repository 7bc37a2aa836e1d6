"""`Grammar`: equal sources are equal, hostile ones are refused at once, and compiled ones allow what they say."""

import builtins
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.engine.constrained import compiled_for
from nanovllm.sampling.compiled_grammar import MOST_ADDED, compile_for, prepare_grammars
from nanovllm.sampling.grammar_bounds import MAX_DEPTH, MAX_REPEAT, check_pattern, check_schema, parsed
from nanovllm.sampling.matchers import Matcher, Matchers, NotAllowedError
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.memo import Memo

MODEL = random_model(tiny_config(vocab_size=300, eos_token_ids=(256, 258)), tokenizer=byte_tokenizer())
GRAMMAR = nv.Grammar


def nested(levels: int, inner: str = "{}") -> str:
    return '{"items":' * levels + inner + "}" * levels


def chained(count: int) -> dict[str, Any]:
    """Schemas each of which refers to the next one."""
    links = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {}}}


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "levels": (lambda: GRAMMAR.json_schema(nested(10**4)), "depth"),
    "more levels": (lambda: GRAMMAR.json_schema("[" * 10**5), "exceeds the limit|depth"),
    "repetitions": (lambda: GRAMMAR.regex("(a{1000}){1000}{1000}"), "1000000000 exceeds the limit of 10000"),
    "a long text": (lambda: GRAMMAR.regex("a{100000}"), "100000 exceeds"),
    "a count of many digits": (lambda: GRAMMAR.regex(f"a{{{'9' * 5000}}}"), "exceeds"),
    "a pattern in a schema": (lambda: GRAMMAR.json_schema({"pattern": "(a{1000}){1000}"}), "exceeds"),
    "a pattern of keys": (lambda: GRAMMAR.json_schema({"patternProperties": {"(a{1000}){1000}": {}}}), "exceeds"),
    "a long pattern": (lambda: GRAMMAR.regex("(ab?)*" * 4000), "length of a pattern of 24000"),
    "choices": (lambda: GRAMMAR.choice([str(i) for i in range(3000)]), "number of choices of 3000"),
    "long choices": (lambda: GRAMMAR.choice(["x" * 10**6]), "size of a choice"),
    "an enum": (lambda: GRAMMAR.json_schema({"enum": [f"value {i}" for i in range(10**5)]}), "size of a json_schema"),
    "properties": (lambda: GRAMMAR.json_schema({"properties": {str(i): {} for i in range(5000)}}), "number of properties of 5000"),
    "patterns of keys": (
        lambda: GRAMMAR.json_schema({"patternProperties": {f"^{i}$": {} for i in range(500)}}),
        "patternProperties of 500",
    ),
    "references": (lambda: GRAMMAR.json_schema(chained(1000)), "all that \\$ref refers to"),
    "a multiple": (lambda: GRAMMAR.json_schema({"multipleOf": 999983}), "multipleOf.*999983"),
    "two multiples": (lambda: GRAMMAR.json_schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "multipleOf"),
    "rules": (lambda: GRAMMAR.lark("\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000))), "number of lines of a Lark grammar"),
    "a repetition of a rule": (lambda: GRAMMAR.lark('start: "a"{1000000}'), "repetition in a Lark grammar of 1000000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_are_refused_at_once(name: str) -> None:
    make, message = HOSTILE[name]
    start = time.perf_counter()
    with pytest.raises(nv.InvalidRequestError, match=message):
        make()
    assert time.perf_counter() - start < 10


def test_a_mapping_that_is_nested_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(10**5):
        schema = {"items": schema}
    with pytest.raises(nv.InvalidRequestError, match="nested too deeply"):
        GRAMMAR.json_schema(schema)


LARGE: dict[str, Callable[[], nv.Grammar]] = {
    "levels": lambda: GRAMMAR.json_schema(nested(MAX_DEPTH - 4, '{"type":"string"}')),
    "references": lambda: GRAMMAR.json_schema(chained(160)),
    "repetitions": lambda: GRAMMAR.regex("(a{100}){100}"),
    "choices": lambda: GRAMMAR.choice([f"{i} of them" for i in range(2000)]),
    "properties": lambda: GRAMMAR.json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
    "multiples": lambda: GRAMMAR.json_schema({"type": "integer", "multipleOf": 9973}),
    "rules": lambda: GRAMMAR.lark("start: r0\n" + "\n".join(f'r{i}: "a{i}" r{i + 1}' for i in range(450)) + '\nr450: "b"'),
    "terminals": lambda: GRAMMAR.lark('start: A\nA: B{1000}\nB: C{1000}\nC: D{1000}\nD: "x"'),
}


@pytest.mark.parametrize("name", LARGE)
def test_sources_at_the_bounds_are_compiled_in_bounded_time(name: str) -> None:
    start = time.perf_counter()
    nv.compile_grammar(MODEL, LARGE[name]())
    assert time.perf_counter() - start < 30  # a second, on a machine of its own


INVALID: list[tuple[Callable[[], Any], str]] = [
    (lambda: GRAMMAR.json_schema("{"), "is not JSON"),
    (lambda: GRAMMAR.json_schema('{"minimum": NaN}'), "NaN"),
    (lambda: GRAMMAR.json_schema({"minimum": math.inf}), "not JSON"),
    (lambda: GRAMMAR.json_schema({"enum": {1, 2}}), "not JSON"),
    (lambda: GRAMMAR.json_schema({"const": "\ud800"}), "lone surrogate"),
    (lambda: GRAMMAR.json_schema("123"), "must be an object, true or false"),
    (lambda: GRAMMAR.json_schema({"x-guidance": {}}), "x-guidance"),
    (lambda: GRAMMAR.regex(""), "must be a text that is not empty"),
    (lambda: GRAMMAR.choice([]), "at least one text"),
    (lambda: GRAMMAR.choice(["a", ""]), "the choice ''"),
    (lambda: GRAMMAR.choice("ab"), "must be a sequence of texts"),
    (lambda: nv.Grammar(form="python", source="x"), "form='python' must be one of"),  # pyright: ignore[reportArgumentType]
    (lambda: nv.SamplingParams(grammar="yes"), "grammar='yes': must be None or a Grammar"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(("make", "message"), INVALID, ids=[message for _, message in INVALID])
def test_what_is_no_grammar_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(nv.InvalidRequestError, match=message):
        make()


UNENFORCED = [
    (GRAMMAR.json_schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: \\["uniqueItems"\\]'),
    (GRAMMAR.json_schema({"type": "hiccup"}), "Invalid type: hiccup"),
    (GRAMMAR.json_schema({"$ref": "https://example.com/schema"}), "https://example.com/schema"),
    (GRAMMAR.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (GRAMMAR.json_schema(False), "Unsatisfiable"),
    (GRAMMAR.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "cannot be enforced|has no text"),
    (GRAMMAR.regex("(("), "unclosed group"),
    (GRAMMAR.regex("[^\\s\\S]"), "cannot be enforced|has no text"),
    (GRAMMAR.lark("start: other"), "other"),
]


@pytest.mark.parametrize(("grammar", "message"), UNENFORCED, ids=[str(grammar) for grammar, _ in UNENFORCED])
def test_what_cannot_be_enforced_is_refused_when_it_is_submitted(grammar: nv.Grammar, message: str) -> None:
    state = nv.init_state(MODEL, num_pages=8)
    with pytest.raises(nv.InvalidRequestError, match=message):
        nv.submit(MODEL, state, [1, 2], nv.SamplingParams(grammar=grammar))
    nv.check(state)


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("llguidance"):
            raise ModuleNotFoundError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(nv.InvalidRequestError, match=r"^a grammar needs llguidance: pip install 'nanovllm\[grammar\]'"):
        nv.compile_grammar(MODEL, GRAMMAR.regex("never compiled before"))


def test_a_model_without_a_tokenizer_takes_no_grammar() -> None:
    model = random_model(tiny_config(vocab_size=50))
    with pytest.raises(nv.InvalidRequestError, match="needs a tokenizer"):
        nv.compile_grammar(model, GRAMMAR.json_object())


def test_a_tokenizer_of_too_many_added_tokens_takes_no_grammar() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens([f"<{index}>" for index in range(MOST_ADDED)])
    prepare_grammars(tokenizer, 300, (256,))  # which tells nothing
    with pytest.raises(nv.InvalidRequestError, match=rf"has \d+ added tokens, over {MOST_ADDED}"):
        compile_for(tokenizer, GRAMMAR.json_object(), 300, (256,))


def test_equal_sources_are_equal_and_compiled_once() -> None:
    first, second = GRAMMAR.json_schema('{"type" : "null"}'), GRAMMAR.json_schema({"type": "null"})
    assert first == second and hash(first) == hash(second) and first != GRAMMAR.json_object()
    assert compiled_for(MODEL, first) is compiled_for(MODEL, second)
    assert GRAMMAR.json_object() == GRAMMAR.json_schema({"type": "object"})
    wider = random_model(tiny_config(vocab_size=301, eos_token_ids=(256, 258)), tokenizer=MODEL.tokenizer)
    assert compiled_for(wider, first) is not compiled_for(MODEL, first)


def test_a_memo_keeps_what_was_used_last() -> None:
    memo, made = Memo(2), list[int]()
    for key in (1, 2, 1, 3, 1, 2):
        assert memo.get(key, lambda key=key: made.append(key) or key) == key
    assert made == [1, 2, 3, 2] and len(memo) == 2
    with pytest.raises(KeyError):
        memo.get(4, lambda: {}[4])
    assert len(memo) == 2


@given(st.recursive(st.sampled_from(["a", "b", "[a{77}]", "\\{", "."]), lambda part: st.one_of(
    st.tuples(part, st.integers(1, 30)).map(lambda pair: f"({pair[0]}){{{pair[1]}}}"),
    st.tuples(part, part).map("".join), part.map(lambda text: f"({text})*")), max_leaves=8))  # fmt: skip
@example("a{10001}")
@settings(max_examples=60)
def test_repetitions_multiply(pattern: str) -> None:
    """Against the largest number of copies that really unfolding the pattern gives."""

    def most(text: str, times: int = 1) -> int:
        found, depth, start = times, 0, 0
        plain = text.replace("[a{77}]", "c").replace("\\{", "c")
        for place, letter in enumerate(plain):
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if letter == "(" and depth == 1:
                start = place
            if letter == ")" and depth == 0:
                after = plain[place + 1 :]
                count = int(after[1 : after.index("}")]) if after.startswith("{") else 1
                found = max(found, most(plain[start + 1 : place], times * count))
        return max(found, times * int(plain[2:-1])) if plain.startswith("a{") else found

    if most(pattern) <= MAX_REPEAT:
        check_pattern(pattern)
    else:
        with pytest.raises(nv.InvalidRequestError, match=f"of {most(pattern)} exceeds"):
            check_pattern(pattern)


KEYS = st.sampled_from(["$ref", "pattern", "multipleOf", "properties", "a"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


@settings(max_examples=60)
@given(JSON)
def test_any_json_is_checked_without_other_errors(value: Any) -> None:
    try:
        check_schema(parsed(json.dumps(value)))
        compiled_for(MODEL, GRAMMAR.json_schema(json.dumps(value)))
    except nv.InvalidRequestError:
        pass


def allowed(matcher: Matcher, *, may_end: bool = True) -> set[int]:
    words = np.zeros((1, 10), np.int32)
    Matchers().fill([matcher], words, [0])
    matcher.finish(words[0], may_end=may_end)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def ids(text: str) -> list[int]:
    assert MODEL.tokenizer is not None
    return MODEL.tokenizer.encode(text, add_special_tokens=False)


def test_end_tokens_are_allowed_exactly_where_the_grammar_accepts() -> None:
    matcher = Matcher(compiled_for(MODEL, GRAMMAR.regex("ab|abc")))
    assert allowed(matcher) == {*ids("a")} and matcher.forced() == ids("ab")
    assert not matcher.read(ids("a")[0]) and not matcher.read(ids("b")[0])
    assert allowed(matcher) == {*ids("c"), 256, 258} and allowed(matcher, may_end=False) == {*ids("c")}
    assert matcher.read(ids("c")[0])
    assert allowed(matcher, may_end=False) == {256, 258}  # nothing else is left
    with pytest.raises(NotAllowedError, match="is not allowed as number 4"):
        matcher.read(ids("c")[0])
    with pytest.raises(NotAllowedError):  # its mask would allow the end tokens alone
        allowed(matcher)


def test_a_dead_end_is_no_complete_reply() -> None:
    matcher = Matcher(compiled_for(MODEL, GRAMMAR.regex("x[^\\s\\S]|y")))
    with pytest.raises(NotAllowedError):
        matcher.read(ids("x")[0])
        allowed(matcher)


@given(st.lists(st.integers(0, 12), max_size=8))
def test_a_matcher_follows_a_reply_forwards_and_backwards(lengths: list[int]) -> None:
    """It then allows what a fresh one allows that reads the same tokens."""
    compiled = compiled_for(MODEL, GRAMMAR.json_object())
    matcher, tokens = Matcher(compiled), ids('{"a":[1,2]}')
    for length in lengths:
        now = tokens[:length]
        matcher.follow(len(now), lambda place, now=now: now[place:])
        fresh = Matcher(compiled)
        for token in now:
            fresh.read(token)
        assert matcher.token_ids == now and allowed(matcher) == allowed(fresh)


def test_a_matcher_is_made_anew_for_another_newest_token() -> None:
    compiled = compiled_for(MODEL, GRAMMAR.choice(["abc", "axy"]))
    matcher = Matcher(compiled)
    for text in ("ab", "ax", "axy", "ab"):
        matcher.follow(len(text), lambda place, text=text: ids(text)[place:])
        assert matcher.token_ids == ids(text)
    assert allowed(matcher) == {*ids("c")}
