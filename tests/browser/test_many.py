"""Ten thousand jobs: first paint, scrolling, search. The figures are printed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support import eventually

from .conftest import Pages, row
from .servers import Server, led

MANY = 10_000
#: notes when the first row of the list has been drawn
FIRST_ROW = """
new MutationObserver((changes, observer) => {
  if (!document.querySelector('.list tbody tr:not(.pad)')) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.firstRow = performance.now(); }));
}).observe(document, {subtree: true, childList: true});
"""


@pytest.fixture(scope="module")
def full_server() -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="oj-b-", dir="/tmp") as name,
        led(Path(name) / "home", many=MANY) as server,
    ):
        eventually(lambda: server.ask("jobs?limit=1")["total"] == MANY, 60, every=0.2)
        yield server


def test_ten_thousand_jobs_are_painted_scrolled_and_searched(
    full_server: Server, pages: Pages, figures: list[str]
) -> None:
    """The first rows come before all are read; the table has a window's worth of rows; the oldest job is found."""
    page = pages.watch(pages.context(full_server).new_page())
    page.add_init_script(FIRST_ROW)
    page.goto(full_server.base)
    rows_ms = page.wait_for_function("() => window.firstRow").json_value()
    paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    figures.append(f"{MANY:,} jobs: first paint after {paint_ms:.0f} ms, first rows after {rows_ms:.0f} ms")
    page.wait_for_function(
        f"() => document.querySelector('table').getAttribute('aria-rowcount') === '{MANY + 1}'", timeout=60_000
    )
    assert page.locator(".list tbody tr").count() < 80
    frames = page.evaluate(
        """() => new Promise(done => {
          const list = document.querySelector('.list');
          const times = [];
          let last = performance.now();
          const step = () => {
            const now = performance.now();
            times.push(now - last);
            last = now;
            list.scrollTop += 900;
            if (times.length < 120) requestAnimationFrame(step); else done(times.slice(1).sort((a, b) => a - b));
          };
          requestAnimationFrame(step);
        })"""
    )
    figures.append(
        f"scrolling: a frame takes {frames[len(frames) // 2]:.0f} ms (median), {frames[-3]:.0f} ms (98 of 100)"
    )
    page.evaluate("() => { const e = document.querySelector('.list'); e.scrollTop = e.scrollHeight }")
    expect(row(page, "Job number 0")).to_be_visible()
    page.get_by_label("Search in subject").fill("number 4321")
    expect(row(page, "Job number 4321")).to_be_visible()
    expect(row(page, "Job number 0")).to_have_count(0)
    page.get_by_label("Search in subject").fill("")
    live = full_server.spawn("a new one on top", "x")
    expect(page.locator(".list")).to_be_visible()
    page.evaluate("() => { document.querySelector('.list').scrollTop = 0 }")
    expect(row(page, "a new one on top").locator(".mark")).to_have_text("completed")
    full_server.until(live)
    assert frames[len(frames) // 2] < 200
