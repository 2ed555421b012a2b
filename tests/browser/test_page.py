"""The page as a whole: keyboard, screen readers, hostile text, lost connections, login, size. (003, D11; R10)"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.cli import ROOT

from .conftest import STATIC, Open, Pages, drawer, row
from .servers import Server, led

AXE = ROOT / "openjobs" / "server" / "panel" / "node_modules" / "axe-core" / "axe.min.js"
SIZE_LIMIT_BYTES = 60_000

# --- size ---------------------------------------------------------------------------------------------------


def test_the_built_panel_is_small_and_asks_nobody_else() -> None:
    """Under 60 KB gzipped, all files together; no address of another host in it but namespaces of XML."""
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < SIZE_LIMIT_BYTES
    found = {url for path in files for url in re.findall(r"https?://[\w.]+", path.read_text())}
    assert found <= {"http://www.w3.org"}


# --- keyboard -----------------------------------------------------------------------------------------------


def test_everything_can_be_done_without_a_mouse(led_server: Server, led_page: Open) -> None:
    """/ j k Enter x c r ? Esc, and n: search, walk, open, mark, stop, run again, help."""
    for n in range(3):
        led_server.spawn(f"key {n}", {"until": "keys", "text": "done"}, session_id="keys")
    page = led_page("?session=keys")
    press = page.keyboard.press
    expect(row(page, "key 2")).to_have_count(1)

    press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)

    press("/")
    expect(page.get_by_label("Search in subject")).to_be_focused()
    page.keyboard.type("key")
    press("Escape")
    expect(page.get_by_label("Search in subject")).not_to_be_focused()

    press("j")
    expect(page.get_by_role("link", name="key 2", exact=True)).to_be_focused()
    press("j")
    press("j")
    expect(page.get_by_role("link", name="key 0", exact=True)).to_be_focused()
    press("k")
    expect(page.get_by_role("link", name="key 1", exact=True)).to_be_focused()

    press("Enter")
    expect(drawer(page).get_by_role("heading", name="key 1")).to_be_focused()
    press("j")
    expect(drawer(page).get_by_role("heading", name="key 0")).to_be_visible()
    press("k")
    expect(drawer(page).get_by_role("heading", name="key 1")).to_be_visible()
    page.get_by_role("tab", name="Overview").focus()
    press("ArrowRight")
    press("ArrowRight")
    expect(page.get_by_role("tab", name="Conversation")).to_be_focused()
    press("Escape")
    expect(drawer(page)).to_have_count(0)
    expect(page.get_by_role("link", name="key 1", exact=True)).to_be_focused()

    press("x")
    press("k")
    press("x")
    expect(page.locator(".bulk")).to_contain_text("2 lines marked")
    press("c")
    expect(page.get_by_label("Reason (optional)")).to_be_focused()
    page.keyboard.type("by hand")
    press("Enter")
    for n in (1, 2):
        expect(row(page, f"key {n}").locator(".mark")).to_have_text("cancelled")

    led_server.go("keys")
    press("j")
    press("r")
    form = page.get_by_role("dialog", name="Run again")
    expect(form.get_by_label("Prompt")).to_be_focused()
    expect(form.get_by_label("Prompt")).not_to_have_value("")
    press("Control+a")
    page.keyboard.type("typed with keys")
    press("Control+Enter")
    expect(drawer(page).get_by_role("region", name="Result")).to_contain_text("typed with keys")
    press("Escape")
    press("Escape")
    assert "q=" not in page.url


# --- screen readers -----------------------------------------------------------------------------------------


def barriers(page: Page) -> list[str]:
    """What axe finds that is serious or critical."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']} ({each['impact']}): {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("look", ["light", "dark"])
def test_axe_finds_no_barrier_on_any_page(led_server: Server, pages: Pages, look: str) -> None:
    """List, drawer with each tab, dialogs, timeline, sessions, conversation: in light and in dark."""
    session = f"axe-{look}"
    bad = led_server.spawn("goes wrong", {"fail": "something broke"}, session_id=session)
    good = led_server.spawn("goes well", "# Title\n\nSome `code`, a [link](https://example.org).", session_id=session)
    runs = led_server.spawn("goes on", {"until": session, "progress": "at 7"}, session_id=session)
    led_server.until(bad)
    head = led_server.until(good)["head_id"]
    context = pages.context(led_server, color_scheme=look, reduced_motion="reduce", bypass_csp=True)
    page = pages.watch(context.new_page())
    places = {
        "list": f"?session={session}",
        "error": f"?session={session}&job={bad}",
        "result": f"?session={session}&job={good}",
        "running": f"?session={session}&job={runs}",
        "history": f"?job={good}&tab=history",
        "conversation": f"?job={good}&tab=conversation",
        "timeline": f"?view=timeline&session={session}",
        "sessions": "?view=sessions",
        "session": f"?view=session&session={session}&head={head}",
        "nothing": "?q=nothing-is-called-this",
    }
    found: dict[str, list[str]] = {}
    for name, place in places.items():
        page.goto(f"{led_server.base}/{place}")
        page.wait_for_selector(".head")
        expect(page.get_by_text("Reading")).to_have_count(0)
        found[name] = barriers(page)
    page.keyboard.press("n")
    expect(page.get_by_role("dialog")).to_be_visible()
    found["spawn"] = barriers(page)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    found["help"] = barriers(page)
    led_server.go(session)
    page.keyboard.press("Escape")
    page.evaluate("document.querySelector('main').append(document.createElement('input'))")
    assert any(each.startswith("label ") for each in barriers(page))  # it does look
    assert {name: each for name, each in found.items() if each} == {}


def test_screen_readers_get_a_table_a_log_and_one_polite_region(real_server: Server, real_page: Open) -> None:
    """Rows are counted though few exist; the one live region is polite; the log is a log that is not read aloud."""
    job_id = real_server.spawn("to be read", "echo read", session_id="readers", agent_id="shell")
    real_server.until(job_id)
    page = real_page(f"?job={job_id}&tab=log")
    table = page.get_by_role("table", name="Jobs and processes")
    assert int(table.get_attribute("aria-rowcount") or 0) >= 2
    expect(table.get_by_role("columnheader")).to_have_count(5)
    assert page.locator("[aria-live=polite], [role=status]").count() == 1
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "off")
    assert page.evaluate("document.querySelectorAll('h1').length") == 1


# --- hostile text -------------------------------------------------------------------------------------------

MARKUP = (
    '<img src=x onerror="window.hacked=1">',
    "<script>window.hacked=2</script>",
    "<svg onload=window.hacked=3>",
    "\"><iframe srcdoc='<script>parent.hacked=4</script>'>",
    "[click](javascript:window.hacked=5)",
    '![x](x"onerror="window.hacked=6)',
    "<a href='javascript:window.hacked=7'>a</a>",
    "<style>*{display:none}</style>",
    "</script><script>window.hacked=8</script>",
    "<math><mtext><style><img src onerror=window.hacked=9></style>",
    "<form action='javascript:window.hacked=10'><button>go</button></form>",
    "\x1b]8;;javascript:window.hacked=11\x07link\x1b]8;;\x07<b>",
)
MADE_OF_MARKUP = (
    "#app :is(iframe, script, style, form, math, img, [onerror], [onload], a[href^='javascript:' i], svg:not(.icon))"
)


def test_markup_in_every_text_stays_text(led_server: Server, real_server: Server, pages: Pages) -> None:
    """Subject, prompt, result, error, progress, partial text, reason, log, card, branch label, title of a dialog:
    nothing of it runs, and no element comes of it."""
    everything = "\n".join(MARKUP)
    jobs = []
    for number, text in enumerate(MARKUP):
        done = {"text": text, "progress": text}
        jobs.append(led_server.spawn(text, done, session_id="hostile", metadata={"m": text[:200]}))
        jobs.append(led_server.spawn(f"{number} {text}", {"fail": text}, session_id="hostile"))
    jobs.append(led_server.spawn("all", {"text": everything}, session_id="hostile"))
    jobs.append(led_server.spawn(everything, everything, session_id="hostile"))
    stopped = led_server.spawn("stopped", {"until": "never", "partial": everything}, session_id="hostile")
    led_server.until(stopped, "running")
    page = pages.open(led_server, f"?session=hostile&job={stopped}")
    expect(drawer(page).get_by_role("region", name="So far")).to_contain_text("click")
    page.keyboard.press("c")
    page.get_by_label("Reason (optional)").fill(MARKUP[0])
    page.keyboard.press("Enter")
    expect(drawer(page).locator(".facts .mark")).to_have_text("cancelled")
    for job_id in jobs:
        led_server.until(job_id)

    def harmless(where: str) -> None:
        assert page.evaluate("window.hacked") is None, where
        made = page.locator(MADE_OF_MARKUP).evaluate_all("all => all.map(e => e.outerHTML.slice(0, 99))")
        assert made == [], where
        assert page.locator(".head").is_visible(), where

    for job_id in [*jobs[:6], *jobs[-2:]]:
        for tab in ("overview", "conversation", "history"):
            page.goto(f"{led_server.base}/?session=hostile&job={job_id}&tab={tab}")
            expect(drawer(page).locator(".quiet", has_text="Reading…")).to_have_count(0)
            expect(drawer(page).locator(".facts")).to_be_visible()
            harmless(f"{job_id} {tab}")
    for place in ("?view=timeline&session=hostile", "?view=session&session=hostile&head=root", "?view=sessions"):
        page.goto(f"{led_server.base}/{place}")
        expect(page.get_by_text("Reading…")).to_have_count(0)
        harmless(place)
    heads = led_server.ask("sessions/hostile/conversation")["branches"]
    for branch in heads[:5]:
        page.goto(f"{led_server.base}/?view=session&session=hostile&head={branch['head_id']}")
        expect(page.locator(".messages > li").first).to_be_visible()
        harmless(branch["label"])
    for text in MARKUP[:4]:
        page.goto(
            f"{led_server.base}/?q={json.dumps(text)[1:20]}&session={text[:10]}&status={text[:5]}&view={text[:9]}&tab=x"
        )
        expect(page.locator(".head")).to_be_visible()
        harmless(text)

    # And in a log, with everything that a terminal would act on.
    printed = "".join(f"\\{byte:03o}" for byte in everything.encode())
    log = real_server.spawn("noise", f"printf '{printed}'", session_id="hostile", agent_id="shell")
    real_server.until(log)
    page = pages.open(real_server, f"?job={log}&tab=log")
    expect(page.get_by_role("log")).to_contain_text("<img src=x onerror=")
    harmless("log")


# --- the connection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["by itself", "at a press of the button"])
def test_a_lost_connection_comes_back_and_misses_nothing(pages: Pages, tmp_path: Path, who: str) -> None:
    """The server is killed and started again: the page says so, tries again, and shows what happened meanwhile."""
    pages.expected += ["ERR_CONNECTION_REFUSED", "WebSocket connection", "Failed to load resource"]
    home = tmp_path / "home"
    with led(home) as first:
        port = first.port
        first.until(first.spawn("before the fall", "x"))
        lost = first.spawn("in the middle", {"until": "never"})
        first.until(lost, "running")
        page = pages.watch(pages.context(first).new_page())
        if who != "by itself":
            # The wait before a try is spread by chance; with this "chance" it takes minutes.
            page.add_init_script("Math.random = () => 4000")
        page.goto(first.base)
        expect(row(page, "in the middle").locator(".mark")).to_have_text("running")
        first.kill()
        expect(page.locator(".lost")).to_contain_text("The connection is lost.")
        expect(page.locator(".connection")).to_have_text("connecting")
    with led(home, port=port) as second:
        after = second.spawn("after the fall", "y")
        second.until(after)
        if who != "by itself":
            expect(page.locator(".lost")).to_contain_text(re.compile(r"Trying again in [45]\d\d\ss"))
            page.get_by_role("button", name="Try now").click()
        expect(page.get_by_role("status")).to_contain_text("Connected again")
        expect(page.locator(".lost")).to_have_count(0)
        expect(row(page, "after the fall").locator(".mark")).to_have_text("completed")
        expect(row(page, "in the middle").locator(".mark")).to_have_text("errored")
        live = second.spawn("live again", "z")
        expect(row(page, "live again").locator(".mark")).to_have_text("completed")
        second.until(live)


def test_a_stranger_is_asked_for_the_token(real_server: Server, pages: Pages) -> None:
    """Without a login there is a form that says how to get one; the link of `serve --url` logs in once."""
    pages.expected.append("401")
    context = pages.context(real_server)
    context.clear_cookies()
    page = pages.watch(context.new_page())
    page.goto(f"{real_server.base}/?q=kept")
    form = page.locator("form.login")
    expect(form).to_contain_text("openjobs serve --url")
    form.get_by_label("Token").fill("wrong")
    form.get_by_role("button", name="Log in").click()
    expect(form.get_by_role("alert")).to_be_visible()
    form.get_by_label("Token").fill(real_server.token)
    form.get_by_role("button", name="Log in").click()
    expect(page.locator(".head")).to_be_visible()
    assert page.url.endswith("?q=kept")


def test_the_printed_link_logs_in_and_leaves_the_address(real_server: Server, pages: Pages) -> None:
    from tests.support.cli import Cli

    link = Cli(real_server.home).run("serve", "--url").out.strip()
    context = pages.context(real_server)
    context.clear_cookies()
    page = pages.watch(context.new_page())
    page.goto(link)
    expect(page.locator(".head")).to_be_visible()
    assert "#" not in page.url


def test_the_panel_works_below_a_prefix(pages: Pages, tmp_path: Path) -> None:
    """A host mounts it where it likes: files, requests, events and links all stay below."""
    with led(tmp_path / "home", prefix="/agents/jobs") as server:
        page = pages.open(server)
        job_id = server.spawn("mounted", "from below")
        row(page, "mounted").get_by_role("link", name="mounted").click()
        expect(drawer(page).get_by_role("region", name="Result")).to_contain_text("from below")
        assert page.url == f"{server.base}/?job={job_id}"
        page.get_by_role("link", name="Sessions").click()
        assert page.url == f"{server.base}/?view=sessions"
        pages.close()


def test_an_empty_home_says_what_to_do(pages: Pages, tmp_path: Path) -> None:
    with led(tmp_path / "home") as server:
        page = pages.open(server)
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        page.goto(f"{server.base}/?view=sessions")
        expect(page.get_by_role("heading", name="No sessions yet")).to_be_visible()
        pages.close()


def test_a_phone_has_room_for_it_all(led_server: Server, pages: Pages) -> None:
    """At 360 pixels nothing is cut off at the side, and the drawer covers the page."""
    job_id = led_server.spawn("a subject that is much longer than a phone is wide " * 3, "x" * 300, session_id="phone")
    head = led_server.until(job_id)["head_id"]
    page = pages.open(led_server, viewport={"width": 360, "height": 700}, is_mobile=True, has_touch=True)
    places = ("", f"?job={job_id}", f"?job={job_id}&tab=history", "?view=timeline", "?view=sessions")
    for place in (*places, f"?view=session&session=phone&head={head}"):
        page.goto(f"{led_server.base}/{place}")
        page.wait_for_selector(".head")
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide == [360, 360], place


def test_who_wants_no_motion_gets_none(led_server: Server, led_page: Open) -> None:
    """The spinner stands still."""
    job_id = led_server.spawn("still", {"until": "still"})
    led_server.until(job_id, "running")
    page = led_page(reduced_motion="reduce")
    spinner = row(page, "still").locator("svg.spin")
    assert spinner.evaluate("e => getComputedStyle(e).animationName") == "none"
    led_server.go("still")
    led_server.until(job_id)


# --- speed --------------------------------------------------------------------------------------------------


def test_every_change_is_seen(led_server: Server, led_page: Open, figures: list[str]) -> None:
    """Without a reload. From the call that ends a job's turn to the changed row in the page: the figure is printed."""
    page = led_page()
    page.evaluate(
        """() => { window.seen = {}; new MutationObserver(() => {
          for (const line of document.querySelectorAll('.list tbody tr')) {
            const text = line.innerText;
            const name = /speed \\d+/.exec(text)?.[0];
            if (name && text.includes('completed')) window.seen[name] ??= Date.now();
          } }).observe(document.querySelector('#app'), {subtree: true, childList: true, characterData: true}); }"""
    )
    took = []
    for n in range(10):
        job_id = led_server.spawn(f"speed {n}", "x", session_id="speed")
        job = led_server.until(job_id)
        seen = page.wait_for_function(f"() => window.seen['speed {n}']").json_value()
        ended = page.evaluate("text => Date.parse(text)", job["completed_at"])
        took.append(seen - ended)
    took.sort()
    figures.append(
        f"a change of status is seen after {took[len(took) // 2]} ms (median), {took[-1]} ms (slowest of {len(took)})"
    )
