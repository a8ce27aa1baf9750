"""Publishing: what files say is what `almanac advise` says, only what changed is written, and nothing is ever half."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from advice_lines import parse

from advisor.duration.replay import recorded_requests
from advisor.explain import short_text
from advisor.service import advise, advise_many
from almanac.config import Tier
from almanac.config_file import parse_config
from almanac.errors import BusyError, ConfigError, StoreError
from almanac.published.outgoing import uid_of
from almanac.records import Advice, JobRequest
from almanac.tiers import requested_tier
from slurm_hooks.advice import rows as advice_rows
from slurm_hooks.advice.file import ADVICE, AdviceFile, look_up
from slurm_hooks.advice.publication_log import published_for
from slurm_hooks.advice.sched import LINES, MAX_BYTES
from telemetry.history import UserHistories, load_history

Site = Any  # of conftest.py
NOW_S = 1_795_256_200
CLUSTER = "lab"
HOUR_S, DAY_S = 3600, 86_400
IS_ROOT = os.geteuid() == 0
Jobs = Callable[[Any, list[dict[str, Any]]], None]


def read(site: Site, name: str) -> AdviceFile:
    """Return what is published, which is the same for users and for Slurm, but for the number of jobs it is for."""
    file = ADVICE.parse(site.folder.read(name, ADVICE.name) or b"").value
    plain = tuple(dataclasses.replace(row, pilot=None) for row in file.rows)
    assert parse(site.folder.read(name, LINES) or b"", site.now_s) == dataclasses.replace(file, rows=plain)
    return file


def file_of(site: Site, user: str) -> AdviceFile:
    return read(site, str(site.uids[user]))


def test_the_file_says_what_advise_says_of_each_familys_newest_job(site: Site) -> None:
    done = site.publish()
    assert (done.written, done.families, done.unchanged) == (13, 36, 0)
    seen, tiers, pilots = 0, 0, set[int | None]()
    for user in site.uids:
        file, history = file_of(site, user), load_history(site.store.of(CLUSTER), user=user, running=True)
        for row in [row for row in file.rows if row.kind == "F"]:
            own = history[(history["name_key"] == row.key) & (history["gpu_count"] == row.gpus)]
            request = recorded_requests(own.sort_values("submit_s").tail(1), site.config.tiers)[0]
            advice = advise(request, history, site.trained, site.config, site.now_s)
            assert advice.duration is not None and advice.priority is not None
            assert row.predicted_s == round(advice.duration.duration_s)
            assert row.site_factor == advice.priority.site_factor
            stated_mib = advice.bound.bound_mib if advice.bound else None
            assert row.bound_mib == (None if stated_mib is None else round(stated_mib))
            assert row.tier == (advice.tier.tier if advice.bound else None)
            assert row.text == short_text(advice)
            assert row.pilot == (advice.tier.pilot if row.tier else None)
            seen, tiers, pilots = seen + 1, tiers + (row.tier is not None), pilots | {row.pilot}
    assert seen == 36
    assert tiers > 10
    assert pilots == {None, 10}


def test_histories_by_user_are_those_that_advise_loads(site: Site) -> None:
    histories = UserHistories(site.store.of(CLUSTER))
    try:
        both, digests = histories.of(["u3", "u5", "u99"]), histories.digests(0)
    finally:
        histories.close()
    assert set(digests) == set(site.uids)
    for user in ("u3", "u5"):
        own = load_history(site.store.of(CLUSTER), user=user, running=True)
        pd.testing.assert_frame_equal(both[both["user"] == user].reset_index(drop=True), own)


def test_several_processes_say_what_one_does(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.publish()
    alone = site.files()
    shutil.rmtree(site.root)
    for name, value in (("MIN_USERS", 1), ("CHUNK", 3), ("CHUNKS_READ", 2)):
        monkeypatch.setattr(f"slurm_hooks.advice.rows.{name}", value)
    site.publish(processes=2)
    assert site.files() == alone


def test_a_past_job_as_a_request_names_the_tier_that_was_asked_for(site: Site) -> None:
    tiers = (*site.config.tiers, Tier(name="large", capacity_mib=144_384, partition="h200"))
    history = load_history(site.store.of(CLUSTER), user="u1", running=True).tail(4)
    history["constraints"] = ["gpu&hbm40g", "", "a|b", "gpu"]
    history["partition"] = ["gpu", "gpu", "gpu", "h200"]
    history["tier"] = ["hbm40g", "hbm80g", None, "hbm80g"]
    requests = recorded_requests(history, tiers)
    found = [requested_tier(request, tiers) for request in requests]
    assert [tier and tier.name for tier in found] == ["hbm40g", "hbm80g", None, "hbm80g"]
    assert [request.constraints for request in requests] == ["gpu&hbm40g", "hbm80g", "a|b", "hbm80g"]
    assert [request.partition for request in requests] == ["gpu", "gpu", "gpu", ""]


def test_an_unknown_name_and_an_unknown_user_get_what_advise_says_of_them(site: Site) -> None:
    site.publish()
    user, everybody = file_of(site, "u1"), read(site, "_site")
    history = load_history(site.store.of(CLUSTER), user="u1", running=True)
    newest = recorded_requests(history[history["gpu_count"] == 2].sort_values("submit_s").tail(1), site.config.tiers)[0]
    advice = advise(dataclasses.replace(newest, job_name=""), history, site.trained, site.config, NOW_S)
    found = look_up(user, everybody, "never-run", 2)
    assert found is not None and advice.priority is not None
    assert (found.row.kind, found.site_factor) == ("G", advice.priority.site_factor)
    found = look_up(user, everybody, "never-run", 7)
    assert found is not None and found.row.kind == "U"
    stranger = look_up(None, everybody, "fama-run#", 4)
    assert stranger is not None and stranger.file is everybody and stranger.row.kind == "G"
    assert {row.kind for row in everybody.rows} == {"G", "U"}


def test_a_nameless_job_gives_no_row_for_other_names(
    site: Site, jobs_of: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script is a family, but the row for a GPU count is for names that are not known."""
    asked: list[JobRequest] = []

    def seen(requests: list[JobRequest], *rest: Any) -> list[Advice]:
        asked.extend(requests)
        return advise_many(requests, *rest)

    monkeypatch.setattr("slurm_hooks.advice.rows.advise_many", seen)
    newest = {"user": "u1", "name": "bash", "gpu_count": 2, "script_key": "ab12"}
    jobs_of(site.store, [{**newest, "job_id": 6000, "submit_s": NOW_S - 1000}])
    site.publish()
    assert {request.rule for request in asked if not request.job_name} == {""}


def test_nothing_is_written_where_nothing_changed_and_one_file_where_one_users_record_did(
    site: Site, jobs_of: Jobs
) -> None:
    site.publish()
    before = site.files()
    site.now_s += 600
    again = site.publish()
    assert (again.written, again.renewed, again.removed, again.unchanged) == (0, 0, 0, 13)
    assert site.files() == before
    jobs_of(site.store, [{"job_id": 5000, "submit_s": NOW_S, "user": "u3", "name": "new", "gpu_count": 16}])
    site.now_s += 7200
    assert site.publish().changed == ["60003", "_site"]
    changed = {name for name, content in site.files().items() if before[name] != content}
    assert changed == {f"user/{user}/{name}" for user in ("60003", "_site") for name in ("advice", "advice.json")}
    assert file_of(site, "u3").find("new", 16) is not None


def test_files_are_renewed_once_half_their_life_is_over(site: Site) -> None:
    site.publish()
    first = file_of(site, "u2")
    site.now_s += 24 * HOUR_S - 1
    assert site.publish().changed == []
    site.now_s += 1
    done = site.publish()
    assert done.written + done.renewed == 13
    renewed = file_of(site, "u2")
    assert (renewed.written_s, renewed.expires_s) == (site.now_s, site.now_s + 48 * HOUR_S)
    if renewed.rows == first.rows:
        assert renewed.version.partition("-")[0] == first.version.partition("-")[0]


def test_files_of_a_clock_that_was_ahead_are_written_again(site: Site) -> None:
    """They would be believed for as long, and never be half over before."""
    now_s = site.now_s
    site.now_s += DAY_S
    site.publish()
    site.now_s = now_s
    done = site.publish()
    assert (done.written, done.unchanged) == (13, 0)
    assert file_of(site, "u2").written_s == now_s


def test_a_dry_run_writes_nothing_and_says_what_would_change(site: Site) -> None:
    done = site.publish(is_dry=True)
    assert done.written == 13
    assert sorted(done.changed) == sorted([*map(str, site.uids.values()), "_site"])
    assert not site.root.exists()
    assert published_for(site.store.of(CLUSTER), "u1", "fama-run#", 1, NOW_S) is None


def test_files_go_with_their_users_once_expired_and_with_their_last_recent_job(site: Site) -> None:
    site.publish()
    gone = {**site.uids}
    del gone["u4"]
    site.now_s += 48 * HOUR_S - 1
    assert site.publish(gone.get).removed == 0
    site.now_s += 1
    assert site.publish(gone.get).removed == 1
    assert not site.folder.path("60004", LINES).parent.exists()
    site.now_s += 200 * DAY_S  # nobody has run anything for 120 days
    assert site.publish(gone.get).removed == 11
    assert site.folder.users() == ["_site"]


def test_files_stay_while_the_user_database_is_out_of_reach(site: Site) -> None:
    site.publish()
    done = site.publish(lambda name: None)
    assert done.removed == 0
    assert len(done.no_uid) == 12
    assert "12 files of nobody known are kept until they expire" in done.warnings[0]
    assert len(site.folder.users()) == 13


def test_files_stay_while_a_part_of_the_user_database_is_out_of_reach(site: Site) -> None:
    """LDAP is down, and u3 is a local user."""
    site.publish()
    done = site.publish({"u3": site.uids["u3"]}.get)
    assert (done.removed, len(done.no_uid)) == (0, 11)
    assert len(site.folder.users()) == 13
    assert site.publish().warnings == []


def test_users_without_a_uid_and_names_that_share_one_get_no_file(site: Site) -> None:
    uids = {**site.uids, "u5": site.uids["u6"]}
    del uids["u7"]
    done = site.publish(uids.get)
    assert (done.no_uid, done.shared_uid) == (["u7"], ["u5", "u6"])
    assert done.written == 10
    assert uid_of("root") == 0
    assert [uid_of(name) for name in ("nobody-has-this-name", "", "a\0b", "../root", "\n")] == [None] * 5


def test_two_publishers_do_not_meet(site: Site) -> None:
    with site.folder.locked():
        site.folder.prepare()
        staged = site.folder.root / ".tmp-1"
        staged.write_text("what the one who holds the lock is about to put in place")
        with pytest.raises(BusyError):
            site.publish()
        assert staged.exists()


def test_a_user_with_more_families_than_fit_keeps_the_newest(site: Site, jobs_of: Jobs) -> None:
    names = [
        f"{first}{second}{third}-" + "x" * 60
        for first in "ghijklmnop"
        for second in "ghijklmnop"
        for third in "ghijklmnop"
    ]
    rows = [
        {"job_id": 10_000 + number, "submit_s": NOW_S - 10_000 + number, "user": "u0", "name": name}
        for number, name in enumerate(names)
    ]
    jobs_of(site.store, rows)
    done = site.publish()
    content = site.folder.read("60000", LINES) or b""
    assert MAX_BYTES - 500 < len(content) <= MAX_BYTES
    families = [row.key for row in read(site, "60000").rows if row.kind == "F"]
    assert families[0] == names[-1][:64]
    assert families == [name[:64] for name in reversed(names)][: len(families)]
    assert done.cut == len(names) + 3 - len(families)


@pytest.mark.parametrize(("length", "most"), [(3, 8000 // 20), (63, 8000 // 80)])
def test_only_families_that_a_file_could_hold_are_predicted(
    site: Site, monkeypatch: pytest.MonkeyPatch, length: int, most: int
) -> None:
    history = load_history(site.store.of(CLUSTER), user="u0", running=True)
    monkeypatch.setattr(advice_rows, "MAX_BYTES", 8000)
    names = ["".join(word) * (length // 3) for word in product("ghijklmn", repeat=3)]
    many = pd.concat([history.head(1)] * len(names), ignore_index=True)
    many = many.assign(name=names, name_key=names, submit_s=NOW_S - DAY_S + np.arange(len(names)))
    rows, asked = rows_and_requests(many, site, monkeypatch)
    families = [request.job_name for request in asked if request.job_name]
    assert families == names[::-1][: len(families)]
    assert len(families) == most, "the shortest row has 17 bytes beside its name"
    assert rows["u0"].cut == len(names) - len(families)


def test_at_most_100_gpu_counts_are_predicted_for_a_user_and_for_strangers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = load_history(site.store.of(CLUSTER), user="u0", running=True)
    many = pd.concat([history.head(1)] * 1000, ignore_index=True).assign(gpu_count=np.arange(1000) + 1)
    many = many.assign(submit_s=NOW_S - DAY_S + np.arange(1000))
    _, asked = rows_and_requests(many, site, monkeypatch)
    assert [request.gpu_count for request in asked if not request.job_name] == [*range(1000, 900, -1), 1000]
    asked.clear()
    assert len(advice_rows.site_rows(many, site.trained, site.config, NOW_S)) == 101
    assert [request.gpu_count for request in asked] == list(range(1, 101))


def rows_and_requests(
    history: pd.DataFrame, site: Site, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, advice_rows.UserRows], list[JobRequest]]:
    """The rows, and what was predicted for them; the list goes on growing."""
    asked: list[JobRequest] = []

    def counted(requests: list[JobRequest], *known: Any) -> list[Any]:
        asked.extend(requests)
        return advise_many(requests, *known)

    monkeypatch.setattr(advice_rows, "advise_many", counted)
    return advice_rows.user_rows(history, site.trained, site.config, NOW_S), asked


def test_hostile_names_stay_within_their_fields(site: Site, jobs_of: Jobs) -> None:
    names = [
        "a\nF\tx\t1",
        "\x1b[31mred",
        "tab\tbed",
        "$(reboot)`id`",
        "%s%n",
        '"quoted"',
        "é" * 40,
        "end\t0\n",
        "x" * 10_000,
    ]
    for at, user in enumerate(("eve", "eve\n", "../eve", "root\0")):
        jobs_of(
            site.store,
            [
                {
                    "job_id": 20_000 + 1000 * at + 100 * place + run,
                    "submit_s": NOW_S - 9000 + run,
                    "user": user,
                    "name": name,
                }
                for place, name in enumerate(names)
                for run in range(6)
            ],
        )
    done = site.publish({**site.uids, "eve": 60_666}.get)
    assert done.no_uid == ["../eve", "eve\n", "root\0"]
    file = read(site, "60666")
    assert sum(row.kind == "F" for row in file.rows) == len(names) - 3, "three of them identify nothing"
    assert all(name == "_site" or name.isdecimal() for name in site.folder.users())


def test_tiers_that_a_file_cannot_name_are_refused(site: Site) -> None:
    tiers = [{"name": "gro\u00df", "capacity_mib": 40960, "constraint": "a"}]
    with pytest.raises(ConfigError, match="gro\u00df"):
        site.publish(config=parse_config({"tiers": tiers}))


def test_without_a_model_the_rolling_estimate_serves_and_strangers_get_nothing(site: Site) -> None:
    site.trained = None
    site.publish()
    file, everybody = file_of(site, "u1"), read(site, "_site")
    assert len(file.rows) > 3
    assert everybody.rows == ()
    assert site.publish().written == 0


# --- faults while writing


def put(folder: Any, letter: str) -> None:
    folder.write((name, LINES, letter.encode() * 9000) for name in ("1", "2", "_site"))


@pytest.mark.parametrize("call", ["rename", "open", "mkdir", "close"])
def test_killed_at_any_moment_every_file_is_the_old_one_or_the_new_one(site: Site, call: str) -> None:
    site.folder.prepare()
    put(site.folder, "o")
    outcomes = set()
    for after in range(30):
        child = os.fork()
        if child == 0:
            _die_at(call, after)
            put(site.folder, "n")
            os._exit(0)
        died = os.waitpid(child, 0)[1] != 0
        contents = {name: site.files().get(name) for name in site.files() if ".tmp-" not in name}
        assert len(contents) == 3
        assert set(contents.values()) <= {b"o" * 9000, b"n" * 9000}
        outcomes.add((died, len(set(contents.values()))))
        site.folder.prepare()
        assert not list(site.root.rglob(".tmp-*"))
        put(site.folder, "o")
        if not died:
            break
    assert (False, 1) in outcomes
    assert (True, 2) in outcomes or call != "rename"


def _die_at(call: str, after: int) -> None:
    count, real = [0], getattr(os, call)

    def counted(*args: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] > after:
            os.kill(os.getpid(), 9)
        return real(*args, **named)

    setattr(os, call, counted)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_the_old_files_and_is_said(site: Site, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    site.publish()
    before = site.files()
    site.now_s += 25 * HOUR_S

    def full(folder: Path) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("almanac.published.outgoing.flush_file_system", full)
    with pytest.raises(StoreError, match=os.strerror(error)) as caught:
        site.publish()
    assert ("make room" in caught.value.hint) == (error != errno.EIO)
    assert site.files() == before


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount a small disk")
def test_a_disk_that_is_really_full(site: Site, tmp_path: Path) -> None:
    site.root.mkdir(mode=0o711)
    # 26 files of a page each fit once, but not twice.
    mount = ["mount", "-t", "tmpfs", "-o", "size=184k,mode=711", "tmpfs", str(site.root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        site.publish()
        before = site.files()
        assert len(before) == 26
        site.now_s += 25 * HOUR_S
        with pytest.raises(StoreError, match="No space left"):
            site.publish()
        assert site.files() == before
    finally:
        subprocess.run(["umount", str(site.root)], check=True)


# --- what was published


def test_what_was_predicted_for_a_job_is_known_later(site: Site, jobs_of: Jobs) -> None:
    site.publish()
    first, submitted_s = file_of(site, "u3"), NOW_S + 60
    site.now_s += 12 * HOUR_S
    runs = [
        {"job_id": 6000 + run, "submit_s": NOW_S + 100 + run, "user": "u3", "name": "fama-run9", "gpu_count": 1,
         "elapsed_s": 30_000}
        for run in range(5)
    ]  # fmt: skip
    jobs_of(site.store, runs)
    site.publish()
    second = file_of(site, "u3")
    one, two = (file.find("fama-run#", 1) for file in (first, second))
    assert one is not None and two is not None and one.site_factor != two.site_factor
    for submit_s, row, file in ((submitted_s, one, first), (site.now_s, two, second), (site.now_s + 5000, two, second)):
        found = published_for(site.store.of(CLUSTER), "u3", "fama-run#", 1, submit_s)
        assert found is not None
        assert (found.row.predicted_s, found.site_factor) == (row.predicted_s, row.site_factor)
        assert found.row.bound_mib == row.bound_mib
        assert (found.file.version, found.file.mode) == (file.version, "observe")
    kept = published_for(site.store.of(CLUSTER), "u3", "famb-run#", 2, site.now_s)
    unchanged = second.find("famb-run#", 2)
    assert kept is not None and unchanged is not None and kept.site_factor == unchanged.site_factor
    stranger = published_for(site.store.of(CLUSTER), "nobody", "x", 2, submitted_s)
    assert stranger is not None and stranger.row.kind == "G"
    assert published_for(site.store.of(CLUSTER), "u3", "fama-run#", 1, NOW_S - 1) is None
    assert published_for(site.store.of(CLUSTER), "u3", "fama-run#", 1, site.now_s + 49 * HOUR_S) is None, "expired"


def test_only_rows_that_changed_are_kept(site: Site, jobs_of: Jobs) -> None:
    site.publish()
    first = site.store.of(CLUSTER).read("advice").num_rows
    site.now_s += 600
    site.publish()
    assert site.store.of(CLUSTER).read("advice").num_rows == first
    jobs_of(site.store, [{"job_id": 7000, "submit_s": NOW_S, "user": "u3", "name": "odd", "gpu_count": 64}])
    site.now_s += 600
    site.publish()
    new = [row for row in site.store.of(CLUSTER).read("advice").to_pylist() if row["published_s"] == site.now_s]
    assert {row["user"] for row in new} == {"u3", ""}
    assert ("F", "odd", 64) in {(row["kind"], row["name_key"], row["gpu_count"]) for row in new}
    assert first > 12 * 4


def test_a_file_taken_away_says_nothing_any_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.publish()
    shared = {**site.uids, "u4": site.uids["u5"]}  # two names of one uid get no file any more
    monkeypatch.setattr(
        "slurm_hooks.advice.publish.pwd.getpwuid", lambda uid: type("Account", (), {"pw_name": f"u{uid - 60_000}"})
    )
    site.now_s += 60
    assert site.publish(shared.get).removed == 2
    assert published_for(site.store.of(CLUSTER), "u4", "fama-run#", 1, NOW_S) is not None
    found = published_for(site.store.of(CLUSTER), "u4", "fama-run#", 1, site.now_s)
    assert found is not None and found.row.kind == "G" and found.file.version.split("-")[0]
    request = JobRequest(user="u4", job_name="fama-run1", gpu_count=1)
    assert request.gpu_count == found.row.gpus
