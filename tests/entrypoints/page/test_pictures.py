"""The pictures of docs/how-to/chat-page.md. `make pictures` writes them there; without `PICTURES=FOLDER` they are only taken."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.page.window import Window, watch
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
SHOWN = Path(__file__).parents[3] / "docs/how-to/chat-page"
SUM = "What is 27 + 38?"
FACTS = {"king": "The king of Aistonia is Oswin.", "capital": "The capital of Aistonia is Velmora."}
HANDBOOK = f"{FACTS['king']} {FACTS['capital']} The lamp on the tower burns all night. " * 5
SIZE = {"width": 1200, "height": 720}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


@contextmanager
def opened(browser: Any, live: Live, **options: Any) -> Iterator[Window]:
    context = browser.new_context(**{"viewport": SIZE, "color_scheme": "light", **options})
    with watch(context, f"http://127.0.0.1:{live.port}/") as window:
        window.settle("temperature", "0")
        yield window
    context.close()


def branched(window: Window) -> None:
    """A chat before, and a sum that was asked in two ways and answered twice."""
    window.send("Tell a story of a fox.")
    window.page.click("#new")
    window.send(SUM)
    window.press("Regenerate")
    window.ended()
    window.press("Edit", 0)
    window.page.fill(".editing textarea", "What is 48 + 36?")
    window.page.click(".editing .save")
    window.ended()


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_chat_with_its_branches(browser: Any, live: Live, colours: str) -> None:
    with opened(browser, live, color_scheme=colours) as window:
        branched(window)
        window.page.click("#branches")
        window.page.locator("details.thinking summary").last.click()
        picture(window, colours)


def test_the_tree_of_a_chat(browser: Any, live: Live) -> None:
    with opened(browser, live) as window:
        branched(window)
        window.send("And what is 84 + 9?")
        window.press("The branch before", 0)
        window.send("What is the half of it?")
        window.press("Regenerate")
        window.ended()
        window.page.click("#branches")
        assert window.page.locator("#tree .branch").count() == 10
        picture(window, "tree", "#panel")


def test_the_shelf(browser: Any, tmp_path: Path) -> None:
    """With files that are saved, one of which is not in memory."""
    with Live(settings=Settings(shutdown_seconds=1.0, chunk_dir=tmp_path)) as live, opened(browser, live) as window:
        assert live.post("/v1/chunks", {"name": "handbook", "text": HANDBOOK}).status == 200
        assert live.post("/v1/chunks", {"name": "king", "text": FACTS["king"]}).status == 200
        for name in ("handbook", "king"):
            assert live.post(f"/v1/chunks/{name}/save", {}).status == 200
        assert live.call("DELETE", "/v1/chunks/handbook").status == 200
        put_before(window, live)
        window.send("What is the capital of Aistonia?")
        picture(window, "shelf")


def test_the_memory(browser: Any, live: Live) -> None:
    with opened(browser, live) as window:
        branched(window)
        put_before(window, live)
        window.send("What is the capital of Aistonia?")
        asked = {"handbook": (HANDBOOK, None), "who": ("Who is the king?", "handbook"), "where": ("Where is the lamp?", "handbook")}
        for name, (text, after) in asked.items():
            assert live.post("/v1/chunks", {"name": name, "text": text, "after": after}).status == 200
        live.wait_until_idle()
        window.page.click("#memory-button")
        window.page.wait_for_selector("#memory-tree li:has-text('where (')")
        window.until("document.querySelectorAll('#memory-map .cell.requests').length === 0")
        picture(window, "memory")


def test_a_phone(browser: Any, live: Live) -> None:
    with opened(browser, live, **PHONE) as window:
        window.send(SUM)
        window.press("Regenerate")
        window.ended()
        picture(window, "phone")


def test_every_picture_of_the_documents_is_taken_here() -> None:
    taken = {"light", "dark", "tree", "shelf", "memory", "phone"}
    assert {path.stem for path in SHOWN.iterdir()} == taken
    page = SHOWN.with_suffix(".md").read_text()
    assert all(f"(chat-page/{name}.png)" in page for name in taken)


def put_before(window: Window, live: Live) -> None:
    """Two chunks before a new chat."""
    for name, text in FACTS.items():
        assert live.post("/v1/chunks", {"name": name, "text": text, "replace": True}).status == 200
    window.page.click("#new")
    window.page.click("#chunks")
    for name in FACTS:
        window.page.get_by_role("button", name=f"Use {name}").click()


def picture(window: Window, name: str, part: str = "body") -> None:
    """A picture of the window or a part of it, which is written where the documents have theirs if that was asked for."""
    window.page.evaluate("document.activeElement.blur()")
    window.page.mouse.move(0, 0)
    data = window.page.locator(part).screenshot()
    assert data.startswith(b"\x89PNG")
    if folder := os.environ.get("PICTURES"):
        (Path(folder) / f"{name}.png").write_bytes(data)
