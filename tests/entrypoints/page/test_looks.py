"""How the chat page looks and feels: accessibility, phone width, colours, the first paint, and frames while a reply streams quickly."""

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest

from tests.entrypoints.page.window import Window, watch
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
SUM = "What is 27 + 38?"
FIRST_PAINT = 1500  # milliseconds; a machine of its own takes a fifth at most
# A reply of 1,200 tokens at 300 a second, from a function in the place of the server
QUICK = r"""
    const asked = window.fetch;
    const words = ["some ", "**bold** ", "words ", "and ", "`code` ", "in a\n",
        "list:\n\n- one\n- two\n\n", "```python\nprint(1)\n```\n\n"];
    window.fetch = (url, options) => {
        if (!String(url).endsWith("chat/completions")) return asked(url, options);
        const began = performance.now(), encoder = new TextEncoder();
        let sent = 0;
        const event = (choice) => encoder.encode(`data: ${JSON.stringify({ model: "quick", choices: [choice] })}\n\n`);
        const body = new ReadableStream({
            async pull(into) {
                await new Promise((done) => setTimeout(done, 2));
                const due = Math.min(1200, Math.floor((performance.now() - began) * 0.3));
                for (; sent < due; sent++) into.enqueue(event({ delta: { content: words[sent % words.length] } }));
                if (sent < 1200) return;
                into.enqueue(event({ delta: {}, finish_reason: "stop" }));
                into.enqueue(encoder.encode("data: [DONE]\n\n"));
                into.close();
            },
        });
        return Promise.resolve(new Response(body, { status: 200 }));
    };
    window.frames_seen = [];
    const watch = (now) => {
        if (document.querySelector(".message.running")) window.frames_seen.push(now);
        requestAnimationFrame(watch);
    };
    requestAnimationFrame(watch);
"""


@pytest.mark.skipif(find_spec("axe_playwright_python") is None, reason="needs axe-playwright-python")
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_no_serious_fault(window: Window, colours: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    def faults() -> list[str]:
        found = Axe().run(window.page).response["violations"]
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")]

    window.page.emulate_media(color_scheme=colours)  # pyright: ignore[reportArgumentType]
    assert faults() == []
    window.send(SUM)
    window.press("Regenerate")
    window.ended()
    window.page.click("#branches")
    window.page.locator("details.thinking summary").last.click()
    assert faults() == []
    window.page.click("#settings")
    assert faults() == []


def test_everything_can_be_reached_with_the_keyboard(window: Window) -> None:
    window.send(SUM)
    window.page.evaluate("document.activeElement.blur()")
    names = set()
    for _ in range(40):
        window.page.keyboard.press("Tab")
        names.add(window.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"new", "menu", "branches", "settings", "log", "text", "send", "Copy", "Edit", "Regenerate", "Thinking"} <= names
    window.page.keyboard.press("Control+b")
    assert window.page.locator("#sidebar").is_hidden() and window.page.locator("#menu").get_attribute("aria-expanded") == "false"


def test_screen_readers_get_a_reply_when_it_is_complete(slow_window: Window) -> None:
    window = slow_window
    log = window.page.locator("#log")
    window.send("Tell a long story of a fox.", wait=False)
    window.page.wait_for_selector(".message.running")
    assert log.get_attribute("aria-live") == "polite" and log.get_attribute("aria-busy") == "true"
    window.page.keyboard.press("Escape")
    window.ended()
    assert log.get_attribute("aria-busy") == "false"


def test_it_fits_on_a_phone(browser: Any, live: Live) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True, device_scale_factor=2)
    with watch(context, f"http://127.0.0.1:{live.port}/") as window:
        window.send(SUM)
        window.press("Regenerate")
        window.ended()
        assert window.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert window.page.locator("#sidebar").is_hidden()
        window.page.click("#menu")
        assert window.page.locator("header button:visible").count() == 1  # the others would be cut by the list
        window.page.locator("#new").click()
        window.until("!location.hash.slice(1)")
    context.close()


def test_a_window_that_becomes_as_narrow_as_a_phone_shows_the_chat(window: Window) -> None:
    window.page.set_viewport_size({"width": 390, "height": 800})
    window.page.locator("#sidebar").wait_for(state="hidden")
    window.page.set_viewport_size({"width": 1280, "height": 800})
    window.page.locator("#sidebar").wait_for(state="visible")


def test_colours_follow_the_system_unless_they_are_chosen(window: Window) -> None:
    def ground() -> str:
        return window.page.evaluate("getComputedStyle(document.body).backgroundColor")

    window.page.emulate_media(color_scheme="light")
    light = ground()
    window.page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    window.page.click("#settings")
    window.page.select_option("#theme", "light")
    assert ground() == light
    window.page.reload()
    assert ground() == light


def test_the_first_paint_is_soon(window: Window) -> None:
    times = []
    for _ in range(5):  # the best of several, because machines are shared
        window.page.reload()
        window.page.wait_for_selector("body[data-server=here]")
        times.append(window.until("performance.getEntriesByName('first-contentful-paint')[0]?.startTime"))
    print(f"first paint: {times} ms")
    assert min(times) < FIRST_PAINT


@pytest.mark.parametrize("beside", ["nothing", "memory"])
def test_frames_hold_at_300_tokens_a_second(browser: Any, live: Live, beside: str) -> None:
    context = browser.new_context()
    context.add_init_script(QUICK)
    with watch(context, f"http://127.0.0.1:{live.port}/") as window:
        if beside == "memory":
            window.page.click("#memory-button")
        for _ in range(3):  # the best of several, because machines are shared
            window.page.evaluate("window.frames_seen = []")
            window.send("Go")
            frames = window.page.evaluate("window.frames_seen")
            gaps = sorted(after - before for before, after in pairwise(frames))
            middle, late, seconds = gaps[len(gaps) // 2], gaps[len(gaps) * 95 // 100], (frames[-1] - frames[0]) / 1e3
            print(f"{len(gaps) / seconds:.1f} frames a second; gaps of {middle:.1f} ms, 95%: {late:.1f} ms; {seconds:.1f} s")
            if held := seconds < 30 and middle < 125 and late < 350:  # 6, 25 and 70 on a machine of its own
                break
        assert held
        assert window.page.locator(".message.assistant").last.locator("li").count() == 300
        window.until("((log) => log.scrollHeight - log.scrollTop - log.clientHeight < 60)(document.getElementById('log'))")
    context.close()


def test_the_page_does_not_scroll_while_one_reads(browser: Any, live: Live) -> None:
    context = browser.new_context()
    context.add_init_script(QUICK)
    with watch(context, f"http://127.0.0.1:{live.port}/") as window:
        window.send("Go", wait=False)
        window.until("document.getElementById('log').scrollHeight > 2 * innerHeight")
        window.page.evaluate("document.getElementById('log').scrollTop = 40")
        window.ended()
        assert window.page.evaluate("document.getElementById('log').scrollTop") == 40
    context.close()
