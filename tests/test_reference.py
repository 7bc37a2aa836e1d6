"""docs/reference: its pages say what the code does, and name everything that is public."""

import inspect
import re
from pathlib import Path

import pytest

import nanovllm as nv
from nanovllm import errors, testing
from tools import write_reference

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/reference"


def text_of(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md")))
def test_generated_parts_are_those_of_the_code(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = text_of(page)
    assert text.count("<!-- generated: ") == len(write_reference.PART.findall(text)) == text.count("<!-- /generated -->")
    assert write_reference.filled(text) == text, "run `make reference`"


def test_every_public_name_has_one_entry() -> None:
    entries = re.findall(r"^::: nanovllm\.(\w+)$", text_of("api") + text_of("errors"), re.M)
    assert sorted(entries) == sorted(nv.__all__)
    assert sorted(re.findall(r"^::: nanovllm\.testing\.(\w+)$", text_of("testing"), re.M)) == sorted([*testing.__all__, "models"])


def test_every_error_is_explained() -> None:
    raised = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, nv.NanoVLLMError)]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", text_of("errors"), re.M)
    assert [*rows, "NanoVLLMError"] and set(rows) | {"NanoVLLMError"} == set(raised) and len(rows) == len(set(rows))
    assert re.findall(r"^## (\w+)$", text_of("errors"), re.M) == rows


def test_every_option_is_listed_with_its_default() -> None:
    sections = dict(part.split("\n", 1) for part in text_of("options").split("\n## ")[1:])
    for name in ("LLM", "load_model", "init_state", "SamplingParams"):
        takes = getattr(nv, name)
        parameters = {key: each.default for key, each in inspect.signature(takes).parameters.items() if each.default is not each.empty}
        listed = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \| [^|]{8,}", sections[name], re.M))
        assert listed == {key: repr(value) for key, value in parameters.items()}, name


def test_docstrings_are_read() -> None:
    def documented() -> None:
        """First sentence, i.e. `it`. Second one.

        Args:
            one: Of one line.
            two (int): Of two lines: with a colon,
                and a second line.

        Returns:
            other: Not an argument.
        """

    assert write_reference.arguments_of(documented) == {"one": "Of one line.", "two": "Of two lines: with a colon, and a second line."}
    assert write_reference.summary(documented) == "First sentence, i.e. `it`."
    assert write_reference.table(("a",), [("b | c\nd",)]) == "| a |\n| --- |\n| b \\| c d |"


def test_the_glossary_has_the_words() -> None:
    words = {word.strip().lower() for entry in re.findall(r"\*\*([^*]+)\*\*", text_of("glossary")) for word in entry.split(",")}
    needed = {"page", "chunk", "context", "sequence", "request", "prefill", "decode", "donated"}
    needed |= {"tile configuration", "sliding-window page", "radix-tree node", "rotate", "sample", "norm weight", "most probable", "prefix"}
    assert needed | {"transformers fallback", "post-process", "handle", "provenance"} <= words


def test_the_format_page_has_the_names_that_files_have(tmp_path: Path) -> None:
    model = nv.load_model("tiny", device="cpu")
    state, chunk = nv.prefill(model, nv.init_state(model, num_pages=4), "Once")
    nv.save_chunk(state, chunk, tmp_path / "chunk.safetensors")
    data = (tmp_path / "chunk.safetensors").read_bytes()
    section = text_of("chunk-file-format").split("\n## Metadata\n")[1].split("\n## ")[0]
    keys = [key.encode() for key in re.findall(r"^\| `(\w+)` \|", section, re.M)]
    places = [data.index(b'"' + key + b'":"') for key in keys]
    assert places == sorted(places) and len(keys) == 10 and data.count(b'":"', 0, data.index(b'},"tokens"')) == 10
