"""Dask workers as jobs of the site's own Slurm, started and ended by dask-jobqueue."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from distributed import Client, Security, SpecCluster
from distributed.utils import get_ip

from almanac.atomic import make_folders
from almanac.config import Dask
from almanac.errors import AlmanacError, CommandError, ConfigError, StoreError
from almanac.files import read_plain
from slurm.commands import Runner, shown_jobs
from telemetry.metrics.dask_engine import QUIET, Workers, quiet_logs

# dask-jobqueue 0.9, once imported, has Ctrl-C end the process with exit code 0.
_ON_INTERRUPT = signal.getsignal(signal.SIGINT)
from dask_jobqueue.slurm import SLURMCluster, SLURMJob  # noqa: E402

signal.signal(signal.SIGINT, _ON_INTERRUPT)

DEATH_TIMEOUT_S = 60
"""A worker that has lost its scheduler ends after this long, and its job with it: also after a kill -9 of almanac."""

_LOOK_S = 5.0
_LOG_TAIL = 600
_NO_DASHBOARD = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}


class SlurmWorkers(Workers):
    """Workers in Slurm jobs of one name. A job that ends early is replaced, as often as there are jobs."""

    def __init__(
        self,
        client: Client,
        cluster: SLURMCluster,
        section: Dask,
        runner: Runner,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client, clock=clock)
        self._cluster = cluster
        self._section = section
        self._runner = runner
        self._folder = folder
        self._clock = clock
        self._looked_s = clock()
        self._wanted = 0
        self._replaced = 0

    def want(self, tasks: int) -> None:
        wanted = min(self._section.jobs, -(-tasks // self._section.cores))
        if wanted > self._wanted:
            self._cluster.scale(jobs=len(self._cluster.worker_spec) + wanted - self._wanted)
            self._wanted = wanted

    def tend(self) -> int:
        present = super().tend()
        is_submitted = len(self._cluster.workers) == len(self._cluster.worker_spec)
        if is_submitted and self._clock() - self._looked_s > _LOOK_S:
            with contextlib.suppress(CommandError):  # slurmctld may be busy: it is asked again
                self._replace(self._wanted - len(shown_jobs(self._runner, self._cluster.job_name)), present)
            self._looked_s = self._clock()
        return present

    def _replace(self, lost: int, present: int) -> None:
        """Start jobs in place of those that have left the queue. Raises AlmanacError if that has not helped."""
        if lost <= 0:
            return
        if self._replaced + lost <= self._section.jobs and (present or self._replaced == 0):
            self._replaced += lost
            self._cluster.scale(jobs=len(self._cluster.worker_spec) + lost)
        elif lost == self._wanted and not present:
            raise AlmanacError(*self.explain("all Slurm jobs of the workers have ended"))

    def explain(self, seen: str) -> tuple[str, str]:
        try:
            queue = shown_jobs(self._runner, self._cluster.job_name)
        except CommandError as error:
            return f"{seen}; squeue: {error}", "check that slurmctld answers"
        shown = "; ".join(queue) or "none in the queue"
        if not any(" RUNNING " in job for job in queue):
            hint = "run `squeue --start` to see when they can run; check directives and walltime in [dask]"
        else:
            hint = f"their nodes must reach {self._cluster.scheduler_address}: check dask.interface"
        if said := _last_words(self._folder):
            hint = f"read the jobs' output in {self._folder}"
        return f"{seen}; jobs {self._cluster.job_name}: {shown}{said}", hint


@contextlib.contextmanager
def slurm_workers(section: Dask, runner: Runner, shared: Path, bin_dir: str = "") -> Iterator[SlurmWorkers]:
    """Workers in Slurm jobs; all are cancelled on leaving, whatever happened.

    shared: a folder that the nodes see under the same path. Of each run it holds a folder with the jobs' output and
    the keys, which is removed unless the run failed. Raises CommandError if sbatch refuses such jobs.
    """
    _check_words(section, shared)
    name = f"almanac-{secrets.token_hex(4)}"
    with quiet_logs(), _run_folder(shared, name) as folder:
        try:
            cluster = SLURMCluster(**_settings(section, name, folder, bin_dir))
        except (OSError, RuntimeError, ValueError) as error:
            raise AlmanacError(
                f"the scheduler cannot be started: {error}", "check dask.interface and dask.port"
            ) from error
        with cluster:
            _shield(cluster)
            _rehearse(cluster.job_script(), runner, folder)
            with Client(cluster) as client:
                yield SlurmWorkers(client, cluster, section, runner, folder)


def _check_words(section: Dask, shared: Path) -> None:
    """Raise ConfigError for a value that dask-jobqueue would put into the job's script as more than one word."""
    values = {name: getattr(section, name) for name in ("walltime", "interface", "worker_python")}
    for name, value in (values | {"shared_directory": str(shared)}).items():
        of_paths = "~${}" if name == "shared_directory" else ""
        if not re.fullmatch(rf"[\w@%+=:,./{of_paths}-]*", value, re.ASCII):
            raise ConfigError(f"dask.{name} is {value!r}", "use a value without spaces and quotes")
    if any("\n" in directive for directive in section.directives):
        raise ConfigError("an entry of dask.directives has several lines", "write one option per entry")


def _settings(section: Dask, name: str, folder: Path, bin_dir: str) -> dict[str, Any]:
    """Arguments of SLURMCluster. None leaves a value to the site's own jobqueue.yaml."""
    commands = {
        key: shlex.quote(str(Path(bin_dir) / command))
        for key, command in (("submit_command", "sbatch"), ("cancel_command", "scancel"))
    }
    # On one address only: without any, Dask listens on all.
    place = {} if section.interface else {"host": get_ip()}
    return {
        "name": name,
        "job_name": name,
        "job_cls": type("Job", (SLURMJob,), commands),
        "cores": section.cores,
        "processes": section.cores,
        "memory": f"{section.cores * section.memory_gib}GiB",
        "walltime": section.walltime or None,
        "job_extra_directives": list(section.directives) or None,
        "interface": section.interface or None,
        "scheduler_options": {**_NO_DASHBOARD, **place, "port": section.port},
        "security": _security(folder),
        "log_directory": str(folder),
        # -P: a job starts in the folder that almanac was called in, whose modules may be another user's.
        "python": f"{section.worker_python or shlex.quote(sys.executable)} -P",
        "worker_extra_args": ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"],
        "death_timeout": DEATH_TIMEOUT_S,
        "silence_logs": QUIET,
    }


def _security(folder: Path) -> Security:
    """Keys for one run, in files that only this user may read; dask-jobqueue's own outlive a failed start."""
    made = Security.temporary()
    paths = {kind: folder / f"{kind}.pem" for kind in ("cert", "key")}
    for kind, path in paths.items():
        path.touch(mode=0o600)
        path.write_text(getattr(made, f"tls_worker_{kind}"))
    roles = {f"tls_{role}_{kind}": str(paths[kind]) for role in ("client", "scheduler", "worker") for kind in paths}
    return Security(require_encryption=True, tls_ca_file=str(paths["cert"]), **roles)


def _shield(cluster: SpecCluster) -> None:
    """Let Ctrl-C stop this process only, which then ends in order what it started.

    A terminal sends it to all. The thread of Dask's loop starts the workers' processes, sbatch and scancel, and what it
    starts inherits its signal mask.
    """
    resource_tracker.ensure_running()  # Python 3.11 unblocks SIGINT in the thread that starts it

    async def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    cluster.sync(block)


@contextlib.contextmanager
def _run_folder(shared: Path, name: str) -> Iterator[Path]:
    """A folder for one run that only this user may enter, kept after a failure for the jobs' output."""
    folder = shared / name
    try:
        make_folders(shared, 0o700)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot be created: {error}", "set dask.shared_directory to a folder that you can write"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except Exception:
            if any(folder.glob(f"{name}-*")):
                stack.pop_all()
                for key in folder.glob("*.pem"):
                    key.unlink()
            raise


def _rehearse(script: str, runner: Runner, folder: Path) -> None:
    """Ask Slurm whether it would take such a job: dask-jobqueue only logs a refusal."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", dir=folder) as file:
        file.write(script)
        file.flush()
        try:
            runner(["sbatch", "--test-only", file.name])
        except CommandError as error:
            raise CommandError(
                f"Slurm refused the workers' jobs: {error}", "correct directives or cores in [dask]"
            ) from error


def _last_words(folder: Path) -> str:
    """The end of the newest output that holds anything; "" without any."""
    written = [path for path in folder.glob("almanac-*") if path.stat().st_size]
    if not written:
        return ""
    newest = max(written, key=lambda path: path.stat().st_mtime)
    lines = read_plain(newest).decode("utf-8", "replace")[-_LOG_TAIL:].splitlines()
    return f"; {newest.name}: …{' | '.join(lines)}"
