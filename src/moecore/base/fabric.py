"""Names of multi-host NVLink domains (fabrics), which NVML reports."""

import ctypes

import torch

FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


class _FabricInfo(ctypes.Structure):
    """The C struct `nvmlGpuFabricInfo_t` of NVML."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def read_nvlink_domain_id(uuid: str | None = None) -> str | None:
    """Return the id of a GPU's multi-host NVLink domain or None; `uuid` None = the current GPU."""
    uuid = uuid or str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        read = nvml.nvmlDeviceGetGpuFabricInfo
    except (OSError, AttributeError):  # no driver, or a driver without fabrics
        return None
    if nvml.nvmlInit_v2():
        return None
    gpu, info = ctypes.c_void_p(), _FabricInfo()
    failed = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(gpu))
    failed = failed or read(gpu, ctypes.byref(info))
    nvml.nvmlShutdown()
    cluster = bytes(info.cluster)
    # The switches of one host are a fabric too, but with a cluster id of zeros.
    if failed or info.state != FABRIC_COMPLETED or info.status or not any(cluster):
        return None
    return f"{cluster.hex()}.{info.clique}"
