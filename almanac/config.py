"""The configuration: one TOML file, every key with a default, unknown keys refused.

Each section is a frozen dataclass; a field's metadata holds its one-line explanation, from which
docs/configuration.md is generated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from almanac.errors import ConfigError

SYSTEM_FILE = Path("/etc/almanac/almanac.toml")


def _key(default: Any, about: str, low: float | None = None, high: float | None = None, is_secret: bool = False) -> Any:
    """A key of a section: its default, its explanation, the least and greatest value; a secret is left out of repr."""
    return field(default=default, repr=not is_secret, metadata={"about": about, "low": low, "high": high})


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
    timeout_s: int = _key(300, "seconds after which a Slurm command is given up", low=1)
    lookback_days: int = _key(30, "days of accounting that the first ingest asks for", low=1)
    window_hours: int = _key(24, "accounting is asked for in windows of this many hours", low=1)
    overlap_hours: int = _key(
        6, "hours before the last read that are read again: slurmdbd can be told late of a job's end", low=1
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
    timeout_s: float = _key(60.0, "seconds after which one query is given up", low=0.1)
    retries: int = _key(4, "further tries of a query that failed, with exponential backoff", low=0)
    chunk_minutes: int = _key(60, "minutes that one query asks for; halved where the server refuses", low=1)
    max_samples: int = _key(5_000_000, "samples that may be held in memory at once", low=1000)
    lookback_days: int = _key(15, "days that the first ingest asks for")
    delay_s: int = _key(60, "newest samples are left for the next run for this many seconds", low=0)
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
        0.2, "newest share of the jobs on which the blend is chosen and scores are taken", low=0.05, high=0.5
    )
    retrain_hours: int = _key(24, "hours between trainings, of the timer and of `almanac evaluate`", low=1)
    max_age_days: int = _key(14, "a model trained longer ago is not used; the rolling estimate serves", low=1)
    keep_versions: int = _key(10, "trained versions that are kept, for going back", low=1)
    seed: int = _key(1, "seed of LightGBM")


@dataclass(frozen=True)
class Priority:
    mode: str = _key("observe", "observe: the term is only shown; apply: Slurm is told, where its weights fit")
    points_per_e: float = _key(
        1000.0, "K of site_factor = C - K ln(GPU-time): points for a job e times as short", low=1, high=1_000_000
    )
    min_gpu_time_s: float = _key(60.0, "shorter GPU-times count as this one, GPU-seconds", low=1)
    max_gpu_time_s: float = _key(8_640_000.0, "longer GPU-times count as this one, GPU-seconds", low=2)
    tau_hours: float = _key(24.0, "hours that a job waits longer for being e times as long: goal of doctor", low=0.1)
    overrun_share: float = _key(
        0.5,
        "a user whose newest runs took twice the expected time in this share is ranked by the interval's upper end; "
        "above 1: never",
        low=0,
        high=2,
    )
    relief_users: tuple[str, ...] = _key((), "users whose jobs get relief_points more (helios-qssf-ces, implication 7)")
    relief_points: int = _key(0, "points for relief_users", low=0, high=1_000_000)
    short_gpu_time_s: float = _key(
        0.0, "jobs predicted to need at most this get short_points more (helios-qssf-ces, implication 6)", low=0
    )
    short_points: int = _key(0, "points for short jobs", low=0, high=1_000_000)


@dataclass(frozen=True)
class Services:
    extra: tuple[str, ...] = _key(
        (), "names of the site's own services (Python entry points almanac.services); others are never loaded"
    )


@dataclass(frozen=True)
class Tier:
    """A kind of GPU memory that can be asked for. Exactly one of constraint, gres and partition selects it."""

    name: str = _key("", "what it is called in advice")
    capacity_mib: int = _key(0, "nominal HBM of one GPU, MiB")
    gpu_model: str = _key("", "row of the hardware table, such as A100-80")
    constraint: str = _key("", "node feature that selects it, such as hbm80g")
    gres: str = _key("", "GRES type that selects it, such as a100_80 of gpu:a100_80:4")
    partition: str = _key("", "partition that selects it")


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
    priority: Priority = Priority()
    services: Services = Services()
    tiers: tuple[Tier, ...] = ()
    source: str = ""


def find_config(explicit: str | None = None) -> Path | None:
    """--config, then $ALMANAC_CONFIG, then /etc, then ~/.config; None where there is none.

    Raises ConfigError where a file was named and is not there.
    """
    for origin, named in (("--config", explicit), ("$ALMANAC_CONFIG", os.environ.get("ALMANAC_CONFIG"))):
        if named:
            if not _is_file(Path(named)):
                raise ConfigError(f"{origin} names {named}, which is not a file", "correct the path, or leave it out")
            return Path(named)
    files = [SYSTEM_FILE]
    with contextlib.suppress(RuntimeError):  # no HOME, and no such user
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        files.append(home / "almanac" / "config.toml")
    return next((path for path in files if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    """Whether a file is there; a folder that may not be looked into holds none."""
    try:
        return path.is_file()
    except OSError:
        return False


def load_config(path: Path | None) -> Config:
    """The configuration of a file, or the defaults. Raises ConfigError naming file, key and remedy."""
    if path is None:
        return Config()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", "make it readable UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}", "correct that line") from error
    return dataclasses.replace(parse_config(data, str(path)), source=str(path))


def parse_config(data: dict[str, Any], where: str = "configuration") -> Config:
    """A Config of parsed TOML. Raises ConfigError."""
    sections = {f.name: f for f in dataclasses.fields(Config) if f.name != "source"}
    _refuse_unknown(data, list(sections), where, "section")
    values: dict[str, Any] = {}
    for name, content in data.items():
        if name == "tiers":
            values[name] = _parse_tiers(content, where)
        elif isinstance(content, dict):
            values[name] = _parse_section(type(sections[name].default), content, f"{where}: [{name}]")
        else:
            raise ConfigError(f"{where}: {name} is {content!r}, expected a section [{name}]", "write it as a table")
    config = Config(**values)
    _check_ranges(config, where)
    return config


def _refuse_unknown(data: dict[str, Any], valid: list[str], where: str, what: str) -> None:
    for key in data:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
            raise ConfigError(
                f"{where}: unknown {what} {key!r}", f"did you mean {near[0]!r}? valid: {', '.join(valid)}"
            )


def _parse_section(cls: type[Any], data: dict[str, Any], where: str) -> Any:
    _refuse_unknown(data, [f.name for f in dataclasses.fields(cls)], where, "key")
    kinds = typing.get_type_hints(cls)
    return cls(**{key: _typed(value, kinds[key], f"{where} {key}") for key, value in data.items()})


def _typed(value: Any, kind: Any, where: str) -> Any:
    if isinstance(kind, types.GenericAlias):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{where} is {value!r}, expected a list of strings", 'write ["a", "b"]')
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}, expected {kind.__name__}", "correct the value's type")
    return value


def _parse_tiers(content: Any, where: str) -> tuple[Tier, ...]:
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ConfigError(f"{where}: tiers must be an array of tables", "write each tier under its own [[tiers]]")
    tiers = []
    for number, item in enumerate(content, 1):
        tier: Tier = _parse_section(Tier, item, f"{where}: [[tiers]] number {number}")
        _check_tier(tier, f"{where}: [[tiers]] number {number}")
        tiers.append(tier)
    names = [tier.name for tier in tiers]
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: two tiers have the same name: {names}", "give each tier a name of its own")
    return tuple(sorted(tiers, key=lambda tier: (tier.capacity_mib, tier.name)))


def _check_tier(tier: Tier, where: str) -> None:
    if not tier.name or tier.capacity_mib <= 0:
        raise ConfigError(
            f"{where}: needs a name and a capacity_mib above 0", 'write name = "hbm80g", capacity_mib = 81920'
        )
    selectors = [tier.constraint, tier.gres, tier.partition]
    if sum(map(bool, selectors)) != 1:
        raise ConfigError(
            f"{where} ({tier.name}): {sum(map(bool, selectors))} of constraint, gres and partition are set",
            "set exactly one: it is what selects the tier",
        )


def _check_ranges(config: Config, where: str) -> None:
    for section in (f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default)):
        for key in dataclasses.fields(getattr(config, section)):
            value = getattr(getattr(config, section), key.name)
            low, high = key.metadata["low"], key.metadata["high"]
            if not (low is None or low <= value) or not (high is None or value <= high):
                expected = f"at least {low}" if high is None else f"{low} to {high}"
                raise ConfigError(f"{where}: {section}.{key.name} is {value}, expected {expected}", "correct the value")
    if config.metrics.window_alignment not in ("utc", "job"):
        raise ConfigError(f"{where}: metrics.window_alignment is {config.metrics.window_alignment!r}", "use utc or job")
    if 3600 % config.metrics.window_s:
        raise ConfigError(
            f"{where}: metrics.window_s is {config.metrics.window_s}, which does not divide 3600", "use 60, or 300"
        )
    if config.priority.mode not in ("observe", "apply"):
        raise ConfigError(f"{where}: priority.mode is {config.priority.mode!r}", "use observe or apply")
    if config.priority.min_gpu_time_s >= config.priority.max_gpu_time_s:
        raise ConfigError(f"{where}: priority.min_gpu_time_s is not below max_gpu_time_s", "use such as 60 and 8640000")
    if config.rolling.families not in ("mask", "levenshtein"):
        raise ConfigError(f"{where}: rolling.families is {config.rolling.families!r}", "use mask or levenshtein")
    if config.training.predictor not in ("almanac", "helios"):
        raise ConfigError(f"{where}: training.predictor is {config.training.predictor!r}", "use almanac or helios")
    if config.prometheus.exporter not in ("dcgm", "jobstats"):
        raise ConfigError(f"{where}: prometheus.exporter is {config.prometheus.exporter!r}", "use dcgm or jobstats")
