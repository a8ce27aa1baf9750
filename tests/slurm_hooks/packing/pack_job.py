"""A job on this host without Slurm: a folder with a fake MPS program, and almanac-pack as a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests/cluster/fake_mps_control.py"
PATH_FIRST = "import sys; sys.path.insert(0, sys.argv.pop(1)); "
MAIN = "from slurm_hooks.packing.launcher import main; main()"
TIMEOUT_S = 300.0


class PackJob:
    """before: Python that the launcher runs first.

    environ: of the launcher. root: its folder; the fake program and its files are in bin, its /tmp is tmp."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.tmp = root, root / "bin", root / "tmp"
        for folder in (self.bin, self.tmp):
            folder.mkdir()
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(root), "TMPDIR": str(self.tmp), "BIN": str(self.bin),
            "SLURM_JOB_ID": str(700_000_000 + os.getpid()), "CUDA_VISIBLE_DEVICES": "3", "MARK": str(root),
        }  # fmt: skip
        self.before = ""
        self.started: list[subprocess.Popen[str]] = []

    def install_mps(self, mode: str = "") -> None:
        shutil.copy(FAKE, self.bin / "nvidia-cuda-mps-control")
        (self.bin / "nvidia-cuda-mps-control").chmod(0o755)
        (self.bin / "mode").write_text(mode)

    def start(self, *argv: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", PATH_FIRST + self.before + MAIN, str(ROOT), *argv], cwd=self.root, text=True,
            env={**self.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *argv: str, **environ: str) -> tuple[int, str]:
        """The exit code, and what it said."""
        process = self.start(*argv, **environ)
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert out == ""
        return process.returncode, err

    def script(self, name: str, text: str) -> str:
        path = self.root / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return name

    def program(self, name: str) -> None:
        """Make almanac-pack a command of this name."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\nexec {sys.executable} -I -c '{PATH_FIRST}{MAIN}' {ROOT} \"$@\"\n")
        path.chmod(0o755)

    def shell(self, text: str, output: IO[bytes], **environ: str) -> int:
        """The exit code of a script whose output goes to an open file, not for appending."""
        return subprocess.run(
            ["sh", "-c", text], cwd=self.root, env={**self.environ, **environ}, stdout=output, stderr=output,
            timeout=TIMEOUT_S, check=False,
        ).returncode  # fmt: skip

    def output(self, item: int) -> str:
        return (self.root / f"slurm-{self.environ['SLURM_JOB_ID']}_{item}.out").read_text()

    def calls(self) -> list[str]:
        """Commands that the fake program got, in order."""
        path = self.bin / "calls"
        return [line.split("\t")[0] for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, what: str, check: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        until = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < until, f"waited {timeout_s} s for {what}: {self.left()}"
            time.sleep(0.02)

    def processes(self) -> dict[int, str]:
        """Living processes that this job started, the launcher's own apart."""
        found = {}
        own = {os.getpid()} | {process.pid for process in self.started}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal() or int(entry.name) in own:
                    continue
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if f"MARK={self.root}".encode() in (entry / "environ").read_bytes().split(b"\0") and state not in "ZX":
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except (OSError, ValueError):
                continue
        return found

    def left(self) -> list[str]:
        """List what is left of a run: processes and folders."""
        return [*self.processes().values(), *(path.name for path in self.tmp.iterdir())]

    def wait_until_nothing_is_left(self) -> None:
        self.wait_for("the end of everything", lambda: not self.left())
