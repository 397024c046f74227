"""What the hardware gate asks pynvml, answered from a description of made-up GPUs."""


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class Memory:
    total = 143771 << 20


# A healthy H200, by the name of the call without "nvmlDevice". An exception is raised instead of returned.
HEALTHY = {
    "GetName": "NVIDIA H200",
    "GetCudaComputeCapability": (9, 0),
    "GetMemoryInfo": Memory,
    "GetMigMode": [0, 0],
    "GetVirtualizationMode": 0,
    "GetNvLinkState": [1] * 18,
    "GetEccMode": [1, 1],
    "GetTotalEccErrors": 0,
    "GetCurrPcieLinkGeneration": 5,
    "GetMaxPcieLinkGeneration": 5,
    "GetCurrPcieLinkWidth": 16,
    "GetMaxPcieLinkWidth": 16,
    "GetPerformanceState": 0,
    "GetCurrentClocksEventReasons": 0,
    "GetEnforcedPowerLimit": 700_000,
    "GetPowerManagementDefaultLimit": 700_000,
    "GetRemappedRows": (0, 0, 0, 0),
    "GetRetiredPagesPendingStatus": NVMLError_NotSupported("Not Supported"),
}


class FakeNvml:
    """pynvml with the GPUs of `gpus`: each a dict of what differs from `HEALTHY`. init: an exception that nvmlInit raises."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 36
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksEventReasonGpuIdle = 1
    nvmlClocksEventReasonApplicationsClocksSetting = 2
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8
    nvmlClocksEventReasonSyncBoost = 16
    nvmlClocksEventReasonSwThermalSlowdown = 32
    nvmlClocksEventReasonHwThermalSlowdown = 64
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 128
    nvmlClocksEventReasonDisplayClockSetting = 256

    def __init__(self, *gpus, init=None):
        self.gpus = [HEALTHY | changes for changes in gpus]
        self.init, self.open = init, 0

    def nvmlInit(self):
        if self.init:
            raise self.init
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return _answer(self.gpus[index].get("GetHandleByIndex", self.gpus[index]))

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        states = _answer(gpu["GetNvLinkState"])
        if link >= len(states):
            raise NVMLError_InvalidArgument("Invalid Argument")
        return _answer(states[link])

    def __getattr__(self, name):
        call = name.removeprefix("nvmlDevice")
        if call not in HEALTHY or any(gpu[call] is AttributeError for gpu in self.gpus):
            raise AttributeError(name)
        return lambda gpu, *args: _answer(gpu[call])


def _answer(value):
    if isinstance(value, Exception):
        raise value
    return value
