"""The chat page in a browser, against a server with the packaged model: stream, stop, edit, branches, and what is kept."""

import pytest

from tests.entrypoints.page.window import Window

pytestmark = pytest.mark.unhooked
SUM = "What is 27 + 38?"


def test_a_reply_streams_with_its_thoughts_folded_and_its_figures_below(window: Window) -> None:
    window.settle("temperature", "0")
    window.send(SUM)
    assert window.said() == [SUM, "27 + 38 = 65."]
    thinking = window.page.locator("details.thinking:visible")
    assert thinking.get_attribute("open") is None
    thinking.locator("summary").click()
    assert "7 + 8 = 15" in thinking.inner_text()
    figures = window.page.locator(".figures").last.inner_text()
    assert "tokens" in figures and "a second" in figures and "prompt tokens reused" in figures
    assert window.page.title() == SUM and window.page.locator("#model").inner_text() == "tiny"
