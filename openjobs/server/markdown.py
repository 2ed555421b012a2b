"""Markdown to HTML that can be put into a page: rendered by markdown-it-py, then cleaned by nh3.

Two lines of defence, since job text is anybody's (R10): the renderer escapes raw HTML, and what it
makes is reduced to a short list of harmless elements, whatever the renderer let through. No images
(they would tell somebody that the page was opened; their text stands instead), no styles, no ids, no forms.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..session.text import storable

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

#: a longer text is shown as it is: rendering costs about a second a megabyte
LIMIT_CHARS = 256 * 1024

_TAGS = frozenset(
    {"a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre"}
    | {"s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"}
)
_ATTRIBUTES = {"a": {"href", "title"}, "ol": {"start"}}
_SCHEMES = frozenset({"http", "https", "mailto"})
_REL = "noopener noreferrer nofollow"


def to_html(text: str | None) -> str | None:
    """Safe HTML of a Markdown text; None where there is none, or it is too long to be rendered."""
    if text is None or len(text) > LIMIT_CHARS:
        return None
    import nh3

    rendered = _renderer().render(storable(text).replace("\0", "\ufffd"))
    return nh3.clean(
        rendered,
        tags=set(_TAGS),
        attributes={tag: set(names) for tag, names in _ATTRIBUTES.items()},
        attribute_filter=_checked,
        url_schemes=set(_SCHEMES),
        link_rel=_REL,
        strip_comments=True,
    )


def _checked(tag: str, name: str, value: str) -> str | None:
    """Links lead elsewhere, with a scheme of ours, or nowhere: one within the server would be somebody else's idea."""
    if name == "href" and value.partition(":")[0].lower() not in _SCHEMES:
        return None
    return value


@functools.cache
def _renderer() -> MarkdownIt:
    from html import escape

    from markdown_it import MarkdownIt

    def image(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        return escape(f"[{tokens[index].content}]")

    # "js-default" escapes raw HTML and bounds nesting.
    renderer = MarkdownIt("js-default", {"linkify": False, "typographer": False, "maxNesting": 50})
    renderer.add_render_rule("image", image)
    return renderer
