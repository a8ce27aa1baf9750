"""A node's layout in the words of Slurm (Gres), of mig-parted (its configuration), and of the decision (shapes)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.decisions.mig_layout import WHOLE, GpuLayout
from advisor.mig.states import is_placeable
from almanac.errors import ConfigError, SourceError
from almanac.mig import MigModel, mig_models, profile_name

CONFIG_NAME = "almanac"
"""The name of the layout within mig-parted's configuration."""
MOST_GPUS = 64
_GPU_TERM = re.compile(r"gpu(?::(?P<type>(?![0-9]+(?:\(|\Z))[^:(,]+))?(?::(?P<count>[0-9]{1,6}))?(?:\([^)]*\))*")
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,62}")
Layout = tuple[GpuLayout, ...]
"""Of a node: its GPUs by index."""


@dataclass(frozen=True)
class GresNames:
    """How a site names the GPUs of one model in Gres. slice_type: a text with {profile}."""

    model: MigModel
    whole_type: str
    slice_type: str = "{profile}"

    def type_of(self, shape: str) -> str:
        """Raises KeyError for a shape that the model lacks."""
        if shape == WHOLE:
            return self.whole_type
        profile = self.model.profile(shape)
        if profile is None:
            raise KeyError(shape)
        return self.slice_type.replace("{profile}", profile.name)

    def shape_of(self, gres_type: str) -> str | None:
        """None where the type is neither a whole GPU's nor a profile's of this model."""
        if gres_type == self.whole_type:
            return WHOLE
        profile = self.model.profile(gres_type) if profile_name(gres_type) else None
        return profile.shape if profile else None

    def all_types(self) -> frozenset[str]:
        """Every GRES type that a GPU of this model can be."""
        return frozenset({self.whole_type, *(self.type_of(profile.shape) for profile in self.model.profiles)})

    def types(self, layout: Layout) -> Counter[str]:
        """How many GPUs of each GRES type a node with this layout has."""
        return Counter(self.type_of(shape) for gpu in layout for shape in gpu)


def gres_names(model: str, whole_types: Sequence[str], slice_type: str) -> GresNames:
    """Raises ConfigError where a model or a type is not known or not valid."""
    found = mig_models().get(model)
    if found is None:
        raise ConfigError(f"mig.nodes: unknown model {model!r}", f"use one of: {', '.join(mig_models())}")
    named = dict(entry.split("=", 1) for entry in whole_types if "=" in entry)
    if len(named) != len(whole_types):
        raise ConfigError(f"mig.whole_types is {list(whole_types)!r}", 'write, for example, ["A100-80=a100"]')
    whole = named.get(model, model.split("-")[0].lower())
    if "{profile}" not in slice_type or not _TYPE.fullmatch(slice_type.replace("{profile}", "1g.10gb")):
        raise ConfigError(f"mig.slice_type is {slice_type!r}", 'write "{profile}", or a text with {profile} in it')
    if not _TYPE.fullmatch(whole) or profile_name(whole):
        raise ConfigError(f"mig.whole_types: {whole!r} is no GRES type of a whole GPU", "write, for example, a100")
    return GresNames(found, whole, slice_type)


def gpu_types(gres: str) -> Counter[str]:
    """GPUs of each type in a node's Gres text; "" is no type. Other GRES are left out."""
    found: Counter[str] = Counter()
    for term in split_gres(gres):
        if match := _GPU_TERM.fullmatch(term):
            found[match["type"] or ""] += int(match["count"] or 1)
    return +found


def named_types(gres: str) -> frozenset[str]:
    """The GPU types that a text names, those of 0 GPUs included, as in "gpu:a100:0(IDX:N/A)"."""
    found = (_GPU_TERM.fullmatch(term) for term in split_gres(gres))
    return frozenset(match["type"] for match in found if match and match["type"])


def with_gpus(gres: str, types: Mapping[str, int]) -> str:
    """The Gres text with other GPUs; what is no GPU stays."""
    others = [term for term in split_gres(gres) if not _GPU_TERM.fullmatch(term)]
    return ",".join([*(f"gpu:{name}:{number}" for name, number in sorted(types.items()) if number), *others])


def split_gres(gres: str) -> list[str]:
    """The terms of a Gres text; commas within parentheses do not split."""
    if gres in ("", "(null)"):
        return []
    return [term.strip() for term in re.findall(r"(?:[^,(]|\([^)]*\))+", gres)]


def parted_config(model: MigModel, layout: Layout) -> bytes:
    """mig-parted's configuration with the whole node's layout, as JSON (a part of YAML).

    It names every GPU: assert fails otherwise. Raises KeyError for a shape that the model lacks.
    """
    entries: list[dict[str, Any]] = []
    for number, gpu in enumerate(layout):
        if gpu == (WHOLE,):
            entries.append({"devices": [number], "mig-enabled": False})
            continue
        profiles = [model.profile(shape) for shape in gpu]
        if None in profiles:
            raise KeyError(gpu)
        counts = Counter(profile.name for profile in profiles if profile)
        entries.append({"devices": [number], "mig-enabled": True, "mig-devices": dict(sorted(counts.items()))})
    return json.dumps({"version": "v1", "mig-configs": {CONFIG_NAME: entries}}).encode()


def parse_export(model: MigModel, text: bytes, gpu_count: int = 0) -> Layout:
    """The layout that `mig-parted export -o json` prints.

    gpu_count: GPUs and slices that Slurm has on the node. Where all GPUs are alike, the export says "all" and not how
    many there are. Raises SourceError where it cannot be understood.
    """
    try:
        [entries] = json.loads(text)["mig-configs"].values()
        gpus: dict[int, GpuLayout] = {}
        for entry in entries:
            layout = _gpu_layout(model, entry)
            for device in _devices(entry["devices"], layout, gpu_count):
                if type(device) is not int or not 0 <= device < MOST_GPUS or device in gpus:
                    raise ValueError(f"device {device!r}")
                gpus[device] = layout
        if not gpus or sorted(gpus) != list(range(len(gpus))):
            raise ValueError(f"devices {sorted(gpus)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"mig-parted export cannot be understood: {type(error).__name__} {str(error)[:100]}",
            "run mig.export_command yourself; it must print JSON that lists every GPU",
        ) from error
    return tuple(gpus[number] for number in range(len(gpus)))


def _devices(devices: Any, layout: GpuLayout, gpu_count: int) -> Any:
    if devices != "all":
        return devices
    if not gpu_count or not layout or gpu_count % len(layout) or gpu_count > MOST_GPUS * len(layout):
        raise ValueError(f"every GPU holds {'+'.join(layout) or 'nothing'}, and Slurm has {gpu_count} GPUs and slices")
    return range(gpu_count // len(layout))


def _gpu_layout(model: MigModel, entry: Mapping[str, Any]) -> GpuLayout:
    if entry["mig-enabled"] is not True:
        return (WHOLE,)
    shapes: list[str] = []
    for name, number in (entry.get("mig-devices") or {}).items():
        profile = model.profile(name)
        if profile is None or type(number) is not int or not 0 <= number <= profile.most:
            raise ValueError(f"{number!r} of profile {name!r} on {model.name}")
        shapes += [profile.shape] * number
    return tuple(sorted(shapes))


def check_layout(model: MigModel, layout: Layout) -> str:
    """Why no GPU of the model can have this layout; "" where it can."""
    for number, gpu in enumerate(layout):
        if gpu == (WHOLE,):
            continue
        known = {profile.shape for profile in model.profiles}
        if not gpu or WHOLE in gpu or not known.issuperset(gpu) or not is_placeable(model, Counter(gpu)):
            return f"GPU {number} cannot hold {'+'.join(gpu) or 'an empty layout'} on {model.name}"
    return "" if layout else "no GPU is named"


def shown(layout: Layout) -> str:
    """ "2x 3g+4g, gpu" of a layout, for people and for a drain's reason."""
    counts = Counter("+".join(_grouped(gpu)) or "empty" for gpu in layout)
    return ", ".join(name if number == 1 else f"{number}x {name}" for name, number in counts.items())


def _grouped(gpu: GpuLayout) -> list[str]:
    return [f"{number}*{shape}" if number > 1 else shape for shape, number in Counter(gpu).items()]
