"""A store of a newer release: the older program says so, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from command_line import CommandLine

from almanac.files import with_checksum
from telemetry.store.schema import SCHEMA_VERSION

ARGV = [
    "ingest", "summarize", "train", "models --use previous", "publish", "waits --publish", "jobs -a",
    "mail run", "metrics", "site-report", "evaluate", "backtest tier", "advise --user root -J x --gpus=1",
    "reprioritize --apply", "place --apply", "power plan --apply", "changes", "forget root --yes",
]  # fmt: skip
ACTING = '[[node_sets]]\nname = "gpu"\nnodes = "n[1-2]"\n[placement]\npartitions = ["gpu"]\ntypes = ["a", "b"]\n'


@pytest.fixture(scope="module")
def newer(site: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(site.folder, folder, dirs_exist_ok=True)
    with (folder / "almanac.toml").open("a") as config:
        config.write(f'\n{ACTING}[hooks]\nadvice_dir = "{folder}/advice"\n[slurm]\nbin_dir = "{folder}"\n')
    (folder / "scontrol").write_text("#!/bin/sh\nprintf 'ClusterName = demo\\nSLURM_VERSION = 24.11.5\\n'\n")
    (folder / "scontrol").chmod(0o755)
    version = json.dumps({"schema_version": SCHEMA_VERSION + 1})
    (folder / "store" / "store.json").write_bytes(with_checksum(version))
    return CommandLine(folder)


def state(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_the_older_program_says_so_and_changes_nothing(newer: CommandLine) -> None:
    before = state(newer.folder)
    options = ["--config", str(newer.folder / "almanac.toml"), "--store", str(newer.folder / "store")]
    said = f"schema version {SCHEMA_VERSION + 1}, this almanac reads version {SCHEMA_VERSION}"
    done = {argv: newer.raw(*options, *argv.split()) for argv in ARGV}
    assert {argv: each.returncode for argv, each in done.items()} == dict.fromkeys(ARGV, 4)
    assert [argv for argv, each in done.items() if said not in each.stderr or "try: use the" not in each.stderr] == []
    assert said in newer.raw(*options, "report", "1").stderr  # which asks Slurm, too
    assert state(newer.folder) == before


def test_doctor_says_it_once(newer: CommandLine) -> None:
    before = state(newer.folder)
    said = newer("doctor", ok=(1,))
    assert said.count("schema version") == 1
    assert state(newer.folder) == before
