"""GPU models: peaks from `hardware.toml` and the configuration, MIG profiles from `mig.toml`, and the names of both.

A model that is not in a table has no peaks or no profiles. A profile is one size of GPU instance. Its name is unique on
one model only: "1g.10gb" is the A100-80's 1g, and the A100-40's 1g with double memory. The nominal name is no capacity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from almanac.units import printable

_PROFILE = re.compile(
    r"(?:.*?[_:. -])??(?:(?P<part>[1-7])c\.)?"
    r"(?P<name>(?P<compute>[1-7])g\.[1-9][0-9]{0,2}gb(?:[+-][a-z.]{2,12})?)",
    re.IGNORECASE | re.ASCII,
)
"""NVML's profile name at the end of a GRES type: "a100_1g.5gb", "nvidia_a100-sxm4-40gb_1g.5gb".

"1c.3g.20gb" is a compute instance: one compute slice of a GPU instance, and all of its memory, shared. ASCII, because
without it [a-z] also takes the Kelvin sign.
"""

NEAR = 0.15
"""The memory of a GPU as sold and as measured differ by less than this share: ECC and the driver take some."""
_SIZE = re.compile(r"([1-7])g\.([0-9]+)gb(.*)")


@dataclass(frozen=True)
class MigProfile:
    """A size of GPU instance on one model.

    shape: name within the geometry, such as "1g+me". name: NVIDIA's, such as "1g.10gb+me".
    compute, memory: slices. starts: memory slices that an instance can begin at. most: instances on one GPU.
    has_media: at most one instance with the media extensions fits on a GPU.
    sms: streaming multiprocessors; None if not published. memory_gib: least and greatest size in published
    listings; None if none was found.
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
    profiles: tuple[MigProfile, ...]
    source: str
    sms: int | None = None

    def profile(self, name: str) -> MigProfile | None:
        """The profile of a shape ("1g"), a name ("1g.10gb"), or a GRES type that ends in one ("a100_1g.10gb")."""
        wanted = profile_name(name) or name
        return next((each for each in self.profiles if wanted in (each.name, each.shape)), None)

    @property
    def whole(self) -> MigProfile:
        """The profile that takes all compute slices."""
        return self.profiles[-1]


@cache
def mig_models() -> dict[str, MigModel]:
    """Every model with MIG, by name such as "A100-80"."""
    import tomllib
    from importlib import resources  # late: sbatch-almanac seldom reads the table

    tables = tomllib.loads((resources.files("almanac") / "mig.toml").read_text(encoding="utf-8"))
    geometries, models = tables["geometry"], tables["model"]
    return {name: _model(name, row, models[row.get("like", name)], geometries) for name, row in models.items()}


def profile_name(gres_type: str) -> str | None:
    """NVIDIA's profile name in a GRES type or an exporter's label, lower case; None if it names no MIG slice.

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


def _profile(shape: str, geometry: dict[str, Any], own: dict[str, Any]) -> MigProfile:
    low_high = own["memory_gib"]
    return MigProfile(
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


UNKNOWN_MAX_POWER_W = 2000.0
"""`max_power_w` of a card without a known one."""
_OF_SLICE = re.compile(r"\s+MIG\s+\S+$", re.I)
"""Suffix that NVML appends to the name of a MIG instance: "NVIDIA A100-SXM4-80GB MIG 1g.10gb"."""
_MAKER = re.compile(r"(nvidia|amd|instinct|tesla|quadro|geforce) ")


def _key(default: Any, about: str) -> Any:
    """A key of [[gpu_models]], as almanac.submit_config.key, which imports this module."""
    return field(default=default, metadata={"about": about, "low": None, "high": None})


@dataclass(frozen=True)
class GpuModel:
    """A GPU model that almanac does not know, or knows otherwise: your entry wins over its table.

    Peaks are dense, without sparsity. Leave out what you do not know. What depends on it is then left out too.
    """

    name: str = _key("", "name in tables, and for gpu_model of [[tiers]], such as H100-80")
    labels: tuple[str, ...] = _key((), "names that exporters and Slurm give it, such as NVIDIA H100 80GB HBM3")
    hbm_mib: int = _key(0, "memory, MiB; the measured one must be within 15% of it")
    hbm_bytes_per_s: float | None = _key(None, "bandwidth of the memory, bytes/s")
    fp64_flops: float | None = _key(None, "peak of the FP64 pipe, flop/s")
    fp32_flops: float | None = _key(None, "peak of the FP32 pipe, flop/s")
    fp16_flops: float | None = _key(None, "peak of the FP16 pipe, flop/s")
    tensor_flops: float | None = _key(None, "peak of the tensor or matrix cores in FP16, flop/s")
    fp8_flops: float | None = _key(None, "the same in FP8, flop/s")
    fp4_flops: float | None = _key(None, "the same in FP4, flop/s")
    peak_clock_mhz: float | None = _key(None, "clock of the multiprocessors at which the peaks hold, MHz, for MFU")
    tensor_clock_mhz: float | None = _key(None, "clock of the tensor peak, MHz, if it is another one")
    max_power_w: float | None = _key(None, "highest board power, W")
    compute_capability: float | None = _key(None, "CUDA's compute capability, such as 9.0")
    shares_host_memory: bool = _key(False, "host programs can use this memory, as on GH200")
    source: str = _key("", "where these figures are from")

    def clock_mhz(self, pipe: str) -> float | None:
        """The clock at which the pipe has its peak; None if not known."""
        return (self.tensor_clock_mhz if pipe == "tensor" else None) or self.peak_clock_mhz


@cache
def packaged_models() -> dict[str, GpuModel]:
    """The models of almanac's own table, by name."""
    import tomllib
    from importlib import resources

    rows = tomllib.loads((resources.files("almanac") / "hardware.toml").read_text(encoding="utf-8"))
    return {name: GpuModel(name=name, **{**row, "labels": tuple(row["labels"])}) for name, row in rows.items()}


_site_models: list[GpuModel] = []


def use_models(models: Iterable[GpuModel]) -> None:
    """Let these models of the site's configuration win over those of the table, in this process."""
    _site_models[:] = models


def gpu_models() -> dict[str, GpuModel]:
    """Every known model, by name such as "A100-80"."""
    return _tables(tuple(_site_models))[0]


@cache
def _tables(site: tuple[GpuModel, ...]) -> tuple[dict[str, GpuModel], dict[str, tuple[GpuModel, ...]]]:
    """Models by name, and by label. A label of the site's is none of another model's."""
    models = packaged_models() | {model.name: model for model in site}
    by_label: dict[str, list[GpuModel]] = {}
    own = {_label(text) for model in site for text in model.labels}
    for model in models.values():
        for text in dict.fromkeys(map(_label, model.labels)):
            if model in site or text not in own:
                by_label.setdefault(text, []).append(model)
    return models, {text: tuple(fits) for text, fits in by_label.items()}


def _label(text: str) -> str:
    """A label without its maker, in the one form of all its spellings: "NVIDIA_A100-SXM4-80GB" as "a100 sxm4 80gb"."""
    found = re.sub(r"[\s_-]+", " ", text.lower()).strip()
    while maker := _MAKER.match(found):
        found = found[maker.end() :]
    return found


def find_gpu_model(label: str, total_mib: float | None = None, *, is_slice: bool | None = None) -> GpuModel | None:
    """The model of an exporter's modelName label, such as "NVIDIA A100-SXM4-80GB"; None where unknown.

    total_mib: used + free, of the whole GPU or of a MIG instance. A whole GPU must have the model's memory within 15%;
    where one label fits several sizes (V100 without a size), this also picks one. Of a slice the label decides, and the
    memory only tells apart sizes with one label: that of a profile of exactly one of them, within 15%.
    is_slice: None if not known; a slice then has the memory of a profile of this model.
    """
    fits = list(_tables(tuple(_site_models))[1].get(_label(model_text(label)), ()))
    if total_mib is not None:
        whole = [m for m in fits if abs(total_mib / m.hbm_mib - 1) <= NEAR]
        if is_slice is False or (whole and is_slice is None):
            fits = whole
        elif is_slice is None or len(fits) > 1:
            fits = [m for m in fits if _has_slice(m, total_mib)]
    return fits[0] if len(fits) == 1 else None


def is_known_label(label: str) -> bool:
    """Return True if some model has this label, whatever its size."""
    return _label(model_text(label)) in _tables(tuple(_site_models))[1]


def shares_host_memory(name: str | None) -> bool:
    """Return True if host programs and files can be in the memory of this model, as on GH200 and MI300A."""
    model = gpu_models().get(name or "")
    return model is not None and model.shares_host_memory


def model_text(label: str) -> str:
    """Return an exporter's modelName label without a slice's profile and without control characters."""
    return printable(_OF_SLICE.sub("", label.strip()), 80)


def _has_slice(model: GpuModel, total_mib: float) -> bool:
    """Return True if a MIG profile of the model has this memory."""
    mig = mig_models().get(model.name)
    sizes = [profile.memory_gib for profile in mig.profiles if profile.memory_gib] if mig else []
    return any((1 - NEAR) * low * 1024 <= total_mib <= (1 + NEAR) * high * 1024 for low, high in sizes)
