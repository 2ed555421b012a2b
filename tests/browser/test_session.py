"""The page of a session: messages, branches, cards; and the timeline. (003, D8, D11)"""

from __future__ import annotations

import re

from playwright.sync_api import expect

from .conftest import Open, drawer
from .servers import Server


def test_a_card_follows_its_job_and_leads_to_its_branch(led_server: Server, led_page: Open) -> None:
    """From a job to its card, whose badge changes with the job; from there to the branch, which is checked out."""
    first = led_server.spawn("first talk", "the beginning", session_id="talk")
    head = led_server.until(first)["head_id"]
    led_server.ask("sessions/talk/checkout", {"node_id": head})
    job_id = led_server.spawn("second thought", {"until": "thought", "text": "a *second* thought"}, session_id="talk")
    led_server.until(job_id, "running")
    page = led_page(f"?job={job_id}")
    drawer(page).get_by_role("link", name="Its card").click()
    card = page.locator(".messages > li.card.target")
    expect(card.locator(".mark")).to_have_text("running")
    expect(card).to_be_focused()
    expect(page.locator(".messages")).to_contain_text("the beginning")
    led_server.go("thought")
    expect(card.locator(".mark")).to_have_text("completed")
    expect(card.locator("em")).to_have_text("second")
    card.get_by_role("link", name="Show its branch").click()
    expect(page.locator(".messages > li.from-assistant").last).to_contain_text("a second thought")
    expect(page.locator(".branches a[aria-current]")).to_contain_text("second thought")
    expect(page.get_by_text("You are looking at another branch")).to_be_visible()
    page.get_by_role("link", name="Back to the checked-out one").click()
    card = page.locator(".messages > li.card")
    card.get_by_role("button", name="Check out its branch").click()
    head = led_server.until(job_id)["head_id"]
    expect(page).to_have_url(re.compile(f"head={head}"))
    expect(page.get_by_text("This branch is checked out")).to_be_visible()
    assert led_server.ask("sessions/talk/conversation")["session_head_id"] == head


def test_a_card_at_the_beginning_of_a_session_is_found(led_server: Server, led_page: Open) -> None:
    """A job in a session without messages: its card hangs on nothing, and the page shows it all the same."""
    job_id = led_server.spawn("out of the blue", "blue", session_id="roots")
    led_server.until(job_id)
    page = led_page(f"?job={job_id}")
    drawer(page).get_by_role("link", name="Its card").click()
    expect(page.locator(".messages > li.card.target")).to_contain_text("out of the blue")


def test_branches_fork_and_are_switched(led_server: Server, led_page: Open) -> None:
    """Two jobs from one message: the message says so, and either branch is a link away."""
    root = led_server.until(led_server.spawn("a root", "root text", session_id="tree"))["head_id"]
    for name in ("left", "right"):
        led_server.until(led_server.spawn(f"go {name}", f"{name} text", session_id="tree", parent_msg_id=root))
    page = led_page("?view=session&session=tree")
    page.locator(".branches").get_by_role("link", name="go left").click()
    answers = page.locator(".messages > li.from-assistant")
    expect(answers).to_contain_text(["root text", "left text"])
    expect(answers.first.locator(".forks a")).to_have_count(2)
    page.locator(".branches").get_by_role("link", name="go right").click()
    expect(answers).to_contain_text(["root text", "right text"])
    page.reload()
    expect(answers).to_contain_text(["root text", "right text"])


def test_sessions_are_listed_with_what_is_in_them(led_server: Server, led_page: Open) -> None:
    """Counts lead to the filtered list, the name to the conversation."""
    led_server.until(led_server.spawn("one", "x", session_id="listed"))
    page = led_page("?view=sessions")
    line = page.get_by_role("row", name=re.compile("^listed"))
    line.locator("a.count").first.click()
    expect(page).to_have_url(re.compile("session=listed"))
    expect(page.locator(".list tbody tr:not(.pad)")).to_have_count(1)


def test_the_timeline_has_a_bar_for_each_job(led_server: Server, led_page: Open) -> None:
    """Waiting is pale, running full; the words say the same to who cannot see bars."""
    jobs = [led_server.spawn(f"bar {n}", {"until": "bars"}, session_id="bars") for n in range(3)]
    led_server.until(jobs[1], "running")
    page = led_page("?view=timeline&session=bars")
    lanes = page.locator(".lanes tbody tr:not(.pad)")
    expect(lanes).to_have_count(3)
    waits = page.locator(".lanes tr", has_text="bar 2")
    expect(waits.locator(".bar.waiting")).to_be_visible()
    expect(waits.locator(".bar.running")).to_have_count(0)
    led_server.go("bars")
    expect(waits.locator(".bar.running.s-completed")).to_be_visible()
    expect(waits).to_contain_text(re.compile(r"waited .* s, ran .* s, completed"))
    page.get_by_role("combobox", name="Span").select_option("5")
    expect(lanes).to_have_count(3)
    assert "span=5" in page.url
    waits.get_by_role("link").click()
    expect(drawer(page).get_by_role("heading", name="bar 2")).to_be_visible()
