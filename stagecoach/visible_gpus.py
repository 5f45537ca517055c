"""How many GPUs this process may use, found without torch.

Asks the driver's own library, which heeds the usual ways of hiding devices. No context is made,
so no memory of a device is taken.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

_DRIVER = "libcuda.so.1"
_COMPUTE_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR


def count(least_capability: int = 0) -> int:
    """CUDA devices that are visible; 0 without a driver or where it does not start.

    Args:
        least_capability: those of an older compute capability, by its first number, are left out.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    number = ctypes.c_int(0)
    # All return an error code, 0 for success.
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return 0
    if not least_capability:
        return number.value
    return sum(_capability(driver, ordinal) >= least_capability for ordinal in range(number.value))


def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA; it is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").is_file()


def _capability(driver: ctypes.CDLL, ordinal: int) -> int:
    """The first number of a device's compute capability; 0 where it does not tell."""
    device, major = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return 0
    failed = driver.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
    return 0 if failed else major.value
