"""Which GPU type a job ran on: sites with typed GRES, with features, with both, and without telemetry."""

from __future__ import annotations

import pytest
from speed_site import job_frame

from advisor.speed.gpu_types import GpuTypes, find_hardware, learn_types
from almanac.hardware import gpu_models


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("h100", "H100-80"), ("a100", "A100-40"), ("a100_80g", "A100-80"), ("nvidia_a100-sxm4-80gb", "A100-80"),
        ("gpu-v100", "V100-16"), ("V100-32", "V100-32"), ("l40s", "L40S"), ("k80", "K80-12"), ("p100", "P100-16"),
    ],
)  # fmt: skip
def test_the_name_of_a_type_means_a_row_of_the_hardware_table(name: str, model: str) -> None:
    found = find_hardware(name)
    assert found is not None
    assert found.name.startswith(model.split("-")[0])
    assert found.hbm_mib == gpu_models()[model].hbm_mib


@pytest.mark.parametrize("name", ["", "gpu", "hbm80g", "a4000", "a100|h100", "xa100", "rtx6000", "h1000", "ä\x00[a"])
def test_a_name_that_means_no_single_model_means_none(name: str) -> None:
    assert find_hardware(name) is None


def test_a_site_with_typed_gres_calls_its_types_by_them() -> None:
    rows = [{"gpu_type": "a100", "gpu_model": "A100-80", "hbm_capacity_mib": 81920.0}] * 4 + [{"gpu_type": "h100"}]
    types = learn_types(job_frame(rows))
    assert types.name("a100", "ib", "A100-80") == "a100"
    assert types.name("h100", "", "") == "h100"
    assert types.capacity_mib("a100") == 81920
    hardware = types.hardware("h100")
    assert hardware is not None
    assert hardware.name == "H100-80", "by its name, as no telemetry has seen it"


def test_a_site_with_features_calls_its_types_by_the_feature_that_telemetry_confirms() -> None:
    pairs = (("ib&new", "H100-80"), ("ib&old", "V100-32"))
    rows = [{"constraints": asked, "gpu_model": model} for asked, model in pairs for _ in range(5)]
    types = learn_types(job_frame(rows))
    assert types.name("", "", "H100-80") == "new", "it asked for nothing, but telemetry saw the GPU"
    assert types.name("", "ib&old", "") == "old", "no telemetry, but the feature is known"
    assert types.name("", "old|new", "") == ""
    assert types.name("", "old|new", "V100-32") == "old"
    assert types.name("", "ib", "") == "", "every type has it"


def test_without_telemetry_features_that_read_like_models_are_types() -> None:
    types = learn_types(job_frame([{"constraints": "a100&ib"}, {"constraints": "h100"}, {"constraints": "a100|h100"}]))
    assert types.name("", "ib&a100", "") == "a100"
    assert types.name("", "[a100|h100]", "") == ""


def test_a_gres_type_of_two_models_is_told_apart_by_their_features() -> None:
    rows = [{"gpu_type": "a100", "constraints": f"gpu&hbm{size}g", "gpu_model": f"A100-{size}"}
            for size in (40, 80) for _ in range(5)]  # fmt: skip
    types = learn_types(job_frame(rows))
    assert types.name("a100", "gpu&hbm40g", "A100-40") == "hbm40g"
    assert types.name("a100", "gpu&hbm80g", "") == "hbm80g"
    assert types.name("a100", "", "") == ""
    assert types.capacity_mib("hbm40g") == 40960


def test_a_mig_slice_is_no_gpu_type() -> None:
    types = learn_types(job_frame([{"gpu_type": "a100_1g.10gb", "gpu_model": "A100-80"}] * 5))
    assert types.name("a100_1g.10gb", "", "A100-80") == ""
    assert types.name("1g.5gb", "", "") == ""
    assert not types.models


def test_the_names_survive_json() -> None:
    types = GpuTypes({"a": "A100-40"}, {"A100-40": "a"}, frozenset({"b"}), {"a": 40960.0})
    assert GpuTypes.from_json(types.to_json()) == types
