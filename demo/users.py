"""Users, their job families, who submits what when (with the rhythm of the day and the week), and under which names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np

from demo.shape import GPUS_PER_NODE, Arrays, Bools, Floats, Ints, SiteShape, deal, fill, pack, rank_within

REGULAR, IDLE, STAFF = 0, 1, 2
SUFFIXES = ("-v2", "-final", "_rerun", "-new", "-v3_final")
_FIRST = (  # noqa: SIM905
    "ada ben carl dina emil fay gus hana ivan jo kai lena max nia otto pia quin rosa sam tara uma vik wei xena yan zoe"
).split()
_LAST = (  # noqa: SIM905
    "abel berg cho diaz engel fox gupta hahn ito jung kim lee mori nunez okoye park quist roy silva tan"
).split()
_CODES = (  # noqa: SIM905
    "vasp lammps gromacs cp2k qe namd openmm chroma milc warpx amrex pele nyx castro hacc gyro xgc bert resnet50 "
    "unet3d gpt-neo vit llama esm2 alphafold nerf diffusion gnn mace nequip cosmoflow deepcam fourcastnet orca pyscf"
).split()
_TASKS = (  # noqa: SIM905
    "relax md scf eq prod train finetune eval sweep infer sim ml test-set pretrain mesh restart ensemble scan bench"
).split()
_TEMPLATES: tuple[Callable[[str, int, int, str], str], ...] = (
    lambda stem, n, r, date: f"{stem}-seed{r % 1000}",
    lambda stem, n, r, date: f"{stem}_{n:04d}",
    lambda stem, n, r, date: f"{stem}_{date}",
    lambda stem, n, r, date: f"{stem}-{r:08x}",
    lambda stem, n, r, date: f"{stem}.{n}",
    lambda stem, n, r, date: stem,
    lambda stem, n, r, date: f"run{n}_{stem}",
    lambda stem, n, r, date: f"{stem}_lr1e-{1 + r % 5}_bs{16 << r % 4}",
    lambda stem, n, r, date: f"{stem}_{date}_{n:02d}",
)
"""Job names as people write them, with seeds, dates, numbers, and hashes."""


def make_users(shape: SiteShape, profile: Any, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Users, and one to six families of each; a share of the users joins in the course of the span. User 0 is staff.

    framework: index into the profile's memory.preallocate, -1 for none.
    """
    people, users = profile.people, shape.users
    is_new = (rng.random(users) < people.new_share) & (np.arange(users) > 0)
    joins = shape.start_s + np.where(is_new, rng.uniform(0.2, 0.9, users), 0.0) * (shape.end_s - shape.start_s)
    low, high = people.families_per_user
    per_user = rng.integers(low, high + 1, users)
    user = np.concatenate([np.repeat(np.arange(users), per_user), rng.integers(1, users, 2)])
    role = np.where(user == 0, STAFF, REGULAR)
    role[-2:] = IDLE
    everybody = Arrays(
        name=np.array([_user_name(number) for number in range(users)], dtype=object),
        account=np.array(["nstaff", *(f"m{rng.integers(1000, 4999)}" for _ in range(1, users))], dtype=object),
        first_s=joins.astype(np.int64),
        weight=np.minimum(rng.lognormal(0.0, 0.8, users), 4.0),
        framework=_frameworks(profile, rng, users),
    )
    weight = np.minimum(rng.lognormal(0.0, 0.8, len(user)), 4.0)
    array_share = np.where(rng.random(len(user)) < 2 * people.array_share, 0.5, 0.0)
    return everybody, Arrays(user=user, role=role, weight=weight, array_share=array_share)


def _user_name(number: int) -> str:
    """Names differ: a number is added from the second round on."""
    around, place = divmod(number, len(_FIRST) * len(_LAST))
    name = f"{_FIRST[place % len(_FIRST)]}{_LAST[place // len(_FIRST)]}"
    return f"{name}{around + 1}" if around else name


def _frameworks(profile: Any, rng: np.random.Generator, users: int) -> Ints:
    """At least one user for each framework that preallocates, where there are users enough."""
    framework = np.full(users, -1)
    free = iter(rng.permutation(np.arange(1, users)))
    for number, kind in enumerate(profile.memory.preallocate):
        for _ in range(max(1, round(kind.users * users))):
            framework[next(free, 0)] = number
    return framework


def make_submissions(
    shape: SiteShape, profile: Any, users: Arrays, families: Arrays, rng: np.random.Generator
) -> Arrays:
    """shape.job_count jobs in order of submission, in sessions of one family each; some sessions are one job array.

    array: -1, or the number of the array that the job is a task of.
    """
    mean, wanted = profile.people.session_jobs_mean, shape.job_count
    sessions = int(wanted / mean * 1.3) + 20
    family = rng.choice(len(families.user), sessions, p=_session_shares(profile, users, families))
    size = rng.geometric(1 / mean, sessions)
    begin_s = _session_times(shape, profile, users.first_s[families.user[family]], rng)
    keep = np.cumsum(size) - size < wanted
    family, size, begin_s = family[keep], size[keep], begin_s[keep]
    is_array = (rng.random(len(family)) < families.array_share[family]) & (size > 1)
    session = np.repeat(np.arange(len(size)), size)
    gaps = rng.exponential(profile.people.within_session_gap_s, len(session))
    rank, _ = rank_within(session)
    gaps[(rank == 0) | is_array[session]] = 0.0
    total = np.cumsum(gaps)
    since_begin = total - total[rank == 0][session]
    submit_s = np.minimum((begin_s[session] + since_begin).astype(np.int64), shape.end_s - 1)
    order = np.lexsort((rank, session, submit_s))[:wanted]
    array = np.where(is_array[session], session, -1)
    return Arrays(family=family[session], submit_s=submit_s, array=array, task=rank).take(order)


def _session_shares(profile: Any, users: Arrays, families: Arrays) -> Floats:
    weight = users.weight[families.user] * families.weight
    weight[families.role != REGULAR] = 0.0
    weight = np.minimum(weight / weight.sum(), 0.02)
    weight /= weight.sum()
    for role, share in ((IDLE, profile.people.idle_job_share), (STAFF, profile.people.staff_job_share)):
        members = families.role == role
        weight[members] = share / members.sum()
    shares: Floats = weight / weight.sum()
    return shares


def _session_times(shape: SiteShape, profile: Any, first_s: Ints, rng: np.random.Generator) -> Floats:
    """Begin of each session, not before first_s, by the inverse of the cumulated weight of the hours."""
    hours = np.arange(max(1, int(np.ceil((shape.end_s - shape.start_s) / 3600))))
    at_s = shape.start_s + hours * 3600
    weekday = hours // 24 % 7  # the first day counts as a Monday: equal shapes give equal jobs, whatever the date
    of_day, of_week = np.array(profile.people.hours), np.array(profile.people.weekdays)
    passed = np.concatenate([[0.0], np.cumsum(of_day[at_s // 3600 % 24] * of_week[weekday])])
    edges = np.concatenate([at_s, [shape.end_s]]).astype(float)
    least = np.interp(first_s, edges, passed) / passed[-1]
    begin_s: Floats = np.interp((least + rng.random(len(first_s)) * (1 - least)) * passed[-1], passed, edges)
    return begin_s


def job_names(families: Arrays, jobs: Arrays, rng: np.random.Generator) -> list[str]:
    """A name for each job: one stem per family, with parts and suffixes that vary."""
    stems = _family_stems(families.user, rng)
    template = rng.integers(0, len(_TEMPLATES), len(stems))[jobs.family].tolist()
    dates = np.char.replace(np.datetime_as_string(jobs.submit_s.astype("datetime64[s]"), unit="D"), "-", "")
    numbers = rng.integers(0, 2**32, len(jobs.family)).tolist()
    names = []
    for job, (rank, number) in enumerate(zip(jobs.rank.tolist(), numbers, strict=True)):
        name = _TEMPLATES[template[job]](stems[jobs.family[job]], rank, number, str(dates[job]))
        ending = "-debug" if jobs.is_debug[job] else SUFFIXES[jobs.suffix[job]] if jobs.suffix[job] >= 0 else ""
        names.append(name + ending)
    return names


def _family_stems(family_user: Ints, rng: np.random.Generator) -> list[str]:
    """A stem for each family; the families of one user differ."""
    taken: set[tuple[int, str]] = set()
    stems = []
    for user in family_user.tolist():
        stem = ""
        while not stem or (user, stem) in taken:
            code, task = _CODES[rng.integers(len(_CODES))], _TASKS[rng.integers(len(_TASKS))]
            stem = f"{code}{'-_'[rng.integers(2)]}{task}"
        taken.add((user, stem))
        stems.append(stem)
    return stems


def job_scripts(shape: SiteShape, profile: Any, users: Arrays, families: Arrays, family: Ints) -> list[str | None]:
    """A key of the script that each job runs, as accounting's hash tells it; None without one.

    Mostly one script a family, unless its user has a launcher. Nothing else of the site depends on them.
    """
    rng, shares = np.random.default_rng([shape.seed, 29]), profile.scripts
    is_launcher: Bools = rng.random(len(users.name)) < shares.launcher_share
    is_unscripted: Bools = rng.random(len(families.user)) < shares.unscripted_share
    is_other: Bools = rng.random(len(family)) < shares.other_share
    keys: list[str | None] = []
    for number, other in zip(family.tolist(), is_other.tolist(), strict=True):
        user = int(families.user[number])
        script = "launcher" if is_launcher[user] else f"{number} {other}"
        key = hashlib.sha256(f"{users.name[user]} {script}".encode()).hexdigest()[:16]
        keys.append(None if is_unscripted[number] else key)
    return keys


NO_TIER, TIER_40, TIER_80 = 0, 1, 2
MIB_40, MIB_80 = 40960.0, 81920.0
_ONE_GPU_MOST = 0.34  # quantile of the four-GPU curve below which one GPU alone can make the mean


def with_traits(
    shape: SiteShape, profile: Any, users: Arrays, families: Arrays, counts: Ints, rng: np.random.Generator
) -> Arrays:
    """The families with their traits. counts: jobs per family.

    Idle and staff families get traits too, but do not take from the shares. *_low and *_width: the family's stretch of
    a quantile curve. need_mib: usual HBM peak of the busiest GPU; need_low/high_mib: limits of its band; grow_mib:
    (families, 2), first and last need of a growing family.
    """
    regular = np.where(families.role == REGULAR, counts, 0)
    framework = users.framework[families.user]
    tier, growing = _tiers(shape, profile, regular, framework, rng)
    size_bin, nodes = _sizes(shape, profile, regular, tier, rng)
    sigma = profile.duration.family_log_sigma(rng.random(len(counts)))
    log_median = _log_medians(profile, regular, nodes, sigma, rng)
    counted = np.rint(regular * _share_counted(shape, profile, regular, nodes, log_median, sigma)).astype(np.int64)
    combo = deal(counted, [each.share for each in profile.pipes.combos])
    combos = [profile.pipes.combos[number] for number in combo]
    # Only what uses the FP64 pipe can be compute-bound by FP64 arithmetic intensity.
    fp64_jobs = np.where(["fp64" in each.pipes for each in combos], counted, 0)
    compute = fill(fp64_jobs, rng.permutation(len(counts)), profile.pipes.compute_bound_share * counted.sum())
    one_gpu = _one_gpu(profile, counted, size_bin, [each.pipes == ["tensor"] for each in combos], compute, rng)
    # Compute-bound jobs lean low (Cankur et al., VII).
    lean = np.array([each.lean for each in combos]) - 1.2 * compute
    util_low, util_width = _utilization(counted, size_bin, lean, one_gpu, rng)
    need, low, high = _needs(profile, counted, tier, growing, framework, rng)
    of_80, of_40 = np.array(profile.memory.grow_80) * MIB_80, np.array(profile.memory.grow_40) * MIB_40
    return families.replaced(
        tier=tier, size_bin=size_bin, nodes=nodes, combo=combo, is_compute_bound=compute, is_one_gpu=one_gpu,
        util_low=util_low, util_width=util_width, imbalance_share=rng.random(len(counts)), log_median=log_median,
        log_sigma=sigma, limit_factor=profile.duration.limit_factor(rng.random(len(counts))), framework=framework,
        is_growing=growing, grow_mib=np.where((tier == TIER_80)[:, None], of_80, of_40), need_mib=need,
        need_low_mib=low, need_high_mib=high, need_spread=profile.memory.family_spread(rng.random(len(counts))),
    )  # fmt: skip


def _tiers(
    shape: SiteShape, profile: Any, counts: Ints, framework: Ints, rng: np.random.Generator
) -> tuple[Ints, Bools]:
    """The tier each family asks for, and whether its need grows. No family is a large part of the 80 GB jobs."""
    memory, order, total = profile.memory, rng.permutation(len(counts)), counts.sum()
    share = memory.tier80_request_share if shape.tier80_request_share is None else shape.tier80_request_share
    wanted = share * total if shape.nodes_80 else 0.0
    small = np.where(counts <= max(0.08 * wanted, 3), counts, 0)
    asks_80 = np.zeros(len(counts), dtype=bool)
    for number in range(len(memory.preallocate)):
        asks_80 |= fill(np.where(framework == number, small, 0), order, 0.08 * wanted)
    free = np.where(framework < 0, small, 0)
    growing = fill(np.where(free >= 8, free, 0), order, 0.12 * wanted)
    rest = wanted - counts[asks_80 | growing].sum()
    asks_80 |= growing | fill(np.where(growing, 0, free), order, rest)
    others = np.where(asks_80 | (framework >= 0), 0, counts)
    asks_40 = fill(others, rng.permutation(len(counts)), memory.tier40_request_share * total)
    growing |= fill(np.where(others >= 8, others, 0), rng.permutation(len(counts)), memory.growing_share * total)
    return np.where(asks_80, TIER_80, np.where(asks_40, TIER_40, NO_TIER)), growing


def size_bins(shape: SiteShape, profile: Any) -> list[Any]:
    """The bins that fit the site, with their curve `util`; the shares of others go to the largest that does."""
    limit = _largest_nodes(shape) * GPUS_PER_NODE
    bins = profile.size.bins
    fitting = [each for number, each in enumerate(bins) if number == 0 or each.low <= limit]
    rest = sum(each.share for each in bins[len(fitting) :])
    shares = [each.share + (rest if each is fitting[-1] else 0) for each in fitting]
    return [
        SimpleNamespace(low=each.low, high=each.high, share=share, util=getattr(profile.utilization, each.util))
        for each, share in zip(fitting, shares, strict=True)
    ]


def _largest_nodes(shape: SiteShape) -> int:
    """Nodes of the largest job that the site takes."""
    pool = max(shape.nodes_40, shape.nodes_80)
    return min(shape.max_nodes, pool) if shape.max_nodes else pool


def _sizes(shape: SiteShape, profile: Any, counts: Ints, tier: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Size bin and nodes of each family; what asks for a tier fits into that tier's nodes."""
    bins = size_bins(shape, profile)
    quarter = max(1, shape.nodes_80 // 4)  # larger ones would wait for each other for days
    pool = np.array([max(shape.nodes_40, shape.nodes_80), shape.nodes_40 or shape.nodes_80, quarter])
    limit = np.minimum(_largest_nodes(shape), pool[tier])
    least = np.array([-(-each.low // GPUS_PER_NODE) for each in bins])
    most = np.array([max(1, each.high // GPUS_PER_NODE) for each in bins])
    chosen = deal(counts, [each.share for each in bins], allowed=least[None, :] <= limit[:, None])
    low, high = least[chosen], np.minimum(most[chosen], limit)
    drawn = np.exp(np.log(low) + rng.random(len(counts)) ** 1.5 * np.log(np.maximum(high, low) / low))
    nodes = np.where(rng.random(len(counts)) < 0.7, 2 ** np.rint(np.log2(drawn)), np.rint(drawn))
    return chosen, np.clip(nodes, low, np.maximum(high, low)).astype(np.int64)


def _one_gpu(
    profile: Any, counts: Ints, size_bin: Ints, is_tensor_only: list[bool], compute: Bools, rng: np.random.Generator
) -> Bools:
    """Families that use one of four GPUs: tensor-only and compute-bound ones first (Cankur et al., VI)."""
    one_node = np.where(size_bin == 0, counts, 0)
    score = 3 * np.array(is_tensor_only) + 1.2 * compute + rng.normal(0.0, 1.0, len(counts))
    return fill(one_node, np.argsort(-score), profile.utilization.one_gpu_share * one_node.sum())


def _utilization(
    counts: Ints, size_bin: Ints, lean: Floats, one_gpu: Bools, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Stretch of each family on its size bin's curve. lean: above 0 means more utilization than others."""
    score = lean + rng.normal(0.0, 1.0, len(counts))
    low, width = np.zeros(len(counts)), np.zeros(len(counts))
    for number in np.unique(size_bin):
        members = size_bin == number
        size = np.where(members, counts, 0)
        place, _ = pack(np.where(one_gpu, 0, size), score)
        share = size[one_gpu].sum() / max(1, size.sum())
        others_below = (_ONE_GPU_MOST - share) / max(1e-9, 1 - share)
        blended = np.interp(place, [0, max(others_below, 1e-6), 1], [0, _ONE_GPU_MOST, 1])
        blended = np.where(one_gpu, rng.random(len(counts)) * _ONE_GPU_MOST, blended)
        bin_low, bin_width = pack(size, np.where(members, blended, 2.0))
        low[members], width[members] = bin_low[members], bin_width[members]
    return low, width


def _log_medians(profile: Any, counts: Ints, nodes: Ints, sigma: Floats, rng: np.random.Generator) -> Floats:
    """Logarithm of each family's usual run time, up to a factor common to its group (one node, several)."""
    log_median = np.zeros(len(counts))
    for several, spread in enumerate((profile.duration.one_node_log_sigma, profile.duration.multi_node_log_sigma)):
        members = (nodes > 1) == bool(several)
        size = np.where(members, counts, 0)
        low, width = pack(size, rng.random(len(counts)))
        within = float((size * sigma**2).sum() / max(1, size.sum()))
        between = max(0.05, spread**2 - within) ** 0.5
        middle = np.clip(low + width / 2, 0.002, 0.998)
        values = np.array([NormalDist().inv_cdf(float(each)) for each in middle]) * between
        log_median = np.where(members, values, log_median)
    return log_median


def _share_counted(
    shape: SiteShape, profile: Any, counts: Ints, nodes: Ints, log_median: Floats, sigma: Floats
) -> Floats:
    """Share of each family's jobs that will be long enough to count in the published shares."""
    durations, share = profile.duration, np.ones(len(counts))
    for several, mean_s in enumerate((durations.one_node_mean_s, durations.multi_node_mean_s)):
        members = (nodes > 1) == bool(several)
        size = np.where(members, counts, 0)
        unscaled = (size * np.exp(log_median + sigma**2 / 2)).sum() / max(1, size.sum())
        margin = log_median + np.log(mean_s * shape.duration_scale / max(unscaled, 1e-9) / durations.mean_from_s)
        above = np.array([NormalDist().cdf(float(each)) for each in margin / sigma])
        share = np.where(members, above, share)
    return share


def _needs(
    profile: Any, counts: Ints, tier: Ints, growing: Bools, framework: Ints, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Usual need, and the limits of the band it stays in, MiB. Of preallocating families: what they would need."""
    memory, families = profile.memory, len(counts)
    plain = (framework < 0) & ~growing
    place, width = pack(np.where((tier != TIER_80) & plain, counts, 0), rng.random(families))
    need = memory.other_40(place + width / 2) * MIB_40
    low, high = np.full(families, 300.0), np.full(families, memory.most_frac * MIB_40)
    unaware = fill(np.where((tier == NO_TIER) & plain, counts, 0), rng.permutation(families),
                   memory.unaware_share * counts.sum())  # fmt: skip
    need = np.where(unaware, rng.uniform(1.1, 1.7, families) * MIB_40, need)
    high = np.where(unaware, memory.most_frac * MIB_80, high)
    bands = np.array(memory.bands_80)
    asks = np.where(tier == TIER_80, counts, 0)
    band = deal(np.where(plain, asks, 0), list(bands[:, 2]), _held_by_others(profile, asks, growing, framework))
    for number, (least, most, _) in enumerate(bands):
        members = (tier == TIER_80) & plain & (band == number)
        place, width = pack(np.where(members, counts, 0), rng.random(families))
        usual = (least + (most - least) * (place + width / 2)) * MIB_80
        need, low = np.where(members, usual, need), np.where(members, least * MIB_80, low)
        high = np.where(members, most * MIB_80 - 20, high)
    need = np.where(framework >= 0, rng.uniform(0.05, 0.6, families) * MIB_40, need)
    return need, low, high


def _held_by_others(profile: Any, asks_80: Ints, growing: Bools, framework: Ints) -> Floats:
    """Jobs per band of the 80 GB requests whose peaks are not dealt: preallocating and growing families."""
    bands = np.array(profile.memory.bands_80)
    held = np.zeros(len(bands))
    for number, kind in enumerate(profile.memory.preallocate):
        inside = (bands[:, 0] <= kind.frac) & (kind.frac < bands[:, 1])
        held += inside * asks_80[framework == number].sum()
    first, last = profile.memory.grow_80
    overlap = np.minimum(bands[:, 1], last) - np.maximum(bands[:, 0], first)
    held += np.maximum(overlap, 0) / (last - first) * asks_80[growing & (framework < 0)].sum()
    return held
