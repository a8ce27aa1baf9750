"""Processes that a test kills: each is a fork of one program, which imports what the first of them imported."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Run = Callable[..., tuple[int, str]]


@contextmanager
def forks_of(*argv: object) -> Iterator[Run]:
    """Start a Python program that calls `serve`; yield a function: (arguments) -> exit code and result of one fork."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    command = [sys.executable, *map(str, argv)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as program:
        assert program.stdin is not None and program.stdout is not None
        requests, replies = program.stdin, program.stdout

        def run(*arguments: Any, **more: Any) -> tuple[int, str]:
            print(json.dumps([arguments, more]), file=requests, flush=True)
            result, _, code = replies.readline().rpartition(" ")
            return int(code), result

        yield run


def serve(work: Callable[..., object]) -> None:
    """Call work with the arguments of each request, each time in a new process."""
    for line in sys.stdin:
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                known = set(sys.modules)
                arguments, more = json.loads(line)
                print(work(*arguments, **more), end="", flush=True)
                os.write(ours, " ".join(name for name in sys.modules if name not in known).encode())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(ours)
        with os.fdopen(theirs) as imported:
            names = imported.read().split()
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        _, status = os.waitpid(child, 0)
        print(f" {os.waitstatus_to_exitcode(status)}", flush=True)
