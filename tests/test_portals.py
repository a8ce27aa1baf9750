"""The examples for portals, run with an almanac that gives what `almanac --json` gives."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reports.published.live import LiveJob

ROOT = Path(__file__).parents[1]
IDLE = LiveJob(7, "7", "ann", "gpu", "<b>train", 1, 10, None, 1, 0.0, 1.0, 2.0, 1, 7200, ("idle",), "end it: scancel 7")
TIER = {"tier": "hbm40g", "option": '-C "gpu&hbm40g"'}
ADVICE = {"tier": TIER, "bound": {"bound_mib": 22528}, "duration": {"duration_s": 5400}}
NONE = {"tier": {"tier": None, "option": None}, "bound": None, "duration": None}


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "examples" / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeAlmanac:
    """A program `almanac` in PATH that prints given JSON, by its command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "almanac").write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\ncat {folder}/$1 || exit 4\n')
        (folder / "almanac").chmod(0o755)

    def says(self, *jobs: LiveJob, as_of_s: float | None = None, advice: Any = ADVICE) -> None:
        rows = [dataclasses.asdict(job) for job in jobs]
        (self.folder / "jobs").write_text(json.dumps({"as_of_s": as_of_s, "jobs": rows}))
        (self.folder / "advise").write_text(json.dumps(advice))


@pytest.fixture
def almanac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAlmanac:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return FakeAlmanac(tmp_path)


def page(query: str = "") -> str:
    status = []
    body = load("open_ondemand/passenger_wsgi.py").application(
        {"QUERY_STRING": query}, lambda *said: status.append(said[0])
    )
    assert status == ["200 OK"]
    return b"".join(body).decode()


def test_open_ondemand_shows_running_jobs_and_fills_its_form(almanac: FakeAlmanac) -> None:
    almanac.says(IDLE, as_of_s=time.time())
    shown = page("name=a%22%3Eb&gpus=4")
    assert "<td>&lt;b&gt;train</td>" in shown and "<td>end it: scancel 7</td>" in shown
    assert 'value="a&quot;&gt;b"' in shown, "what the user typed stays text"
    assert 'name="option" value="-C &quot;gpu&amp;hbm40g&quot;"' in shown
    assert "22.0 GiB" in shown and "1.5 h" in shown
    assert '--json --job-name=a">b --gpus=4' in (almanac.folder / "asked").read_text()
    almanac.says(advice=NONE)
    silent = page("name=new&gpus=4")
    assert "Not known" in silent and "No advice yet" in silent
    (almanac.folder / "jobs").unlink()
    assert "No such file" in page(), "almanac's own words"


class _Hub(BaseHTTPRequestHandler):
    """Servers of ann (jobs 7, and 8 by name) and bob (no Slurm job)."""

    stopped: list[str]

    def do_GET(self) -> None:
        own = {"": {"ready": True, "state": {"job_id": "7"}}, "a b": {"ready": True, "state": {"job_id": 8}}}
        other = {"": {"ready": True, "state": {}}, "x": {"ready": False, "state": {"job_id": "7"}}}
        users = [{"name": "ann", "servers": own}, {"name": "bob", "servers": other}]
        self.answer(json.dumps(users).encode())

    def do_DELETE(self) -> None:
        self.stopped.append(self.path)
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        assert self.headers["Authorization"] == "token secret"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    _Hub.stopped = []
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("JUPYTERHUB_API_URL", f"http://127.0.0.1:{server.server_port}/hub/api")
        monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
        yield _Hub.stopped
        server.shutdown()
        thread.join()


def test_jupyterhub_servers_stop_if_all_their_gpus_are_idle(almanac: FakeAlmanac, stopped: list[str]) -> None:
    culler, busy = load("jupyterhub/gpu_idle_culler.py"), dataclasses.replace(IDLE, kinds=(), idle_gpus=0, idle_s=0)
    almanac.says(IDLE, dataclasses.replace(IDLE, job_id=8), as_of_s=time.time())
    assert culler.cull(3600, True) == 2 and not stopped, "it only says so"
    assert culler.cull(3600, False) == 2
    assert stopped == ["/hub/api/users/ann/server", "/hub/api/users/ann/servers/a%20b"]
    for job, as_of_s in (
        (busy, time.time()), (IDLE, time.time() - 700), (IDLE, None),
        (dataclasses.replace(IDLE, idle_s=3599), time.time()), (dataclasses.replace(IDLE, gpus_seen=0), time.time()),
        (dataclasses.replace(IDLE, gpu_count=2), time.time()),
        (dataclasses.replace(IDLE, kinds=("xid", "idle")), time.time()),
    ):  # fmt: skip
        almanac.says(job, as_of_s=as_of_s)
        assert culler.cull(3600, False) == 0, job
    assert len(stopped) == 2
