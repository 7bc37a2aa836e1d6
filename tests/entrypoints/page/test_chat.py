"""The chat page in a browser, against a server with the packaged model: stream, stop, edit, branches, and what is kept."""

from typing import Any

import pytest

from tests.entrypoints.page.window import Window
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
SUM = "What is 27 + 38?"


def test_a_reply_streams_with_its_thoughts_folded_and_its_figures_below(window: Window) -> None:
    window.settle("temperature", "0")
    window.send(SUM)
    assert window.said() == [SUM, "27 + 38 = 65."]
    thinking = window.page.locator("details.thinking:visible")
    assert thinking.get_attribute("open") is None
    thinking.locator("summary").click()
    assert "7 + 8 = 15" in thinking.text_content()
    figures = window.page.locator(".figures").last.text_content()
    assert "tokens" in figures and "prompt tokens reused" in figures
    assert window.page.title() == SUM and window.page.locator("#model").text_content() == "tiny"


def test_a_reply_that_comes_in_several_pieces_has_its_speed_below(window: Window) -> None:
    window.send("Tell a long story of a fox.")  # a short reply may come in one piece, which tells no speed
    assert "a second" in window.page.locator(".figures").last.text_content()


def test_a_reply_can_be_stopped_and_what_came_stays(slow_window: Window) -> None:
    window = slow_window
    window.send("Tell a long story of a fox.", wait=False)
    window.until("document.querySelector('.message.assistant .thinking .plain')?.textContent.length > 20")
    window.page.keyboard.press("Escape")
    window.ended()
    assert "stopped" in window.page.locator(".figures").last.text_content()
    (reply,) = [node for node in window.stored()["nodes"] if node["role"] == "assistant"]
    assert reply["finish"] == "stopped" and len(reply["reasoning"]) > 20 and reply["error"] is None
    window.send(SUM)
    assert "65" in window.said()[-1]


def test_the_engine_stops_with_the_page(slow_window: Window, slow: Live) -> None:
    window = slow_window
    window.send("Tell a long story of a fox.", wait=False)
    slow.wait_until_running()
    window.page.click("#stop")
    slow.wait_until_idle()
    window.ended()


def test_edits_and_other_replies_are_branches_that_one_can_walk(window: Window) -> None:
    page = window.page
    window.send(SUM)
    first = window.said()
    window.press("Regenerate")
    window.ended()
    assert page.locator(".walk:visible span").all_text_contents() == ["2/2"]
    assert "of" in page.locator(".figures").last.text_content() and reused(window) > 0
    window.press("Edit", 0)
    page.fill(".editing textarea", "What is 2 + 2?")
    page.click(".editing .save")
    window.ended()
    assert window.said()[0] == "What is 2 + 2?" and page.locator(".walk:visible span").all_text_contents() == ["2/2"]
    window.press("The branch before", 0)
    assert window.said()[0] == SUM and page.locator(".walk:visible span").all_text_contents() == ["1/2", "2/2"]
    window.press("The branch before")
    assert window.said() == first and page.locator(".walk:visible span").all_text_contents() == ["1/2", "1/2"]
    page.locator("#log").focus()
    page.keyboard.press("Alt+ArrowRight")
    assert page.locator(".walk:visible span").all_text_contents() == ["1/2", "2/2"]

    page.click("#branches")
    lines = page.locator("#tree .branch")
    assert lines.count() == 5 and page.locator("#tree .branch[aria-current]").count() == 2
    page.locator("#tree .branch.user", has_text="2 + 2").click()
    assert window.said()[0] == "What is 2 + 2?" and page.locator("#tree .branch[aria-current]").count() == 2


def test_a_reply_can_be_written_by_hand(window: Window) -> None:
    window.send(SUM)
    window.press("Edit")
    window.page.fill(".editing textarea", "It is 65, my friend.")
    window.page.get_by_role("button", name="Keep").click()
    assert window.said()[-1] == "It is 65, my friend." and window.page.locator(".walk:visible").count() == 1
    assert "written by hand" in window.page.locator(".figures").last.text_content()


def test_two_branches_run_at_the_same_time(slow_window: Window) -> None:
    window = slow_window
    window.send("Tell a long story of a fox.", wait=False)
    window.page.wait_for_selector(".message.running")
    window.page.click("#new")
    window.send(SUM)
    assert "65" in window.said()[-1]
    window.page.locator("#chats .chat").filter(has_text="fox").click()
    window.ended()
    assert window.said()[-1] and [node["finish"] for node in window.stored()["nodes"] if node["role"] == "assistant"].count("stop") >= 1


def test_back_leads_from_a_new_chat_to_the_one_before(window: Window) -> None:
    window.send(SUM)
    shown = window.page.evaluate("""() => {
        document.getElementById("new").click();
        return document.querySelectorAll(".message").length;
    }""")
    assert shown == 0, "the new chat is there at once"
    window.page.go_back()
    window.until("document.querySelectorAll('.message').length === 2")
    window.page.go_forward()
    window.until("document.querySelectorAll('.message').length === 0")


def test_settings_go_into_the_request_and_stay_with_the_chat(window: Window) -> None:
    asked = list[dict[str, Any]]()
    window.page.on("request", lambda request: request.post_data_json and asked.append(request.post_data_json))
    window.send(SUM)
    assert asked[-1].keys() == {"messages", "stream", "stream_options"}
    given = {"temperature": "0.25", "top_p": "0.5", "max_tokens": "7", "system": "Be brief.", "thinking": "off"}
    for name, value in given.items():
        window.settle(name, value)
    window.send("And 2 + 2?")
    body = asked[-1]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.25, 0.5, 7)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."} and body["reasoning_effort"] == "none"
    assert window.page.locator(".message").last.locator(".thinking:visible").count() == 0
    window.page.reload()
    window.page.click("#settings")
    shown = {name: window.page.locator(f"[name={name}]").input_value() for name in given}
    assert shown == given


def test_a_setting_that_cannot_be_is_not_taken_in_silence(window: Window) -> None:
    field, dialog = window.page.locator("[name=temperature]"), window.page.locator("#settings-dialog")
    window.settle("temperature", "0.33")
    window.page.click("#settings")
    field.fill("7")
    window.page.click("#settings-close")
    assert dialog.is_visible() and window.page.evaluate("document.activeElement.name") == "temperature"
    window.page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    window.page.click("#settings")
    assert field.input_value() == "0.33"


def test_reloading_keeps_everything(window: Window) -> None:
    window.send(SUM)
    window.press("Regenerate")
    window.ended()
    before, figures = window.said(), window.page.locator(".figures").all_text_contents()
    window.page.reload()
    window.page.wait_for_selector(".message.assistant")
    assert window.said() == before and window.page.locator(".figures").all_text_contents() == figures
    assert window.page.locator(".walk:visible span").all_text_contents() == ["2/2"]
    window.send("What is 2 + 2?")
    assert len(window.said()) == 4


def test_a_reload_in_mid_reply_keeps_what_was_there(slow_window: Window) -> None:
    window = slow_window
    window.send("Tell a long story of a fox.", wait=False)
    window.until("document.querySelector('.message.assistant .thinking .plain')?.textContent.length > 10")
    window.page.wait_for_timeout(1500)
    window.page.reload()
    window.page.wait_for_selector(".message.assistant")
    reply = window.page.locator(".message.assistant").last
    assert reply.locator(".thinking .plain").text_content()
    window.press("Regenerate")
    window.ended()


def test_chats_are_listed_renamed_and_deleted(window: Window) -> None:
    page, answers = window.page, ["Sums", None]
    page.on("dialog", lambda dialog: dialog.accept(answers.pop(0)) if answers[0] else dialog.accept())
    window.send(SUM)
    page.keyboard.press("Control+Shift+O")
    window.send("What is 2 + 2?")
    assert page.locator("#chats .chat").all_text_contents() == ["What is 2 + 2?", SUM]
    page.get_by_role("button", name=f"Rename {SUM}").click()
    page.locator("#chats .chat", has_text="Sums").click()
    window.until("document.title === 'Sums'")
    assert window.said()[0] == SUM
    page.get_by_role("button", name="Delete Sums").click()
    window.until("document.querySelectorAll('#chats .chat').length === 1")
    assert {node["chat"] for node in window.stored()["nodes"]} == {chat["id"] for chat in window.stored()["chats"]}
    assert window.said() == []


def reused(window: Window) -> int:
    """How many tokens the last reply says were reused."""
    return int(window.page.locator(".figures").last.text_content().partition(" of ")[0].rpartition(" ")[2])
