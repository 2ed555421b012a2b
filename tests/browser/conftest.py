"""Chromium from the system, driven by Playwright; every page must run without a word on its console."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Error,
    Locator,
    Page,
    sync_playwright,
)

from tests.support.cli import ROOT

from .servers import Server, led, served

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
STATIC = ROOT / "openjobs" / "server" / "static"
PATIENCE_MS = 15_000
#: opens a page at a place (`?job=…`) of the panel
Open = Callable[..., Page]


def row(page: Page, subject: str) -> Locator:
    """The line of the list with that subject."""
    return page.locator(".list tbody tr", has=page.get_by_role("link", name=subject, exact=True))


def drawer(page: Page) -> Locator:
    return page.get_by_role("complementary", name="Details")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The browser's processes come and go as it likes; it is ended as a whole, after the last test.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.leaks("the browser lives longer than a test"))
            item.add_marker(pytest.mark.timeout(180))


_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> list[str]:
    """What was measured; shown below the results."""
    return request.config.stash.setdefault(_FIGURES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_FIGURES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "no Chromium here: install it (Debian: apt-get install chromium) or name one with CHROMIUM=…"
    assert (STATIC / "index.html").exists(), "the panel is not built: run `nox -s panel`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def led_server() -> Iterator[Server]:
    """A server whose jobs do what their prompt says, with two workers."""
    with tempfile.TemporaryDirectory(prefix="oj-b-", dir="/tmp") as name, led(Path(name) / "home") as server:
        yield server


@pytest.fixture(scope="session")
def real_server() -> Iterator[Server]:
    """`openjobs serve` with two workers."""
    with tempfile.TemporaryDirectory(prefix="oj-b-", dir="/tmp") as name, served(Path(name) / "home") as server:
        yield server


class Pages:
    """Pages that are logged in, each with a context of its own."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.said: list[str] = []
        #: parts of console lines that belong to a test, as a failed connection where the server is killed
        self.expected: list[str] = []

    def context(self, server: Server, **options: Any) -> BrowserContext:
        context = self._browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self._contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        answer = context.request.post(
            f"{server.base}/api/login", data={"token": server.token}, headers={"Origin": server.origin}
        )
        assert answer.ok, answer.text()
        return context

    def watch(self, page: Page) -> Page:
        page.on("console", self._console)
        page.on("pageerror", self._error)
        page.on("dialog", self._dialog)
        return page

    def open(self, server: Server, where: str = "", **options: Any) -> Page:
        page = self.watch(self.context(server, **options).new_page())
        page.goto(f"{server.base}/{where}")
        page.wait_for_selector(".head")
        return page

    def _console(self, message: ConsoleMessage) -> None:
        if not any(part in message.text for part in self.expected):
            self.said.append(f"{message.type}: {message.text}")

    def _error(self, error: Error) -> None:
        self.said.append(f"error: {error}")

    def _dialog(self, dialog: Dialog) -> None:
        self.said.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def close(self) -> None:
        while self._contexts:
            self._contexts.pop().close()


@pytest.fixture
def pages(chromium: Browser) -> Iterator[Pages]:
    pages = Pages(chromium)
    yield pages
    pages.close()
    assert pages.said == []


@pytest.fixture
def led_page(pages: Pages, led_server: Server) -> Open:
    return lambda where="", **options: pages.open(led_server, where, **options)


@pytest.fixture
def real_page(pages: Pages, real_server: Server) -> Open:
    return lambda where="", **options: pages.open(real_server, where, **options)
