"""The process that calls NVML, on a stub of the library: values of GPUs, and faults of GPU, driver, and library."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from telemetry.collector import reader as reading
from tests.telemetry.collector.conftest import NvmlStub

OF_CARD = {
    "DCGM_FI_DEV_GPU_UTIL": 80, "DCGM_FI_DEV_MEM_COPY_UTIL": 55, "DCGM_FI_DEV_FB_USED": 20000,
    "DCGM_FI_DEV_FB_FREE": 61000, "DCGM_FI_DEV_FB_RESERVED": 559, "DCGM_FI_DEV_FB_TOTAL": 81559,
    "DCGM_FI_DEV_POWER_USAGE": 500, "DCGM_FI_DEV_GPU_TEMP": 60, "DCGM_FI_DEV_SM_CLOCK": 1800,
    "DCGM_FI_DEV_MAX_SM_CLOCK": 1980, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 4,
}  # fmt: skip
ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
ACTIVITY = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.8, "DCGM_FI_PROF_SM_ACTIVE": 0.7, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4,
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": 0, "DCGM_FI_PROF_PCIE_TX_BYTES": 100 << 20,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 100 << 20, "ALMANAC_GPM_DRAM_BW_RATIO": 0.55, "ALMANAC_GPM_FP32_RATIO": 0.12,
}  # fmt: skip


def by_gpu(answer: dict[str, Any] | None) -> dict[str, dict[str, float]]:
    assert answer is not None
    return {
        f"{gpu['labels']['gpu']}.{gpu['labels'].get('GPU_I_ID', '')}".rstrip("."): gpu["values"]
        for gpu in answer["gpus"]
    }


def test_eight_gpus_have_all_values_and_activity_from_the_second_sample(stub: NvmlStub) -> None:
    stub.set("count 8", "gpm 1", "set 3 used 79000.25")
    reader = stub.reader()
    first, second = by_gpu(reader.sample()), by_gpu(reader.sample())
    assert list(first) == [str(number) for number in range(8)]
    expected = OF_CARD | {ENERGY: pytest.approx(500_000 * time.clock_gettime(time.CLOCK_BOOTTIME), rel=0.01)}
    assert first["0"] == expected
    # The stub's FP64 is NaN, and it lacks NVLink: neither is 0.
    assert second["7"] == expected | ACTIVITY
    assert second["3"]["DCGM_FI_DEV_FB_USED"] == 79000.25
    assert reader.starts == 1 and reader.fault == ""


def test_labels_are_dcgm_exporters(stub: NvmlStub) -> None:
    stub.set("count 2")
    answer = stub.reader().sample()
    assert answer is not None
    assert answer["gpus"][1]["labels"] == {
        "gpu": "1", "UUID": "GPU-1", "device": "nvidia1", "modelName": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:11:00.0", "DCGM_FI_DRIVER_VERSION": "580.65.06",
    }  # fmt: skip


def test_a_lost_gpu_is_absent_and_the_others_keep_their_numbers(stub: NvmlStub) -> None:
    stub.set("count 4")
    reader = stub.reader(look_again_s=0.0)
    assert list(by_gpu(reader.sample())) == ["0", "1", "2", "3"]
    stub.set("count 4", "set 1 lost 1")
    answer = reader.sample()
    assert list(by_gpu(answer)) == ["0", "2", "3"] and answer is not None and answer["lost"] == 1
    # A new reader finds it lost from the start, and once it is back, finds it again.
    assert list(by_gpu(reader.sample())) == ["0", "2", "3"]
    stub.set("count 4")
    answer = reader.sample()
    assert list(by_gpu(answer)) == ["0", "1", "2", "3"] and answer is not None and answer["lost"] == 0


def test_a_gpu_that_nvml_counts_no_more_leaves_its_number_free(stub: NvmlStub) -> None:
    stub.set("count 2")
    reader = stub.reader(indices={"GPU-0": 1, "GPU-7": 0})
    assert list(by_gpu(reader.sample())) == ["1", "2"]


def test_a_reader_that_hangs_is_killed_and_the_next_one_answers(stub: NvmlStub) -> None:
    stub.set("count 2")
    reader = stub.reader(answer_s=1.0)
    assert reader.sample()
    stub.set("count 2", "hang nvmlDeviceGetPowerUsage")
    start_s = time.monotonic()
    assert reader.sample() is None
    assert time.monotonic() - start_s < 60 and reader.fault == "the reader did not answer within 1 s"
    assert reader.sample() is None, "and again, as long as the driver hangs"
    stub.set("count 2")
    assert list(by_gpu(reader.sample())) == ["0", "1"]
    assert (reader.starts, reader.fault) == (3, "")


def test_no_second_reader_starts_while_the_kernel_cannot_end_the_first(
    stub: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.set("count 1", "hang nvmlDeviceGetPowerUsage")
    reader = stub.reader(answer_s=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: None)
        assert reader.sample() is None
        assert reader.sample() is None and "the kernel cannot end the last reader" in reader.fault
        assert reader.starts == 1
    stub.set("count 1")
    reader.close()
    assert by_gpu(reader.sample())


def test_a_start_that_hangs_ends_too(stub: NvmlStub) -> None:
    stub.set("count 1", "hang nvmlInitWithFlags")
    reader = stub.reader(start_s=0.7)
    assert reader.sample() is None and "within 0.7 s" in reader.fault


@pytest.mark.parametrize("code", [9, 18, 12, 999])
def test_without_a_driver_nothing_is_read_and_starts_pause(stub: NvmlStub, code: int) -> None:
    stub.set("count 1", f"error nvmlInitWithFlags {code}")
    reader = stub.reader(pause_s=0.4)
    assert reader.sample() is None and reader.fault.startswith("NVML: ")
    assert reader.sample() is None and reader.starts == 1
    stub.set("count 1")
    time.sleep(0.4)
    assert list(by_gpu(reader.sample())) == ["0"] and reader.starts == 2


def test_a_driver_that_goes_away_ends_the_reader(stub: NvmlStub) -> None:
    stub.set("count 1")
    reader = stub.reader()
    assert reader.sample()
    stub.set("count 1", "error nvmlDeviceGetTemperature 18")
    assert reader.sample() is None and reader.fault.startswith("NVML: ")
    stub.set("count 1")
    assert reader.sample() and reader.starts == 2


ASKED_EACH_TIME = {
    "nvmlDeviceGetUtilizationRates": {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_MEM_COPY_UTIL"},
    "nvmlDeviceGetPowerUsage": {"DCGM_FI_DEV_POWER_USAGE"}, "nvmlDeviceGetTotalEnergyConsumption": {ENERGY},
    "nvmlDeviceGetTemperature": {"DCGM_FI_DEV_GPU_TEMP"}, "nvmlDeviceGetClockInfo": {"DCGM_FI_DEV_SM_CLOCK"},
    "nvmlDeviceGetCurrentClocksEventReasons": set(), "nvmlDeviceGetMemoryInfo_v2": {"DCGM_FI_DEV_FB_RESERVED"},
    "nvmlDeviceGetMigMode": set(), "nvmlEventSetWait_v2": set(), "nvmlGpmSampleGet": set(ACTIVITY),
    "nvmlGpmMetricsGet": set(ACTIVITY),
}  # fmt: skip


def test_what_fails_is_absent_and_the_rest_is_there(stub: NvmlStub) -> None:
    stub.set("count 1", "gpm 1")
    reader = stub.reader()
    for function, missing in ASKED_EACH_TIME.items():
        for code in (3, 4, 999):
            stub.set("count 1", "gpm 1")
            reader.sample()
            whole = by_gpu(reader.sample())["0"]
            assert whole.keys() == {*OF_CARD, ENERGY, *ACTIVITY}
            stub.set("count 1", "gpm 1", f"error {function} {code}")
            found = by_gpu(reader.sample())["0"]
            assert {name: found[name] for name in found if name != ENERGY}.items() <= whole.items(), function
            assert found.keys() == {*OF_CARD, ENERGY, *ACTIVITY} - missing, function
    assert reader.starts == 1


def test_what_a_gpu_lacks_from_the_start_is_absent_and_the_rest_is_there(stub: NvmlStub) -> None:
    functions = ("DeviceGetMaxClockInfo", "DeviceGetPciInfo_v3", "DeviceGetName", "EventSetCreate", "GpmSampleAlloc",
                 "DeviceGetMinorNumber", "SystemGetDriverVersion")  # fmt: skip
    stub.set("count 1", "gpm 1", *(f"error nvml{name} 3" for name in functions))
    reader = stub.reader()
    reader.sample()
    answer = reader.sample()
    assert by_gpu(answer)["0"].keys() == {*OF_CARD, ENERGY} - {"DCGM_FI_DEV_MAX_SM_CLOCK"}
    assert answer is not None and "uuid" not in answer["gpus"][0], "an XID error would not be noticed"
    assert {name for name, text in answer["gpus"][0]["labels"].items() if text} == {"gpu", "UUID"}


@pytest.mark.parametrize("stub", ["-DOLD"], indirect=True)
def test_a_driver_that_is_older_than_some_functions_gives_the_others(stub: NvmlStub) -> None:
    stub.set("count 1", "gpm 1")
    reader = stub.reader()
    reader.sample()
    found = by_gpu(reader.sample())["0"]
    assert found.keys() == {*OF_CARD, ENERGY} - {"DCGM_FI_DEV_FB_RESERVED"}
    assert found["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"] == 4


def test_gpm_can_be_left_alone(stub: NvmlStub) -> None:
    stub.set("count 1", "gpm 1")
    reader = stub.reader(has_gpm=False)
    reader.sample()
    assert by_gpu(reader.sample())["0"].keys() == {*OF_CARD, ENERGY}


def test_xid_errors_come_once_with_their_gpu(stub: NvmlStub) -> None:
    stub.set("count 2")
    reader = stub.reader()
    answer = reader.sample()
    assert answer is not None and answer["xids"] == []
    assert all(gpu["uuid"] == gpu["labels"]["UUID"] for gpu in answer["gpus"])
    stub.set("count 2", "set 1 xid 79")
    answer = reader.sample()
    assert answer is not None and answer["xids"] == [["GPU-1", 79]]
    answer = reader.sample()
    assert answer is not None and answer["xids"] == []


# --- MIG

INSTANCES = ("gpm 1", "mig 0 7 1500", "mig 0 9 3000")


def test_instances_stand_in_the_place_of_their_gpu(stub: NvmlStub) -> None:
    stub.set("count 2", *INSTANCES)
    reader = stub.reader()
    reader.sample()
    answer = reader.sample()
    found = by_gpu(answer)
    assert list(found) == ["0.7", "0.9", "1"]
    assert found["0.7"]["DCGM_FI_DEV_FB_USED"] == 1500 and found["0.9"]["DCGM_FI_DEV_FB_TOTAL"] == 10000
    assert found["0.9"]["DCGM_FI_PROF_SM_ACTIVE"] == 0.7 and found["0.9"]["DCGM_FI_DEV_POWER_USAGE"] == 500
    assert "DCGM_FI_DEV_GPU_UTIL" not in found["0.7"], "NVML has none of an instance, nor of its card"
    assert answer is not None
    labels = answer["gpus"][0]["labels"]
    assert (labels["UUID"], labels["GPU_I_PROFILE"]) == ("GPU-0", "1g.10gb"), "of 1c.1g.10gb"


def test_a_change_of_layout_changes_the_series_and_mixes_no_samples(stub: NvmlStub) -> None:
    stub.set("count 1", *INSTANCES)
    reader = stub.reader()
    reader.sample()
    stub.set("count 1", "gpm 1", "mig 0 9 3000", "mig 0 11 10")
    found = by_gpu(reader.sample())
    assert list(found) == ["0.9", "0.11"]
    assert "DCGM_FI_PROF_SM_ACTIVE" in found["0.9"] and "DCGM_FI_PROF_SM_ACTIVE" not in found["0.11"]
    stub.set("count 1", "gpm 1", "migmode 0")
    found = by_gpu(reader.sample())
    assert list(found) == ["0"] and "DCGM_FI_PROF_SM_ACTIVE" not in found["0"], "MIG without an instance"
    stub.set("count 1", "gpm 1")
    reader.sample()
    assert by_gpu(reader.sample())["0"]["DCGM_FI_PROF_SM_ACTIVE"] == 0.7


def test_gpm_is_switched_off_where_it_takes_the_memory_of_instances_away(stub: NvmlStub, tmp_path: Path) -> None:
    stub.set("count 1", "poison 1", *INSTANCES)
    reader = stub.reader(gpm_off_file=tmp_path / "gpm-off")
    assert reader.sample() is None
    assert reader.fault.startswith("GPM is off from now on: GPU 0, instance 7") and not reader.has_gpm
    assert (tmp_path / "gpm-off").exists()
    found = by_gpu(reader.sample())
    assert found["0.7"]["DCGM_FI_DEV_FB_USED"] == 1500 and "DCGM_FI_PROF_SM_ACTIVE" not in found["0.7"]


def test_memory_that_no_user_may_read_does_not_switch_gpm_off(stub: NvmlStub) -> None:
    stub.set("count 1", "error nvmlDeviceGetMemoryInfo 4", "error nvmlDeviceGetMemoryInfo_v2 4", *INSTANCES)
    reader = stub.reader()
    reader.sample()
    assert by_gpu(reader.sample())["0.7"]["DCGM_FI_PROF_SM_ACTIVE"] == 0.7 and reader.has_gpm


def test_an_answer_that_is_no_json_or_too_long_is_a_fault(stub: NvmlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, said in (
        ("print('nonsense')", "cannot be read"),
        ("print('x' * (5 << 20))", "ended"),
        ("pass", "ended"),
    ):
        monkeypatch.setattr(reading, "_PROGRAM", program)
        reader = stub.reader()
        assert reader.sample() is None and said in reader.fault
