"""The chat page with several tabs, with a server that goes and comes back, with keys, with files, and with long chats."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.server.settings import Settings
from nanovllm.sampling.process_logits import as_processor
from tests.entrypoints.page.window import Window, slowly, watch
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
SUM = "What is 27 + 38?"
GRACE = Settings(shutdown_seconds=1.0)


def test_two_tabs_of_one_chat_overwrite_nothing(window: Window) -> None:
    window.send(SUM)
    with watch(window.page.context, window.page.url) as other:
        other.page.wait_for_selector(".message.assistant")
        assert other.said() == window.said()
        window.send("What is 2 + 2?", wait=False)
        other.until("document.querySelectorAll('.message').length === 4")
        window.ended()
        other.until("document.querySelector('.message:last-child .figures').textContent.includes('tokens')")
        assert other.said() == window.said()
        window.press("Regenerate", 1)
        other.until("document.querySelectorAll('.message')[1].querySelector('.walk span')?.textContent.endsWith('/2')")
        other.press("Regenerate", 1)
        for one in (window, other):
            one.ended()
            one.until("document.querySelectorAll('.message')[1].querySelector('.walk span')?.textContent.endsWith('/3')")
        nodes = window.stored()["nodes"]
        assert len(nodes) == 6 and all(node["finish"] == "stop" and node["content"] for node in nodes)
        other.page.click("#new")
        other.send("What is 1 + 1?")
        window.until("document.querySelectorAll('#chats .chat').length === 2")
        assert len(window.said()) == 2, "this tab stays where it is"


def test_a_server_that_goes_and_comes_back(browser: Any) -> None:
    context = browser.new_context()
    with Live(settings=GRACE) as server:
        port = server.port
        with_context = watch(context, f"http://127.0.0.1:{port}/")
        window = with_context.__enter__()
        window.send(SUM)
    window.send("What is 2 + 2?")
    assert "cannot be reached" in window.page.locator(".message.assistant .error").last.text_content()
    window.until("document.body.dataset.server === 'gone'")
    assert window.page.locator("#notice").is_visible()
    server = Live(settings=GRACE)
    server.settings = replace(server.settings, port=port)
    with server:
        window.until("document.body.dataset.server === 'here'")
        assert not window.page.locator("#notice").is_visible()
        window.press("Regenerate")
        window.ended()
        assert window.said()[-1] and len(window.said()) == 4
        assert window.page.locator(".walk:visible span").all_text_contents() == ["2/2"]
    with_context.__exit__(None, None, None)
    context.close()


def test_an_engine_that_dies_in_mid_reply_is_an_error_below_what_came(browser: Any) -> None:
    context = browser.new_context()
    slow = {"process_logits": as_processor(slowly)}  # so that the reply has not ended before
    with Live(settings=GRACE, limits=slow) as server, watch(context, f"http://127.0.0.1:{server.port}/") as window:
        window.send("Tell a long story of a fox.", wait=False)
        window.until("document.querySelector('.message.assistant .thinking .plain')?.textContent.length > 10")
        server.stop_engine()
        window.page.wait_for_selector(".message.assistant .error:visible")
        assert window.page.locator(".thinking .plain").text_content()
        server.start_engine(again=True)
        server.wait_until_healthy()
        window.press("Regenerate")
        window.ended()
        assert not window.page.locator(".message.assistant .error:visible").count()
    context.close()


def test_the_page_asks_for_a_key_and_says_when_it_is_wrong(browser: Any) -> None:
    keys = (hashlib.sha256(b"right").digest(),)
    context = browser.new_context()
    with Live(settings=Settings(shutdown_seconds=1.0, api_keys=keys)) as server:
        address = f"http://127.0.0.1:{server.port}/"
        with watch(context, address) as window:
            page = window.page
            page.wait_for_selector("#settings-dialog[open]")
            assert page.evaluate("document.activeElement.id") == "key" and "API key" in page.locator("#notice").text_content()
            page.fill("#key", "wrong")
            page.press("#key", "Enter")
            page.wait_for_selector("#settings-dialog[open]")
            page.click("#settings-close")
            window.send(SUM)
            assert "API key" in (page.locator(".message.assistant .error").text_content() or "")
            page.wait_for_selector("#settings-dialog[open]")
            page.keyboard.press("Escape")
            page.wait_for_timeout(2500)
            assert page.locator("#settings-dialog").is_hidden(), "it does not come again and again"
            page.click("#settings")
            page.fill("#key", "right")
            page.press("#key", "Enter")
            window.until("document.body.dataset.server === 'here'")
            window.press("Regenerate")
            window.ended()
            assert "65" in window.said()[-1]
            assert page.evaluate("[sessionStorage.getItem('key'), localStorage.getItem('key')]") == ["right", None]
            assert "right" not in json.dumps(window.stored())
            page.reload()
            window.until("document.body.dataset.server === 'here'")
            page.click("#settings")
            page.check("#keep-key")
            page.click("#settings-close")
        with watch(context, address) as other:
            other.until("document.body.dataset.server === 'here'")
    context.close()


def test_all_chats_are_exported_and_imported(window: Window, browser: Any, tmp_path: Path) -> None:
    window.send(SUM)
    window.press("Regenerate")
    window.ended()
    window.page.click("#new")
    window.send("What is 2 + 2?")
    with window.page.expect_download() as download:
        window.page.click("#export")
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    before = window.stored()
    assert json.loads(file.read_text())["nodes"] == before["nodes"]
    context = browser.new_context()
    with watch(context, window.address) as other:
        for _ in range(2):  # the second time nothing is added
            other.page.set_input_files("#import-file", file)
            other.until("document.querySelectorAll('#chats .chat').length === 2")
        assert sorted(node["id"] for node in other.stored()["nodes"]) == sorted(node["id"] for node in before["nodes"])
        other.page.locator("#chats .chat", has_text=SUM).click()
        other.page.wait_for_selector(".walk:visible")
        other.send("And 1 + 1?")
        good = json.loads(file.read_text())
        loop = {**good, "nodes": [{**node, "parent": node["id"]} for node in good["nodes"]]}
        orphan = {**good, "nodes": [{**good["nodes"][0], "id": "x", "parent": "nothing"}]}
        for wrong in ({}, {**good, "version": 9}, {**good, "nodes": 3}, loop, orphan, {**good, "chats": []}):
            file.write_text(json.dumps(wrong))
            count = len(other.stored()["nodes"])
            other.page.set_input_files("#import-file", file)
            other.page.wait_for_selector("#notice:visible")
            assert len(other.stored()["nodes"]) == count
            other.page.evaluate("document.getElementById('notice').hidden = true")
    context.close()


def long_chat(turns: int) -> dict[str, Any]:
    """A chat of so many turns, as a file."""
    nodes = []
    for place in range(2 * turns):
        reply = f"Turn {place}: some **words** and `code`.\n\n- a\n- b\n\n```python\nprint({place})\n```\n"
        role, text = ("assistant", reply) if place % 2 else ("user", f"Question {place}?")
        node = {"id": f"n{place}", "chat": "long", "parent": f"n{place - 1}" if place else None, "role": role}
        nodes.append({**node, "content": text, "reasoning": "", "created": place})
    chat = {"id": "long", "title": "A long chat", "created": 0, "updated": 0, "leaf": nodes[-1]["id"], "settings": {"max_tokens": 8}}
    return {"format": "nanovllm-chats", "version": 1, "chats": [chat], "nodes": nodes}


def open_long_chat(window: Window, folder: Path, turns: int) -> None:
    """Import a chat of so many turns, and open it."""
    file = folder / "long.json"
    file.write_text(json.dumps(long_chat(turns)))
    window.page.set_input_files("#import-file", file)
    window.page.locator("#chats .chat").click()
    window.until(f"document.querySelectorAll('.message').length === {2 * turns}")


def test_a_chat_of_200_turns_is_quick(window: Window, tmp_path: Path) -> None:
    open_long_chat(window, tmp_path, 200)
    opened = """async () => {
        const began = performance.now();
        location.hash = "";
        await new Promise((done) => setTimeout(done, 50));
        location.hash = "#long";
        while (document.querySelectorAll(".message").length < 400) await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        return performance.now() - began - 50;
    }"""
    assert (
        min(window.page.evaluate(opened) for _ in range(3)) < 7500
    )  # 1500 on a machine of its own; the best of several, because machines are shared
    typed = """() => {
        const field = document.getElementById("text"), began = performance.now();
        for (let i = 0; i < 20; i++) { field.value += "x"; field.dispatchEvent(new Event("input")); field.offsetHeight; }
        return (performance.now() - began) / 20;
    }"""
    assert window.page.evaluate(typed) < 250
    window.page.click("#branches")
    assert window.page.locator("#tree .branch").count() == 400
    window.press("Regenerate", 199)
    window.page.wait_for_selector(".walk:visible")
    assert window.page.locator(".message").count() == 200


def test_a_long_chat_is_scrolled_without_jumps(window: Window, tmp_path: Path) -> None:
    """Messages get their heights when they come near to the window. What is on the screen stays where it is."""
    open_long_chat(window, tmp_path, 100)
    moved = """async () => {
        const log = document.getElementById("log"), { x, y, width } = log.getBoundingClientRect(), moves = [];
        for (let i = 0; i < 20; i++) {
            let seen = null;  // between two messages there is none
            for (let down = 40; !seen; down += 20) seen = document.elementFromPoint(x + width / 2, y + down).closest(".message");
            const before = seen.getBoundingClientRect().y;
            log.scrollBy(0, -100);
            for (let frame = 0; frame < 4; frame++) await new Promise(requestAnimationFrame);
            moves.push(seen.getBoundingClientRect().y - before);
        }
        return moves;
    }"""
    moves = window.page.evaluate(moved)
    assert all(abs(pixels - 100) <= 2 for pixels in moves), moves
