"""A submission, as every live path reads it, and its record are one job: what is learned of records counts for it.

Live: job_submit.lua, cli_filter.lua, sbatch-almanac and `almanac advise`, and `almanac reprioritize`. The record:
sacct's, as ingest stores it and back-tests read it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from advice_files import TIERS, advice, guarded_line, publish, uid_of
from processes import wait_until
from site_commands import SiteCommands
from sites import Site
from submissions import DIFFERENCES, FOLDER, SCRIPTED, SUBMISSIONS, Submitted, submitting

from advisor.duration.features import SubmittedJob, submission_of, submissions
from advisor.duration.replay import recorded_requests, replay_durations
from advisor.explain import to_json
from advisor.memory.calibration import Calibration, Margins
from advisor.memory.decide import decide_memory
from advisor.memory.peak_store import replay_peaks
from advisor.service import Trained, advise_many, train
from almanac.config import Config, Slurm, Tier
from almanac.names import SCRIPT_PREFIX, is_family
from almanac.records import Advice, JobRequest
from almanac.tiers import requested_tier
from slurm.accounting import probe_accounting
from slurm.nodes import with_defaults
from slurm.queue import parse_queue
from slurm.queued_job import QueuedJob
from slurm.sbatch import parse_submission
from slurm_hooks.advice.file import FAMILY, AdviceRow
from slurm_hooks.advice.rows import user_rows
from slurm_hooks.submit import prompt
from telemetry.history import load_history
from telemetry.sources.sacct import SacctSource
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

JOB_SUBMIT = """
function slurm_job_submit(job_desc, part_list, submit_uid)
    slurm.log_info("almanac-test: a submission")
    {line}
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
# What cli_filter.lua tells almanac-prompt, without the terminal on which it would be asked.
CLI_FILTER = """
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, offset)
    pcall(function()
        local file = io.open("{folder}/seen-" .. os.getenv("ALMANAC_CASE"), "a")
        file:write(dofile("{lua}/cli_filter.lua").submission(options, offset, ""), "\\n")
        file:close()
    end)
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""
MARK = "almanac-test: a submission"
HOOK_LINE = re.compile(r"lua: almanac: observe site_factor=\d+ uid=\d+ gpus=(\d+) row=[FGU] .* key=(\S+)")
TIER_KINDS = {
    "constraint": TIERS,
    "gres": (Tier("small", 40960, gres="a100"), Tier("large", 81920, gres="h100")),
    "partition": (Tier("small", 40960, partition="all"), Tier("large", 81920, partition="hbm80")),
}


@dataclass(frozen=True)
class Component:
    """A submission, or a part of a heterogeneous one, as each path saw it.

    job_submit, cli_filter: name key and number of GPUs; job_submit: None if it looked nothing up. typed: by kind of
    tiers, as sbatch-almanac and `almanac advise` read it; None of later parts. pending: as `almanac reprioritize` does.
    records: rows of the jobs table, several of an array.
    """

    job_submit: tuple[str, str] | None
    cli_filter: tuple[str, str]
    typed: Mapping[str, JobRequest] | None
    pending: QueuedJob
    records: tuple[dict[str, Any], ...]

    def requests(self, tiers: str = "constraint") -> dict[str, JobRequest]:
        return {"pending": self.pending.request()} | ({"typed": self.typed[tiers]} if self.typed else {})


@dataclass(frozen=True)
class Lived:
    """components: by case and offset. history: of alice, as back-tests and training have it. tiers: those that a record
    asks for, by kind of tiers and job.
    """

    components: Mapping[str, Component]
    history: pd.DataFrame
    tiers: Mapping[str, Mapping[int, str | None]]


_LIVED: dict[int, Lived] = {}


@pytest.fixture
def lived(site: Site, tmp_path: Path) -> Lived:
    """Outcomes of SUBMISSIONS, submitted to each site once."""
    if id(site) not in _LIVED:
        _LIVED[id(site)] = live(site, tmp_path)
    return _LIVED[id(site)]


def live(site: Site, root: Path) -> Lived:
    cases = {name: case for name, case in SUBMISSIONS.items() if case.since <= site.release}
    commands = remembered(SiteCommands(site))
    cluster = probe_accounting(SiteCommands(site)).cluster
    publish(site, uid_of(site, "alice"), advice(AdviceRow("U", 3600, 0), mode="observe"))
    site.hook("job_submit", JOB_SUBMIT.format(line=guarded_line(site)))
    site.hook("cli_filter", CLI_FILTER.format(lua=site.lua_dir, folder=FOLDER))
    site.remove("login", FOLDER)
    with busy(site):
        since = len(site.controller_log())
        script = submitting(list(cases.values()), FOLDER)
        done = site.run_bytes("login", "alice", "sh", "-s", stdin=script)
        said = [line.split(";")[0] for line in done.stdout.decode(errors="replace").splitlines()]
        assert {name: line for name, line in zip(cases, said, strict=True) if not line.isdecimal()} == {}
        jobs = dict(zip(cases, map(int, said), strict=True))
        pending = parse_queue(SiteCommands(site)(["squeue", "-a", "--json"]), cluster).waiting().jobs
        hooked = [HOOK_LINE.search(part) for part in site.controller_log()[since:].split(MARK)[1:]]
    filtered = site.run("login", "root", "sh", "-c", f"cd {FOLDER} && cat $(ls -v | grep ^seen-)").stdout.splitlines()
    wait_until("an empty queue", lambda: not site.run("ctl", "root", "squeue", "-h").stdout)
    tables = {kind: ended_records(site, cluster, jobs.values(), tiers) for kind, tiers in TIER_KINDS.items()}
    components, parts = {}, iter(zip(hooked, filtered, strict=True))
    for name, case in cases.items():
        typed = {kind: request_of(case, cluster, tiers, commands) for kind, tiers in TIER_KINDS.items()}
        own = [job for job in pending if jobs[name] in (job.job_id, job.array_job_id, job.het_job_id)]
        for offset, job in enumerate(own):
            line, seen = next(parts)
            records = [row for row in tables["constraint"] if is_of(row, job)]
            components[f"{name} +{offset}" if offset else name] = Component(
                job_submit=(line[2], line[1]) if line else None,
                cli_filter=told_by_filter(seen),
                typed=None if offset else typed,
                pending=job,
                records=tuple(records),
            )
    assert next(parts, None) is None
    return Lived(
        components,
        history_of(Store.create(root / "store"), cluster, tables["constraint"]),
        {kind: {row["job_id"]: row["tier"] for row in rows} for kind, rows in tables.items()},
    )


def told_by_filter(seen: str) -> tuple[str, str]:
    """Name key and number of GPUs, as almanac-prompt reads them."""
    request = prompt.submission_of(prompt.parse_told(seen.encode()), 0).request
    return request.name_key, str(request.gpu_count)


@contextmanager
def busy(site: Site) -> Iterator[None]:
    """Jobs stay pending."""
    site.run("ctl", "root", "scontrol", "update", "nodename=n[1-4]", "state=drain", "reason=test")
    try:
        yield
    finally:
        site.run("ctl", "root", "scontrol", "update", "nodename=n[1-4]", "state=resume", check=False)
        site.wait_for_nodes()


def remembered(commands: SiteCommands) -> Callable[[Sequence[str]], bytes]:
    """The commands, each asked once: for answers that do not change meanwhile."""
    ask = cache(lambda *argv: commands(argv))
    return lambda argv: ask(*argv)


def ended_records(site: Site, cluster: str, jobs: Collection[int], tiers: Sequence[Tier]) -> list[dict[str, Any]]:
    """Rows of the jobs table, once accounting has the end of every job."""
    config = Slurm(overlap_hours=0, read_steps=False)
    source = SacctSource(
        SiteCommands(site), cluster, tiers, config, time.time, open_jobs=lambda: dict.fromkeys(jobs, 0)
    )
    rows: list[dict[str, Any]] = []

    def have_ended() -> bool:
        rows[:] = [row for batch in source.read(86400, 86410) for row in batch.rows.to_pylist()]
        return len(rows) >= len(jobs) and all(row["end_s"] for row in rows)

    wait_until("the ends of all jobs in sacct", have_ended)
    return rows


def is_of(row: Mapping[str, Any], job: QueuedJob) -> bool:
    if job.array_job_id is not None:
        return bool(row["array_job_id"] == job.array_job_id)
    return bool(row["job_id"] == job.job_id)


def request_of(
    case: Submitted, cluster: str, tiers: Sequence[Tier], commands: Callable[[Sequence[str]], bytes]
) -> JobRequest:
    """As `almanac advise` has it."""
    argv = case.argv if case.file or case.is_wrapped else (*case.argv, "-")
    submission = parse_submission(argv, case.env, lambda _: case.script)
    return with_defaults(submission.request("alice", 0, FOLDER), submission.options, tiers, cluster, commands)


def history_of(store: Store, cluster: str, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """With peaks of memory, as telemetry would have brought them."""
    store.of(cluster).write("jobs", pa.Table.from_pylist(list(rows), schema=TABLES["jobs"].schema))
    metrics = [
        {
            "job_id": row["job_id"], "submit_s": row["submit_s"], "verdict": "ok", "is_preallocated": False,
            "hbm_peak_mib": 20000.0 + row["job_id"] % 7 * 100, "hbm_max_mib": 21000.0, "hbm_capacity_mib": 81920.0,
            "idle_gpus": [],
        }
        for row in rows
    ]  # fmt: skip
    store.of(cluster).write("job_metrics", pa.Table.from_pylist(metrics, schema=TABLES["job_metrics"].schema))
    return load_history(store.of(cluster), running=True)


def recorded(lived: Lived, component: Component) -> list[SubmittedJob]:
    """The component's rows of the history; [] without GPUs."""
    ids = {row["job_id"] for row in component.records}
    own = lived.history[lived.history["job_id"].isin(ids)]
    return submissions(own)


def said_of(lived: Lived, component: Component) -> Iterator[tuple[str, str, object, object]]:
    """Yield path, field, the path's value, and the record's."""
    ids = {row["job_id"] for row in component.records}
    jobs = recorded(lived, component)
    row = component.records[0]
    known = {(without_script(job.name_key), str(job.gpu_count)) for job in jobs} or {(row["name_key"], "0")}
    looked_up = {"cli_filter": component.cli_filter} | ({"job_submit": component.job_submit} if jobs else {})
    for path, found in looked_up.items():
        for key, gpus in known:
            yield path, "name_key", found and found[0], key
            yield path, "gpu_count", found and found[1], gpus
    for path, request in component.requests().items():
        for job in jobs:
            one, other = (dataclasses.asdict(each) for each in (submission_of(request, TIERS), job))
            if not (one["script_key"] and other["script_key"]):  # a path that knows no script says none
                for each in (one, other):
                    each |= {"script_key": "", "name_key": without_script(each["name_key"])}
            yield from ((path, name, repr(one[name]), repr(other[name])) for name in one if name != "submit_s")
    for kind, tiers in TIER_KINDS.items():
        for path, request in component.requests(kind).items():
            tier = requested_tier(request, tiers)
            yield from ((path, f"tier by {kind}", tier and tier.name, lived.tiers[kind][number]) for number in ids)


def without_script(key: str) -> str:
    """The key as a path has it that knows no script: a nameless job has no family there."""
    return "-" if key.startswith(SCRIPT_PREFIX) else key


def exceptions(site: Site) -> dict[tuple[str, str, str], str]:
    """Reasons by case, path, and field."""
    here = (each for each in DIFFERENCES if site.release <= each.until)
    return {(each.case, path, name): each.why for each in here for path in each.paths for name in each.fields}


def test_every_path_says_what_the_record_says(site: Site, lived: Lived) -> None:
    found = {}
    for case, component in lived.components.items():
        for path, name, one, other in said_of(lived, component):
            if one != other:
                found[case, path, name] = (one, other)
    known = exceptions(site)
    assert {what: values for what, values in found.items() if what not in known} == {}
    assert set(found) == set(known)


def test_a_script_has_one_key_on_every_path_that_knows_it(site: Site, lived: Lived) -> None:
    """Whatever its path and its arguments hold; values of options do not count."""
    recorded_keys = {name: recorded(lived, lived.components[name])[0].script_key for name in SCRIPTED}
    typed = {name: (each := lived.components[name].typed) and each["constraint"].script_key for name in SCRIPTED}
    pending = {name: lived.components[name].pending.script_key for name in SCRIPTED}
    assert all(typed.values())
    assert recorded_keys == (typed if site.release >= "24.11" else dict.fromkeys(SCRIPTED, ""))
    assert pending == (typed if site.release >= "26.05" else dict.fromkeys(SCRIPTED, ""))
    wrapped = {name for name in lived.components if SUBMISSIONS[name.partition(" +")[0]].is_wrapped}
    others = [each for name, each in lived.components.items() if name not in SCRIPTED and name not in wrapped]
    assert not any(row["script_key"] for component in others for row in component.records)
    keys = {row["script_key"] for name in wrapped for row in lived.components[name].records}
    assert any(keys) is (site.release >= "24.11")


def test_advice_is_what_a_back_test_would_say_of_the_record(site: Site, lived: Lived) -> None:
    """Byte for byte: of a submission now, and of a record of the same one."""
    known = {(case, path) for case, path, name in exceptions(site) if name in ("gpu_count", "node_count")}
    # The last runs of the same job are those with as many CPUs and this time limit.
    other_job = {(case, path) for case, path, name in exceptions(site) if name in ("cpu_count", "time_limit_s")}
    config = Config(tiers=TIERS)
    now_s = int(lived.history["end_s"].max()) + 3600
    trained = calibrated(train(lived.history, config, now_s))
    rows = user_rows(lived.history, trained, config, now_s)["alice"].rows
    published = {(row.key, str(row.gpus)) for row in rows if row.kind == FAMILY}
    with_gpus = {name: component for name, component in lived.components.items() if recorded(lived, component)}
    again = {name: submitted_again(lived.history, component, now_s) for name, component in with_gpus.items()}
    replayed = dict(zip(again, replayed_advice(lived.history, again.values(), trained, config, now_s), strict=True))
    differences: dict[tuple[str, str], Any] = {}
    for path in ("pending", "typed"):
        requests = {name: asked[path] for name, each in with_gpus.items() if path in (asked := each.requests())}
        said = advise_many(list(requests.values()), lived.history, trained, config, now_s)
        for name, now in zip(requests, map(told, said), strict=True):
            was = dict(replayed[name])
            asked, jobs = submission_of(requests[name], TIERS), recorded(lived, with_gpus[name])
            if asked.name_key not in {job.name_key for job in jobs}:
                continue  # a nameless job whose script one of both does not know
            if not asked.script_key and any(job.script_key for job in jobs):
                continue  # other jobs of its script are evidence for the record alone
            if (name, path) in other_job:
                for key in ("duration", "priority"):
                    now.pop(key)
                    was.pop(key)
            if as_bytes(now) != as_bytes(was) and (name, path) not in known:
                differences[name, path] = {key: (now[key], was[key]) for key in was if now[key] != was[key]}
    for name, component in with_gpus.items():
        key, gpus = component.cli_filter
        if is_family(key) and (key, gpus) not in published and (name, "cli_filter") not in known:
            differences[name, "published"] = component.cli_filter
    assert differences == {}
    assert sum(each["tier"]["tier"] is not None for each in replayed.values()) >= 20


def calibrated(trained: Trained) -> Trained:
    """With the margins that a long record would give."""
    classes = itertools.product(("family", "similar"), range(3), range(3), range(7))
    margins = {f"{scope}/{waiting}/{trend}/*/{runs}": Margins(1.0, 1.0) for scope, waiting, trend, runs in classes}
    return dataclasses.replace(trained, calibration=Calibration(0.01, margins))


def submitted_again(history: pd.DataFrame, component: Component, now_s: int) -> pd.DataFrame:
    """The component's record as one of a job that is submitted now."""
    own = history[history["job_id"].isin({row["job_id"] for row in component.records})].tail(1)
    unknown = dict.fromkeys(("start_s", "end_s", "elapsed_s"), math.nan)
    return own.assign(submit_s=now_s, state="PENDING", **unknown)


def replayed_advice(
    history: pd.DataFrame, again: Iterable[pd.DataFrame], trained: Trained, config: Config, now_s: int
) -> list[dict[str, Any]]:
    """Replay each job that comes after the history as back-tests do: its evidence, and its user's earlier runs."""
    jobs = pd.concat(again, ignore_index=True)
    requests = recorded_requests(jobs, config.tiers)
    rolling_s = replay_durations(pd.concat([history, jobs], ignore_index=True)).rolling_s[len(history) :]
    told_now = advise_many(requests, history, trained, config, now_s)
    found = []
    for place, (request, said) in enumerate(zip(requests, told_now, strict=True)):
        frame = pd.concat([history, jobs.iloc[[place]]], ignore_index=True)
        case = next(case for case in replay_peaks(frame, config.advice, config.tiers) if case.row == len(history))
        memory = decide_memory(request, case.evidence, trained.calibration, config)
        assert said.duration is not None and said.duration.rolling_s == rolling_s[place]
        found.append(told(dataclasses.replace(said, tier=memory.tier, bound=memory.bound, evidence=memory.evidence)))
    return found


def told(advice: Advice) -> dict[str, Any]:
    """All but the request, whose words are not those of a record."""
    return {key: value for key, value in to_json(advice).items() if key != "request"}


def as_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
