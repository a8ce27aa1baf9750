"""A service for JupyterHub: stop servers whose GPUs were idle for an hour, as almanac's watch saw them.

jupyterhub-idle-culler looks at the browser and the kernels: a notebook with an open page holds its GPUs for days. This
looks at the GPUs. It needs batchspawner, which keeps the id of the Slurm job in the server's state, and runs as an
operator of almanac. In jupyterhub_config.py:

    c.JupyterHub.services = [{"name": "gpu-culler", "command": [sys.executable, "gpu_idle_culler.py", "--stop"]}]
    c.JupyterHub.load_roles = [{"name": "gpu-culler", "services": ["gpu-culler"], "scopes":
        ["list:users", "read:servers", "admin:server_state", "delete:servers"]}]

Without --stop it says what it would stop. What is unknown is not idle, and nothing is stopped by an old round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 30
FRESH_S = 600
PAGE = 200
"""Users of one answer of the hub."""


def hub(path: str, method: str = "GET") -> Any:
    """An answer of the hub's REST API. Raises OSError."""
    url, token = os.environ["JUPYTERHUB_API_URL"], os.environ["JUPYTERHUB_API_TOKEN"]
    request = urllib.request.Request(f"{url}/{path}", method=method, headers={"Authorization": f"token {token}"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        body = answer.read()
    return json.loads(body) if body else None


def servers() -> Iterator[tuple[str, str, int]]:
    """(user, name of the server, job id) of the servers that run as Slurm jobs."""
    offset = 0
    while users := hub(f"users?state=active&limit={PAGE}&offset={offset}"):
        offset += PAGE
        for user in users:
            for name, server in user.get("servers", {}).items():
                job_id = str((server.get("state") or {}).get("job_id", ""))
                if server.get("ready") and job_id.isascii() and job_id.isdigit():
                    yield user["name"], name, int(job_id)
        if len(users) < PAGE:
            return


def idle_jobs(least_s: int) -> dict[int, str]:
    """By job id, the words of almanac about running jobs whose GPUs were all idle for so long."""
    argv = ["almanac", "jobs", "--running", "--allusers", "--json"]
    live = json.loads(subprocess.run(argv, capture_output=True, timeout=TIMEOUT_S, check=True).stdout)
    if live["as_of_s"] is None or time.time() - live["as_of_s"] > FRESH_S:
        return {}
    return {
        job["job_id"]: job["says"]
        for job in live["jobs"]
        if job["kinds"] == ["idle"]
        and job["idle_s"] >= least_s
        and job["idle_gpus"] == job["gpus_seen"] == job["gpu_count"]
    }


def cull(least_s: int, is_dry: bool) -> int:
    """Stop servers, say which, and return their number."""
    idle, number = idle_jobs(least_s), 0
    for user, name, job_id in servers() if idle else ():
        if job_id in idle:
            number += 1
            print(f"{'would stop' if is_dry else 'stopping'} {user!r}, job {job_id}: GPUs idle", flush=True)
            if not is_dry:
                path = f"servers/{urllib.parse.quote(name, safe='')}" if name else "server"
                hub(f"users/{urllib.parse.quote(user, safe='')}/{path}", "DELETE")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description="Stop JupyterHub servers whose GPUs are idle.")
    parser.add_argument("--idle-min", type=int, default=60, help="minutes without GPU use [60]")
    parser.add_argument("--every-min", type=int, default=5, help="minutes between two looks; 0: look once [5]")
    parser.add_argument("--stop", action="store_true", help="stop them; without it, only say so")
    options = parser.parse_args()
    while True:
        try:
            cull(60 * options.idle_min, not options.stop)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            print(f"gpu_idle_culler: nothing was stopped: {error}", file=sys.stderr, flush=True)
        if not options.every_min:
            return
        time.sleep(60 * options.every_min)


if __name__ == "__main__":
    main()
