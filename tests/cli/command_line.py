"""`almanac` on the command line of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from click.testing import CliRunner

import cli.main


@dataclass(frozen=True)
class CommandLine:
    """Runs `almanac` in this process: a new one would import everything again."""

    folder: Path

    def __call__(self, *argv: str, ok: tuple[int, ...] = (0,), stdin: str | None = None, **env: str) -> str:
        options = ["--config", str(self.folder / "almanac.toml"), "--store", str(self.folder / "store")]
        done = self.raw(*options, *argv, stdin=stdin, **env)
        assert done.returncode in ok, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def raw(self, *argv: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        start: Any = SimpleNamespace(name="almanac", main=lambda args, prog_name: cli.main.main(list(args)))
        with warnings.catch_warnings(), mock.patch.dict(os.environ, {"NO_COLOR": "1", **env}):
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)
            time.tzset()
            done = CliRunner().invoke(start, argv, input=stdin)
        time.tzset()
        assert done.exception is None or isinstance(done.exception, SystemExit), (argv, done.exc_info)
        return subprocess.CompletedProcess(argv, done.exit_code, done.stdout, done.stderr)

    def process(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own, for what Python itself reads of the environment."""
        command = [sys.executable, "-m", "cli.main", *argv]
        return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)

    def json(self, *argv: str, ok: tuple[int, ...] = (0,)) -> Any:
        return json.loads(self(*argv, ok=ok))
