"""A browser for the tests of the chat page: Debian's Chromium or another, driven by Playwright. Without one they are skipped."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from nanovllm.sampling.process_logits import as_processor
from tests.entrypoints.page.window import SOON, Window, slowly, watch
from tests.entrypoints.server.live import Live

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync")


def browser_path() -> str | None:
    """The browser's program: `CHROMIUM` names one, else the first that is installed."""
    return os.environ.get("CHROMIUM") or next((found for name in BROWSERS if (found := shutil.which(name))), None)


def lacking() -> list[str]:
    """What these tests need and this machine lacks."""
    return [*([] if find_spec("playwright") else ["playwright"]), *([] if browser_path() else ["chromium (or CHROMIUM=PATH)"])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a browser where there is none."""
    if missing := lacking():
        for item in items:
            if "browser" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=f"the chat page in a browser: needs {' and '.join(missing)}"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of a module. Meanwhile Playwright's event loop runs in this thread, which other modules cannot have."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=[*OPTIONS], timeout=SOON)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server with the packaged model."""
    with Live() as server:
        yield server


@pytest.fixture
def slow() -> Iterator[Live]:
    """A server whose stories take seconds: they do not end before a slow browser has looked at them."""
    with Live(limits={"process_logits": as_processor(slowly)}) as server:
        yield server


@pytest.fixture
def slow_window(browser: Any, slow: Live) -> Iterator[Window]:
    """The page of the slow server, in a fresh profile."""
    context = browser.new_context()
    with watch(context, f"http://127.0.0.1:{slow.port}/") as window:
        yield window
    context.close()


@pytest.fixture
def window(browser: Any, live: Live) -> Iterator[Window]:
    """The page of the server, in a fresh profile."""
    context = browser.new_context(accept_downloads=True)
    with watch(context, f"http://127.0.0.1:{live.port}/") as window:
        yield window
    context.close()
