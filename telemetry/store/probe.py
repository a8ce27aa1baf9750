"""Trying files with native readers in a process of its own: a damaged file ends that process, not the command."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from almanac.errors import FileFormatError

Kind = Literal["footer", "pages", "import"]
"""A file of the store without its pages, or with them; a user's own Parquet file."""
_PROGRAM = """
import json, sys
task = json.load(sys.stdin)
sys.path[:] = task["path"]
from telemetry.store.damage import try_files
try_files(task["kind"], task["files"])
"""
FILE_S = 60
MEMORY_BYTES = 2**34
UNTRIED = "not tried"
"""Begins a fault that says nothing of the file, so that it is tried again next time."""


def probe(paths: Sequence[Path], kind: Kind) -> dict[Path, str]:
    """Return why each file cannot be read, by path; "" for a file that can be."""
    left, found = [str(path) for path in paths], dict[Path, str]()
    while left:
        task = json.dumps({"path": sys.path, "kind": kind, "files": left}).encode()
        done = subprocess.run([sys.executable, "-I", "-c", _PROGRAM], input=task, capture_output=True, check=False)
        said = _answers(done.stdout)
        found |= {Path(name): str(fault) for name, fault in zip(left, said, strict=False)}
        if len(said) < len(left):
            found[Path(left[len(said)])] = _ending(done)
        left = left[len(said) + 1 :]
    return found


def require_readable(path: Path) -> None:
    """Raise FileFormatError for a Parquet file, not of the store, that ends or hangs native readers."""
    if fault := probe([path], "import")[path]:
        raise FileFormatError(f"{path}: cannot be read: {fault}", "export it again")


def _answers(output: bytes) -> list[str]:
    """The answers about the first files. A native reader may have written into the output, or cut it short."""
    said: list[str] = []
    with contextlib.suppress(ValueError):
        said.extend(str(json.loads(line)) for line in output.splitlines())
    return said


def _ending(done: subprocess.CompletedProcess[bytes]) -> str:
    """The reason for no answer about a file."""
    if done.returncode == -signal.SIGALRM:
        return f"{UNTRIED} within {FILE_S} s"
    if done.returncode == -signal.SIGKILL:
        return f"{UNTRIED}: the process that tried to read it was killed"
    if done.returncode < 0:
        return f"damaged: {signal.Signals(-done.returncode).name} ended the process that tried to read it"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
    return f"{UNTRIED}: {said[-1]}"
