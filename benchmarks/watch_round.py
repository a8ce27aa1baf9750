"""Time and memory of one round of `almanac watch --json` with 10,000 running jobs on 4 GPUs each.

A squeue of our own prints the jobs in the fields and widths that it is asked for: its time, given apart, is not that of
Slurm's. A sinfo of our own prints the nodes. A server of our own answers the instant queries as a Prometheus with
dcgm-exporter on 10,000 nodes would.
Run: make bench-watch
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from figures import Figure, at_most, exactly, main

from telemetry.counters import COUNTERS
from telemetry.sources.exporters import presets
from telemetry.store.store import Store

JOBS, GPUS_PER_NODE = 10_000, 4
SQUEUE = """#!{python} -IS
import sys
fields = [each.split(":") for each in sys.argv[sys.argv.index("-O") + 1].split(",")]
given = dict(JobID="{{0}}", SubmitTime="{start}", RestartCnt="0", ArrayJobID="{{0}}", UserName="user",
    ArrayTaskID="N/A", Account="lab", Partition="gpu", NumNodes="1", StartTime="{start}", EndTime="{end}",
    TimeLimit="1-00:00:00", BatchFlag="1", NodeList="n{{0:05d}}", Name="train", Comment="(null)",
    HetJobID="N/A", HetJobOffset="N/A")
given["tres-alloc"] = "cpu=32,mem=200G,node=1,billing=32,gres/gpu=4,gres/gpu:a100=4"
for job in range(1, {jobs} + 1):
    print("".join(given[name].format(job)[: int(size)].ljust(int(size)) for name, size in fields))
"""
SINFO = """#!/bin/sh
echo "n[00001-{jobs:05d}] 64 1000000 2 gpu:a100:{gpus} (null)"
"""
LABELS = {"Hostname": "n{0:05d}", "gpu": "{1}", "UUID": "GPU-{0:05x}-{1}", "modelName": "NVIDIA A100-SXM4-80GB"}


class QueryAnswers(BaseHTTPRequestHandler):
    """Instant queries: a series of each GPU for a metric of DCGM, its names by __name__, and nothing else."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        query = parse_qs(f"{urlsplit(self.path).query}&{form}").get("query", [""])[0]
        body = f'{{"status":"success","data":{{"resultType":"vector","result":[{",".join(series(query))}]}}}}'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def series(query: str) -> Iterator[str]:
    by, name = re.search(r"by \(([^)]*)\)", query), re.search(r"\((DCGM_\w+)", query)
    if by and by[1] == "__name__":
        for each in COUNTERS:
            yield f'{{"metric":{{"__name__":"{presets()["dcgm"].main(each.column).name}"}},"value":[0,"1"]}}'
    if not name:
        return
    kept = [label for label in LABELS if by is None or label in re.findall(r"\w+", by[1])]
    is_fault = re.search("XID|THROTTLE|REASON|ECC|REMAP|changes", query)
    value = "4" if "count_over" in query else "0" if is_fault else "0.5" if "_PROF_" in query else "50"
    text = ",".join(f'"{label}":"{LABELS[label]}"' for label in kept)
    for node in range(1, JOBS + 1):
        for gpu in range(GPUS_PER_NODE):
            yield f'{{"metric":{{{text.format(node, gpu)}}},"value":[0,"{value}"]}}'


def rounds(root: Path) -> Iterator[Figure]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), QueryAnswers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    now_s, tools = int(time.time()), root / "bin"
    tools.mkdir()
    squeue = tools / "squeue"
    squeue.write_text(SQUEUE.format(python=sys.executable, start=now_s - 8000, end=now_s + 78_400, jobs=JOBS))
    sinfo = tools / "sinfo"
    sinfo.write_text(SINFO.format(jobs=JOBS, gpus=GPUS_PER_NODE))
    for tool in (squeue, sinfo):
        tool.chmod(0o755)
    Store.create(root / "store").of("bench")
    config = root / "almanac.toml"
    address = f"http://127.0.0.1:{server.server_address[1]}"
    lines = ("[site]", 'cluster = "bench"', "[store]", f'path = "{root}/store"', "[slurm]", f'bin_dir = "{tools}"')
    config.write_text("\n".join([*lines, "[prometheus]", f'url = "{address}"', ""]))
    argv = [str(Path(sys.executable).parent / "almanac"), "--config", str(config), "watch", "--json"]
    started = time.monotonic()
    subprocess.run([squeue, "-O", "JobID:16,Comment:256"], check=True, capture_output=True)
    yield Figure("our squeue alone, s (Slurm's is not measured)", time.monotonic() - started)
    for title in ("first round", "second round"):
        began, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run([*argv, "--apply"], check=False, capture_output=True, text=True)
        used, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
        if found.returncode:
            raise RuntimeError(f"almanac watch ended with {found.returncode}: {found.stderr[-2000:]}")
        answer = json.loads(found.stdout)
        yield exactly(f"{title}: jobs with counters", answer["jobs_with_counters"], JOBS)
        used_s = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
        yield at_most(f"{title}: s of CPU, our squeue's included", used_s, 10)
        yield Figure(f"{title}: s until its end, the answers of the server included", took)
    yield at_most("highest memory of the process, MB", used.ru_maxrss * 1024 / 1e6, 300)


def measure() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        yield from rounds(Path(name))


if __name__ == "__main__":
    main(measure)
