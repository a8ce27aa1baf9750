"""Man pages and completions, as scripts/manual.py makes them of the commands."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from cli.main import COMMANDS

ROOT = Path(__file__).parents[1]


def _manual() -> ModuleType:
    spec = importlib.util.spec_from_file_location("manual", ROOT / "scripts" / "manual.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, manual = tmp_path_factory.mktemp("manual"), _manual()
    manual.write_manual(made / "man1")
    manual.write_completions(made / "completions")
    return made


def commands(group: click.Group, name: str = "almanac") -> Iterator[tuple[str, click.Command]]:
    yield name, group
    for key, command in group.commands.items():
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, f"{name}-{key}")
        else:
            yield f"{name}-{key}", command


def test_each_command_has_a_page_that_names_each_option(folder: Path) -> None:
    found = dict(commands(_manual().whole_group()))
    assert {path.stem for path in (folder / "man1").iterdir()} == set(found)
    assert {f"almanac-{name}" for name in COMMANDS} <= set(found)
    for name, command in found.items():
        page = (folder / "man1" / f"{name}.1").read_text().replace("\\-", "-")
        assert page.startswith(".TH")
        about = page.partition(".SH NAME\n")[2].partition("\n")[0].partition(" - ")[2]
        assert about, name
        assert not about.endswith("."), name  # whole: "..." is what click puts for a cut rest
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                for spelling in parameter.opts:
                    assert spelling in page, f"{name} {spelling}"


def test_the_main_page_tells_the_exit_codes(folder: Path) -> None:
    page = (folder / "man1" / "almanac.1").read_text()
    assert "3 configuration" in page
    assert "130 stopped by Ctrl-C" in page


@pytest.mark.skipif(shutil.which("man") is None, reason="no man here")
def test_man_formats_every_page(folder: Path) -> None:
    own = [ROOT / "scripts" / "debian" / f"{name}.1" for name in ("almanac-pack", "almanac-restart", "sbatch-almanac")]
    own += [ROOT / "scripts" / "debian" / f"almanac-{name}.8" for name in ("collect", "distribute")]
    pages = [*(folder / "man1").iterdir(), *own]
    for page in pages:
        done = subprocess.run(
            ["man", "--warnings", "-l", str(page)], capture_output=True, text=True, check=True, timeout=300,
            env={**os.environ, "MANWIDTH": "200", "MANPAGER": "cat", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert done.stderr == ""
        assert "NAME" in done.stdout


def test_bash_completes_commands_and_options(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "almanac"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli.main "$@"\n')
    program.chmod(0o755)
    script = (
        f"source {folder}/completions/almanac\n"
        "COMP_WORDS=(almanac in) COMP_CWORD=1; _almanac_completion almanac in almanac; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(almanac train --) COMP_CWORD=2; _almanac_completion almanac -- train; echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=300, cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.split() == ["ingest", "install-hooks"]
    assert "--json" in second.split()


def test_zsh_has_its_completion(folder: Path) -> None:
    script = (folder / "completions" / "_almanac").read_text()
    assert script.startswith("#compdef almanac")
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n", str(folder / "completions" / "_almanac")], check=True, timeout=300)
