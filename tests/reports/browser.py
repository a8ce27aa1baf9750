"""Chromium without a window: what a page looks like, how wide it is, and what it asks the network for."""

from __future__ import annotations

import html
import re
import shutil
import socketserver
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--hide-scrollbars", "--disable-extensions",
    "--disable-features=OptimizationHints,Translate,MediaRouter,DialMediaRouteProvider", "--no-default-browser-check",
)  # fmt: skip
OWN_HOSTS = {"accounts.google.com", "clients2.google.com", "update.googleapis.com"}
"""Addresses that Chromium asks for by itself at times, for any page."""


@dataclass(frozen=True)
class Seen:
    """width, height: of the whole page, CSS pixels. asked: hosts that the browser asked for. dark: prefers dark."""

    width: int
    height: int
    asked: frozenset[str]
    is_dark: bool
    ground: str


def look(page: str, width: int, *, is_dark: bool = False, picture: Path | None = None) -> Seen:
    """The page in a frame of so many CSS pixels: a window cannot be as narrow as a phone."""
    frame = f"""<!DOCTYPE html><meta charset="utf-8"><body style="margin:0"><iframe id="f" srcdoc="{html.escape(page)}"
    style="border:0;display:block" width="{width}" height="600"></iframe><script>
    const frame = document.getElementById("f");
    frame.onload = () => {{
      const whole = frame.contentDocument.documentElement;
      frame.height = whole.scrollHeight;
      const dark = frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches;
      const ground = frame.contentWindow.getComputedStyle(frame.contentDocument.body).backgroundColor;
      document.title = [whole.scrollWidth, whole.scrollHeight, dark, ground].join("|");
    }};</script>"""
    with tempfile.TemporaryDirectory() as folder, Proxy() as proxy:
        path = Path(folder) / "frame.html"
        path.write_text(frame, encoding="utf-8")
        common = [
            f"--user-data-dir={folder}/profile",
            f"--proxy-server=http://127.0.0.1:{proxy.port}",
            "--proxy-bypass-list=<-loopback>",
            *(["--blink-settings=preferredColorScheme=0"] if is_dark else []),
        ]
        dom = _run(*common, "--virtual-time-budget=5000", "--dump-dom", path.as_uri())
        found = re.search(r"<title>(\d+)\|(\d+)\|(true|false)\|([^<]+)</title>", dom)
        assert found, dom[-2000:]
        if picture:
            size = f"--window-size={max(width, 500)},{found[2]}"
            _run(*common, size, "--virtual-time-budget=5000", f"--screenshot={picture}", path.as_uri())
        return Seen(int(found[1]), int(found[2]), frozenset(proxy.hosts - OWN_HOSTS), found[3] == "true", found[4])


def _run(*arguments: str) -> str:
    assert CHROMIUM
    done = subprocess.run([CHROMIUM, *FLAGS, *arguments], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


class Proxy:
    """A proxy for every request of the browser: it notes the host, and answers nothing."""

    def __enter__(self) -> Proxy:
        self.hosts: set[str] = set()
        hosts = self.hosts

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                words = self.rfile.readline(65536).decode("latin-1").split()
                if len(words) > 1:
                    hosts.add(re.sub(r"^\w+://", "", words[1]).partition("/")[0].partition(":")[0])

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
