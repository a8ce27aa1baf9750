"""jobstats' summaries from its own database: a real MariaDB, and answers that cannot be trusted."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from almanac.bounded import Done
from almanac.config import Jobstats
from almanac.errors import ConfigError, ServerError
from telemetry.sources import jobstats_database
from telemetry.sources.jobstats_database import JobstatsDatabase

JOBS: Sequence[dict[str, Any]] = [
    {"job_id": 7, "submit_s": 100, "end_s": 1000}, {"job_id": 7, "submit_s": 1000, "end_s": 2_000},
    {"job_id": 8, "submit_s": 100, "end_s": None}, {"job_id": 9, "submit_s": 100, "end_s": 900},
]  # fmt: skip


@pytest.fixture
def option_file(tmp_path: Path) -> Path:
    path = tmp_path / "jobstats.cnf"
    path.write_text("[client]\nhost = localhost\nuser = reader\npassword = geheim\n")
    path.chmod(0o600)
    return path


def answering(
    monkeypatch: pytest.MonkeyPatch, option_file: Path, stdout: bytes, code: int = 0, stderr: bytes = b""
) -> Any:
    asked: list[tuple[Sequence[str], bytes]] = []

    def run(argv: Sequence[str], *, stdin: bytes = b"", **limits: Any) -> Done:
        asked.append((argv, stdin))
        return Done(code, stdout, stderr)

    monkeypatch.setattr(jobstats_database, "run", run)
    return JobstatsDatabase(Jobstats(option_file=str(option_file)), "della"), asked


def test_a_summary_goes_to_the_last_run_of_its_number(monkeypatch: pytest.MonkeyPatch, option_file: Path) -> None:
    """A row that was written before a run ended is of an earlier job with the number."""
    answer = b"7\t2000\tJS1:SGk=\n9\t500\tJS1:T2xk\n8\t900\tJS1:T3Blbg==\n99\t900\tJS1:T3Blbg==\n"
    database, asked = answering(monkeypatch, option_file, answer)
    assert database.summaries(JOBS) == {(7, 1000): "JS1:SGk="}
    [(argv, sql)] = asked
    assert "geheim" not in " ".join(argv) and argv[1] == f"--defaults-file={option_file}"
    assert b"cluster = 'della' AND jobid IN (7,9)" in sql
    assert database.summaries(JOBS[2:3]) == {} and len(asked) == 1, "nothing has ended: nothing is asked"


@pytest.mark.parametrize(
    "answer",
    [b"", b"7\t2000\tNULL\n", b"7\tNULL\tJS1:SGk=\n", b"7\t2000\tJS1:\x1b[31m\n", b"-7\t2000\tJS1:SGk=\n", b"\xff\n",
     b"7\t2000\tJS1:SGk=\t1\n", b"99999999999999\t2000\tJS1:SGk=\n", b"7\t2000\n"],
)  # fmt: skip
def test_rows_of_another_form_are_skipped(monkeypatch: pytest.MonkeyPatch, option_file: Path, answer: bytes) -> None:
    assert answering(monkeypatch, option_file, answer)[0].summaries(JOBS) == {}


def test_faults_are_said_without_the_password(monkeypatch: pytest.MonkeyPatch, option_file: Path) -> None:
    said = b"ERROR 1045 (28000): Access denied for user 'reader'@'localhost' (using password: YES)"
    with pytest.raises(ServerError, match="Access denied"):
        answering(monkeypatch, option_file, b"", 1, said)[0].count()
    database, _ = answering(monkeypatch, option_file, b"3\n")
    assert database.count() == 3
    for mode in (0o640, 0o604, 0o666):
        option_file.chmod(mode)
        with pytest.raises(ConfigError, match="not a file of this user alone"):
            database.count()
    with pytest.raises(ConfigError, match="option_file"):
        JobstatsDatabase(Jobstats(option_file=str(option_file.with_name("none"))), "della").count()
    option_file.chmod(0o600)
    for cluster, table in (("de'lla", "job_summary"), ("della", "job_summary; DROP TABLE x"), ("", "job_summary")):
        with pytest.raises(ConfigError, match=r"jobstats\.table|site\.cluster"):
            JobstatsDatabase(Jobstats(option_file=str(option_file), table=table), cluster).count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The option file of a private MariaDB with jobstats' table, and a user who may only read."""
    server, install, client = (shutil.which(name) for name in ("mariadbd", "mariadb-install-db", "mariadb"))
    if not (server and install and client):
        pytest.skip("MariaDB is not installed")
    root = tmp_path_factory.mktemp("mariadb")
    socket, user = root / "s", "root" if os.geteuid() == 0 else os.environ.get("USER", "")
    # A server that starts removes the temporary tables of all others that share its tmpdir.
    own = ["--no-defaults", f"--datadir={root / 'data'}", f"--user={user}", f"--tmpdir={root}"]
    subprocess.run([install, *own, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
    process = subprocess.Popen(
        [server, *own, f"--socket={socket}", "--skip-networking", f"--pid-file={root / 'pid'}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        admin = [client, "--no-defaults", f"--socket={socket}", "-uroot"]
        for _ in range(3000):
            if subprocess.run([*admin, "-e", "SELECT 1"], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        subprocess.run(admin, input=SETUP, text=True, check=True, capture_output=True)
        path = root / "jobstats.cnf"
        path.write_text(f"[client]\nsocket = {socket}\nuser = reader\npassword = 'ge#heim'\n")
        path.chmod(0o600)
        yield path
    finally:
        process.terminate()
        process.wait(300)


# jobstats' own columns (PrincetonUniversity/jobstats, db_handler.py and docs/setup/external-database.md).
SETUP = """
CREATE DATABASE jobstats; USE jobstats;
CREATE TABLE job_summary (id INT AUTO_INCREMENT PRIMARY KEY, cluster VARCHAR(50) NOT NULL, jobid BIGINT NOT NULL,
  admin_comment MEDIUMTEXT, total_time DOUBLE, gpus INT, created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
  updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP, UNIQUE KEY (cluster, jobid));
CREATE TABLE job_statistics (id INT AUTO_INCREMENT PRIMARY KEY, cluster VARCHAR(50), jobid VARCHAR(50),
  admin_comment TEXT, updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP);
INSERT INTO job_summary (cluster, jobid, admin_comment, updated_at) VALUES
  ('della', 7, 'JS1:SGk=', FROM_UNIXTIME(2010)), ('della', 9, 'JS1:Short', FROM_UNIXTIME(1000)),
  ('stellar', 9, 'JS1:T3RoZXI=', FROM_UNIXTIME(1000)), ('della', 10, NULL, FROM_UNIXTIME(1000));
INSERT INTO job_statistics (cluster, jobid, admin_comment, updated_at) VALUES
  ('della', '7', 'JS1:T2xk', FROM_UNIXTIME(2010));
CREATE USER reader@localhost IDENTIFIED BY 'ge#heim'; GRANT SELECT ON jobstats.* TO reader@localhost;
"""


def test_a_real_database_gives_the_summaries_of_this_cluster(server: Path) -> None:
    database = JobstatsDatabase(Jobstats(option_file=str(server)), "della")
    assert database.summaries(JOBS) == {(7, 1000): "JS1:SGk=", (9, 100): "JS1:Short"}
    assert database.count() == 3
    older = JobstatsDatabase(Jobstats(option_file=str(server), table="job_statistics"), "della")
    assert older.summaries(JOBS) == {(7, 1000): "JS1:T2xk"}
    with pytest.raises(ServerError, match="doesn't exist"):
        JobstatsDatabase(Jobstats(option_file=str(server), table="nothing"), "della").count()
