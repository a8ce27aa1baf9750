"""Records that the layers hand to each other: all frozen but `Counts`, with at most small methods of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from almanac.names import SCRIPT_PREFIX, is_family, name_key

SITE_FACTOR_KEY = "term"
"""Key of the site factor in JSON output and published files. Their readers expect this name."""
DurationCase = Literal["name", "user", "user, any size", "site", "site, any size"]
MemoryScope = Literal["family", "similar", "script"]
TierReason = Literal[
    "no GPU", "no tiers", "no evidence", "paused", "ran out", "none large enough", "choice", "fits", "smaller",
    "larger", "name it", "not rewritable",
]  # fmt: skip
"""Reasons to advise a tier, or none; advisor.memory.tier has the constants."""


@dataclass
class Counts:
    """The fate of the records of one run. Nothing is lost silently: seen == kept + sum(dropped).

    notes: what records that were kept lack, such as a name.
    """

    seen: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, number: int = 1, example: str = "") -> None:
        """Count `number` records as not kept, with the first example of each reason for the message."""
        if number:
            self.dropped[reason] += number
            self.examples.setdefault(reason, example)

    def note(self, what: str, number: int = 1, example: str = "") -> None:
        """Count `number` records that are kept although something is missing from them."""
        if number:
            self.notes[what] += number
            self.examples.setdefault(what, example)

    def add(self, other: Counts) -> None:
        self.seen += other.seen
        self.kept += other.kept
        self.dropped.update(other.dropped)
        self.notes.update(other.notes)
        for reason, example in other.examples.items():
            self.examples.setdefault(reason, example)


@dataclass(frozen=True)
class JobRequest:
    """One submission, as known at submit time. Counts are of the whole job (one array task).

    script_key: of slurm.sbatch; "" if no script is known. rule: key of the workflow's rule that the
    job's comment names (almanac.names.rule_key); "" or "-" without one. gpu_options: options but --gres that name
    GPUs, with their texts. may_use_more: the job can get more GPUs than gpu_count, or whole nodes, because its numbers
    of nodes and tasks leave that open.
    """

    user: str
    job_name: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    constraints: str = ""
    gres: str = ""
    gpu_count: int = 0
    gpu_type: str = ""
    node_count: int = 1
    cpu_count: int = 1
    time_limit_s: int | None = None
    is_array: bool = False
    submit_s: int = 0
    script_key: str = ""
    gpu_options: tuple[tuple[str, str], ...] = ()
    may_use_more: bool = False
    rule: str = ""

    @property
    def name_key(self) -> str:
        """The family key: of the name, else of the rule, else of the script; "-" is no family."""
        own = name_key(self.job_name)
        if is_family(own):
            return own
        return self.rule if is_family(self.rule) else f"{SCRIPT_PREFIX}{self.script_key}" if self.script_key else own

    @property
    def is_one_gpu(self) -> bool:
        """True if the job surely uses one GPU on one node. Only such a job can use a MIG slice."""
        return self.gpu_count == 1 and self.node_count <= 1 and not self.may_use_more


MAX_SPAN = 30
"""A wider interval of a duration (its end divided by its start) is not shown: "10 min to 5 h" helps nobody."""


@dataclass(frozen=True)
class Duration:
    """A predicted run time, seconds, and GPU-time, GPU-seconds.

    rolling_s and model_s are the two estimates blended; model_s is None without a trained model.
    case names the rolling estimate's case: "name", "user" or "site" (Hu et al., SC'21, algorithm 1).
    low_s and high_s bound 80% of such jobs; None without a trained model.
    """

    duration_s: float
    gpu_time_s: float
    rolling_s: float
    model_s: float | None
    case: DurationCase
    runs: int
    low_s: float | None = None
    high_s: float | None = None

    @property
    def is_regular(self) -> bool:
        """True if the interval is narrow enough to show: its end is at most MAX_SPAN times its start."""
        return self.low_s is not None and self.high_s is not None and self.high_s <= MAX_SPAN * self.low_s


@dataclass(frozen=True)
class MemoryBound:
    """An upper bound of the peak memory of one GPU, MiB, exceeded with probability at most `risk`.

    bound_mib: None where runs differ too much, or the history is too short, to state a bound; a tier can still be
    advised. tier_mib: what a tier must hold, MiB, so that jobs exceed the tiers advised with probability at most
    `risk`. The risk holds for all jobs of the evidence class together, not for one family. highest_mib: the highest
    measured peak of the `runs`. scope: "family", "similar" (names like it), or "script" (runs of the same script under
    other names).
    """

    bound_mib: float | None
    tier_mib: float
    risk: float
    highest_mib: float
    runs: int
    scope: MemoryScope
    evidence_class: str


@dataclass(frozen=True)
class MemoryEvidence:
    """The runs behind a memory advice. since_s, until_s: ends of the oldest and the newest run, s since 1970.

    ran_out_mib: capacity of the GPUs on which a run of the family seems to have run out of memory; ran_out_s: when the
    last one did. paused_until_s: no advice before then, because it happened on a smaller tier than before.
    changes_above_mib: a peak above this would lead to another tier; None if no bound leads to a tier.
    """

    scope: MemoryScope
    runs: int
    since_s: int | None = None
    until_s: int | None = None
    newest_peaks_mib: tuple[float, ...] = ()
    ran_out_mib: float | None = None
    ran_out_s: int | None = None
    paused_until_s: int | None = None
    changes_above_mib: float | None = None


@dataclass(frozen=True)
class HostOption:
    """Another size of a resource of the host to ask for. resource: "memory" (MiB) or "cpus".

    option: as typed. size: of the option; given: what the job had; highest: the highest need of the `runs` of its
    family. risk: accepted probability that such a job needs more than size.
    """

    resource: str
    option: str
    size: float
    given: float
    highest: float
    runs: int
    risk: float


WAIT_DIFFERENCE_S, WAIT_DIFFERENCE_FRAC = 60.0, 0.2
"""A gain is said if it is more than this, and more than this share of the usual wait (almanac's own choice)."""


@dataclass(frozen=True)
class WaitGain:
    """Seconds by which a job starts sooner in the advised tier than in `asked`: at least half of `pairs` jobs did."""

    asked: str
    pairs: int
    gain_s: float


def gain_text(earlier: str, gpus: int, freed: str) -> str:
    """Say what a change gains the user: "it starts about 40 min earlier (half of such jobs did) and frees 3 hbm80g".

    earlier: the time; freed: the larger tier that is not used. "" for what is not known, and without either.
    """
    starts = [f"starts about {earlier} earlier (half of such jobs did)"] if earlier else []
    frees = [f"frees {gpus} {freed} for others"] if freed else []
    return f"it {' and '.join([*starts, *frees])}" if starts or frees else ""


@dataclass(frozen=True)
class TierAdvice:
    """The tier to ask for, None without advice; reason says why. rewrite: the sbatch option to use.

    holds_bound: False if the memory bound cannot be stated or is larger than the tier advised. slow_down: run time on
    the advised MIG slice, as a multiple of that on a whole GPU; None for a whole GPU, and if unknown. no_slice: why no
    smaller MIG slice is advised, although one holds the bound; else "". pilot: jobs that may still follow the advice
    before one of those open has shown its memory; None: any number.
    """

    tier: str | None
    reason: TierReason
    requested_tier: str | None = None
    is_change: bool = False
    rewrite: str | None = None
    note: str = ""
    holds_bound: bool = True
    slow_down: float | None = None
    no_slice: str = ""
    pilot: int | None = None

    @property
    def is_held(self) -> bool:
        """True if too many jobs follow this advice already whose memory is not known."""
        return self.pilot is not None and self.pilot <= 0 and self.is_change and self.reason != "larger"


@dataclass(frozen=True)
class PriorityAdvice:
    """The site factor of a job, and what it rests on.

    site_factor: 0 or more; jobs with a greater one start earlier. gpu_time_s: the predicted GPU-time behind it,
    GPU-seconds. rank_gpu_time_s: the GPU-time from which the site factor is computed. share_longer: share of recent
    jobs that rank behind it. worth_wait_s: lead over a typical (median) recent job, seconds of waiting; negative behind
    it. Both are None without recent jobs. is_cautious: more than the predicted time counted, because the user's runs
    overrun. extra: the points that options of the site add.
    """

    site_factor: int
    gpu_time_s: float
    share_longer: float | None
    worth_wait_s: float | None
    is_cautious: bool = False
    extra: int = 0
    rank_gpu_time_s: float = field(default=0.0, compare=False)  # not in published files

    def to_table(self) -> dict[str, object]:
        """Plain values for JSON output and published files. Older programs do not know rank_gpu_time_s."""
        values = asdict(self)
        del values["rank_gpu_time_s"]
        return {SITE_FACTOR_KEY: values.pop("site_factor"), **values}

    @classmethod
    def from_table(cls, values: Mapping[str, Any]) -> PriorityAdvice:
        """The advice of to_table. Raises KeyError or TypeError for other keys."""
        others = {name: value for name, value in values.items() if name != SITE_FACTOR_KEY}
        return cls(values[SITE_FACTOR_KEY], **others)


@dataclass(frozen=True)
class Advice:
    """The advice for one submission; advisor.explain renders it.

    gains: of the advised tier over others.
    excluded: excluded runs by reason. services: results of the site's own services, by name.
    """

    request: JobRequest
    tier: TierAdvice
    bound: MemoryBound | None = None
    duration: Duration | None = None
    priority: PriorityAdvice | None = None
    excluded: Mapping[str, int] = field(default_factory=dict)
    evidence: MemoryEvidence | None = None
    gains: tuple[WaitGain, ...] = ()
    services: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_evidence(self) -> bool:
        """True if the history has jobs of this user to learn from."""
        return self.bound is not None or (self.duration is not None and self.duration.case != "site")
