"""Job text as HTML: whatever it says, nothing in it can run, load or lead anywhere unasked. R10."""

from __future__ import annotations

import itertools

import pytest

from openjobs.server.markdown import LIMIT_CHARS, to_html
from tests.support.markup import LINKS, MARKUP, PAYLOADS, PLACES, harmless


def test_there_are_enough_of_them() -> None:
    """At least 200 payloads, each another one."""
    assert len(set(PAYLOADS)) >= 200


@pytest.mark.parametrize("place", PLACES)
def test_markup_is_neutralised_everywhere(place: str) -> None:
    """No payload becomes a tag, an attribute or a link that is not on the short list, wherever it stands."""
    for text in MARKUP + LINKS:
        html = to_html(place.replace("{}", text))
        assert html is not None
        harmless(html)


def test_the_check_would_see_it() -> None:
    """The same check, on what was not rendered here, fails."""
    for text in ("<script>x</script>", "<a href='javascript:1'>x</a>", "<p onclick=x>", "<a href='https://x'>x</a>"):
        with pytest.raises(AssertionError):
            harmless(text)


def test_two_payloads_that_meet_make_no_third() -> None:
    """Texts that only together are markup."""
    for first, second in itertools.product(MARKUP[:20], LINKS):
        html = to_html(f"{first}\n{second} {first[: len(first) // 2]}")
        assert html is not None
        harmless(html)


def test_what_people_write_is_shown() -> None:
    """Headings, emphasis, lists, tables, code, and links that lead elsewhere."""
    html = to_html(
        "# A\n\n*b* **c** ~~d~~ `e`\n\n1. x\n\n|a|\n|-|\n|1|\n\n[t](https://ok.example)\n\n```py\nif a < b: pass\n```"
    )
    assert html is not None
    for part in ("<h1>A</h1>", "<em>b</em>", "<strong>c</strong>", "<s>d</s>", "<code>e</code>", "<td>1</td>"):
        assert part in html
    assert '<a href="https://ok.example" rel="noopener noreferrer nofollow">t</a>' in html
    assert "if a &lt; b: pass" in html


def test_an_image_is_named_and_not_loaded() -> None:
    """Its text stands in its place."""
    assert to_html("![a <b> cat](https://x.example/cat.png)") == "<p>[a &lt;b&gt; cat]</p>\n"


def test_no_text_and_too_much_text_have_no_html() -> None:
    """Then the text is shown as it is."""
    assert to_html(None) is None
    assert to_html("x" * (LIMIT_CHARS + 1)) is None
    assert to_html("") == ""


def test_any_text_at_all() -> None:
    """Lone surrogates, NULs, deep nesting and long lines raise nothing."""
    for text in ("\ud800 x", "a\0b", "> " * 5000, "*" * 5000, "[" * 5000, "- " * 5000 + "x", "`" * 5001):
        html = to_html(text)
        assert html is not None
        harmless(html)
