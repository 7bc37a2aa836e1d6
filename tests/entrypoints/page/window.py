"""What a person does with the chat page, as functions of one browser window."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from nanovllm.types import Tensor

SOON = 90_000  # milliseconds that anything may take on a busy machine


def slowly(logits: Tensor) -> Tensor:
    """The same logits, a while later."""
    time.sleep(0.02)
    return logits


class Window:
    """One window with the page.

    Attributes:
        page: Playwright's page.
        wrong: Errors of the page's programs, and what its policy has refused.
    """

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address, self.wrong = page, address, list[str]()
        page.set_default_timeout(SOON)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", self._heard)
        self.requests = list[str]()
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("body[data-server]")

    def _heard(self, message: Any) -> None:
        if "Content Security Policy" in message.text or "Content-Security-Policy" in message.text or "TrustedHTML" in message.text:
            self.wrong.append(message.text)

    def send(self, text: str, *, wait: bool = True) -> None:
        """Write a message and send it."""
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        if wait:
            self.ended()

    def ended(self) -> None:
        """Wait for the end of the reply that is shown."""
        self.page.wait_for_selector(".message.assistant:last-child:not(.running) .figures:not(:empty)")

    def until(self, expression: str) -> Any:
        """Wait until an expression holds. The page's policy forbids Playwright's own way, which evaluates a string in the page."""
        end = time.monotonic() + SOON / 1e3
        while not (found := self.page.evaluate(expression)):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(20)
        return found

    def said(self) -> list[str]:
        """The texts of the messages that are shown."""
        return [text.strip() for text in self.page.locator(".message .body").all_text_contents()]

    def press(self, name: str, place: int = -1, role: str = "") -> None:
        """Press a button of a message: the last one's, or that of a place.

        Whether a mouse could do it is tried first, with no effect. A mouse's click on a button that moves meanwhile would be lost.
        """
        messages = self.page.locator(f".message{role and f'.{role}'}")
        button = messages.nth(place if place >= 0 else messages.count() + place).get_by_role("button", name=name, exact=True)
        button.click(trial=True)
        button.evaluate("(one) => one.click()")

    def settle(self, name: str, value: str) -> None:
        """Change one of the settings."""
        self.page.click("#settings")
        field = self.page.locator(f"#settings-dialog [name={name}]")
        field.select_option(value) if name == "thinking" else field.fill(value)
        self.page.click("#settings-close")

    def stored(self) -> dict[str, Any]:
        """All chats, as IndexedDB has them."""
        return self.page.evaluate(
            """() => new Promise((resolve) => {
                const asked = indexedDB.open("nanovllm", 1);
                asked.onsuccess = () => {
                    const at = asked.result.transaction(["chats", "nodes"]), found = {};
                    for (const name of ["chats", "nodes"]) {
                        at.objectStore(name).getAll().onsuccess = ({ target }) => (found[name] = target.result);
                    }
                    at.oncomplete = () => { asked.result.close(); resolve(found); };
                };
            })"""
        )


@contextlib.contextmanager
def watch(context: Any, address: str) -> Iterator[Window]:
    """A window whose programs may not fail, and which may ask no other host."""
    window = Window(context.new_page(), address)
    yield window
    assert window.wrong == []
    ours = ("/".join(address.split("/", 3)[:3]), "data:", "blob:")
    assert [url for url in window.requests if not url.startswith(ours)] == []
