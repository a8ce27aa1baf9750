"""An upgrade from a package that had a timer for each task, in a copy of this machine's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from test_package import IN_A_COPY, ROOT

UPGRADE = r"""
set -e
units=/etc/systemd/system
mkdir -p $units/timers.target.wants /etc/almanac
rm -f /etc/almanac/tasks.toml
cp /in/system/systemd/* /usr/lib/systemd/system
cp /in/system/sysusers.conf /usr/lib/sysusers.d/slurm-almanac.conf
cp /in/system/tmpfiles.conf /usr/lib/tmpfiles.d/slurm-almanac.conf
settings() { mkdir -p $units/$1.d; printf '[Service]\n# ours\n%s\n' "$2" >$units/$1.d/override.conf; }
for task in $OLD; do
    ln -s /lib/systemd/system/almanac-$task.timer $units/timers.target.wants/
done
{BEFORE}
sh /in/postinst configure 0.0
sh /in/postinst configure 0.0 2>/dev/null
echo ==
cat /etc/almanac/tasks.toml
echo ==
ls $units/timers.target.wants | grep almanac || true
cat $units/almanac*.service.d/from-timers.conf 2>/dev/null || true
"""
UPGRADES = {
    "new": ("", "", [["ingest", "summarize", "train", "publish"], ["distribute"]], [], []),
    "what was on": (
        "ingest distribute power",
        "",
        [["ingest", "power"], ["distribute"]],
        ["almanac-root", "almanac"],
        [],
    ),
    "without distribute": ("publish", "", [["publish"], ["distribute"]], ["almanac-root", "almanac"], []),
    "masked": ("ingest power", "ln -s /dev/null $units/almanac-power.timer", [["ingest"], []], ["almanac"], []),
    "acting": (
        "reprioritize mig-raise",
        "settings almanac-reprioritize.service '\nExecStart=\nExecStart=/usr/bin/almanac reprioritize --apply'\n"
        "settings almanac-mig-raise.service '\nExecStart=\nExecStart=/usr/bin/almanac mig raise --apply'",
        [["reprioritize", "mig-raise"], []],
        ["almanac"],
        [],
    ),
    "as root": ("ingest mig", "settings almanac-mig.service User=root", [["ingest"], []], ["almanac"], []),
    "elsewhere": (
        "ingest",
        "settings almanac-ingest.service 'ReadWritePaths=/data\nMemoryMax=90%'",
        [["ingest"], []],
        ["almanac"],
        ["[Service]", "ReadWritePaths=/data"],
    ),
}
SAID = {"as root": "mig no longer runs, because", "elsewhere": "ingest: limits and times in"}

COMMANDS = {
    "acting": {
        "reprioritize": {"command": "almanac reprioritize --apply"},
        "mig-raise": {"command": "almanac mig raise --apply"},
    }
}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("name", UPGRADES)
def test_an_upgrade_starts_what_was_enabled_and_nothing_else(tmp_path: Path, name: str) -> None:
    on, before, tasks, timers, kept = UPGRADES[name]
    shutil.copytree(ROOT / "slurm_hooks/system", tmp_path / "in/system")
    shutil.copy(ROOT / "scripts/debian/slurm-almanac.postinst", tmp_path / "in/postinst")
    (tmp_path / "box").mkdir()
    script = UPGRADE.replace("{BEFORE}", before.replace("\\n", "\n"))
    alone = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", IN_A_COPY, "sh"]
    done = subprocess.run(
        [*alone, tmp_path / "box", tmp_path / "in", script], env=os.environ | {"OLD": on, "SYSTEMD_OFFLINE": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, text, rest = done.stdout.split("==\n")
    written = tomllib.loads(text)
    assert [written.pop("almanac"), written.pop("root")] == tasks
    assert written == COMMANDS.get(name, {})
    assert rest.splitlines() == [*(f"{timer}.timer" for timer in timers), *kept]
    said = [line for line in done.stderr.splitlines() if line.startswith("slurm-almanac: ")]
    assert [line.startswith(f"slurm-almanac: {SAID[name]}") for line in said] == ([True] if name in SAID else [])
