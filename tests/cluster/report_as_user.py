"""almanac's commands as a user, with or without the libraries that hosts with the client package lack.

    report_as_user.py USER full|client CONFIG "report 12"...

Prints JSON: by command, [exit code, output, errors]. "until TEXT report 12" asks again until the output has the text;
its errors are when the answer came. The repository and its environment may be closed to that user, so a first run of
root imports what the answers need.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import io
import json
import os
import pwd
import sys
import time
from pathlib import Path
from typing import Any

LIBRARIES = {
    "pyarrow",
    "pandas",
    "numpy",
    "duckdb",
    "lightgbm",
    "scipy",
    "matplotlib",
    "jinja2",
    "css_inline",
    "requests",
}


class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_libraries() -> None:
    """Hide the libraries, as on a host with the client package."""
    sys.meta_path.insert(0, Missing())
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name in LIBRARIES else found(name, *rest)  # type: ignore[assignment]


def become(user: str) -> None:
    account = pwd.getpwnam(user)
    if account.pw_uid != os.getuid():
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    os.chdir("/")


def almanac(config: str, *words: str) -> tuple[int, str, str]:
    from cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["--config", config, *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def until(text: str, config: str, *words: str) -> tuple[int, str, str]:
    for _ in range(100):
        code, out, err = almanac(config, *words)
        if text in out:
            return code, out, str(time.time())
    return code, out, err


def answer(config: str, words: list[str]) -> tuple[int, str, str]:
    return until(words[1], config, *words[2:]) if words[0] == "until" else almanac(config, *words)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    _, wanted, kind, path, *commands = sys.argv
    if kind == "client":
        without_libraries()
    if wanted != "root":
        almanac(path, *commands[0].split()[-2:])
    become(wanted)
    print(json.dumps({each: answer(path, each.split()) for each in commands}))
