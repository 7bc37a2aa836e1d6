"""Chats whose KV the server keeps: it outlives other work and restarts, belongs to the ends of branches, and goes with the chat."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.page.window import Window
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
LONG = "The king of Aistonia is Oswin. The capital of Aistonia is Velmora. " * 6


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """A server with a folder for files."""
    with Live(settings=Settings(shutdown_seconds=1.0, chunk_dir=tmp_path), num_pages=128) as server:
        yield server


def keep(window: Window, on: bool = True) -> None:
    window.page.click("#settings")
    window.page.locator("[name=keep]").set_checked(on)
    window.page.click("#settings-close")


def names(live: Live) -> list[str]:
    return [chunk["name"] for chunk in live.get("/v1/chunks").json()["data"]]


def until_named(window: Window, live: Live, count: int) -> list[str]:
    for _ in range(4000):
        if len(found := names(live)) == count:
            return found
        window.page.wait_for_timeout(20)
    raise AssertionError(names(live))


def reused(window: Window) -> tuple[int, int]:
    """How many prompt tokens of the last reply were reused, and how many there were."""
    (found,) = re.findall(r"(\d+) of (\d+) prompt tokens reused", window.page.locator(".figures").last.text_content())
    return int(found[0]), int(found[1])


def flood(live: Live) -> None:
    """So many other prompts that the index forgets every earlier one."""
    for place in range(12):
        assert live.post("/v1/completions", {"prompt": [300 + place] * 600, "max_tokens": 1}).status == 200
    live.wait_until_idle()


@pytest.mark.parametrize("kept", [True, False])
def test_a_kept_chat_goes_on_after_much_other_work(window: Window, live: Live, kept: bool) -> None:
    keep(window, kept)
    window.send(f"{LONG} Who is the king of Aistonia?")
    assert ("kept on the server" in window.page.locator(".figures").last.text_content()) is kept
    flood(live)
    window.send("And the capital?")
    again, prompt = reused(window)
    assert (again > prompt - 64) if kept else (again < 32), (again, prompt)
    assert len(until_named(window, live, int(kept))) == kept


def test_it_outlives_a_restart_of_the_server(window: Window, live: Live) -> None:
    keep(window)
    window.send(f"{LONG} Who is the king of Aistonia?")
    (name,) = until_named(window, live, 1)
    assert live.settings.chunk_dir is not None
    for _ in range(4000):  # the file is written beside the steps
        if list(live.settings.chunk_dir.rglob("*.safetensors")):
            break
        window.page.wait_for_timeout(20)
    live.stop_engine()
    live.start_engine()  # as a server does that is started anew: it loads nothing by itself
    live.wait_until_healthy()
    assert names(live) == []
    window.page.reload()
    window.page.wait_for_selector(".message.assistant")
    window.send("And the capital?")
    again, prompt = reused(window)
    assert again > prompt - 64, (again, prompt)
    assert until_named(window, live, 1) != [name], "the longer one has taken its place"


def test_each_branch_keeps_its_end_and_all_go_with_the_chat(window: Window, live: Live) -> None:
    keep(window)
    window.send("Who is the king of Aistonia?")
    window.send("And the capital?")
    (first,) = until_named(window, live, 1)
    window.press("Regenerate")
    window.ended()
    assert first in until_named(window, live, 2)
    window.page.click("#memory-button")
    window.page.wait_for_selector("#memory-tree li:has-text('chat “Who is the king of Aistonia?”')")
    window.page.click("#chunks")
    window.page.wait_for_selector("#shelf-room:has-text('2 of them of chats')")
    assert window.page.locator("#chunk-list li").count() == 0
    window.page.on("dialog", lambda dialog: dialog.accept())
    window.page.get_by_role("button", name="Delete Who is the king").click()
    until_named(window, live, 0)
    assert live.settings.chunk_dir is not None
    for _ in range(4000):
        if not list(live.settings.chunk_dir.rglob("*.safetensors")):
            break
        window.page.wait_for_timeout(20)
    else:
        raise AssertionError("a file is left")


def test_what_is_no_longer_wanted_is_deleted_also_by_a_server_that_was_gone(window: Window, live: Live) -> None:
    keep(window)
    window.send("Who is the king of Aistonia?")
    until_named(window, live, 1)
    window.page.route("**/v1/chunks/**", lambda route: route.abort())
    keep(window, False)
    window.until("localStorage.getItem('forget') !== '[]' && localStorage.getItem('forget') !== null")
    window.page.unroute("**/v1/chunks/**")
    assert len(names(live)) == 1
    window.page.reload()
    until_named(window, live, 0)
    window.until("localStorage.getItem('forget') === '[]'")
    assert "kept" not in window.page.locator(".figures").last.text_content()


def test_a_chat_that_cannot_be_kept_says_why(window: Window, live: Live) -> None:
    asked = list[Any]()
    window.page.on("request", lambda request: "completions" in request.url and asked.append(request.post_data_json))
    assert live.post("/v1/chunks", {"name": "big", "token_ids": [300] * 16 * 64}).status == 200  # all that chunks may hold
    keep(window)
    window.send("Who is the king of Aistonia?")
    assert "not kept: " in window.page.locator(".figures").last.text_content() and asked[0]["keep"].startswith("chat-")
    assert names(live) == ["big"] and window.said()[-1] and [body.get("keep", "") != "" for body in asked] == [True, False]
