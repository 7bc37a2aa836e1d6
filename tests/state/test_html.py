"""What a notebook shows of values: `_repr_html_` and `_repr_svg_`."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import nanovllm as nv
from nanovllm.state.html import card

GREEDY = nv.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> nv.Model:
    return nv.load_model("tiny", device="cpu")


class Cells(HTMLParser):
    """The text of a document's cells, in pairs, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data

    def pairs(self) -> dict[str, str]:
        return dict(zip(self.cells[::2], self.cells[1::2], strict=True))


def test_a_hostile_text_is_shown_as_text() -> None:
    bad = "<img src=x onerror=alert(1)>&\n  two"
    found = Cells(card(bad, [(bad, bad)], bad))
    assert found.tags == {"div", "b", "pre", "table", "tr", "th", "td"} and found.cells == [bad, bad]


def test_a_state_tells_its_pages_and_that_it_was_donated(model: nv.Model) -> None:
    state = nv.init_state(model, num_pages=64)
    newer, chunk = nv.prefill(model, state, "Once upon a time")
    newer, _ = nv.submit(model, newer, "Hello", GREEDY)
    told = Cells(newer._repr_html_()).pairs()
    assert (told["pages used"], told["chunks"], told["requests"]) == ("1 of 64", "1", "0 running, 1 waiting")
    assert told["prompt tokens"] == "4 run, 0 reused" and "donated" not in told["epoch"]
    assert "donated: use the newest state" in Cells(state._repr_html_()).pairs()["epoch"]
    told = Cells(chunk._repr_html_()).pairs()
    assert told == {"tokens": "4", "pages": "1", "KV": "exact", "exact": "4 of 4 tokens"}
    newer, moved = nv.drop(model, newer, chunk, 1, 2, mode="gap")
    assert Cells(moved._repr_html_()).pairs()["KV"].startswith("approximate: ")


def test_replies_show_their_text_and_why_they_ended(model: nv.Model) -> None:
    state = nv.init_state(model, num_pages=64)
    state, reply = nv.generate(model, state, "Once upon a time", GREEDY)
    page = reply._repr_html_()
    assert f">{reply.text}<" in page and Cells(page).pairs()["ended by"] == "length" and "Chunk(8 tokens" in page
    llm = nv.LLM(model, num_pages=64)
    (output,) = llm.generate("Once upon a time", GREEDY)
    told = Cells(output._repr_html_()).pairs()
    assert told == {"ended by": "length", "reply tokens": "4", "prompt tokens": "4, of which 0 were reused"}


def test_a_report_of_memory_is_a_picture(model: nv.Model) -> None:
    state = nv.init_state(model, num_pages=64)
    report = nv.memory(state)
    assert report._repr_svg_() == report.svg() and ElementTree.fromstring(report._repr_svg_()).tag.endswith("svg")
