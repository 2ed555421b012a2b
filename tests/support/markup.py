"""Texts that would run, load or lead somewhere if a page took them for markup, and what is harmless."""

from __future__ import annotations

import itertools
from html.parser import HTMLParser

#: what a browser would do something about
TAGS = {
    *("a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre"),
    *("s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
}
ATTRIBUTES = {("a", "href"), ("a", "title"), ("a", "rel"), ("ol", "start")}

MARKUP = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<svg><style><img src=x onerror=alert(1)></style></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--><img src=x onerror=alert(1)>'>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<object data=javascript:alert(1)>",
    "<embed src=javascript:alert(1)>",
    "<form action=javascript:alert(1)><button>x</button></form>",
    "<button formaction=javascript:alert(1)>x</button>",
    "<input autofocus onfocus=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)></video>",
    "<audio src=x onerror=alert(1)>",
    "<body onload=alert(1)>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<style>@import '//evil.example/x.css'</style>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=javascript:alert(1)'>",
    "<a href=javascript:alert(1)>x</a>",
    "<a href=' javascript:alert(1)'>x</a>",
    "<a href='java\tscript:alert(1)'>x</a>",
    "<a href='data:text/html,<script>alert(1)</script>'>x</a>",
    "<a href=x onclick=alert(1)>x</a>",
    "<a style='position:fixed;inset:0' href=//evil.example>x</a>",
    "<div style=background:url(//evil.example/x)>x</div>",
    "<template><script>alert(1)</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "<textarea><script>alert(1)</script></textarea>",
    "<title><script>alert(1)</script></title>",
    "<xmp><script>alert(1)</script></xmp>",
    "<plaintext><script>alert(1)</script>",
    "<!--><script>alert(1)</script>-->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "<?xml version='1.0'?><script>alert(1)</script>",
    "<scr<script>ipt>alert(1)</scr</script>ipt>",
    "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
    "<script\x00>alert(1)</script>",
    "\u003cscript\u003ealert(1)\u003c/script\u003e",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<p id=app>x</p><a name=head>x</a>",
]
LINKS = [
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](file:///etc/passwd)",
    "[x](/api/cancel)",
    "[x](api/jobs)",
    "[x](//evil.example)",
    "[x](?job=1)",
    "[x](#login=abc)",
    "[x](<javascript:alert(1)>)",
    "[x][y]\n\n[y]: javascript:alert(1)",
    "<javascript:alert(1)>",
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:alert(1))",
    "![<img src=x onerror=alert(1)>](x)",
    "[![x](https://evil.example/p.png)](javascript:alert(1))",
    '[x](https://ok.example "title\\" onmouseover=alert(1) x=\\"")',
    '[x](https://ok.example/" onmouseover=alert(1) y=")',
]
PLACES = ["{}", "# {}", "- {}\n  - {}", "> {}", "| a |\n|---|\n| {} |", "**{}**", "`{}`", "```html\n{}\n```"]


class Reader(HTMLParser):
    """Every tag and attribute that a browser would see."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))

    def handle_comment(self, data: str) -> None:
        self.found.append(("!--", []))

    def handle_decl(self, decl: str) -> None:
        self.found.append(("!", []))

    def handle_pi(self, data: str) -> None:
        self.found.append(("?", []))


def harmless(html: str) -> None:
    reader = Reader()
    reader.feed(html)
    reader.close()
    for tag, attributes in reader.found:
        assert tag in TAGS, html
        for name, value in attributes:
            assert (tag, name) in ATTRIBUTES, html
            if name == "href":
                assert value is not None
                assert value.lower().startswith(("http://", "https://", "mailto:")), html
            if name == "rel":
                assert value == "noopener noreferrer nofollow"
        if tag == "a":
            assert ("rel", "noopener noreferrer nofollow") in attributes


PAYLOADS = [place.replace("{}", text) for text, place in itertools.product(MARKUP + LINKS, PLACES)]
