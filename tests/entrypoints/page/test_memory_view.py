"""The memory view of the chat page: figures, map and tree are those of the engine, and follow it while the panel is open."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.page.window import Window, watch
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
FACTS = "The king of Aistonia is Oswin, and the capital of Aistonia is Velmora. " * 2


@pytest.fixture
def live() -> Iterator[Live]:
    """A server in whose memory is nothing."""
    with Live() as server:
        yield server


def counts(window: Window) -> dict[str, int]:
    """What the legend says."""
    items = window.page.locator("#memory-legend li").all_text_contents()
    return {words: int(count) for count, _, words in (item.strip().partition(" ") for item in items)}


def shown(window: Window, kind: str) -> int:
    return window.page.locator(f"#memory-map .cell.{kind}").count()


def test_figures_map_and_tree_follow_the_engine(window: Window, live: Live) -> None:
    page = window.page
    page.click("#memory-button")
    window.until("document.querySelectorAll('#memory-map .cell.free').length === 256")
    assert "0 of 256 pages used" in page.locator("#memory-told").text_content()
    for name, more in {"king": {"text": FACTS}, "ask": {"text": "Who is the king?", "after": "king"}}.items():
        assert live.post("/v1/chunks", {"name": name, **more}).status == 200
    window.until("document.querySelectorAll('#memory-tree li').length === 3")
    report = nv.memory(live.engine.state)
    first, *ends = page.locator("#memory-tree li").all_text_contents()
    assert "2 owners" in first and {text.partition(": ")[2].partition(" ")[0] for text in ends} == {"king", "ask"}
    assert shown(window, "chunks") == report.num_chunk and str(report.num_saved) in page.locator("#memory-told").text_content()
    cell = page.locator("#memory-map .cell").first
    assert cell.text_content() == "2" and "2 owners, chunks" in cell.get_attribute("title")
    window.send("What is 27 + 38?")
    window.until("document.querySelectorAll('#memory-map .cell.index').length > 0")
    live.wait_until_idle()
    window.until("document.querySelectorAll('#memory-map .cell.requests').length === 0")
    report = nv.memory(live.engine.state)
    found = counts(window)
    assert (found["chunks"], found["free"]) == (report.num_chunk, report.num_free) and sum(found.values()) == 256
    widths = "[...document.querySelectorAll('#memory-bar .part')].map((part) => Number(part.style.flexGrow))"
    assert sorted(page.evaluate(widths)) == sorted(found.values())
    assert any("only in the index" in text for text in page.locator("#memory-tree li").all_text_contents())
    live.call("DELETE", "/v1/chunks/ask")
    live.call("DELETE", "/v1/chunks/king")
    window.until("document.querySelectorAll('#memory-map .cell.chunks').length === 0")


def test_a_reply_that_runs_is_seen_and_a_closed_panel_asks_nothing(slow_window: Window) -> None:
    """A reply of seconds, because the panel asks once a second."""
    page, asked = slow_window.page, list[str]()
    page.on("request", lambda request: "memory" in request.url and asked.append(request.url))
    page.click("#memory-button")
    slow_window.send("Tell a long story of a fox.", wait=False)
    slow_window.until("document.querySelectorAll('#memory-map .cell.requests').length > 0")
    slow_window.until("document.getElementById('memory-tree').textContent.includes('request')")
    page.evaluate("document.getElementById('stop').click()")  # the reply may have ended, and the button with it
    page.click("#chunks")
    assert page.locator("#memory").is_hidden() and page.locator("#shelf").is_visible(), "one panel at a time"
    slow_window.ended()
    before = len(asked)
    page.wait_for_timeout(1500)
    assert len(asked) == before


def test_another_keys_chunks_are_only_counted(browser: Any) -> None:
    keys = tuple(hashlib.sha256(key).digest() for key in (b"one", b"two"))
    context = browser.new_context()
    context.add_init_script("sessionStorage.setItem('key', 'one')")
    with (
        Live(settings=Settings(shutdown_seconds=1.0, api_keys=keys)) as server,
        watch(context, f"http://127.0.0.1:{server.port}/") as window,
    ):
        for key, name in (("one", "mine"), ("two", "secret")):
            answer = server.call("POST", "/v1/chunks", {"name": name, "text": FACTS}, {"authorization": f"Bearer {key}"})
            assert answer.status == 200
        window.page.click("#memory-button")
        window.until("document.querySelectorAll('#memory-map .cell.others').length > 0")
        assert counts(window)["chunks and requests of other keys"] == shown(window, "others") == shown(window, "chunks")
        text = window.page.locator("#memory").text_content()
        assert "mine" in text and "secret" not in text
    context.close()


def test_a_server_that_is_gone_is_told_and_looked_for(window: Window, live: Live) -> None:
    window.page.click("#memory-button")
    window.page.route("**/v1/memory", lambda route: route.abort())
    window.until("document.getElementById('memory-wrong').textContent.includes('cannot be reached')")
    window.page.unroute("**/v1/memory")
    window.until("document.getElementById('memory-wrong').textContent === ''")


def test_axe_finds_no_serious_fault_and_a_phone_has_room(browser: Any, live: Live) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    for name, more in {"king": {"text": FACTS}, "ask": {"text": "Who is the king?", "after": "king"}}.items():
        assert live.post("/v1/chunks", {"name": name, **more}).status == 200
    for colours in ("light", "dark"):
        context = browser.new_context(viewport={"width": 360, "height": 640}, is_mobile=True, color_scheme=colours)
        with watch(context, f"http://127.0.0.1:{live.port}/") as window:
            window.page.click("#memory-button")
            window.page.wait_for_selector("#memory-tree li:has-text('king')")
            assert window.page.evaluate("document.documentElement.scrollWidth") <= 360
            found = axe.Axe().run(window.page).response["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
        context.close()
