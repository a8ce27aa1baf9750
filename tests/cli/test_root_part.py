"""Publishing as root for another account's store: root parses nothing of it, and users get their files."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from almanac.config_file import load_config, parse_config
from almanac.errors import ConfigError, StoreError
from cli.distribute import below_store, sched_gid
from cli.root_part import hand_out
from slurm_hooks.root_files import acl_for, acl_on
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

ACCOUNT, USER = 60_100, 65_534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account")


@pytest.fixture
def root() -> Iterator[Path]:
    """A store of ACCOUNT's with a job of nobody's, in a folder that everybody can reach."""
    folder = Path(tempfile.mkdtemp(prefix="almanac-root-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "almanac.toml").write_text(
        f'[hooks]\nadvice_dir = "{folder}/advice"\ngroup = "root"\n[store]\npath = "{folder}/store"\n'
    )
    now_s = int(time.time())
    row = {"job_id": 10, "submit_s": now_s - 7200, "user": "nobody", "name": "train", "name_key": "train",
           "state": "COMPLETED", "start_s": now_s - 7100, "end_s": now_s - 3600, "elapsed_s": 3500, "gpu_count": 1,
           "node_list": "n1", "node_count": 1}  # fmt: skip
    store = Store.create(folder / "store").of("c")
    store.write("jobs", pa.Table.from_pylist([row], TABLES["jobs"].schema))
    for path in (folder / "store", *(folder / "store").rglob("*")):
        os.chown(path, ACCOUNT, ACCOUNT)
    yield folder
    shutil.rmtree(folder)


BECOME = """
import os, sys
import cli.publish, cli.root_part, lightgbm, pandas, pyarrow.compute, pyarrow.parquet, duckdb
import reports.published.publish, reports.published.publish, slurm_hooks.advice.publish, slurm_hooks.advice.type_files
import reports.published.publish, reports.published.publish, slurm_hooks.advice.publish, slurm_hooks.advice.type_files
import almanac.hardware, multiprocessing.pool, encodings.idna, encodings.ascii, encodings.latin_1
import almanac.tres, ClusterShell.NodeSet
from cli.main import main
almanac.hardware.gpu_models()
if uid := int(sys.argv[1]):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
main(sys.argv[2:])
"""
"""All is imported before: the Python of these tests may be shut to other users."""


def publish(root: Path, uid: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BECOME, str(uid), "--config", str(root / "almanac.toml"), "publish"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_root_computes_as_the_stores_owner_and_distributes(root: Path) -> None:
    done = publish(root)
    assert (done.returncode, "files placed" in done.stdout) == (0, True), done.stderr
    assert "at the next run of almanac-distribute" not in done.stdout, "its child leaves that to it"
    owners = {path.stat().st_uid for path in (root / "store").rglob("*")}
    assert owners == {ACCOUNT}, "root wrote nothing to the store"
    advice = root / "advice" / "user" / str(USER) / "advice"
    assert (advice.stat().st_uid, acl_on(str(advice))) == (0, acl_for(USER))
    assert stat.S_IMODE((root / "advice/sched" / str(USER)).stat().st_mode) == 0o640


def test_a_store_that_crashes_its_reader_crashes_no_process_of_roots(root: Path) -> None:
    """Root's part goes on with what is there: the account's files are those of before."""
    assert publish(root).returncode == 0
    (root / "store" / "store.json").write_text("[" * 100_000)
    os.chown(root / "store" / "published" / "c" / "user" / "_site" / "advice", 0, 0)
    done = publish(root)
    assert done.returncode != 0
    assert "another owner" in done.stderr
    assert not (root / "advice/user/_site/advice").exists()
    assert (root / "advice/user" / str(USER) / "advice").exists()


def test_a_store_that_only_the_environment_names_is_not_distributed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store, said in (("store", "configured"), ("bobs", "of bob")):
        advice = root / store / "published" / "c" / "user" / "_site" / "advice"
        advice.parent.mkdir(parents=True)
        advice.write_text(said)
        for path in (root / store, *(root / store).rglob("*")):
            os.chown(path, ACCOUNT if store == "store" else USER, -1)
    monkeypatch.setenv("ALMANAC_STORE", str(root / "bobs"))
    config = root / "almanac.toml"
    subprocess.run([sys.executable, "-m", "cli.distribute", "--config", str(config)], check=True, timeout=300)
    assert (root / "advice/sched/_site").read_text() == "configured"
    with pytest.raises(ConfigError, match=r"only \$ALMANAC_STORE names") as caught:
        hand_out(load_config(config), root / "bobs", "c", root / "advice", is_quiet=True)
    assert "--store" in caught.value.hint
    assert (root / "advice/sched/_site").read_text() == "configured"


def test_the_account_computes_and_leaves_the_rest_to_root(root: Path) -> None:
    (root / "advice").mkdir(mode=0o711)
    done = publish(root, ACCOUNT)
    assert (done.returncode, "files placed" in done.stdout) == (0, False), done.stderr
    assert not list((root / "advice").iterdir())
    assert (root / "store/published/c/user" / str(USER) / "advice").exists()


def test_the_group_of_sched_is_the_configured_one_else_its_own_else_slurm_users(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'SlurmUser               = nobody(65534)'\n")
    (tmp_path / "scontrol").chmod(0o755)
    named = parse_config({"hooks": {"group": "tty"}, "slurm": {"bin_dir": str(tmp_path)}})
    plain = parse_config({"slurm": {"bin_dir": str(tmp_path)}})
    assert sched_gid(named, tmp_path) == grp.getgrnam("tty").gr_gid
    assert sched_gid(plain, tmp_path) == pwd.getpwuid(65534).pw_gid
    (tmp_path / "sched").mkdir()
    os.chown(tmp_path / "sched", 0, 60_064)
    assert sched_gid(plain, tmp_path) == 60_064
    (tmp_path / "sched").rmdir()
    for bad in ("exit 1", "echo SlurmUser = nobody-knows"):
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{bad}\n")
        with pytest.raises(ConfigError):
            sched_gid(plain, tmp_path)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nyes | head -c 2000000\n")
    with pytest.raises(ConfigError, match="printed more than"):
        sched_gid(plain, tmp_path)
    (tmp_path / "scontrol").chmod(0o777)
    with pytest.raises(ConfigError, match="scontrol"):
        sched_gid(plain, tmp_path)
    with pytest.raises(ConfigError, match="no group 'nobody-has-this'"):
        sched_gid(parse_config({"hooks": {"group": "nobody-has-this"}}), tmp_path)


def test_the_only_cluster_is_taken_and_none_or_several_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        below_store(tmp_path, "")
    (tmp_path / "published").mkdir()
    with pytest.raises(StoreError, match="nothing is published"):
        below_store(tmp_path, "")
    (tmp_path / "published" / "c").mkdir()
    assert below_store(tmp_path, "") == ("published", "c")
    (tmp_path / "published" / "d").mkdir()
    with pytest.raises(ConfigError, match="files of several clusters") as caught:
        below_store(tmp_path, "")
    assert f"almanac-distribute --from {tmp_path}/published/CLUSTER" in caught.value.hint
    assert below_store(tmp_path, "d") == ("published", "d")
