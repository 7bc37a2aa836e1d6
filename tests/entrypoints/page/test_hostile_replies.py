"""Replies that try to be more than text: the page shows them, and nothing of them runs or loads. The model says what the test wants."""

from collections.abc import Iterator

import pytest

from tests.entrypoints.page.window import Window
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.scripted import say, scripted

pytestmark = pytest.mark.unhooked
HOSTILE = [
    '<img src=x onerror="window.hit=1">',
    "Before <script>window.hit=1</script> after",
    "<script>window.hit=1</script>",
    '<iframe srcdoc="<script>parent.hit=1</script>"></iframe>',
    "<svg onload=window.hit=1><style>body{display:none}</style></svg>",
    "<details open ontoggle=window.hit=1><summary>s</summary></details>",
    "# <b onmouseover=window.hit=1>title</b>",
    "| a |\n|---|\n| <img src=x onerror=window.hit=1> |",
    "`<img src=x onerror=window.hit=1>`",
    "```html\n<script>window.hit=1</script>\n```",
    '```"><script>window.hit=1</script>\ncode\n```',
    "&lt;img src=x onerror=window.hit=1&gt;",
]
LINKS = [
    "[press](javascript:window.hit=1)",
    "[press](JaVaScRiPt:window.hit=1)",
    "[press](data:text/html,<script>window.hit=1</script>)",
    "[press](&#106;avascript:window.hit=1)",
    "<javascript:window.hit=1>",
    "![x](javascript:window.hit=1)",
    "[press][one]\n\n[one]: javascript:window.hit=1",
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server whose model says what the message asks for."""
    with scripted("hermes") as server:
        yield server


@pytest.mark.parametrize("reply", HOSTILE)
def test_html_is_text(window: Window, reply: str) -> None:
    window.send(say(reply))
    shown = window.page.locator(".message.assistant .body").text_content() or ""
    assert "hit=1" in shown
    inside = "document.querySelector('.message.assistant .body')"
    assert window.page.evaluate(f"{inside}.querySelectorAll('img, script, iframe, svg, style, b, summary').length") == 0
    handlers = f"[...{inside}.querySelectorAll('*')].some((one) => [...one.attributes].some(({{name}}) => name.startsWith('on')))"
    assert window.page.evaluate(handlers) is False
    window.page.reload()
    window.page.wait_for_selector(".message.assistant")
    assert window.page.evaluate("window.hit") is None


@pytest.mark.parametrize("reply", LINKS)
def test_links_lead_to_the_web_alone(window: Window, reply: str) -> None:
    window.send(say(reply))
    assert window.page.locator(".message.assistant .body a").count() == 0
    assert window.page.evaluate("window.hit") is None


def test_thoughts_titles_and_the_tree_are_text_too(window: Window) -> None:
    words = "<img src=x onerror=window.hit=1>"
    window.send(f"{words} {say(f'<think>{words}</think>{words}')}")
    assert window.page.locator(".thinking .plain").text_content() == words
    window.page.click("#branches")
    assert words in window.page.locator("#tree").text_content() and words in window.page.locator("#chats").text_content()
    assert window.page.locator("#log img, #tree img, #chats img").count() == 0 and window.page.evaluate("window.hit") is None


def test_pictures_are_links_and_nothing_is_loaded(window: Window) -> None:
    window.send(say('![a fox](https://elsewhere.example/fox.png) and [a page](https://elsewhere.example/ "title")'))
    links = window.page.locator(".message.assistant .body a")
    assert links.all_text_contents() == ["a fox", "a page"] and window.page.locator(".message img").count() == 0
    for link in links.all():
        assert link.get_attribute("rel") == "noopener noreferrer nofollow" and link.get_attribute("target") == "_blank"


def test_markdown_is_shown_as_such(window: Window) -> None:
    text = (
        "# Title\n\nSome **bold**, *slanted* and `code` &amp; more.\n\n"
        "- one\n- two\n  1. deep\n\n> said\n\n| a | b |\n|:-:|--:|\n| 1 | 2 |\n\n"
        "```python\nprint('<b>')\n```\n\n---\n\n- [x] done\n- [ ] open\n\nSee [the page][p].\n\n[p]: https://elsewhere.example/"
    )
    window.send(say(text))
    body = window.page.locator(".message.assistant .body")
    for selector, wanted in {
        "h3": ["Title"], "strong": ["bold"], "em": ["slanted"], "p > code": ["code"], "ol > li": ["deep"], "blockquote p": ["said"],
        "td": ["1", "2"], "pre code": ["print('<b>')"], "a": ["the page"], "figcaption span": ["python"],
    }.items():  # fmt: skip
        assert body.locator(selector).all_text_contents() == wanted, selector
    assert "code & more." in (body.locator("p").first.text_content() or "")
    assert [box.is_checked() for box in body.locator("input").all()] == [True, False]
    window.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copy, told = body.get_by_role("button", name="Copy"), "() => (window.told ??= one.textContent)"  # it tells so for a second only
    copy.evaluate(f"(one) => new MutationObserver({told}).observe(one, {{ childList: true, characterData: true, subtree: true }})")
    copy.click()
    assert window.until("window.told") == "Copied"
    assert window.page.evaluate("navigator.clipboard.readText()") == "print('<b>')"


def test_a_reply_that_grows_is_shown_as_when_it_is_read_whole(window: Window) -> None:
    text = (
        "One.\n\n- a\n- b\n\n  more\n\n```\nx\n\ny\n```\n\nTwo\nlines.\n\n1. c\n\n2. d\n\n***\n\n> e\nf\n\n| g |\n|---|\n| h |\n\nEnd <b>."
    )
    window.send(say(text))
    streamed = window.page.locator(".markdown").inner_html()
    window.page.reload()
    window.page.wait_for_selector(".message.assistant")
    assert window.page.locator(".markdown").inner_html() == streamed
    pieces = """async ([text]) => {
        const script = [...document.scripts].find((one) => one.type === "module").src;
        const { Markdown } = await import(script.replace("main.js", "markdown.js"));
        const grown = new Markdown();
        for (let length = 1; length <= text.length; length++) {
            grown.set(text.slice(0, length), false);
            const whole = new Markdown();
            whole.set(text.slice(0, length), true);
            if (grown.element.outerHTML !== whole.element.outerHTML) return text.slice(0, length);
        }
        return null;
    }"""
    assert window.page.evaluate(pieces, [text]) is None


def test_nesting_without_end_is_shown_as_text(window: Window) -> None:
    made = """async () => {
        const script = [...document.scripts].find((one) => one.type === "module").src;
        const { Markdown } = await import(script.replace("main.js", "markdown.js"));
        const text = ">".repeat(20000) + " deep", one = new Markdown(), began = performance.now();
        one.set(text, true);
        return [one.element.textContent === text || one.element.textContent.trim() === "deep", performance.now() - began];
    }"""
    right, milliseconds = window.page.evaluate(made)
    assert right and milliseconds < 30_000
