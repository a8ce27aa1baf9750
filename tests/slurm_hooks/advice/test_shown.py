"""Users without access to the store see the same advice, from their own file and nobody else's."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from advisor.artefacts import save
from advisor.explain import explain
from advisor.memory.calibration import Margins
from advisor.service import advise
from almanac.records import JobRequest, WaitGain
from almanac.submit_config import Tier
from slurm_hooks.advice.file import ADVICE, FAMILY, AdviceRow
from slurm_hooks.advice.rows import published_gains
from slurm_hooks.advice.shown import explain as explain_shown
from slurm_hooks.advice.shown import from_files, to_json
from telemetry.history import load_history

Site = Any  # of conftest.py
Jobs = Callable[[Any, list[dict[str, Any]]], None]
NOW_S, CLUSTER = 1_795_256_200, "lab"
IS_ROOT = os.geteuid() == 0
UIDS = {"nobody": 65534, "daemon": 1}


def steady(user: str, first_id: int, peak_mib: float, last_s: int) -> list[dict[str, Any]]:
    """Fourteen runs of one family that used nearly the same memory."""
    return [
        {"job_id": first_id + run, "submit_s": last_s - (14 - run) * 40_000, "user": user, "name": f"bert-{run}",
         "hbm_peak_mib": peak_mib * (1 + 0.001 * (run % 5))}
        for run in range(14)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def published(new_site: Callable[[Path], Site], jobs_of: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = new_site(tmp_path_factory.mktemp("published"))
    jobs_of(site.store, [*steady("nobody", 50_000, 20_000, NOW_S), *steady("daemon", 60_000, 70_000, NOW_S)])
    site.uids = {**site.uids, **UIDS}
    site.publish()
    return site


@pytest.mark.parametrize(
    ("asked", "said"),
    [("hbm80g", "it starts about 40 min earlier (half of such jobs did) and frees 4 hbm80g for others"),
     ("hbm141g", "it frees 4 hbm141g for others"), ("hbm40g", ""), (None, ""),
     ("hbm24g", "it starts about 3 h earlier (half of such jobs did)")],
)  # fmt: skip
def test_a_published_row_says_what_a_change_gains(asked: str | None, said: str) -> None:
    tiers = {name: Tier(name, size << 10, constraint=name) for name, size in
             (("hbm24g", 24), ("hbm40g", 40), ("hbm80g", 80), ("hbm141g", 141))}  # fmt: skip
    gains = published_gains([WaitGain("hbm80g", 40, 2400.0), WaitGain("hbm24g", 40, 10_800.0)])
    row = AdviceRow(FAMILY, 1, 0, "k", 4, gains=gains)
    assert row.gain(tiers.get(asked or ""), tiers["hbm40g"], 4) == said


ASKED = JobRequest(
    user="nobody", job_name="bert-99", account="ml", partition="gpu", qos="normal", constraints="gpu&hbm80g",
    gpu_count=4, cpu_count=32, time_limit_s=7200, submit_s=NOW_S,
)  # fmt: skip


def shown_to(site: Site, request: JobRequest) -> Any:
    own, everybody = (site.folder.read(name, ADVICE.name) for name in (str(site.uids[request.user]), "_site"))
    return from_files(request, ADVICE.parse(own).value, ADVICE.parse(everybody).value)


@pytest.mark.parametrize("constraint", ["gpu&hbm80g", "gpu&hbm40g", "gpu", "hbm40g|hbm80g", "[hbm80g]"])
@pytest.mark.parametrize("user", ["nobody", "daemon"])
def test_the_first_line_is_that_of_advise_and_so_are_tier_bound_time_and_site_factor(
    published: Site, user: str, constraint: str
) -> None:
    request = dataclasses.replace(ASKED, user=user, constraints=constraint)
    history = load_history(published.store.of(CLUSTER), user=user, running=True)
    advice = advise(request, history, published.trained, published.config, NOW_S)
    shown = shown_to(published, request)
    assert advice.bound is not None and advice.duration is not None and advice.priority is not None
    assert explain_shown(shown).splitlines()[0] == explain(advice).splitlines()[0]
    # holds_bound chooses the words of the text, which is published as it is.
    same = {"requested_tier": None, "holds_bound": True}
    assert dataclasses.replace(shown.tier, **same) == dataclasses.replace(advice.tier, **same)
    told = to_json(shown)
    assert (told["bound"] or {"bound_mib": 0})["bound_mib"] == round(advice.bound.bound_mib or 0)
    if constraint == "gpu&hbm80g":  # as the family's newest job
        assert told["duration"]["duration_s"] == round(advice.duration.duration_s)
        assert told["priority"]["term"] == advice.priority.site_factor


@pytest.mark.parametrize("constraint", ["gpu&hbm80g", "gpu&hbm40g", "gpu", "hbm40g|hbm80g", "[hbm80g]"])
def test_a_tier_without_a_bound_is_shown_as_advise_shows_it(site: Site, jobs_of: Jobs, constraint: str) -> None:
    jobs_of(site.store, steady("nobody", 50_000, 20_000, NOW_S))
    site.uids = {**site.uids, **UIDS}
    margins = {name: Margins(None, each.tier) for name, each in site.trained.calibration.margins.items()}
    calibration = dataclasses.replace(site.trained.calibration, margins=margins)
    site.trained = dataclasses.replace(site.trained, calibration=calibration)
    site.publish()
    request = dataclasses.replace(ASKED, constraints=constraint)
    history = load_history(site.store.of(CLUSTER), user="nobody", running=True)
    advice = advise(request, history, site.trained, site.config, NOW_S)
    shown = shown_to(site, request)
    assert advice.bound is not None and advice.bound.bound_mib is None
    assert not shown.is_silent
    assert explain_shown(shown).splitlines()[0] == explain(advice).splitlines()[0]
    assert dataclasses.replace(shown.tier, requested_tier=None) == dataclasses.replace(
        advice.tier, requested_tier=None, holds_bound=True
    )
    assert to_json(shown)["bound"] is None


def test_why_nothing_is_advised_is_shown_as_advise_shows_it(site: Site, jobs_of: Jobs) -> None:
    jobs_of(site.store, steady("nobody", 50_000, 20_000, NOW_S)[:2])
    site.uids = {**site.uids, **UIDS}
    site.publish()
    history = load_history(site.store.of(CLUSTER), user="nobody", running=True)
    advice = advise(ASKED, history, site.trained, site.config, NOW_S)
    shown = shown_to(site, ASKED)
    assert shown.is_silent
    said = 'almanac: no advice yet for "bert-#" on 4 GPUs: 2 of the 3 measured runs needed.'
    assert explain_shown(shown).splitlines()[0] == explain(advice).splitlines()[0] == said
    assert to_json(shown)["published"]["why_not"] == "2 of the 3 measured runs needed"


def test_a_name_that_was_never_run_gets_a_time_but_no_tier(published: Site) -> None:
    shown = shown_to(published, dataclasses.replace(ASKED, job_name="first-time"))
    assert shown.is_silent
    lines = explain_shown(shown).splitlines()
    assert lines[0] == 'almanac: no advice yet for "first-time" on 4 GPUs.'
    assert lines[1].startswith("  predicted time: ")
    assert to_json(shown)["published"]["kind"] == "G"


def test_without_gpus_and_without_files_nothing_is_said(published: Site) -> None:
    shown = shown_to(published, dataclasses.replace(ASKED, gpu_count=0))
    assert explain_shown(shown) == "almanac: no memory tier to advise: the job asks for no GPU."
    nothing = from_files(ASKED, None, None)
    assert to_json(nothing)["published"] is None
    assert "unknown" in explain_shown(nothing)


# --- as a real other user


@dataclass(frozen=True)
class As:
    """Runs `almanac` as another user, with a configuration that everybody may read."""

    folder: Path

    def __call__(self, uid: int, *argv: str) -> subprocess.CompletedProcess[str]:
        main = ["--config", str(self.folder / "almanac.toml"), "-M", CLUSTER, *argv]
        program = (
            f"import os, sys, cli.main, cli.advise, cli.publish, slurm_hooks.advice.shown\n"
            # All that is needed is imported while the interpreter's own folder may still be read.
            "import difflib, slurm.sbatch\n"
            f"os.setgroups([]); os.setgid(65534); os.setuid({uid})\ncli.main.main({main!r})\n"
        )
        env = {**os.environ, "NO_COLOR": "1", "HOME": "/nonexistent"}
        return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def other(site: Site, jobs_of: Jobs) -> Iterator[As]:
    """Jobs of two real accounts that end now, published by `almanac publish` below a folder that all can reach."""
    import time

    now_s = int(time.time())
    jobs_of(site.store, [*steady("nobody", 50_000, 20_000, now_s), *steady("daemon", 60_000, 70_000, now_s)])
    save(dataclasses.replace(site.trained, trained_s=now_s), site.store.of(CLUSTER).models_dir)
    (site.store.root).chmod(0o750)
    folder = Path(tempfile.mkdtemp(prefix="almanac-test-"))
    folder.chmod(0o755)
    text = f'[store]\npath = "{site.store.root}"\n[hooks]\nadvice_dir = "{folder}/advice"\ngroup = "root"\n'
    text += "[advice]\nrisk = 0.05\n" + "".join(
        f'[[tiers]]\nname = "{tier.name}"\ncapacity_mib = {tier.capacity_mib}\nconstraint = "{tier.constraint}"\n'
        for tier in site.config.tiers
    )
    (folder / "almanac.toml").write_text(text)
    try:
        yield As(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_a_user_who_may_not_read_the_store_reads_only_their_own_file(other: As) -> None:
    asked = ["-J", "bert-3", "--gpus=4", "-C", "gpu&hbm80g", "-A", "ml", "-p", "gpu", "-q", "normal", "-c32"]
    asked += ["-t120", "--wrap=x"]
    missing = other(65534, "advise", *asked)
    assert missing.returncode == 4
    assert "holds no published advice" in missing.stderr
    done = other(0, "publish")
    assert done.returncode == 0, done.stderr
    theirs, operators = other(65534, "advise", *asked), other(0, "advise", "--user", "nobody", *asked)
    assert (theirs.returncode, operators.returncode) == (0, 0), theirs.stderr + operators.stderr
    assert theirs.stdout.splitlines()[0] == operators.stdout.splitlines()[0]
    assert theirs.stdout.startswith('almanac: ask for hbm40g (-C "gpu&hbm40g") instead of hbm80g: your last 10')
    assert "predicted time: " in theirs.stdout
    told = json.loads(other(65534, "advise", "--json", *asked).stdout)
    assert told["tier"]["option"] == "--constraint=gpu&hbm40g"
    assert other(65534, "advise", "--gpus=4", "-J", "odd", "--wrap=x").returncode == 10
    refused = other(65534, "advise", "--user", "daemon", *asked)
    assert refused.returncode == 6
    assert other(65534, "publish").returncode == 6


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_one_user_cannot_read_the_files_of_another(other: As) -> None:
    assert other(0, "publish").returncode == 0
    advice = other.folder / "advice"
    own, others = advice / "user" / "65534" / "advice", advice / "user" / "1" / "advice"
    tried = [
        others,
        others.parent,
        advice / "sched" / "1",
        advice / "sched" / "65534",
        advice / "sched",
        advice / "user",
    ]
    program = (
        "import os, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        print(len(os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read()) > 0)\n"
        "    except PermissionError:\n"
        "        print('refused')\n"
    )
    argv = [sys.executable, "-c", program, str(own), str(advice / "user" / "_site" / "advice"), *map(str, tried)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["True", "True", *["refused"] * len(tried)]


@pytest.mark.skipif(not IS_ROOT, reason="Slurm's own group is asked for by root only")
def test_apply_is_published_only_where_slurms_weights_fit(other: As) -> None:
    config, program = other.folder / "almanac.toml", other.folder / "scontrol"
    text = config.read_text()
    config.write_text(f'{text}[priority]\nmode = "apply"\n[slurm]\nbin_dir = "{other.folder}"\n')

    def modes(settings: str) -> tuple[set[str], str]:
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{settings}\nEND\n")
        program.chmod(0o755)
        done = other(0, "publish")
        assert done.returncode == 0, done.stderr
        files = [path.read_text() for path in (other.folder / "advice" / "sched").iterdir()]
        return {file.split("\nmode\t")[1].split("\n")[0] for file in files}, done.stderr

    said, warned = modes("PriorityType = priority/basic")
    assert said == {"observe"}
    assert "PriorityType=priority/multifactor" in warned
    fits = "PriorityType = priority/multifactor\nPriorityMaxAge = 12-00:00:00\nPriorityWeightAge = 12000"
    assert modes(fits)[0] == {"apply"}
    program.write_text("#!/bin/sh\nexit 1\n")
    assert "observe" in other(0, "publish").stderr
