"""Reports of each kind of job, in each form."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from reports.job.conclusions import report_of
from reports.job.evidence import JobContext
from reports.job.render import json_of, render_email, render_page, render_terminal

MAX_MAIL_BYTES = 200_000


def on_terminal(context: JobContext) -> str:
    console = Console(width=100, file=io.StringIO(), highlight=False, markup=False, emoji=False, force_terminal=True)
    with console.capture() as capture:
        console.print(render_terminal(report_of(context), 100))
    return capture.get()


def plain(text: str) -> str:
    """Without the colors that rich itself sets."""
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()) + "\n"


class Page(HTMLParser):
    """The elements of a page, and the addresses that it names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "background"):
                self.addresses.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


@pytest.mark.parametrize("case", ["balanced", "hostile"])
def test_a_mail_reads_well_where_styles_are_left_out(reported: Any, case: str) -> None:
    """Outlook for Windows knows neither display: block nor padding of div; some clients drop all styles."""
    mail = render_email(report_of(reported.contexts[case]))
    body = mail.html[mail.html.index("<body") :]
    assert "max-width" not in re.sub(r"<(table|img) [^>]*>", "", body), "Word ignores it, but for tables"
    bare = re.sub(r' (style|class)="[^"]*"', "", body)
    assert "&lt;span" not in bare and "<div" not in bare
    assert re.search(r"<td[^>]*>(1 h|15 min) <br><span>4 h requested</span></td>", bare)
    assert all("cellpadding=" in table for table in re.findall(r"<table [^>]*>", bare))
    assert bare.index("<h1>") < bare.index("What to do next time") < bare.index("Roofline") < bare.index("Figures")
    assert "<span>--time</span>" in bare, "an option stays in one piece"


@pytest.mark.parametrize("case", ["balanced", "64-gpus", "mig", "hostile", "no-telemetry", "out-of-memory"])
def test_mail_and_page_are_small_and_whole_and_name_nothing_outside(reported: Any, case: str) -> None:
    context = reported.contexts[case]
    mail = render_email(report_of(context))
    assert [line for line in mail.text.splitlines() if len(line) > 80] == []
    assert len(mail.html) + len(mail.text) + sum(map(len, mail.images.values())) * 4 / 3 < MAX_MAIL_BYTES
    assert set(re.findall(r'src="cid:([^"]+)"', mail.html)) == set(mail.images)
    assert mail.html.count("<img") == len(re.findall(r'<img [^>]*alt="[^"]{20,}"', mail.html)) == len(mail.images)
    assert all(content.startswith(b"\x89PNG") for content in mail.images.values())
    assert len(report_of(context).suggestions) <= 3
    for html in (mail.html, render_page(report_of(context))):
        page = Page(html)
        allowed = {"html", "head", "meta", "title", "style", "body", "p", "h1", "h2", "table", "tbody", "tr", "td",
                   "span", "br", "img"}  # fmt: skip
        assert set(page.elements) <= allowed
        assert not page.handlers
        assert all(address.startswith(("cid:", "data:image/png;base64,")) for address in page.addresses)
        assert "url(" not in html and "@import" not in html


def test_hostile_names_are_inert_in_every_format(reported: Any) -> None:
    context = reported.contexts["hostile"]
    mail = render_email(report_of(context))
    terminal = on_terminal(context)
    assert len(mail.subject.splitlines()) == 1
    assert len(mail.subject) <= 150
    for text in (mail.subject, *(each.replace("\n", "") for each in (mail.text, mail.html, plain(terminal)))):
        assert text.isprintable() and "A" * 300 not in text
    assert "<script" not in mail.html
    assert "{{7*7}}" in mail.text and "{{7*7}}" in mail.html
    assert "49" not in mail.subject
    assert "\nBcc" not in mail.text
    assert "\x1b[31m" not in terminal and "\x1b]" not in terminal
    # JSON keeps the name whole, and escapes what a terminal or a page could take for more than text.
    said = json.dumps(json_of(report_of(context)), ensure_ascii=True)
    assert said.isascii() and json.loads(said)["job"]["name"] == context.job["name"]


def test_what_is_not_known_is_null_in_json(reported: Any) -> None:
    said = json_of(report_of(reported.contexts["no-telemetry"]))
    assert said["metrics"]["mean_gpu_util_pct"] is None
    assert said["gpus"] == [] and said["ranks"] == {}
    json.dumps(said, allow_nan=False)


def test_the_same_job_gives_the_same_bytes(reported: Any) -> None:
    first, second = (render_email(report_of(reported.contexts["idle"])) for _ in range(2))
    assert first == second
