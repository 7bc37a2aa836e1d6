"""Notebooks: the values of the package show themselves in a kernel, and those of examples/ do what they show."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.unhooked,
    pytest.mark.skipif(not (find_spec("nbclient") and find_spec("ipykernel")), reason="needs nbclient and ipykernel"),
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning"),  # of Jupyter's own
]
NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
LONGEST = 300  # seconds; each takes about three when the machine is quiet

SETUP = """
import nanovllm as nv
llm = nv.LLM("tiny", num_pages=64)
greedy = nv.SamplingParams(temperature=0, max_tokens=12)
"""


def run(tmp_path: Path, *cells: str, tags: tuple[str, ...] = ()) -> list[list[Any]]:
    """The outputs of cells after the set-up."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    from tools.run_notebooks import executed

    path = tmp_path / "some.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(text, metadata={"tags": [*tags]}) for text in (SETUP, *cells)]), path)
    return [cell.outputs for cell in executed(path).cells[1:]]


def test_values_show_themselves(tmp_path: Path) -> None:
    cells = (
        ("llm.state", "text/html", "EngineState"),
        ('llm.state, chunk = nv.prefill(llm.model, llm.state, "Once upon a time")\nchunk', "text/html", "4 of 4 tokens"),
        ("nv.memory(llm.state, names={'story': chunk})", "image/svg+xml", "story (chunk"),
        ("from IPython.display import display\ndisplay(chunk)", "text/html", "4 of 4 tokens"),
        ('llm.generate("Hello", greedy)[0]', "text/html", "How can I help you?"),
    )
    for (output,), (code, kind, words) in zip(run(tmp_path, *(code for code, *_ in cells)), cells, strict=True):
        assert output.output_type in ("execute_result", "display_data") and words in output.data[kind], code


def test_a_stream_shows_the_reply_while_it_grows(tmp_path: Path) -> None:
    """The display is updated in place, so that one output is left, and what was read before is in it."""
    watch = """
import nanovllm.entrypoints.stream as streams
streams.SHOWN_EVERY = 0.0
from IPython.core.displaypub import DisplayPublisher
publish, seen = get_ipython().display_pub.publish, []
get_ipython().display_pub.publish = lambda data, *rest, **more: (seen.append(data["text/html"]), publish(data, *rest, **more))[1]
stream = llm.stream("Hello", greedy)
first = next(stream).text
stream
"""
    shown, told = run(
        tmp_path, watch, "print(len(seen), all(len(a) <= len(b) for a, b in zip(seen[:-1], seen[1:])), list(stream), first in seen[0])"
    )
    (output,) = shown
    assert output.output_type == "display_data" and "How can I help you?" in output.data["text/html"]
    assert "reply tokens" in output.data["text/html"]
    count, *rest = told[0].text.split()
    assert int(count) > 8 and rest == ["True", "[]", "True"]


def test_a_stream_that_fails_leaves_what_has_come(tmp_path: Path) -> None:
    cell = """
def broken(logits, tokens):
    if llm.state.num_steps > 4:
        raise ValueError("no more")
    return logits
stream = llm.stream("Hello", greedy, process_logits=broken)
stream
"""
    ((shown, *told),) = run(tmp_path, cell, tags=("raises-exception",))
    assert "<pre" in shown.data["text/html"] and "How" in shown.data["text/html"]
    assert "no more" in str(told), "IPython shows the error below"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_does_what_it_shows(path: Path) -> None:
    import nbformat

    from tools.run_notebooks import executed

    kept, began = nbformat.read(path, as_version=4), time.monotonic()
    found = executed(path)
    assert time.monotonic() - began < LONGEST
    for before, now in zip(kept.cells, found.cells, strict=True):
        assert before.source.strip() and before.get("outputs") == now.get("outputs"), f"`make notebooks` writes anew:\n{before.source}"
    assert kept == found, "the metadata differ: `make notebooks`"


def test_there_are_notebooks_and_the_documents_name_them() -> None:
    index = (Path(__file__).parents[1] / "docs/index.md").read_text()
    assert len(NOTEBOOKS) >= 3 and all(f"(../examples/{path.name})" in index for path in NOTEBOOKS)
