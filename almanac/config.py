"""The configuration: every key with its default, its limits and what it means. almanac.config_file reads the file.

Each section is a frozen dataclass; a field's metadata holds its one-line explanation, from which
docs/configuration.md is generated.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from zoneinfo import ZoneInfo

from almanac.actions_config import Mig as Mig
from almanac.actions_config import MigRaise as MigRaise
from almanac.actions_config import NodeSet as NodeSet
from almanac.actions_config import PlacementSection as PlacementSection
from almanac.actions_config import Power as Power
from almanac.actions_config import TrialRules as TrialRules
from almanac.actions_config import WatchSection as WatchSection
from almanac.hardware import GpuModel as GpuModel
from almanac.submit_config import GpuType as GpuType
from almanac.submit_config import Hooks as Hooks
from almanac.submit_config import Priority as Priority
from almanac.submit_config import Tier as Tier
from almanac.submit_config import fixed
from almanac.submit_config import key as _key

BackendName = Literal["commands", "pyslurm"]
Predictor = Literal["almanac", "helios"]
MailSecurity = Literal["none", "starttls", "tls"]
MailFrequency = Literal["every", "useful", "digest", "off"]


PLACEHOLDERS = (
    "job_id", "shown_id", "user", "account", "partition", "cluster", "start_s", "end_s", "start_ms", "end_ms",
)  # fmt: skip
"""Placeholders of a link's address. shown_id: as Slurm shows it, such as 1234_5 for a task of an array."""
MOST_LINKS = 8
PLACEHOLDER = r"\{([^{}]*)\}"


@dataclass(frozen=True)
class SiteSection:
    cluster: str = _key("", "Slurm cluster name; empty: ask Slurm")
    operators_group: str = _key(
        "", "Unix group whose members may see the jobs of all users; empty: root and the store's owner"
    )
    help_url: str = _key("", "page that mails and pages name for help, http or https; empty: none")
    timezone: str = _key("", "time zone of hours and months, such as Europe/Berlin; empty: this machine's")

    @property
    def zone(self) -> dt.tzinfo | None:
        """None: this machine's. Raises zoneinfo.ZoneInfoNotFoundError or ValueError for a name that is no zone's."""
        return ZoneInfo(self.timezone) if self.timezone else None


@dataclass(frozen=True)
class StoreSection:
    path: str = _key("/var/lib/almanac", "root folder of the store")
    memory_limit_mib: int = _key(2048, "memory that a command may use, MiB", low=64)
    threads: int = _key(0, "threads that DuckDB may use; 0: all cores", low=0)


@dataclass(frozen=True)
class Retention:
    """Days that `almanac summarize` keeps each table; 0 keeps everything. Whole days (UTC) are removed."""

    telemetry_days: int = _key(0, "days to keep samples of GPUs, once their jobs have metrics", low=0, high=36500)
    bindings_days: int = _key(0, "days to keep the records of GPU allocations", low=0, high=36500)
    steps_days: int = _key(0, "days to keep job steps, from the submission of the job", low=0, high=36500)
    jobs_days: int = _key(0, "days to keep job records, from the submission", low=0, high=36500)
    job_metrics_days: int = _key(0, "days to keep job metrics, from the submission", low=0, high=36500)
    gpu_metrics_days: int = _key(0, "days to keep metrics of each GPU of a job, from the submission", low=0, high=36500)
    step_metrics_days: int = _key(0, "days to keep step metrics, from the submission", low=0, high=36500)
    advice_days: int = _key(
        0, "days to keep published advice; the advice that was in force then also stays", low=0, high=36500
    )
    node_counts_days: int = _key(0, "days to keep counts of nodes", low=0, high=36500)


@dataclass(frozen=True)
class Slurm:
    bin_dir: str = _key("", "folder of sacct, squeue, and scontrol; empty: search PATH")
    backend: BackendName = _key("commands", "how almanac reaches slurmctld: commands, or pyslurm (Slurm 25.11 only)")
    timeout_s: int = _key(300, "seconds after which almanac stops waiting for a Slurm command", low=1, high=86400)
    lookback_days: int = _key(30, "days of accounting that the first ingest reads", low=1, high=36500)
    window_hours: int = fixed(24, "hours of accounting that one sacct query reads: few enough for its memory")
    overlap_hours: int = fixed(6, "hours before the last read to read again: slurmdbd can learn late of a job's end")
    read_steps: bool = _key(
        True,
        "also read the jobs' steps, for CPU time, host memory, and step metrics; one sacct query per 500 ended jobs",
    )


@dataclass(frozen=True)
class Prometheus:
    """One server. Each [[prometheus.server]] is another one, with these keys and a name of its own."""

    name: str = _key("", "name of a [[prometheus.server]], such as amd; empty in [prometheus]")
    url: str = _key("", "base address, such as http://prometheus.example:9090; empty: no Prometheus", is_secret=True)
    selector: str = _key("", 'label matchers added to every query, such as job="dcgm"')
    names: str = _key("dcgm", "names of the counters: a preset (docs/exporters.md), or NAME of [prometheus_names.NAME]")
    nodes: str = _key("", "read only these nodes, a hostlist such as gpu[001-128]; empty: all that the server has")
    partitions: tuple[str, ...] = _key((), "read only the nodes of these Slurm partitions; empty: all")
    cluster: str = _key("", "read this server only for the Slurm cluster of this name; empty: for any")
    username: str = _key("", "user name for HTTP basic authentication, with password_file")
    password_file: str = _key("", "file that holds the password")
    token_file: str = _key("", "file that holds a bearer token")
    ca_file: str = _key("", "certificate authority for https; empty: the system's")
    timeout_s: float = _key(60.0, "seconds after which one query fails", low=0.1, high=86400)
    retries: int = fixed(4, "retries of a failed query: with exponential backoff, seconds in all")
    chunk_minutes: int = fixed(60, "minutes that one query reads; halved if the server refuses")
    max_samples: int = fixed(12_000_000, "largest number of samples in memory at once: about 1 GiB")
    lookback_days: int = _key(15, "days that the first ingest reads", low=0, high=36500)
    delay_s: int = _key(60, "samples younger than this many seconds wait for the next run", low=0, high=86400)
    host_suffix: str = _key(
        "", "domain to remove from the exporter's host names; empty: any, unless two hosts share the short name"
    )
    own_names: Mapping[str, Any] = field(
        default_factory=dict, metadata={"about": "the tables [prometheus_names.NAME], as written", "fixed": True}
    )
    more: tuple[Prometheus, ...] = fixed((), "each [[prometheus.server]]")

    @property
    def servers(self) -> tuple[Prometheus, ...]:
        """Every server that has an address, [prometheus] first."""
        return tuple(each for each in (self, *self.more) if each.url)

    @property
    def source_name(self) -> str:
        """The name of its source and watermark."""
        return f"prometheus.{self.name}" if self.name else "prometheus"

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources of all servers."""
        return tuple(each.source_name for each in self.servers)

    @property
    def place(self) -> str:
        """The words before a key of this server in a message."""
        return f"[[prometheus.server]] {self.name}: " if self.name else "prometheus."


@dataclass(frozen=True)
class Jobstats:
    """jobstats' own database, for a site whose jobstats does not write AdminComment."""

    option_file: str = _key("", "MariaDB option file with host, user, and password in [client]; empty: no database")
    database: str = _key("jobstats", "name of the database")
    table: str = _key("job_summary", "table of the summaries: job_summary, or job_statistics in older releases")
    timeout_s: float = _key(60.0, "seconds after which one query fails", low=1, high=3600)


@dataclass(frozen=True)
class Bindings:
    prolog_dir: str = _key(
        "", "folder of the records that slurm_hooks/prolog/almanac-gpus.sh writes; empty: no records"
    )
    use_labels: bool = _key(True, "use the exporter's hpc_job or jobid label")


@dataclass(frozen=True)
class Filters:
    min_elapsed_s: int = _key(180, "shorter jobs are excluded, seconds (Cankur et al., II-C)")
    min_gpu_util_pct: float = _key(1.0, "jobs with a lower mean GPU_UTIL are idle (Cankur et al., II-C)")
    min_coverage: float = _key(
        0.5, "jobs with a smaller share of the expected samples have low coverage", low=0, high=1
    )
    partitions: tuple[str, ...] = _key((), "use only jobs of these partitions; empty: all")
    staff_accounts: tuple[str, ...] = _key((), "jobs of these accounts are excluded")
    login_nodes: tuple[str, ...] = _key((), "jobs on these nodes are excluded (hostlists such as login[01-04])")


@dataclass(frozen=True)
class Dask:
    """Workers of `summarize --engine slurm` and `--engine ADDRESS`. Dask's own configuration fills in empty keys."""

    memory_gib: float = _key(4.0, "memory of one worker process, GiB; DuckDB uses at most half of it", low=0.25)
    jobs: int = _key(4, "most Slurm jobs that --engine slurm runs at once", low=1)
    cores: int = _key(8, "cores of each Slurm job, one worker process on each", low=1)
    walltime: str = _key("02:00:00", "time limit of these Slurm jobs; a job that ends early is replaced")
    directives: tuple[str, ...] = _key((), 'more sbatch options, such as "--partition=cpu" and "--account=ops"')
    interface: str = _key("", "network interface of the scheduler and workers, such as ib0")
    port: int = _key(0, "port of the scheduler; 0: any free port", low=0, high=65535)
    worker_python: str = _key(
        "", "Python of these Slurm jobs, with this almanac installed; empty: the Python that runs now"
    )
    shared_directory: str = _key("", "shared folder for the jobs' output and keys; empty: workers/ in the store")
    tls_ca_file: str = _key("", "certificate authority of an existing scheduler (--engine tls://...)")
    tls_cert_file: str = _key("", "this client's certificate for it")
    tls_key_file: str = _key("", "this client's key for it")


@dataclass(frozen=True)
class AdviceSection:
    risk: float = _key(
        0.01, "accepted probability that a job's peak GPU memory exceeds the memory bound", low=0.0001, high=0.5
    )
    min_runs: int = fixed(3, "runs that advice of a memory tier needs")
    history_days: int = fixed(120, "age in days above which past jobs are ignored: users change what they run")
    headroom_mib: int = _key(
        1024, "GPU memory of a tier that a job cannot use, MiB (driver, contexts, fragmentation)", low=0
    )
    checkpoint_s: int = _key(300, "time that a large job needs to save a checkpoint, s", low=1, high=86400)


@dataclass(frozen=True)
class Training:
    min_jobs: int = _key(200, "ended jobs needed to train a LightGBM model", low=20)
    predictor: Predictor = _key(
        "almanac",
        "almanac: LightGBM with the last runs; helios: LightGBM with the rolling estimate, as in the paper",
    )
    retrain_hours: int = _key(24, "hours between trainings, for the timer and `almanac evaluate`", low=1)


@dataclass(frozen=True)
class Reports:
    """Data of their own jobs that `almanac publish` gives each user, to read without access to the store."""

    own_jobs: int = _key(50, "newest ended GPU jobs to publish for each user; 0: none", low=0)
    own_days: int = _key(30, "days after which a job is no longer published", low=1)


@dataclass(frozen=True)
class Services:
    extra: tuple[str, ...] = _key(
        (), "names of the site's own services (Python entry points almanac.services); no others are loaded"
    )


@dataclass(frozen=True)
class Cost:
    """Prices of the site report. The report says if a price is not configured; it never counts as 0."""

    per_gpu_hour: float = _key(-1.0, "price of one GPU-hour; negative: not configured", low=-1, high=1_000_000)
    per_kwh: float = _key(-1.0, "price of electricity per kWh; negative: not configured", low=-1, high=1_000_000)
    currency: str = _key("", "currency of the prices, such as EUR")


@dataclass(frozen=True)
class Mail:
    """Reports by mail. almanac sends nothing until you name a server."""

    server: str = _key("", "host of the SMTP server, such as localhost, or path of a sendmail program; empty: no mail")
    port: int = _key(25, "port of the SMTP server", low=1, high=65535)
    security: MailSecurity = _key("none", "none, starttls, or tls (from the first byte)")
    ca_file: str = _key("", "certificate authority of the server; empty: the system's")
    username: str = _key("", "user name for the login, with password_file; empty: no login")
    password_file: str = _key("", "file that holds the password")
    sender: str = _key("", "sender address; empty: almanac at this host's name")
    recipient: str = _key("{user}", "address of a user, where {user} is the user name, as in {user}@example.org")
    address_map: str = _key(
        "", "file with lines `user address`, for users whose address recipient does not give; empty: none"
    )
    address_command: tuple[str, ...] = _key(
        (), "program that gets a user name as its last argument and prints the address; empty: recipient decides"
    )
    reply_to: str = _key("", "address that answers go to; empty: sender")
    unsubscribe: str = _key(
        "", "page (http or https) or address in List-Unsubscribe; empty: a mail to reply_to, or to sender"
    )
    users: tuple[str, ...] = _key((), "a pilot: only these users, and jobs of accounts, get mail; both empty: all")
    accounts: tuple[str, ...] = _key((), "a pilot: only jobs of these accounts, and users, get mail; both empty: all")
    frequency: MailFrequency = _key(
        "every",
        "frequency for users without a choice: every (GPU job), useful (problems and news), digest (weekly), off",
    )
    min_elapsed_s: int = _key(
        60, "shorter jobs (in seconds) get no mail of their own; the weekly digest counts them", low=0
    )
    storm: int = _key(5, "more reports than this for one user at once become one mail; an array always does", low=1)
    family_wait_min: int = _key(
        60,
        "minutes after a mail about a job family in which like runs wait, to share one mail; 0: a mail for each",
        low=0,
        high=1440,
    )
    spool_dir: str = _key(
        "/var/spool/almanac/ended", "folder that almanac-ended.sh writes to when a job ends; optional"
    )
    per_minute: int = _key(300, "most mails to the server within a minute; the next run sends the others", low=1)


@dataclass(frozen=True)
class Packing:
    """Advice on jobs of one user that can share a GPU. The risk to run out of memory is [advice] risk."""

    advise: bool = _key(True, "say which of a user's jobs can share a GPU")


@dataclass(frozen=True)
class Link:
    """A link from the report of each job to another page, such as a dashboard. A link without a known value, such as
    the start of a job that never started, is left out.
    """

    name: str = _key("", "text of the link, such as Open in Grafana")
    url: str = _key("", f"address, http or https, which can name {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}")

    def filled(self, values: Mapping[str, str]) -> str | None:
        """The address for a job. values: by placeholder, URL-encoded; None if one is missing."""
        names = re.findall(PLACEHOLDER, self.url)
        if any(name not in values for name in names):
            return None
        return re.sub(PLACEHOLDER, lambda found: values[found[1]], self.url)


@dataclass(frozen=True)
class Config:
    site: SiteSection = SiteSection()
    store: StoreSection = StoreSection()
    retention: Retention = Retention()
    slurm: Slurm = Slurm()
    prometheus: Prometheus = Prometheus()
    jobstats: Jobstats = Jobstats()
    bindings: Bindings = Bindings()
    filters: Filters = Filters()
    dask: Dask = Dask()
    advice: AdviceSection = AdviceSection()
    training: Training = Training()
    priority: Priority = Priority()  # noqa: RUF009 - frozen
    hooks: Hooks = Hooks()  # noqa: RUF009
    reports: Reports = Reports()
    services: Services = Services()
    cost: Cost = Cost()
    mail: Mail = Mail()
    power: Power = Power()  # noqa: RUF009 - frozen
    mig: Mig = Mig()  # noqa: RUF009
    mig_raise: MigRaise = MigRaise()  # noqa: RUF009
    placement: PlacementSection = PlacementSection()  # noqa: RUF009
    packing: Packing = Packing()
    watch: WatchSection = WatchSection()  # noqa: RUF009
    trial: TrialRules = TrialRules()  # noqa: RUF009
    tiers: tuple[Tier, ...] = ()
    gpu_types: tuple[GpuType, ...] = ()
    gpu_models: tuple[GpuModel, ...] = ()
    node_sets: tuple[NodeSet, ...] = ()
    links: tuple[Link, ...] = ()
    source: str = fixed("", "path of the file")
    removed: tuple[str, ...] = fixed((), "keys of the file that are no longer settings (almanac.config_file)")


_ALWAYS = """
    advice max_runs=60 spike_margin=0.02 min_relative_spread=0.02 censored_share=0.97 failed_share=0.9 pause_days=30
    advice min_runs=3 max_slowdown=1.5 history_days=120
    bindings use_squeue=true
    dask tls=true wait_s=600
    gpu_advice max_age_s=600 min_gain=0.15
    hooks lifetime_hours=48
    mail timeout_s=30 wait_s=1800 array_wait_hours=24 give_up_hours=72 keep_days=90 per_user_hour=20
    metrics window_s=60 pipe_used_frac=0.005 window_alignment=utc imbalance_counter=gpu_util_pct spatial_method=means
    mig demand_days=7 reservation_hours=2 verify_timeout_s=180 run_s=900 job_wait_s=300 command_timeout_s=300
    mig hours_between=24 nodes_at_once=1
    mig_raise undo_min=10 again_min=60 soon_min=60 jobs_per_run=20
    packing context_mib=500 min_runs=5 min_coverage=0.7 min_gain=1.15
    placement jobs_per_run=20 undo_min=10 again_min=60 requeue_delay_s=121 start_up_s=120 checkpoint_s=300 max_age_s=60
    power stale_s=1800 wake_retries=1 nodes_per_run=20
    priority overrun_share=0.5 min_gpu_time_s=60 max_gpu_time_s=8640000
    prometheus chunk_minutes=60 max_samples=12000000 retries=4
    reports own_per_run=1000
    rolling decay=0.8 max_runs=50 similarity=0.8 families=mask
    slurm max_clock_skew_s=300 overlap_hours=6 window_hours=24
    training coverage=0.8 validation_share=0.2 max_age_days=14 keep_versions=10 seed=1
"""
"""The value that each key which is no longer a setting always has now: a line for a section, or two."""
REMOVED: dict[str, dict[str, str]] = {
    "0.1.0": {
        **{f"dask.{name}": f"--{name}=... in dask.directives" for name in ("qos", "partition", "account")},
        "dask.host": "the address of dask.interface, or of the default route",
        "dask.local_directory": "temporary-directory in Dask's own configuration",
        "dask.workers": "--engine local, which uses all cores",
        "priority.relief_users": "priority.relief_points, for the users who wait most in the hour",
        "prometheus.exporter": "prometheus.names",
        "mail.bcc": "copies by the mail server, such as sender_bcc_maps of Postfix",
        "power.wakeups_per_day": "power.boots_per_node; power.wakes_per_day where wake-ups are limited, too",
        "training.blend": "always chosen on the validation span",
        **{
            f"{section}.{key}": f"always {value}"
            for section, *settings in map(str.split, _ALWAYS.strip().splitlines())
            for key, _, value in (each.partition("=") for each in settings)
        },
    },
}
"""Keys that are no longer settings, by the release that removed them, with what replaced each.

They are read for one release, and never stop a command. `almanac doctor` and docs/configuration.md list them.
"""
