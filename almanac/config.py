"""The configuration: every key with its default, its limits and what it means. almanac.config_file reads the file.

Each section is a frozen dataclass; a field's metadata holds its one-line explanation, from which
docs/configuration.md is generated.
"""

from __future__ import annotations

from dataclasses import dataclass

from almanac.power_config import NodeSet as NodeSet
from almanac.power_config import Power as Power
from almanac.submit_config import Hooks as Hooks
from almanac.submit_config import Priority as Priority
from almanac.submit_config import Tier as Tier
from almanac.submit_config import key as _key


@dataclass(frozen=True)
class Site:
    cluster: str = _key("", "Slurm cluster name; empty: asked from Slurm")
    operators_group: str = _key(
        "", "Unix group whose members may look at other users' jobs; empty: root and the store's owner"
    )


@dataclass(frozen=True)
class StoreSection:
    path: str = _key("/var/lib/almanac", "root folder of the store")
    memory_limit_mib: int = _key(2048, "memory that DuckDB may use, MiB", low=64)
    threads: int = _key(0, "threads that DuckDB may use; 0: all cores", low=0)


@dataclass(frozen=True)
class Slurm:
    bin_dir: str = _key("", "folder of sacct, squeue, scontrol; empty: PATH")
    backend: str = _key(
        "commands", "how slurmctld is asked and told: commands, or pyslurm, which works with Slurm 25.11 only"
    )
    timeout_s: int = _key(300, "seconds after which a Slurm command is given up", low=1, high=86400)
    lookback_days: int = _key(30, "days of accounting that the first ingest asks for", low=1, high=36500)
    window_hours: int = _key(24, "accounting is asked for in windows of this many hours", low=1, high=87600)
    overlap_hours: int = _key(
        6, "hours before the last read that are read again: slurmdbd can be told late of a job's end", low=1, high=87600
    )
    read_steps: bool = _key(
        True, "read the steps of GPU jobs too: one more sacct query for 500 ended GPU jobs; needed for step metrics"
    )
    max_clock_skew_s: int = _key(300, "a job that starts or ends further in the future is dropped and counted")


@dataclass(frozen=True)
class Prometheus:
    url: str = _key("", "base address, such as http://prometheus.example:9090; empty: no Prometheus", is_secret=True)
    selector: str = _key("", 'label matchers added to every query, such as job="dcgm"')
    exporter: str = _key("dcgm", "whose names to read: dcgm (dcgm-exporter) or jobstats (nvidia_gpu_*)")
    username: str = _key("", "for HTTP basic authentication, with password_file")
    password_file: str = _key("", "file that holds the password")
    token_file: str = _key("", "file that holds a bearer token")
    ca_file: str = _key("", "certificate authority for https; empty: the system's")
    timeout_s: float = _key(60.0, "seconds after which one query is given up", low=0.1, high=86400)
    retries: int = _key(4, "further tries of a query that failed, with exponential backoff", low=0, high=1000)
    chunk_minutes: int = _key(
        60, "minutes that one query asks for; halved where the server refuses", low=1, high=525600
    )
    max_samples: int = _key(5_000_000, "samples that may be held in memory at once", low=1000)
    lookback_days: int = _key(15, "days that the first ingest asks for", low=0, high=36500)
    delay_s: int = _key(60, "newest samples are left for the next run for this many seconds", low=0, high=86400)
    host_suffix: str = _key("", "domain to cut from the exporter's host names; empty: everything after the first dot")


@dataclass(frozen=True)
class Bindings:
    prolog_dir: str = _key("", "folder of the records that slurm_hooks/prolog/almanac-gpus.sh writes; empty: none")
    use_labels: bool = _key(True, "believe the exporter's hpc_job or jobid label")
    use_squeue: bool = _key(True, "poll gres_detail of running jobs from squeue")


@dataclass(frozen=True)
class Filters:
    min_elapsed_s: int = _key(180, "shorter jobs are set aside (perlmutter-telemetry, II-C)")
    min_gpu_util_pct: float = _key(1.0, "jobs whose mean GPU_UTIL is below are set aside (perlmutter-telemetry, II-C)")
    min_coverage: float = _key(0.5, "below this share of the expected samples a job gets no verdict", low=0, high=1)
    partitions: tuple[str, ...] = _key((), "only jobs of these partitions; empty: all")
    staff_accounts: tuple[str, ...] = _key((), "jobs of these accounts are set aside")
    login_nodes: tuple[str, ...] = _key((), "jobs on these nodes (hostlists such as login[01-04]) are set aside")


@dataclass(frozen=True)
class MetricsSection:
    imbalance_counter: str = _key("gpu_util_pct", "counter whose spatial and temporal imbalance is computed")
    window_s: int = _key(60, "seconds of a window of spatial imbalance; a divisor of 3600", low=1, high=3600)
    window_alignment: str = _key("utc", "windows start at full UTC minutes (utc), or at the job's first sample (job)")
    pipe_used_frac: float = _key(
        0.005, "a floating-point pipe counts as used above this mean activity (perlmutter-telemetry, IV-B)", low=0
    )


@dataclass(frozen=True)
class Dask:
    """Workers of `--engine dask` and `--engine slurm`. What is empty here is Dask's own configuration's to say."""

    workers: int = _key(0, "worker processes on this machine (--engine dask); 0: one per core", low=0)
    memory_gib: float = _key(4.0, "memory of one worker process, GiB; DuckDB uses at most half of it", low=0.25)
    wait_s: float = _key(600.0, "seconds without any worker after which a run is given up", low=1)
    jobs: int = _key(4, "Slurm jobs that --engine slurm runs at once, at most", low=1)
    cores: int = _key(8, "cores of a job, each with one worker process", low=1)
    partition: str = _key("", "partition of the jobs")
    account: str = _key("", "account of the jobs")
    qos: str = _key("", "QOS of the jobs")
    walltime: str = _key("02:00:00", "time limit of the jobs; a job that ends early is replaced")
    directives: tuple[str, ...] = _key((), 'further options of sbatch, such as "--constraint=cpu"')
    interface: str = _key("", "network interface of scheduler and workers, such as ib0")
    host: str = _key("", "address at which the scheduler listens; empty: that of interface, or of the default route")
    port: int = _key(0, "the scheduler's port; 0: any free one", low=0, high=65535)
    worker_python: str = _key("", "Python of the jobs, with this almanac installed; empty: the one that runs now")
    local_directory: str = _key("", "folder on a worker's node to spill to; can name a variable of the job: $TMPDIR")
    shared_directory: str = _key(
        "", "folder that nodes see too, for jobs' output and keys; empty: the store's workers/"
    )
    tls: bool = _key(True, "encrypt, and admit only who has the key, made for each run (--engine slurm)")
    tls_ca_file: str = _key("", "certificate authority of a scheduler that is already there (--scheduler tls://...)")
    tls_cert_file: str = _key("", "this client's certificate for it")
    tls_key_file: str = _key("", "this client's key for it")


@dataclass(frozen=True)
class AdviceSection:
    risk: float = _key(0.01, "accepted probability that a job's HBM peak exceeds the bound", low=0.0001, high=0.5)
    min_runs: int = _key(5, "runs that a bound needs; with fewer nothing is advised", low=2)
    max_runs: int = _key(60, "newest runs by which growth is judged", low=2)
    history_days: int = _key(120, "older jobs are not looked at", low=1)
    headroom_mib: int = _key(1024, "HBM of a tier that a job cannot use (driver, contexts, fragmentation)", low=0)
    spike_margin: float = _key(0.02, "share by which a peak may exceed its highest 10 s sample", low=0, high=1)
    min_relative_spread: float = _key(0.02, "smallest relative spread of needs assumed", low=0.001, high=1)
    censored_share: float = _key(
        0.97, "a peak above this share of the capacity may have been cut off there", low=0.5, high=1
    )
    failed_share: float = _key(
        0.9, "the same of a job that failed: it is suspected to have run out of GPU memory", low=0.5, high=1
    )
    pause_days: int = _key(
        30, "how long a family that ran out of memory on a smaller tier than before gets no advice", low=0
    )


@dataclass(frozen=True)
class Rolling:
    decay: float = _key(
        0.8, "weight of a matched run against the next newer one (helios-qssf-ces, algorithm 1)", low=0, high=1
    )
    similarity: float = _key(
        0.8, "smallest normalised Levenshtein similarity of names that count as the same", low=0, high=1
    )
    max_runs: int = _key(50, "newest matched runs that are looked at", low=1)
    families: str = _key(
        "mask", "name families of the model's features; mask: names alike but for numbers; levenshtein: by similarity"
    )


@dataclass(frozen=True)
class Training:
    min_jobs: int = _key(200, "ended jobs below which no LightGBM model is trained", low=20)
    predictor: str = _key(
        "almanac",
        "almanac: LightGBM with the last runs; helios: LightGBM with the rolling estimate, as the paper has it",
    )
    blend: float = _key(
        -1.0,
        "weight of the rolling estimate under predictor helios, 0..1; negative: chosen on the validation span",
        low=-1,
        high=1,
    )
    coverage: float = _key(0.8, "share of jobs that the interval of a predicted duration holds", low=0.5, high=0.99)
    validation_share: float = _key(
        0.2, "newest share of the jobs on which the first model is tried; later ones: on jobs since", low=0.05, high=0.5
    )
    retrain_hours: int = _key(24, "hours between trainings, of the timer and of `almanac evaluate`", low=1)
    max_age_days: int = _key(14, "a model trained longer ago is not used; the last runs serve", low=1)
    keep_versions: int = _key(10, "trained versions that are kept, for going back", low=1)
    seed: int = _key(1, "seed of LightGBM")


@dataclass(frozen=True)
class Reports:
    """What `almanac publish` gives each user of their own jobs, for who may not read the store."""

    own_jobs: int = _key(50, "newest ended GPU jobs of each user that are published for them; 0: none", low=0)
    own_days: int = _key(30, "days after which a job is no longer published for its user", low=1)
    own_per_run: int = _key(1000, "reports that one run of publish makes, newest jobs first; others wait", low=1)


@dataclass(frozen=True)
class Services:
    extra: tuple[str, ...] = _key(
        (), "names of the site's own services (Python entry points almanac.services); others are never loaded"
    )


@dataclass(frozen=True)
class Cost:
    """What the site report puts a price on. A price that is not configured is said to be, and never taken for 0."""

    per_gpu_hour: float = _key(-1.0, "price of a GPU for an hour; negative: not configured", low=-1, high=1_000_000)
    per_kwh: float = _key(-1.0, "price of electricity per kWh; negative: not configured", low=-1, high=1_000_000)
    currency: str = _key("", "what prices are in, such as EUR")


@dataclass(frozen=True)
class Mail:
    """Reports by mail. Nothing is sent until a server is named."""

    server: str = _key("", "host of the SMTP server that takes almanac's mail, such as localhost; empty: no mail")
    port: int = _key(25, "its port", low=1, high=65535)
    security: str = _key("none", "none, starttls, or tls from the first byte")
    ca_file: str = _key("", "certificate authority of the server; empty: the system's")
    username: str = _key("", "to log in with, with password_file; empty: no login")
    password_file: str = _key("", "file that holds the password")
    timeout_s: float = _key(30.0, "seconds after which the server is given up", low=0.1, high=86400)
    sender: str = _key("", "address that mail comes from; empty: almanac at this host's name")
    recipient: str = _key("{user}", "address of a user: {user} is their name, as in {user}@example.org")
    frequency: str = _key("every", "for users who have not chosen: every (GPU job), digest (weekly), off")
    min_elapsed_s: int = _key(60, "shorter jobs get no mail of their own; the weekly digest counts them", low=0)
    storm: int = _key(5, "more reports of one user at once than this become one mail; an array always does", low=1)
    wait_s: int = _key(1800, "seconds after a job's end for which its report waits for telemetry", low=0)
    array_wait_hours: int = _key(24, "hours after its end for which an array's task waits for the others", low=0)
    spool_dir: str = _key("/var/spool/almanac/ended", "where almanac-ended.sh says that a job has ended; need not be")
    per_minute: int = _key(300, "mails that the server gets within a minute, at most", low=1)
    per_user_hour: int = _key(20, "mails that one user gets within an hour, at most; the others wait", low=1)
    give_up_hours: int = _key(72, "hours after which a mail that the server does not take is given up", low=1)
    keep_days: int = _key(90, "days for which the outbox remembers what was sent", low=1)


@dataclass(frozen=True)
class Config:
    site: Site = Site()
    store: StoreSection = StoreSection()
    slurm: Slurm = Slurm()
    prometheus: Prometheus = Prometheus()
    bindings: Bindings = Bindings()
    filters: Filters = Filters()
    metrics: MetricsSection = MetricsSection()
    dask: Dask = Dask()
    advice: AdviceSection = AdviceSection()
    rolling: Rolling = Rolling()
    training: Training = Training()
    priority: Priority = Priority()  # noqa: RUF009 - frozen
    hooks: Hooks = Hooks()  # noqa: RUF009
    reports: Reports = Reports()
    services: Services = Services()
    cost: Cost = Cost()
    mail: Mail = Mail()
    power: Power = Power()  # noqa: RUF009 - frozen
    tiers: tuple[Tier, ...] = ()
    node_sets: tuple[NodeSet, ...] = ()
    source: str = ""
