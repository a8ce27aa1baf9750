"""MIG profiles of GPU models, from `mig.toml`, and the names that they go by.

A profile is one size of GPU instance. Its name is unique on one model only: "1g.10gb" is the A100-80's 1g, and the
A100-40's 1g with double memory. The nominal name is no capacity.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_PROFILE = re.compile(
    r"(?:.*?[_:. -])??(?:(?P<part>[1-7])c\.)?"
    r"(?P<name>(?P<compute>[1-7])g\.[1-9][0-9]{0,2}gb(?:[+-][a-z.]{2,12})?)",
    re.IGNORECASE | re.ASCII,
)
"""NVML's profile name at the end of a GRES type: "a100_1g.5gb", "nvidia_a100-sxm4-40gb_1g.5gb".

"1c.3g.20gb" is a compute instance: one compute slice of a GPU instance, and all of its memory, shared. ASCII, because
without it [a-z] also takes the Kelvin sign.
"""

_SIZE = re.compile(r"([1-7])g\.([0-9]+)gb(.*)")


@dataclass(frozen=True)
class Profile:
    """A size of GPU instance on one model.

    shape: name within the geometry, such as "1g+me". name: NVIDIA's, such as "1g.10gb+me".
    compute, memory: slices. starts: memory slices that an instance can begin at. most: instances on one GPU.
    has_media: at most one instance with the media extensions fits on a GPU.
    sms: streaming multiprocessors; None where not published. memory_gib: least and greatest size in published
    listings; None where none was found.
    """

    shape: str
    name: str
    compute: int
    memory: int
    starts: tuple[int, ...]
    most: int
    has_media: bool
    sms: int | None
    memory_gib: tuple[float, float] | None


@dataclass(frozen=True)
class MigModel:
    """The profiles of a GPU model, by increasing memory and compute. name: as in hardware.toml, such as "A100-80".

    sms: of the whole GPU without MIG; None where not published. An A100's instances can use 98 of its 108.
    """

    name: str
    geometry: str
    compute_slices: int
    memory_slices: int
    profiles: tuple[Profile, ...]
    source: str
    sms: int | None = None

    def profile(self, name: str) -> Profile | None:
        """The profile of a shape ("1g"), a name ("1g.10gb"), or a GRES type that ends in one ("a100_1g.10gb")."""
        wanted = profile_name(name) or name
        return next((each for each in self.profiles if wanted in (each.name, each.shape)), None)

    @property
    def whole(self) -> Profile:
        """The profile that takes all compute slices."""
        return self.profiles[-1]


@cache
def mig_models() -> dict[str, MigModel]:
    """Every model with MIG, by name such as "A100-80"."""
    tables = tomllib.loads((resources.files("almanac") / "mig.toml").read_text(encoding="utf-8"))
    geometries, models = tables["geometry"], tables["model"]
    return {name: _model(name, row, models[row.get("like", name)], geometries) for name, row in models.items()}


def profile_name(gres_type: str) -> str | None:
    """NVIDIA's profile name in a GRES type or an exporter's label, lower case; None where it names no MIG slice.

    Of a compute instance, the name of its GPU instance.
    """
    found = _PROFILE.fullmatch(gres_type)
    return found["name"].lower() if found else None


def is_same_profile(one: str, other: str) -> bool:
    """Return True if two texts can name one profile: an exporter's gigabytes can be off, as 1g.11gb of 1g.12gb is.

    Profiles of one model with as many compute slices differ by half of their memory or more, or by an extension.
    """
    found = [_SIZE.fullmatch(profile_name(text) or "") for text in (one, other)]
    if not all(found):
        return one == other
    (a, a_gb, a_more), (b, b_gb, b_more) = (match.groups() for match in found if match)
    return (a, a_more) == (b, b_more) and max(int(a_gb), int(b_gb)) < 1.5 * min(int(a_gb), int(b_gb))


def real_profile(named: str | None, model_name: str | None, gres_type: str = "") -> str | None:
    """Return the name of a MIG slice's profile, from the name that an exporter gives it; None where nothing names it.

    Slurm's GRES type wins over the model's nearest profile, and that over the exporter's text.
    """
    asked = profile_name(gres_type)
    if asked and (not named or is_same_profile(asked, named)):
        return asked
    model = mig_models().get(model_name or "")
    if not named or model is None:
        return named
    alike = [profile.name for profile in model.profiles if is_same_profile(profile.name, named)]
    return min(alike, key=lambda name: abs(_gigabytes(name) - _gigabytes(named)), default=named)


def engines_of(profile: str | None, model_name: str | None, total_mib: float | None) -> int | None:
    """Return the compute slices of a MIG slice by its profile; without one, the most that have its measured memory."""
    model = mig_models().get(model_name or "")
    if profile or model is None or total_mib is None:
        return compute_slices(profile or "")
    sizes = [(each.compute, each.memory_gib) for each in model.profiles if each.memory_gib]
    known = [count for count, (low, high) in sizes if 0.97 * low <= total_mib / 1024 <= 1.03 * high]
    return max(known, default=None)


def _gigabytes(profile: str) -> int:
    found = _SIZE.fullmatch(profile_name(profile) or "")
    return int(found[2]) if found else 0


def compute_slices(gres_type: str) -> int | None:
    """Compute slices that a GRES type names; None for one that is no MIG slice."""
    found = _PROFILE.fullmatch(gres_type)
    return int(found["part"] or found["compute"]) if found else None


def _model(name: str, row: dict[str, Any], named: dict[str, Any], geometries: dict[str, Any]) -> MigModel:
    geometry = geometries[named["geometry"]]
    profiles = [_profile(shape, geometry["profiles"][shape], own) for shape, own in named["profiles"].items()]
    return MigModel(
        name=name,
        geometry=named["geometry"],
        compute_slices=geometry["compute_slices"],
        memory_slices=geometry["memory_slices"],
        profiles=tuple(sorted(profiles, key=lambda each: (each.memory, each.compute, each.has_media))),
        source=row["source"],
        sms=named.get("sms", max(profiles, key=lambda each: each.compute).sms),
    )


def _profile(shape: str, geometry: dict[str, Any], own: dict[str, Any]) -> Profile:
    low_high = own["memory_gib"]
    return Profile(
        shape=shape,
        name=own["name"],
        compute=geometry["compute"],
        memory=geometry["memory"],
        starts=tuple(geometry["starts"]),
        most=geometry["most"],
        has_media=geometry.get("media", False),
        sms=own.get("sms"),
        memory_gib=(low_high[0], low_high[1]) if low_high else None,
    )
