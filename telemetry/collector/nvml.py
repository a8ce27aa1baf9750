"""Values of this node's GPUs and MIG instances, read by NVML, under dcgm-exporter's names and in its units.

A value that the driver or the GPU lacks is left out, never 0. A GPU that is lost, or needs a reset, is left out whole.
From Hopper on, GPM gives the activity of the units as means between two samples, without root, and without the
profiler that users may want. Two of its values mean something else than DCGM's of a similar name, and have names of
their own: DRAM_BW is a share of the peak bandwidth, and FP32 leaves integer operations out.

Units and meanings: NVIDIA's nvml.h as nvidia-ml-py 13.615.71 has it, and dcgm_fields.h of DCGM 4.5.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

MIB = 2.0**20
_MOST_EVENTS, _MOST_PROCESSES = 100, 1000
"""XID errors of one sample, where more wait for the next, and processes of one GPU."""
_PROFILE = re.compile(r" MIG (?:[0-9]{1,2}c\.)?([0-9]{1,2}g\.[0-9A-Za-z+.]{1,24})\s*\Z")

_Values = dict[str, float]

GPM: dict[str, tuple[int, float]] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": (1, 100),  # GRAPHICS_UTIL
    "DCGM_FI_PROF_SM_ACTIVE": (2, 100),  # SM_UTIL
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": (5, 100),  # ANY_TENSOR_UTIL
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": (11, 100),  # FP64_UTIL
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": (13, 100),  # FP16_UTIL
    "DCGM_FI_PROF_PCIE_TX_BYTES": (20, 1 / MIB),  # PCIE_TX_PER_SEC
    "DCGM_FI_PROF_PCIE_RX_BYTES": (21, 1 / MIB),  # PCIE_RX_PER_SEC
    "DCGM_FI_PROF_NVLINK_TX_BYTES": (61, 1 / MIB),  # NVLINK_TOTAL_TX_PER_SEC
    "DCGM_FI_PROF_NVLINK_RX_BYTES": (60, 1 / MIB),  # NVLINK_TOTAL_RX_PER_SEC
    "ALMANAC_GPM_DRAM_BW_RATIO": (10, 100),  # DRAM_BW_UTIL
    "ALMANAC_GPM_FP32_RATIO": (12, 100),  # FP32_UTIL
}
"""GPM's metrics by name, each with a divisor for the unit of the name: ratios from percent, bytes/s from MiB/s."""

_GONE = {15, 16, 28, 11}
"""Return codes of a lost GPU, one that needs a reset, one that is not found, and one whose interrupts are broken."""
_NO_DRIVER = {1, 9, 18}
"""Not initialized, no driver, and a driver of another release than the library."""


class GpuGoneError(Exception):
    """A GPU that answers no more: it is lost, or needs a reset."""


class DriverGoneError(Exception):
    """NVML has to be loaded again: the driver is not there, or another one than before."""


class GpmHarmError(Exception):
    """Memory of a MIG instance could be read before the first GPM sample, and not after it."""


@dataclass
class GpmSamples:
    """Two buffers of a device that take turns. has_first: `old` holds a sample."""

    old: Any
    new: Any
    has_first: bool = False


@dataclass(frozen=True)
class NvmlGpu:
    """A GPU, with the labels and values that never change. index: given at first sight, so that it outlives a lost
    neighbor."""

    handle: Any
    index: int
    uuid: str
    labels: dict[str, str]
    values: _Values
    sends_xids: bool


@dataclass
class GpuReading:
    """One sample of a GPU or a MIG instance. mig: instance id, "" for a whole GPU. device: its UUID."""

    gpu: NvmlGpu
    handle: Any
    device: str
    labels: dict[str, str]
    mig: str = ""
    values: _Values = field(default_factory=dict)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or None if this GPU or driver lacks it. Raises GpuGoneError and DriverGoneError."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _GONE:
            raise GpuGoneError(str(error)) from None
        if error.value in _NO_DRIVER:
            raise DriverGoneError(str(error)) from None
        return None
    except UnicodeDecodeError:
        return None


class NvmlReader:
    """Reads all GPUs of the node. Raises DriverGoneError if NVML cannot be started.

    indices: of GPUs by UUID, as an earlier reader knew them; new ones are added. has_gpm: False leaves GPM alone.
    """

    def __init__(self, indices: dict[str, int], *, has_gpm: bool = True) -> None:
        self.indices, self.has_gpm = indices, has_gpm
        self._gpm: dict[str, GpmSamples] = {}
        self._metrics = pynvml.c_nvmlGpmMetricsGet_t()
        try:
            pynvml.nvmlInit()
            self._driver = call(pynvml.nvmlSystemGetDriverVersion) or ""
            count = pynvml.nvmlDeviceGetCount()
            self._events = call(pynvml.nvmlEventSetCreate)
        except (pynvml.NVMLError, GpuGoneError) as error:
            raise DriverGoneError(str(error)) from None
        found = [self._found(number) for number in range(count)]
        self._gpus = [gpu for gpu in found if gpu]
        self._lost_at_start = self.lost = len(found) - len(self._gpus)

    def sample(self) -> list[GpuReading]:
        """Return what can be read now; `lost` counts the GPUs that did not answer. Raises DriverGoneError.

        Raises GpmHarmError if the first GPM sample does harm; then stop this process, and start one without GPM.
        """
        readings: list[GpuReading] = []
        self.lost = self._lost_at_start
        for gpu in self._gpus:
            try:
                readings += self._read(gpu)
            except GpuGoneError:
                self.lost += 1
        for device in self._gpm.keys() - {reading.device for reading in readings}:
            self._free(self._gpm.pop(device))
        return readings

    def xids(self) -> list[tuple[str, int]]:
        """Return UUID and code of each XID error since the last call. Does not wait."""
        by_address = {_address(gpu.handle): gpu.uuid for gpu in self._gpus}
        found: list[tuple[str, int]] = []
        if self._events is None:
            return found
        with contextlib.suppress(pynvml.NVMLError):  # a timeout: there is none
            for _ in range(_MOST_EVENTS):
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = by_address.get(_address(event.device))
                if uuid and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    found.append((uuid, int(event.eventData)))
        return found

    def processes(self, reading: GpuReading) -> list[int]:
        """Return ids of the processes that compute on it, _MOST_PROCESSES at most."""
        for function in (
            pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
            pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
        ):
            with contextlib.suppress(GpuGoneError):
                if (found := call(function, reading.handle)) is not None:
                    return [process.pid for process in found][:_MOST_PROCESSES]
        return []

    def _found(self, number: int) -> NvmlGpu | None:
        """None if it does not answer."""
        try:
            handle = call(pynvml.nvmlDeviceGetHandleByIndex, number)
            uuid = handle and call(pynvml.nvmlDeviceGetUUID, handle)
            if not uuid:
                return None
            minor, pci = call(pynvml.nvmlDeviceGetMinorNumber, handle), call(pynvml.nvmlDeviceGetPciInfo_v3, handle)
            labels = {
                "UUID": uuid,
                "modelName": call(pynvml.nvmlDeviceGetName, handle) or "",
                "device": "" if minor is None else f"nvidia{minor}",
                "pci_bus_id": str(pci.busId) if pci else "",
                "DCGM_FI_DRIVER_VERSION": self._driver,
                "gpu": str(self._index(uuid, number)),
            }
            most = call(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
            values = {"DCGM_FI_DEV_MAX_SM_CLOCK": most} if most else {}
            return NvmlGpu(handle, self.indices[uuid], uuid, labels, values, self._registered(handle))
        except GpuGoneError:
            return None

    def _index(self, uuid: str, number: int) -> int:
        """NVML counts the GPUs that it finds: without a lost one, those behind it would take another's number."""
        taken = set(self.indices.values())
        if uuid not in self.indices:
            self.indices[uuid] = next(one for one in (number, *range(len(taken) + 1)) if one not in taken)
        return self.indices[uuid]

    def _registered(self, handle: Any) -> bool:
        if self._events is None:
            return False
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError:
            return False
        return True

    def _read(self, gpu: NvmlGpu) -> list[GpuReading]:
        """The whole GPU, or its MIG instances, which dcgm-exporter shows in its place (its issue 561).

        An instance has the temperature, power, energy, and clock of its card, as there (issue 257).
        """
        whole = GpuReading(gpu, gpu.handle, gpu.uuid, gpu.labels)
        mode = call(pynvml.nvmlDeviceGetMigMode, gpu.handle)
        is_mig = bool(mode) and mode[0] == 1
        parts = (self._instances(gpu) if is_mig else []) or [whole]
        of_card: _Values = {}
        for read in _OF_CARD:
            of_card |= call(read, gpu.handle) or {}
        if not of_card:
            raise GpuGoneError("every value failed")
        of_card |= gpu.values
        before = [one.device for one in parts if is_mig and one.device not in self._gpm and _memory(one.handle)]
        for part in parts:
            part.values = of_card | self._activity(part)
        for part in parts:
            memory = _memory(part.handle)
            if not memory and part.device in before and part.device in self._gpm:
                raise GpmHarmError(f"GPU {gpu.index}, instance {part.mig}: no memory after the first GPM sample")
            part.values |= memory
        return parts

    def _instances(self, gpu: NvmlGpu) -> list[GpuReading]:
        """GPU instances; of several compute instances in one, the first stands for it."""
        found: dict[str, GpuReading] = {}
        for number in range(call(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu.handle) or 0):
            handle = call(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu.handle, number)
            instance = handle and call(pynvml.nvmlDeviceGetGpuInstanceId, handle)
            uuid = handle and call(pynvml.nvmlDeviceGetUUID, handle)
            if instance is None or not uuid or str(instance) in found:
                continue
            profile = _PROFILE.search(call(pynvml.nvmlDeviceGetName, handle) or "")
            labels = {**gpu.labels, "GPU_I_ID": str(instance), "GPU_I_PROFILE": profile[1] if profile else ""}
            found[str(instance)] = GpuReading(gpu, handle, uuid, labels, str(instance))
        return list(found.values())

    def _activity(self, reading: GpuReading) -> _Values:
        """GPM's means since the last sample; {} for the first one, and for GPUs before Hopper."""
        samples = self._gpm.get(reading.device) or self._new_samples(reading)
        if samples is None:
            return {}
        if reading.mig:
            taken = call(pynvml.nvmlGpmMigSampleGet, reading.gpu.handle, int(reading.mig), samples.new)
        else:
            taken = call(pynvml.nvmlGpmSampleGet, reading.handle, samples.new)
        if taken is None:
            samples.has_first = False
            return {}
        wanted, found = self._metrics, {}
        wanted.version, wanted.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        wanted.sample1, wanted.sample2 = samples.old, samples.new
        for number, (metric, _) in enumerate(GPM.values()):
            wanted.metrics[number].metricId = metric
        if samples.has_first and call(pynvml.nvmlGpmMetricsGet, wanted) is not None:
            for number, (name, (_, divisor)) in enumerate(GPM.items()):
                given = wanted.metrics[number]
                if given.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(given.value):
                    found[name] = given.value / divisor
        samples.old, samples.new, samples.has_first = samples.new, samples.old, True
        return found

    def _new_samples(self, reading: GpuReading) -> GpmSamples | None:
        support = call(pynvml.nvmlGpmQueryDeviceSupport, reading.gpu.handle) if self.has_gpm else None
        if not support or not support.isSupportedDevice:
            return None
        old, new = call(pynvml.nvmlGpmSampleAlloc), call(pynvml.nvmlGpmSampleAlloc)
        if old is None or new is None:
            return None
        self._gpm[reading.device] = GpmSamples(old, new)
        return self._gpm[reading.device]

    def _free(self, samples: GpmSamples) -> None:
        for one in (samples.old, samples.new):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(one)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _memory(handle: Any) -> _Values:
    """MiB. Up to driver 505 used memory includes what the driver reserves, and there is no second form."""
    found = call(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    reserved = {"DCGM_FI_DEV_FB_RESERVED": found.reserved / MIB} if found else {}
    found = found or call(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if not found:
        return {}
    used, free, total = found.used / MIB, found.free / MIB, found.total / MIB
    return {"DCGM_FI_DEV_FB_USED": used, "DCGM_FI_DEV_FB_FREE": free, "DCGM_FI_DEV_FB_TOTAL": total} | reserved


def _use(handle: Any) -> _Values:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {"DCGM_FI_DEV_GPU_UTIL": rates.gpu, "DCGM_FI_DEV_MEM_COPY_UTIL": rates.memory}


def _power(handle: Any) -> _Values:
    return {"DCGM_FI_DEV_POWER_USAGE": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _energy(handle: Any) -> _Values:
    return {"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)}


def _temperature(handle: Any) -> _Values:
    return {"DCGM_FI_DEV_GPU_TEMP": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)}


def _clock(handle: Any) -> _Values:
    return {"DCGM_FI_DEV_SM_CLOCK": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)}


def _throttling(handle: Any) -> _Values:
    """Bits of nvml.h. Up to driver 530 the function has its old name."""
    reasons = call(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": reasons}


_OF_CARD = (_use, _power, _energy, _temperature, _clock, _throttling)
