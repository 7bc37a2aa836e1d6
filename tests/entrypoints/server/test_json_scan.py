"""The JSON scanner accepts what `json.loads` accepts, and finds the parts of an object wherever the text is divided."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.entrypoints.server.chat_limits import MAX_DEPTH
from nanovllm.entrypoints.server.tools.json_scan import Found, Scan

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)
TEXTS = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    OBJECTS,
    st.none() | st.integers(0, 2),
    st.booleans(),
)
ALPHABET = st.text(st.sampled_from('{}[]",:\\u0012eE+-.tfnraulse \n\x01é'), max_size=6)


def scanned(text: str, size: int = 1 << 30) -> tuple[int, bool, list[tuple[Found, int]]]:
    """How far a text is scanned in pieces, whether its object ends there, and what is found where."""
    scan, found, opened, begin = Scan(), [], False, 0
    while begin < len(text):
        end = min(len(text), begin + size)
        scan, at, why = scan.run(text, begin, end, opened=opened)
        if why in (Found.BAD, Found.END):
            return at, why is Found.END, found
        if why is not Found.MORE:
            found.append((why, at))
        opened, begin = why in (Found.KEY, Found.VALUE), at
    return begin, False, found


def accepted(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@given(TEXTS, st.integers(0, 60), st.integers(0, 3), ALPHABET)
def test_a_text_is_an_object_for_the_scanner_if_it_is_one_for_python(text: str, at: int, cut: int, put: str) -> None:
    for given_text in (text, text[:at] + put + text[at + cut :], "{" + put + "}"):
        at, ended, _ = scanned(given_text)
        assert accepted(given_text) == (ended and not given_text[at:].strip(" \t\n\r")) or not given_text.startswith("{")
        if ended:
            assert accepted(given_text[:at])


@given(TEXTS, ALPHABET, st.integers(0, 60), st.integers(1, 4))
def test_what_is_found_does_not_depend_on_the_pieces(text: str, put: str, at: int, size: int) -> None:
    text = text[:at] + put + text[at:]
    assert scanned(text, size) == scanned(text)


def test_the_parts_of_the_outermost_object_are_found() -> None:
    text = '{"a": "b", "c" :[1, {"d": "e"}], "f": -1.5e3}'
    _, ended, found = scanned(text)
    assert ended
    assert [(why.name, text[at : at + 1] if why in (Found.KEY, Found.VALUE) else text[at - 1]) for why, at in found] == [
        ("KEY", '"'), ("STRING", '"'), ("VALUE", '"'), ("STRING", '"'),
        ("KEY", '"'), ("STRING", '"'), ("VALUE", "["), ("CLOSED", "]"),
        ("KEY", '"'), ("STRING", '"'), ("VALUE", "-"),
    ]  # fmt: skip


@pytest.mark.parametrize(("depth", "ends"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_depth_is_bounded(depth: int, ends: bool) -> None:
    assert scanned('{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}")[1] is ends
