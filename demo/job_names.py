"""Job names as people write them: one stem per family, with seeds, dates, numbers, hashes and suffixes that vary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from demo.profile import Bools, Ints

_CODES = (  # noqa: SIM905
    "vasp lammps gromacs cp2k qe namd openmm chroma milc warpx amrex pele nyx castro hacc gyro xgc bert resnet50 "
    "unet3d gpt-neo vit llama esm2 alphafold nerf diffusion gnn mace nequip cosmoflow deepcam fourcastnet orca pyscf"
).split()
_TASKS = (  # noqa: SIM905
    "relax md scf eq prod train finetune eval sweep infer sim ml test-set pretrain mesh restart ensemble scan bench"
).split()
SUFFIXES = ("-v2", "-final", "_rerun", "-new", "-v3_final")
DEBUG_SUFFIX = "-debug"

_Template = Callable[[str, int, int, str, str], str]
TEMPLATES: tuple[_Template, ...] = (
    lambda stem, n, r, date, digest: f"{stem}-seed{r % 1000}",
    lambda stem, n, r, date, digest: f"{stem}_{n:04d}",
    lambda stem, n, r, date, digest: f"{stem}_{date}",
    lambda stem, n, r, date, digest: f"{stem}-{digest}",
    lambda stem, n, r, date, digest: f"{stem}.{n}",
    lambda stem, n, r, date, digest: stem,
    lambda stem, n, r, date, digest: f"run{n}_{stem}",
    lambda stem, n, r, date, digest: f"{stem}_lr1e-{1 + r % 5}_bs{16 << r % 4}",
    lambda stem, n, r, date, digest: f"{stem}_{date}_{n:02d}",
)


def family_stems(family_user: Ints, rng: np.random.Generator) -> list[str]:
    """A stem for each family; the families of one user differ."""
    used: dict[int, set[str]] = {}
    stems = []
    for user in family_user.tolist():
        taken = used.setdefault(user, set())
        stem = ""
        while not stem or stem in taken:
            code, task = _CODES[rng.integers(len(_CODES))], _TASKS[rng.integers(len(_TASKS))]
            stem = f"{code}{'-_'[rng.integers(2)]}{task}"
        taken.add(stem)
        stems.append(stem)
    return stems


def job_names(
    stems: list[str], family: Ints, submit_s: Ints, rank: Ints, is_debug: Bools, suffix: Ints, rng: np.random.Generator
) -> list[str]:
    """A name for each job. rank: its number within the family; suffix: index into SUFFIXES, -1 for none."""
    template = rng.integers(0, len(TEMPLATES), len(stems))[family].tolist()
    dates = np.datetime_as_string(submit_s.astype("datetime64[s]"), unit="D")
    dates = np.char.replace(dates, "-", "")
    numbers = rng.integers(0, 2**32, len(family)).tolist()
    names = []
    for job, (number, random) in enumerate(zip(rank.tolist(), numbers, strict=True)):
        stem = stems[family[job]]
        name = TEMPLATES[template[job]](stem, number, random, str(dates[job]), f"{random:08x}")
        if is_debug[job]:
            name += DEBUG_SUFFIX
        elif suffix[job] >= 0:
            name += SUFFIXES[suffix[job]]
        names.append(name)
    return names
