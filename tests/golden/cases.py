"""The pinned texts by the names of their files: of the commands, and of what is published, mailed, and reported."""

from __future__ import annotations

import gzip
import io
import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import click
from golden_site import NOW_S, Bench
from reported_site import CASES as JOBS
from reported_site import CLUSTER
from rich.console import Console

from cli.main import COMMANDS, cli
from reports.job.conclusions import report_of
from reports.job.render import render_email, render_terminal
from reports.mail.digest import Digest, render_burst, render_weekly
from reports.mail.handover import Rendered

Case = Callable[[Bench], str]
COSMOFLOW = "--user benabel -J cosmoflow_pretrain_20261118_11 --gpus=4 -C gpu&hbm80g"
ALPHAFOLD = "--user carlabel -J pyscf-test-set --gpus=8 -C gpu&hbm80g"
SIMULATED = "--config untrained.toml simulate --jobs 1 --nodes 2 --from 0.7 --set controls=0"
TYPED = "simulate jobs.trace --throughputs speeds.json --gpu-types h100=4,a100=4 --jobs 1"
PACKED = "simulate --packing --throughputs pairs.json --gpu-types h100=4 --set jobs=60 --set seeds=2"
BOTH = {
    "advise/smaller": f"advise {COSMOFLOW}",
    "advise/why": f"advise --why {ALPHAFOLD}",
    "changes": "changes",
    "characterize-state": "characterize --by state",
    "backtest/power": "backtest power --node-set hbm40g",
    "backtest/tier": "backtest tier",
    "backtest/tier-followed": "backtest tier --tier-nodes hbm40g=2 --tier-nodes hbm80g=1 --gpus-per-node 4 --follow 1",
    "backtest/type": "backtest type",
    "backtest/waits": "backtest waits",
    "doctor/healthy": "doctor",
    "forget": "forget benabel",
    "jobs/all": "jobs -a -n 20",
    "mig/plan": "mig plan",
    "mig/raise": "mig raise",
    "mig/status": "mig status",
    "models": "models",
    "place/plan": "place",
    "place/undo": "place --clear",
    "power/plan": "power plan",
    "power/status": "power status",
    "publish-dry-run": "publish --dry-run",
    "report/of-the-site": "report 1000180",
    "reprioritize": "reprioritize",
    "run/list": "run --list",
    "site-report": "site-report --names",
    "waits": "waits",
}
"""Commands that print text, and with --json the same as JSON. None of them writes to the site."""
ONE = {
    "advise/newcomer.txt": "advise --user newcomer -J first --gpus=4 -C gpu&hbm80g",
    "study.txt": "site-report --study",
    "characterize.txt": "characterize",
    **{f"characterize-{by}.txt": f"characterize --by {by}" for by in ("time", "partition", "user")},
    "evaluate.txt": "evaluate --share 0.1",
    "jobs/columns.txt": "jobs -e",
    "jobs/of-a-user.csv": "jobs -u benabel -n 10 --csv",
    "jobs/wide.txt": "jobs -a -n 10 -w",
    "mail/choice.txt": "mail",
    "metrics.prom": "metrics",
    "place/dry-run.txt": "place --apply",
    "simulate/mig.txt": "simulate --mig --nodes 1 --set days=0.25",
    "simulate/packing.txt": PACKED,
    "simulate/placement.txt": TYPED,
    "simulate/placement.json": f"{TYPED} --policy fifo --json",
    "simulate/policies.txt": f"{SIMULATED} --policy fifo,qssf,sjf+easy",
    "simulate/policies.json": f"{SIMULATED} --policy fifo+easy --json",
    "unknown-command.txt": "raport",
}


def _command(text: str) -> Case:
    return lambda bench: bench.run(*shlex.split(text))


def _help(name: str) -> Case:
    """--help of a command and of all commands below it."""

    def show(bench: Bench) -> str:
        return "\n".join(f"$ almanac {' '.join(path)}\n{bench.run(*path, '--help')}" for path in _below([name]))

    return show


def _below(path: list[str]) -> list[list[str]]:
    found: click.Command | None = cli
    for name in path:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), name)
    found._help_option = None  # Click keeps that of the first call, which another test may have made without the group
    names = found.list_commands(click.Context(found)) if isinstance(found, click.Group) else []
    return [path, *(each for name in names for each in _below([*path, name]))]


def _on_terminal(name: str) -> Case:
    def show(bench: Bench) -> str:
        console = Console(width=100, file=io.StringIO(), highlight=False, markup=False, emoji=False, no_color=True)
        with console.capture() as capture:
            console.print(render_terminal(report_of(bench.reported.contexts[name]), 100))
        return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"

    return show


def _mail(render: Callable[[Any], Digest | None]) -> Mapping[str, Case]:
    """The text and the HTML of a mail about jobs of the site made by hand."""

    def rendered(bench: Bench) -> Rendered:
        digest = render(bench.reported)
        assert digest is not None
        return digest.rendered

    return _forms(rendered)


def _forms(render: Callable[[Bench], Rendered]) -> Mapping[str, Case]:
    once: list[Rendered] = []

    def rendered(bench: Bench) -> Rendered:
        once.extend([] if once else [render(bench)])
        return once[0]

    def text(bench: Bench) -> str:
        mail = rendered(bench)
        return f"Subject: {mail.subject}\n\n{mail.text}"

    return {"txt": text, "html": lambda bench: rendered(bench).html}


def _job_mail(name: str) -> Mapping[str, Case]:
    return _forms(lambda bench: render_email(report_of(bench.reported.contexts[name])))


def _published(path: str) -> Case:
    """A published file; of a packed one, its line of JSON."""

    def show(bench: Bench) -> str:
        content = min(bench.published.glob(path)).read_bytes()
        if not content.startswith(b"\x1f\x8b"):
            return content.decode()
        return json.dumps(json.loads(gzip.decompress(content).splitlines()[0]), indent=2)

    return show


def _published_names(bench: Bench) -> str:
    names = sorted(str(path.relative_to(bench.published)) for path in bench.published.rglob("*") if path.is_file())
    return "\n".join(names) + "\n"


def _broken(*argv: str) -> Case:
    """doctor where Slurm does not fit, files of the store are damaged, and no server takes mail."""

    def show(bench: Bench) -> str:
        site = bench.copied()
        settings, slurm = site / "almanac.toml", site / "slurm" / "config"
        text = settings.read_text().replace('gpu_model = "A100-40"', 'gpu_model = "A1000"')
        settings.write_text(
            text.replace("[mail]", '[mail]\nserver = "127.0.0.1"\nport = 1').replace('"hbm80g"]', '"h100"]')
        )
        text = slurm.read_text().replace(",gres/gpu", "").replace("12-00:00:00", "UNLIMITED")
        slurm.write_text(text.replace("31536000", "600"))
        for path in sorted((site / "store" / "jobs").rglob("*.parquet"))[:2]:
            path.write_bytes(path.read_bytes()[:-20])
        return bench.run(*argv, site=site)

    return show


def _trained(bench: Bench) -> str:
    return (bench.site / "trained").read_text()


def _all() -> dict[str, Case]:
    cases: dict[str, Case] = {f"help/{name}.txt": _help(name) for name in COMMANDS}
    cases["help/almanac.txt"] = lambda bench: bench.run("--help")
    for name, text in BOTH.items():
        cases |= {f"{name}.txt": _command(text), f"{name}.json": _command(f"{text} --json")}
    cases |= {name: _command(text) for name, text in ONE.items()}
    for name in JOBS:
        cases[f"report/{name}.txt"] = _on_terminal(name)
        cases |= {f"mail/job-{name}.{form}": case for form, case in _job_mail(name).items()}
    digests: dict[str, Callable[[Any], Digest | None]] = {
        "storm": lambda site: render_burst(list(site.contexts.values()), site.config),
        "storm-array": lambda site: render_burst(site.build(1001, 1002, 1003, has_series=False), site.config),
        "weekly": lambda site: render_weekly(site.store.of(CLUSTER), "alice", site.config, NOW_S),
        "weekly-mixed": lambda site: render_weekly(site.store.of(CLUSTER), "alice", site.config, NOW_S + 7 * 86_400),
    }
    for name, render in digests.items():
        cases |= {f"mail/{name}.{form}": case for form, case in _mail(render).items()}
    return cases | {
        "doctor/broken.txt": _broken("doctor"),
        "doctor/broken.json": _broken("doctor", "--json"),
        "published/files.txt": _published_names,
        "published/advice-of-the-site.txt": _published("user/_site/advice"),
        "published/advice-of-a-user.txt": _published("user/60002/advice"),
        "published/advice-of-a-user.json": _published("user/60002/advice.json"),
        "published/times-of-a-user.json": _published("user/60002/times"),
        "published/jobs-of-a-user.json": _published("user/60004/jobs"),
        "published/report.json": _published("user/60003/reports/*"),
        "train.txt": _trained,
    }


CASES = _all()
