"""The nodes of [mig], and a layout in the words of Slurm (Gres), mig-parted (its configuration), and the decision."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.mig.decide import WHOLE, GpuLayout
from advisor.mig.states import is_placeable
from almanac.actions_config import Mig
from almanac.errors import ConfigError, SourceError
from almanac.hardware import MigModel, mig_models, profile_name
from slurm.hostlist import expand

CONFIG_NAME = "almanac"
"""The name of the layout within mig-parted's configuration."""
MOST_GPUS = 64
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,62}")
Layout = tuple[GpuLayout, ...]
"""Layout of a node: its GPUs by index."""


@dataclass(frozen=True)
class GresNames:
    """A site's names in Gres for the GPUs of one model. slice_type: a text with {profile}."""

    model: MigModel
    whole_type: str
    slice_type: str = "{profile}"

    def type_of(self, shape: str) -> str:
        """Return the GRES type of a shape, such as "1g". Raises KeyError for a shape that the model lacks."""
        if shape == WHOLE:
            return self.whole_type
        profile = self.model.profile(shape)
        if profile is None:
            raise KeyError(shape)
        return self.slice_type.replace("{profile}", profile.name)

    def shape_of(self, gres_type: str) -> str | None:
        """Return the shape of a GRES type; None if it is neither the whole GPU's nor a profile's of this model."""
        if gres_type == self.whole_type:
            return WHOLE
        profile = self.model.profile(gres_type) if profile_name(gres_type) else None
        return profile.shape if profile else None

    def all_types(self) -> frozenset[str]:
        """Every GRES type that a GPU of this model can be."""
        return frozenset({self.whole_type, *(self.type_of(profile.shape) for profile in self.model.profiles)})

    def types(self, layout: Layout) -> Counter[str]:
        """Count the GPUs of each GRES type of a node with this layout."""
        return Counter(self.type_of(shape) for gpu in layout for shape in gpu)


def gres_names(model: str, whole_types: Sequence[str], slice_type: str) -> GresNames:
    """Return the GRES types of a model's GPUs and slices. Raises ConfigError if it is unknown, or a type invalid."""
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


def parted_config(model: MigModel, layout: Layout) -> bytes:
    """Return mig-parted's configuration with the whole node's layout, as JSON (a part of YAML)."""
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
    many there are. Raises SourceError if it cannot be understood.
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
    """Return why no GPU of the model can have this layout; "" if it can."""
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


@dataclass(frozen=True)
class MigSettings:
    """The MIG configuration and, for each managed node that is not excluded, the GRES names of its GPUs."""

    config: Mig
    names: Mapping[str, GresNames]


def mig_settings(config: Mig) -> MigSettings:
    """Resolve section [mig] to node names. Raises ConfigError if it names no nodes, or models that are unknown."""
    if not config.nodes:
        raise ConfigError("mig.nodes is empty", 'name the nodes, for example ["gpu[01-08]=A100-80"] (docs/mig.md)')
    found: dict[str, GresNames] = {}
    for entry in config.nodes:
        hosts, equals, model = entry.partition("=")
        if not equals:
            raise ConfigError(f"mig.nodes: {entry!r} names no model", 'write "gpu[01-08]=A100-80"')
        names = gres_names(model, config.whole_types, config.slice_type)
        for host in _expand(hosts, "mig.nodes"):
            if host in found:
                raise ConfigError(f"mig.nodes names {host} twice", "name each node once")
            found[host] = names
    excluded = _expand(config.exclude, "mig.exclude")
    return MigSettings(config, {host: names for host, names in found.items() if host not in excluded})


def _expand(text: str, key: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", "give a host list, such as gpu[01-08]") from error
