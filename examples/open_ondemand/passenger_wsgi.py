"""An app for Open OnDemand: a card of the user's running GPU jobs, and a form filled with almanac's advice.

Copy this folder to /var/www/ood/apps/sys/almanac. Passenger runs it as the user who is logged in, so almanac shows only
what that user may see. It needs slurm-almanac-client on the host of Open OnDemand, and no other Python package.
"""

from __future__ import annotations

import html
import json
import subprocess
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

TIMEOUT_S = 20
NO_ADVICE = 10
"""Exit code of `almanac advise` for a job that it knows too little about."""
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>GPU jobs</title></head><body>
<h1>Running GPU jobs</h1>{card}
<h1>New job</h1><form>
<label>Job name <input name="name" value="{name}"></label>
<label>GPUs <input name="gpus" type="number" min="1" max="1024" value="{gpus}"></label>
<button>Advise</button></form>{advice}</body></html>"""


def almanac(*argv: str) -> Any:
    """The JSON that almanac prints. Raises RuntimeError with its own words."""
    try:
        done = subprocess.run(["almanac", *argv], capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"almanac did not answer: {error}") from error
    if done.returncode not in (0, NO_ADVICE):
        raise RuntimeError(done.stderr.decode("utf-8", "replace")[:500] or f"almanac ended with {done.returncode}")
    return json.loads(done.stdout)


def card(live: dict[str, Any]) -> str:
    """The running jobs as a table. A figure that is not known is a question mark, not zero."""
    if live["as_of_s"] is None:
        return "<p>Not known: the last round of the watch is older than 10 minutes.</p>"
    rows = [
        (job["job"], job["name"], job["gpu_count"], _percent(job["gpu_util_pct"]), ", ".join(job["kinds"]), job["says"])
        for job in live["jobs"]
    ]
    head = ("Job", "Name", "GPUs", "Use", "Now", "What to do")
    lines = [f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in (head, *rows)]
    return f"<table>{''.join(lines)}</table>" if rows else "<p>You have no running GPU job.</p>"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}%"


def advice(found: dict[str, Any]) -> str:
    """The fields that the advice fills: an option for sbatch, and the memory and the run time behind it."""
    option, bound, duration = found["tier"]["option"], found["bound"] or {}, found["duration"] or {}
    lines = [f'<label>Option for sbatch <input name="option" value="{html.escape(option or "", quote=True)}"></label>']
    if bound.get("bound_mib") is not None:
        lines.append(f"<p>About {bound['bound_mib'] / 1024:.1f} GiB of memory per GPU.</p>")
    if duration.get("duration_s") is not None:
        lines.append(f"<p>Probably runs for {duration['duration_s'] / 3600:.1f} h.</p>")
    return "".join(lines) if option or len(lines) > 1 else "<p>No advice yet: too few jobs of this name.</p>"


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer a request (WSGI)."""
    asked = {name: values[-1] for name, values in parse_qs(environ.get("QUERY_STRING", "")).items()}
    name, gpus = asked.get("name", "")[:200], asked.get("gpus", "1")
    fills = {"name": html.escape(name, quote=True), "gpus": "1", "card": "", "advice": ""}
    try:
        fills["card"] = card(almanac("jobs", "--running", "--json"))
        if name and gpus.isascii() and gpus.isdigit() and 1 <= int(gpus) <= 1024:
            fills["gpus"] = gpus
            fills["advice"] = advice(almanac("advise", "--json", f"--job-name={name}", f"--gpus={gpus}", "--wrap=true"))
    except (RuntimeError, ValueError) as error:
        fills["card"] += f"<p>{html.escape(str(error))}</p>"
    start_response(
        "200 OK", [("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", "default-src 'none'")]
    )
    return [_PAGE.format(**fills).encode()]
