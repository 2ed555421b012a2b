"""The list and what can be done from it: live rows, filters, tree, queue, marks, forms. (003, D9, D11)"""

from __future__ import annotations

import re

from playwright.sync_api import expect

from .conftest import Open, Pages, row
from .servers import Server


def test_a_job_is_seen_from_its_start_to_its_end(led_server: Server, led_page: Open) -> None:
    """Icon, word and colour; the running count in title and badge; progress; a duration that ticks."""
    page = led_page()
    job_id = led_server.spawn("count the leaves", {"until": "leaves", "progress": "at leaf 7", "text": "12 leaves"})
    line = row(page, "count the leaves")
    expect(line.locator(".mark.s-running")).to_have_text("running")
    expect(line.locator(".mark svg.spin")).to_be_visible()
    expect(line).to_contain_text("at leaf 7")
    expect(page).to_have_title(re.compile(r"^\(\d+\) openjobs$"))
    expect(page.locator(".head .badge")).to_contain_text("1")
    expect(line.locator(".c-agent")).to_have_text("main")
    first = line.locator(".c-spent").inner_text()
    expect(line.locator(".c-spent")).not_to_have_text(first)
    led_server.go("leaves")
    expect(line.locator(".mark")).to_have_text("completed")
    expect(page.locator(".head .badge")).to_have_count(0)
    expect(page).to_have_title("openjobs")
    expect(page.get_by_role("status").first).to_contain_text("count the leaves: completed")
    assert led_server.until(job_id)["result_text"] == "12 leaves"


def test_who_waits_sees_the_place_in_the_queue(led_server: Server, led_page: Open) -> None:
    """Two workers are busy: the next jobs have a clock and their number, and move up."""
    page = led_page()
    jobs = [led_server.spawn(f"busy {n}", {"until": f"busy{n}"}) for n in (1, 2)]
    jobs += [led_server.spawn(f"waits {n}", {"until": f"waits{n}"}) for n in (1, 2)]
    expect(row(page, "waits 1").locator(".mark.s-queued .place")).to_have_text(re.compile("1$"))
    expect(row(page, "waits 2").locator(".place")).to_have_text(re.compile("2$"))
    expect(row(page, "waits 2").locator(".c-spent")).to_contain_text("waits")
    led_server.go("busy1")
    expect(row(page, "waits 1").locator(".mark")).to_have_text("running")
    expect(row(page, "waits 2").locator(".place")).to_have_text(re.compile("1$"))
    for name in ("busy2", "waits1", "waits2"):
        led_server.go(name)
    for job_id in jobs:
        led_server.until(job_id)


def test_children_stand_below_their_parent_and_fold_away(led_server: Server, led_page: Open) -> None:
    """The tree of parent and children, by a button that says how many there are."""
    parent = led_server.spawn("the parent", {"until": "parent"})
    led_server.until(parent, "running")
    children = [led_server.spawn(f"child {n}", {"text": "x"}, parent_job_id=parent) for n in (1, 2)]
    for child in children:
        led_server.until(child)
    page = led_page()
    subjects = page.locator(".list tbody .subject > a")
    at = subjects.all_inner_texts().index("the parent")
    assert subjects.all_inner_texts()[at : at + 3] == ["the parent", "child 1", "child 2"]
    fold = row(page, "the parent").get_by_role("button", name="2 below the parent")
    fold.click()
    expect(row(page, "child 1")).to_have_count(0)
    expect(fold).to_have_attribute("aria-expanded", "false")
    fold.click()
    expect(row(page, "child 2")).to_have_count(1)
    led_server.go("parent")
    led_server.until(parent)


def test_filters_and_search_are_in_the_address(led_server: Server, led_page: Open) -> None:
    """A filter is a link: it survives a reload, the back button, and counts say what each status would show."""
    bad = led_server.spawn("burn the toast", {"fail": "too hot"}, session_id="kitchen")
    good = led_server.spawn("butter the toast", "buttered", session_id="kitchen")
    assert led_server.until(bad)["status"] == "errored"
    led_server.until(good)
    page = led_page()
    page.get_by_role("button", name=re.compile("^errored")).click()
    expect(row(page, "butter the toast")).to_have_count(0)
    expect(row(page, "burn the toast")).to_contain_text("RuntimeError: too hot")
    assert "status=errored" in page.url
    page.get_by_label("Search in subject").fill("TOAST")
    expect(page).to_have_url(re.compile(r"status=errored&q=TOAST$"))
    expect(page.locator(".list tbody tr:not(.pad)")).to_have_count(1)
    expect(page.get_by_role("button", name=re.compile("^errored"))).to_contain_text("1")
    expect(page.get_by_role("button", name=re.compile("^completed"))).to_contain_text("1")
    page.reload()
    expect(page.locator(".list tbody tr:not(.pad)")).to_have_count(1)
    expect(page.get_by_label("Search in subject")).to_have_value("TOAST")
    page.get_by_role("combobox", name="Session").select_option("kitchen")
    page.get_by_role("button", name=re.compile("^errored")).click()
    expect(page.locator(".list tbody tr:not(.pad)")).to_have_count(2)
    page.go_back()
    expect(page.locator(".list tbody tr:not(.pad)")).to_have_count(1)
    page.get_by_label("Search in subject").fill("no such thing")
    expect(page.get_by_role("heading", name="Nothing fits this filter")).to_be_visible()
    page.get_by_role("button", name="Show everything").click()
    expect(row(page, "butter the toast")).to_have_count(1)


def test_stop_asks_for_a_reason_and_says_what_is_going_on(led_server: Server, led_page: Open) -> None:
    """cancelling…, then cancelled with its reason and what was said so far."""
    job_id = led_server.spawn("a long walk", {"until": "never", "partial": "**half** way"})
    page = led_page(f"?job={job_id}")
    expect(page.get_by_role("region", name="So far").locator("strong")).to_have_text("half")
    page.get_by_role("button", name="Stop…").click()
    page.get_by_label("Reason (optional)").fill("rain")
    page.get_by_role("button", name="Stop", exact=True).click()
    drawer = page.get_by_role("complementary", name="Details")
    expect(drawer.locator(".facts .mark")).to_have_text("cancelled")
    expect(drawer).to_contain_text("Reason: rain")
    expect(drawer.get_by_role("region", name="Result")).to_contain_text("stopped half way")
    assert led_server.until(job_id)["cancel_reason"] == "rain"


def test_what_was_ended_by_force_is_said_honestly(led_server: Server, led_page: Open) -> None:
    """A job that does not listen: cancelling…, dimmed, and then that it may still be running."""
    job_id = led_server.spawn("deaf as a post", {"until": "post", "deaf": True})
    led_server.until(job_id, "running")
    page = led_page(f"?job={job_id}")
    page.get_by_role("button", name="Stop…").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(row(page, "deaf as a post").locator(".mark.dim")).to_have_text("cancelling…")
    expect(page.get_by_role("button", name="Cancelling…")).to_be_disabled()
    expect(row(page, "deaf as a post")).to_contain_text("asked to stop, may still be running in background")
    expect(page.get_by_role("note")).to_contain_text("asked to stop, may still be running in background")
    led_server.go("post")


def test_several_jobs_are_stopped_at_once(led_server: Server, led_page: Open) -> None:
    """Marked by their boxes; one question for all of them."""
    jobs = [led_server.spawn(f"one of several {n}", {"until": "never"}) for n in range(3)]
    page = led_page("?q=one+of+several")
    for n in range(3):
        page.get_by_role("checkbox", name=f"Mark one of several {n}").check()
    expect(page.locator(".bulk")).to_contain_text("3 lines marked")
    page.locator(".bulk").get_by_role("button", name="Stop…").click()
    page.get_by_role("button", name="Stop 3").click()
    for n in range(3):
        expect(row(page, f"one of several {n}").locator(".mark")).to_have_text("cancelled")
    expect(page.locator(".bulk")).to_have_count(0)
    assert {led_server.until(job_id)["status"] for job_id in jobs} == {"cancelled"}


def test_a_job_is_started_and_run_again_with_another_prompt(led_server: Server, led_page: Open) -> None:
    """The form takes session, agent and prompt; the new job opens; again: the old prompt, to be changed."""
    page = led_page()
    page.get_by_role("button", name="New job").click()
    form = page.get_by_role("dialog", name="New job")
    form.get_by_label("Prompt").fill("write a haiku")
    form.get_by_label("Session").fill("poems")
    form.get_by_label("Subject").fill("haiku")
    form.get_by_label("Context").select_option("clean")
    form.get_by_role("button", name="Start").click()
    drawer = page.get_by_role("complementary", name="Details")
    expect(drawer.get_by_role("heading", name="haiku")).to_be_visible()
    expect(drawer.locator(".facts .mark")).to_have_text("completed")
    first = page.url
    drawer.get_by_role("button", name="Run again…").click()
    form = page.get_by_role("dialog", name="Run again")
    expect(form.get_by_label("Prompt")).to_have_value("write a haiku")
    form.get_by_label("Prompt").fill("write a limerick")
    form.get_by_role("button", name="Run again").click()
    expect(page).not_to_have_url(first)
    expect(drawer.get_by_role("region", name="Result")).to_contain_text("write a limerick")
    found = led_server.ask("jobs?session=poems")["tasks"]
    assert [job["agent_id"] for job in found] == ["main", "main"]


def test_a_refusal_of_the_server_is_shown_in_the_form(led_server: Server, led_page: Open, pages: Pages) -> None:
    """What was typed stays."""
    pages.expected.append("400")
    page = led_page()
    page.keyboard.press("n")
    form = page.get_by_role("dialog", name="New job")
    form.get_by_label("Prompt").fill("hello")
    form.get_by_label("Session").fill("a.lock")
    form.get_by_role("button", name="Start").click()
    expect(form).to_contain_text("It was not started.")
    expect(form.get_by_label("Prompt")).to_have_value("hello")


def test_a_notification_comes_when_a_job_ends_elsewhere(led_server: Server, led_page: Open) -> None:
    """Only where it was asked for, and only when nobody looks at the page."""
    page = led_page(permissions=["notifications"])
    page.evaluate(
        """() => {
          window.told = [];
          window.Notification = class { static permission = 'granted'; static requestPermission = async () => 'granted';
            constructor(title, more) { window.told.push([title, more.body]); } };
          document.hasFocus = () => false;
        }"""
    )
    led_server.until(led_server.spawn("before it was asked for", "x"))
    page.get_by_role("button", name="Notify me").click()
    job_id = led_server.spawn("the kettle", "boils")
    led_server.until(job_id)
    expect(row(page, "the kettle").locator(".mark")).to_have_text("completed")
    page.wait_for_function("() => window.told.length > 0")
    assert page.evaluate("window.told") == [["the kettle", "completed"]]
