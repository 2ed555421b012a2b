"""One job, whole: result, error, history, conversation, log. A real server, real commands. (003, D11; 004)"""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import expect

from tests.support.cli import Cli

from .conftest import Open, Pages, drawer, row
from .servers import Server

MARKDOWN = """# Found it

The *index* is read **twice**:

- in `open`
- in `recover`
"""

AT_THE_END = "() => (e => e.scrollTop + e.clientHeight >= e.scrollHeight - 12)(document.querySelector('[role=log]'))"


def shell(server: Server, subject: str, command: str, **fields: object) -> str:
    return server.spawn(subject, command, session_id="shop", agent_id="shell", **fields)


def go_file(server: Server, name: str) -> Path:
    path = server.home.parent / name
    assert not path.exists()
    return path


def test_a_result_is_rendered_and_can_be_copied(real_server: Server, real_page: Open) -> None:
    """Markdown from the server, as HTML; the copy is the text as it was."""
    job_id = shell(real_server, "look into it", f"cat <<'END'\n{MARKDOWN}END")
    real_server.until(job_id)
    page = real_page(f"?job={job_id}", permissions=["clipboard-read", "clipboard-write"])
    result = drawer(page).get_by_role("region", name="Result")
    expect(result.get_by_role("heading", name="Found it")).to_be_visible()
    expect(result.locator("li code")).to_have_text(["open", "recover"])
    page.get_by_role("button", name="Copy the result").click()
    expect(page.get_by_text("Copied the result.").first).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()").strip() == MARKDOWN.strip()
    expect(drawer(page).get_by_role("region", name="Prompt")).to_contain_text("cat <<'END'")


def test_an_error_stands_first(real_server: Server, real_page: Open) -> None:
    """Above what was said so far and above the prompt."""
    job_id = shell(real_server, "break", "echo halfway; echo 'no such tag' >&2; exit 3")
    real_server.until(job_id)
    page = real_page(f"?job={job_id}")
    sections = drawer(page).locator("#tab-panel > section")
    expect(sections.first).to_contain_text("no such tag")
    expect(sections.first).to_have_attribute("aria-label", "Error")
    expect(drawer(page)).to_contain_text("Partial result")


def test_the_history_is_the_commits_of_git(real_server: Server, real_page: Open) -> None:
    """Each state with its commit id and time, as the repository has them; a link leads to this very tab."""
    job_id = shell(real_server, "for the record", "true")
    real_server.until(job_id)
    page = real_page(f"?job={job_id}")
    page.get_by_role("tab", name="History").click()
    marks = drawer(page).locator(".commits .mark")
    expect(marks).to_have_text(["pending", "queued", "running", "completed"])
    commits = real_server.ask(f"jobs/{job_id}/history")["commits"]
    shown = drawer(page).locator(".commits .mono").all_inner_texts()
    assert [text.strip() for text in shown] == [commit["commit_id"][:10] for commit in commits]
    page.reload()
    expect(marks).to_have_count(4)
    assert "tab=history" in page.url


def test_the_conversation_of_a_job_is_its_branch(real_server: Server, real_page: Open) -> None:
    """Its prompt and its answer, at `head_id`."""
    job_id = shell(real_server, "say hello", "echo hello from the branch")
    real_server.until(job_id)
    page = real_page(f"?job={job_id}&tab=conversation")
    messages = drawer(page).locator(".messages > li")
    expect(messages).to_have_count(2)
    expect(messages.nth(0)).to_contain_text("echo hello from the branch")
    expect(messages.nth(1)).to_contain_text("hello from the branch")


def test_a_log_is_followed_only_at_its_end(real_server: Server, real_page: Open) -> None:
    """New lines come by themselves; who scrolled up stays where he reads, and one button leads to the end."""
    more, end = go_file(real_server, "log-more"), go_file(real_server, "log-end")
    job_id = shell(
        real_server,
        "count",
        f"seq 1 300; until [ -e {more} ]; do sleep 0.02; done; seq 301 400; until [ -e {end} ]; do sleep 0.02; done; "
        "echo the end",
    )
    page = real_page(f"?job={job_id}&tab=log")
    log = page.get_by_role("log")
    expect(log).to_contain_text("300")
    page.wait_for_function(f"{AT_THE_END} && document.querySelector('[role=log]').scrollHeight > 2000")
    log.evaluate("e => { e.scrollTop = 100 }")
    expect(page.get_by_role("button", name="To the end")).to_be_visible()
    more.touch()
    expect(log).to_contain_text("400")
    assert log.evaluate("e => e.scrollTop") == 100
    page.get_by_role("button", name="100 new lines").click()
    page.wait_for_function(AT_THE_END)
    end.touch()
    expect(log).to_contain_text("the end")
    expect(page.locator(".log-foot")).to_contain_text("Complete")
    page.wait_for_function(AT_THE_END)
    lines = log.evaluate("e => [...e.querySelectorAll('.line')].map(line => line.textContent)")
    assert lines == [*map(str, range(1, 401)), "the end"]


def test_a_log_has_colours_search_wrap_and_download(real_server: Server, real_page: Open) -> None:
    """Escape sequences become colours, what a search finds is counted, and the file is the bytes as written."""
    long = "x" * 400
    job_id = shell(
        real_server,
        "paint",
        f"printf '\\033[31mred\\033[0m plain\\033[1;38;5;33m blue\\033[0m\\nRED again\\n{long}\\n'",
    )
    real_server.until(job_id)
    page = real_page(f"?job={job_id}&tab=log")
    log = page.get_by_role("log")
    expect(log.locator(".f1")).to_have_text("red")
    expect(log.locator(".bold")).to_have_text(" blue")
    assert log.locator(".bold").evaluate("e => getComputedStyle(e).color") == "rgb(0, 135, 255)"
    assert log.locator(".line").first.inner_text() == "red plain blue"
    page.get_by_label("Search in the log").fill("red")
    expect(page.locator(".find")).to_contain_text("1 of 2")
    page.keyboard.press("Enter")
    expect(page.locator(".find")).to_contain_text("2 of 2")
    assert page.evaluate("[CSS.highlights.get('found').size, CSS.highlights.get('found-here').size]") == [1, 1]
    assert log.evaluate("e => e.scrollWidth <= e.clientWidth")
    page.get_by_label("Wrap").uncheck()
    assert log.evaluate("e => e.scrollWidth > e.clientWidth")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the log").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x1b[31mred\x1b[0m plain")


def test_a_long_log_shows_its_end_first(real_server: Server, real_page: Open) -> None:
    """A quarter of a megabyte at once, what is before it on request, whole lines only."""
    job_id = shell(real_server, "write much", "seq -w 1 100000")
    real_server.until(job_id)
    page = real_page(f"?job={job_id}&tab=log")
    log = page.get_by_role("log")
    expect(log).to_contain_text("100000")
    first = log.locator(".line").first
    before = int(first.text_content() or "")
    assert before > 50_000
    page.get_by_role("button", name=re.compile("^Show earlier lines")).evaluate("e => e.click()")
    expect(first).not_to_have_text(f"{before:06d}")
    numbers = [int(text) for text in log.evaluate("e => [...e.querySelectorAll('.line')].map(l => l.textContent)")]
    assert numbers == list(range(numbers[0], 100_001))


def test_processes_stand_beside_jobs_and_can_be_stopped(real_server: Server, real_page: Open) -> None:
    """A background command: its row, its live log, its end by a stop with a reason."""
    cli = Cli(real_server.home)
    cli.run("run", "--detach", "--session", "shop", "--", "sh", "-c", "echo up and running; exec sleep 300")
    page = real_page("?kind=process")
    line = page.locator(".list tbody tr").first
    expect(line.locator(".mark")).to_have_text("running")
    line.locator("a").first.click()
    expect(page.get_by_role("log")).to_contain_text("up and running")
    page.get_by_role("button", name="Stop…").click()
    page.get_by_label("Reason (optional)").fill("no longer needed")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(drawer(page).locator(".facts .mark")).to_have_text("cancelled")
    page.get_by_role("tab", name="Overview").click()
    expect(drawer(page)).to_contain_text("no longer needed")
    expect(line.locator(".mark")).to_have_text("cancelled")


def test_a_link_to_a_job_that_is_not_there_says_what_to_do(real_page: Open, pages: Pages) -> None:
    pages.expected.append("404")
    page = real_page("?job=00000000-0000-4000-8000-000000000000")
    expect(drawer(page)).to_contain_text("No job 00000000 can be shown.")
    expect(drawer(page).get_by_role("button", name="Try again")).to_be_visible()
    page.keyboard.press("Escape")
    expect(drawer(page)).to_have_count(0)


def test_a_drawer_is_a_link_and_back_closes_it(real_server: Server, real_page: Open) -> None:
    """Opening adds a step to the browser's history; the address opens the same drawer elsewhere."""
    job_id = shell(real_server, "linked", "echo linked")
    real_server.until(job_id)
    page = real_page()
    row(page, "linked").get_by_role("link", name="linked").click()
    expect(drawer(page).get_by_role("heading", name="linked")).to_be_focused()
    address = page.url
    assert job_id in address
    page.go_back()
    expect(drawer(page)).to_have_count(0)
    page.goto(address)
    expect(drawer(page).get_by_role("region", name="Result")).to_contain_text("linked")
    # The beginning of an id will do, as everywhere.
    page.goto(f"{real_server.base}/?job={job_id[:13]}")
    expect(drawer(page).get_by_role("region", name="Result")).to_contain_text("linked")
