"""A site's own service from docs/own-services.md, installed, trained, and asked; and another one that fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

CommandLine = Any  # of conftest.py

PAGE = Path(__file__).parents[2] / "docs" / "own-services.md"
BROKEN = "\n\nclass Broken:\n    def fetch(self, record):\n        raise OSError('no \\x1b[31mtable')\n"


@pytest.fixture(scope="module")
def code_and_tables() -> tuple[str, dict[str, Any], str]:
    """The guide's module, the package's table of entry points, and the configuration."""
    section = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    package, config = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    return code, tomllib.loads(package)["project"], config


@pytest.fixture(scope="module")
def own(site: CommandLine, code_and_tables: tuple[str, dict[str, Any], str], tmp_path_factory: Any) -> OwnSite:
    """The generated site with the guide's package installed, and a broken service in it."""
    code, package, config = code_and_tables
    folder: Path = tmp_path_factory.mktemp("own")
    shutil.copytree(site.folder / "store", folder / "store")
    (folder / "our_services.py").write_text(code + BROKEN)
    info = folder / f"{package['name'].replace('-', '_')}-{package['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package['name']}\nVersion: {package['version']}\n")
    entries = [*package["entry-points"]["almanac.services"].items(), ("broken", "our_services:Broken")]
    lines = [f"{name} = {target}\n" for name, target in entries]
    (info / "entry_points.txt").write_text("[almanac.services]\n" + "".join(lines))
    whole = config.replace('"gpu_use"', '"gpu_use", "broken"')
    (folder / "almanac.toml").write_text((site.folder / "almanac.toml").read_text() + whole)
    return OwnSite(type(site)(folder))


class OwnSite:
    def __init__(self, line: CommandLine) -> None:
        self.line = line

    def __call__(self, *argv: str) -> CompletedProcess[str]:
        folder = self.line.folder
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        options = ["--config", str(folder / "almanac.toml"), "--store", str(folder / "store")]
        return self.line.process(*options, *argv, PYTHONPATH=path)


def test_a_sites_own_service_is_trained_and_asked_and_a_broken_one_costs_itself(own: OwnSite) -> None:
    done = own("train", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["services"] == ["gpu_time", "memory", "wait", "gpu_use"]
    assert outcome["service_faults"] == {"broken": "failed to update: OSError: no \x1b[31mtable"}
    jobs = json.loads(own("jobs", "-a", "-n", "0", "--json").stdout)
    user = next(row["user"] for row in jobs if row["mean_gpu_util_pct"] is not None)
    advice = json.loads(own("advise", "--json", "--user", user, "--gpus=4").stdout)
    assert 0 < advice["services"]["gpu_use"]["told"]["usual_gpu_util_pct"] <= 100
    assert advice["services"]["gpu_use"]["error"] is None
    assert advice["services"]["broken"]["error"].startswith("failed to predict: AttributeError")
    assert advice["duration"]["duration_s"] > 0
    stranger = json.loads(own("advise", "--json", "--user", "nobody-knows", "--gpus=4").stdout)
    assert stranger["services"]["gpu_use"]["told"] == {"usual_gpu_util_pct": None}


def test_people_are_told_of_services_in_plain_text(own: OwnSite) -> None:
    done = own("train")
    assert "services updated: gpu_time, memory, wait, gpu_use\n" in done.stdout
    assert "service broken: failed to update: OSError: no " in done.stderr
    assert "\x1b" not in done.stderr
    done = own("advise", "--user", "nobody-knows", "--gpus=4")
    assert "service broken: failed to predict" in done.stderr
    assert "service" not in done.stdout


def test_doctor_says_which_services_can_be_loaded(own: OwnSite) -> None:
    assert "ok    services: loaded: gpu_use, broken" in own("doctor").stdout
    config = own.line.folder / "almanac.toml"
    text = config.read_text()
    config.write_text(text.replace('"broken"', '"mistyped"'))
    try:
        done = own("doctor")
    finally:
        config.write_text(text)
    assert "FAIL  service mistyped: failed to load: LookupError: 0 entry points" in done.stdout
    assert "try: install or correct it, or remove it from services.extra" in done.stdout


def test_a_site_without_services_of_its_own_hears_of_almanacs_only(site: CommandLine) -> None:
    assert site.json("advise", "--json", "--user", "nobody-knows", "--gpus=4", ok=(10,))["services"] == {}
