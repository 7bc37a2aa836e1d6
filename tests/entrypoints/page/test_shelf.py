"""The shelf of the chat page: chunks are made, put before a chat in any order, saved, loaded and deleted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server.saved_chunks import path_of
from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.page.window import Window, watch
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
FACTS = {"king": "The king of Aistonia is Oswin.", "capital": "The capital of Aistonia is Velmora."}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """A server with no chunks yet and a folder for their files."""
    with Live(settings=Settings(shutdown_seconds=1.0, chunk_dir=tmp_path)) as server:
        yield server


def make(window: Window, name: str) -> None:
    window.page.fill("#chunk-name", name)
    window.page.fill("#chunk-text", FACTS[name])
    window.page.click("#chunk-make")
    window.page.locator(f"#chunk-list [data-name={name}]").wait_for()


def row(window: Window) -> list[str]:
    return window.page.locator("#used strong").all_text_contents()


def test_chunks_are_made_and_stand_before_the_chat_in_any_order(window: Window) -> None:
    page, asked = window.page, list[dict[str, Any]]()
    page.on("request", lambda request: "completions" in request.url and asked.append(request.post_data_json))
    page.click("#chunks")
    for name in FACTS:
        make(window, name)
    assert "exact" in (page.locator("#chunk-list .told").first.text_content() or "")
    page.get_by_role("button", name="Use king").click()
    told = page.locator("#used-told")
    assert row(window) == ["king"] and "tokens, exact" in (told.text_content() or "")
    window.send("Who is the king of Aistonia?")
    assert asked[-1]["chunks"] == ["king"]
    figures = window.page.locator(".figures").last
    assert "after a chunk, exact" in (figures.text_content() or "") and " 0 of " not in (figures.text_content() or "")

    page.get_by_role("button", name="Use capital").click()
    assert row(window) == ["king", "capital"] and "approximate" in (told.text_content() or "")
    page.get_by_role("button", name="Before: capital").click()
    assert row(window) == ["capital", "king"]
    page.locator("#used li").first.drag_to(page.locator("#used li").last)
    assert row(window) == ["king", "capital"]
    page.locator("#chunk-list [data-name=king]").drag_to(page.locator("#used"))
    assert sorted(row(window)) == ["capital", "king", "king"]
    page.get_by_role("button", name="Do not use king").first.click()
    window.press("Regenerate")
    window.ended()
    assert asked[-1]["chunks"] == row(window) and "after 2 chunks, approximate" in (figures.text_content() or "")
    before = row(window)
    page.route("**/v1/chunks", lambda route: route.abort())
    page.reload()
    page.click("#chunks")
    window.until("document.querySelectorAll('#used li').length === 2")
    assert row(window) == before and told.text_content() == ""  # the server has not told its chunks: none is called missing
    page.unroute("**/v1/chunks")
    page.click("#chunks")
    page.click("#chunks")
    window.until("document.getElementById('used-told').textContent.includes('approximate')")
    assert row(window) == before
    page.click("#new")
    window.until("document.querySelectorAll('#used li').length === 0")


def test_a_file_becomes_a_chunk(window: Window, tmp_path: Path) -> None:
    window.page.click("#chunks")
    file = tmp_path / "My notes.txt"
    file.write_text(FACTS["king"])
    window.page.set_input_files("#chunk-file", file)
    window.page.locator("#chunk-list [data-name=My-notes]").wait_for()


def test_a_file_and_a_text_can_be_dropped(window: Window) -> None:
    drop = """([kind, content]) => {
        const dataTransfer = new DataTransfer();
        if (kind === "file") dataTransfer.items.add(new File([content], "Dropped notes.md"));
        else dataTransfer.setData("text/plain", content);
        document.getElementById("chunk-text").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    }"""
    window.page.click("#chunks")
    window.page.evaluate(drop, ["file", FACTS["king"]])
    window.page.locator("#chunk-list [data-name=Dropped-notes]").wait_for()
    window.page.evaluate(drop, ["text", FACTS["capital"]])
    assert window.page.input_value("#chunk-text") == FACTS["capital"]


def test_chunks_are_saved_loaded_and_deleted(window: Window, live: Live) -> None:
    page = window.page
    page.click("#chunks")
    make(window, "king")
    page.get_by_role("button", name="Save king").click()
    page.wait_for_selector("#shelf[aria-busy=false]")
    page.get_by_role("button", name="Use king").click()
    page.get_by_role("button", name="Delete king").click()
    window.until("document.querySelectorAll('#chunk-list li').length === 0")
    assert live.get("/v1/chunks").json()["data"] == [] and row(window) == ["king (not on the server)"]
    page.get_by_role("button", name="Load king").click()
    page.locator("#chunk-list [data-name=king]").wait_for()
    assert row(window) == ["king"]


def test_saved_files_are_listed_loaded_and_deleted(window: Window, live: Live) -> None:
    page, files = window.page, window.page.locator("#saved-list li")
    for name in ("king", "broken", "chat-" + "0" * 24):
        assert live.post("/v1/chunks", {"name": name, "text": FACTS["king"]}).status == 200
        assert live.post(f"/v1/chunks/{name}/save", {}).status == 200
    broken = path_of(live.engine.named.limits, "", "broken")
    broken.write_bytes(broken.read_bytes()[:-1])
    page.click("#chunks")
    king, damaged = (page.locator(f"#saved-list [data-name={name}]") for name in ("king", "broken"))
    king.wait_for()
    assert files.count() == 2 and (page.locator("#saved-room").text_content() or "") == "3 of 256 files, 1 of them of chats"
    assert "11 tokens · 88.9 KiB" in (king.text_content() or "") and page.get_by_role("button", name="Load king").is_disabled()
    assert "broken: truncated" in (damaged.locator(".error").text_content() or "")
    assert damaged.get_by_role("button").all_text_contents() == ["Delete"]
    page.get_by_role("button", name="Delete king").click()
    page.get_by_role("button", name="Load king").click()
    page.locator("#chunk-list [data-name=king]").wait_for()
    for name in ("broken", "king"):
        page.get_by_role("button", name=f"Delete the file of {name}").click()
        page.locator(f"#saved-list [data-name={name}]").wait_for(state="detached")
    assert [file["name"] for file in live.get("/v1/saved_chunks").json()["data"]] == ["chat-" + "0" * 24]
    assert "king" in [chunk["name"] for chunk in live.get("/v1/chunks").json()["data"]]


def test_a_server_without_a_folder_says_nothing_of_files(browser: Any) -> None:
    context = browser.new_context()
    with Live() as server, watch(context, f"http://127.0.0.1:{server.port}/") as window:
        window.page.click("#chunks")
        make(window, "king")
        assert window.page.locator("#saved").is_hidden() and window.page.get_by_role("button", name="Save king").count() == 0
        assert not [url for url in window.requests if "saved_chunks" in url]
    context.close()


def test_what_goes_wrong_is_said(window: Window) -> None:
    page = window.page
    page.click("#chunks")
    make(window, "king")
    for name, words in {"king": "king", "no name!": "1 to 64", "": "needs a name"}.items():
        page.fill("#chunk-name", name)
        page.fill("#chunk-text", "Some words.")
        page.click("#chunk-make")
        page.locator("#notice:visible", has_text=words).wait_for()
        page.evaluate("document.getElementById('notice').textContent = ''")
    page.click("#chunk-make")
    page.locator("#notice:visible", has_text="needs a name").wait_for()
    window.send("Hello")  # what went wrong before is no longer of interest
    assert page.locator("#notice").is_hidden()


def test_axe_finds_no_serious_fault(window: Window) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    window.page.click("#chunks")
    make(window, "king")
    window.page.get_by_role("button", name="Use king").click()
    window.page.get_by_role("button", name="Save king").click()
    window.page.locator("#saved-list [data-name=king]").wait_for()
    found = axe.Axe().run(window.page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []


def test_it_fits_on_a_phone(browser: Any, live: Live) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    with watch(context, f"http://127.0.0.1:{live.port}/") as window:
        window.page.click("#chunks")
        make(window, "king")
        assert window.page.evaluate("document.documentElement.scrollWidth") <= 360
    context.close()
