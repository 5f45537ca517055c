"""CUDA C++ kernels, compiled for the GPU at hand when first needed, and their launches.

Owns compilation, loading and the launch on PyTorch's current stream, which a CUDA graph may
capture. A kernel takes one struct by value. Knows nothing of what kernels compute. What was
compiled once is found on disk (`kernel_cache.py`).
"""

import ctypes
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# What the driver calls the limit that a kernel must raise to use more than 48 KiB.
_DEFAULT_SHARED_BYTES = 48 * 1024
_MAX_COMPILERS = 8
# While nothing is launched, what compiles beside the thread that would launch; else empty.
_compilers: list[ThreadPoolExecutor] = []


class CudaCompileError(RuntimeError):
    """A source does not compile here; the text is the compiler's."""


def is_available() -> bool:
    """Whether the compiler's and the driver's Python bindings are installed."""
    try:
        _bindings()
    except ImportError:
        return False
    return True


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Kernels that are needed meanwhile are compiled, side by side, and their launches left out.

    What is not compiled at the end goes on; whoever launches it first waits for it.
    """
    assert not _compilers, "one at a time"
    compilers = ThreadPoolExecutor(_MAX_COMPILERS, thread_name_prefix="cuda compiler")
    _compilers.append(compilers)
    try:
        yield
    finally:
        _compilers.clear()
        compilers.shutdown(wait=False)


def find_or_compile(source: Path, architecture: str, definitions: Mapping[str, int]) -> bytes:
    """`compile_cubin`, or what it made of the same text at an earlier start."""
    from stagecoach.kernels import kernel_cache

    headers = _headers_of(source)
    version = _value(_bindings().nvrtc.nvrtcVersion())
    name = kernel_cache.digest(
        [
            repr((version, architecture, sorted(definitions.items()), source.name)).encode(),
            source.read_bytes(),
            *(part for header in headers for part in (header.name.encode(), header.read_bytes())),
        ]
    )
    cubin = kernel_cache.find(name)
    if cubin is None:
        cubin = compile_cubin(source, architecture, definitions)
        kernel_cache.store(name, cubin)
    return cubin


def compile_cubin(source: Path, architecture: str, definitions: Mapping[str, int]) -> bytes:
    """Machine code of a source; needs no GPU.

    Args:
        source: a `.cu` file; it may include the `.cuh` files beside it and beside this module.
        architecture: as of `sm_90a`.
        definitions: macros and their values.

    Raises:
        CudaCompileError: with the compiler's log.
    """
    nvrtc = _bindings().nvrtc
    text = source.read_bytes()
    headers = _headers_of(source)
    program = _value(
        nvrtc.nvrtcCreateProgram(
            text,
            source.name.encode(),
            len(headers),
            [header.read_bytes() for header in headers],
            [header.name.encode() for header in headers],
        )
    )
    options = [
        f"--gpu-architecture={architecture}".encode(),
        b"--std=c++17",
        b"--ftz=true",
        *(f"-D{name}={value}".encode() for name, value in definitions.items()),
    ]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        log = b" " * _value(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaCompileError(f"{source.name}: {log.decode(errors='replace')}")
    cubin = b" " * _value(nvrtc.nvrtcGetCUBINSize(program))
    _value(nvrtc.nvrtcGetCUBIN(program, cubin))
    _value(nvrtc.nvrtcDestroyProgram(program))
    return cubin


def _headers_of(source: Path) -> list[Path]:
    return sorted([*source.parent.glob("*.cuh"), *Path(__file__).parent.glob("*.cuh")])


class CudaKernel:
    """A function of a module, loaded at the first launch; launches go to the current stream."""

    def __init__(self, cubin: "Future[bytes]", name: str, device: torch.device) -> None:
        """`cubin`: its machine code, or that on its way."""
        self._driver = _bindings().driver
        self._cubin = cubin
        self._name = name
        self._device = device
        self._shared_bytes = _DEFAULT_SHARED_BYTES

    @cached_property
    def _function(self) -> Any:
        cubin = self._cubin.result()  # must outlive the module, as it does here
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # there is a current context from here on
            module = _value(self._driver.cuModuleLoadData(cubin))
        return _value(self._driver.cuModuleGetFunction(module, self._name.encode()))

    def reserve_shared(self, num_bytes: int) -> None:
        """Allow launches with up to `num_bytes` of dynamic shared memory."""
        if num_bytes <= self._shared_bytes:
            return
        attribute = self._driver.CUfunction_attribute
        _value(
            self._driver.cuFuncSetAttribute(
                self._function,
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                num_bytes,
            )
        )
        self._shared_bytes = num_bytes

    def launch(
        self,
        grid: tuple[int, int, int],
        num_threads: int,
        arguments: ctypes.Structure,
        shared_bytes: int = 0,
        *,
        cluster: int = 1,
        is_dependent: bool = False,
    ) -> None:
        """Enqueue one launch.

        Args:
            grid: blocks in x, y and z.
            num_threads: of a block.
            arguments: the kernel's one parameter; copied before this returns.
            shared_bytes: dynamic shared memory of a block.
            cluster: blocks in x that run together, where the source does not say.
            is_dependent: it may start before the kernel in front has ended, and waits itself.

        Raises:
            CudaCompileError: with the compiler's log, at the first launch.
        """
        if _compilers:
            return
        self.reserve_shared(shared_bytes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = torch.cuda.current_stream().cuda_stream
        if cluster > 1 or is_dependent:
            config = self._driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
            config.sharedMemBytes = shared_bytes
            config.hStream = stream
            config.attrs = _launch_attributes(cluster, is_dependent=is_dependent)
            config.numAttrs = len(config.attrs)
            function = self._function
            _value(self._driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
            return
        _value(
            self._driver.cuLaunchKernel(
                self._function,
                *grid,
                *(num_threads, 1, 1),
                shared_bytes,
                stream,
                ctypes.addressof(pointers),
                0,
            )
        )


@cache
def load_kernel(
    source: Path, name: str, device: torch.device, definitions: tuple[tuple[str, int], ...]
) -> CudaKernel:
    """The function `name` of a source on a device, compiled at the first call or found on disk.

    Raises:
        CudaCompileError: with the compiler's log; while nothing is launched, at the first launch.
    """
    major, minor = torch.cuda.get_device_capability(device)
    # The "a" set has instructions that no other GPU has; only Hopper's is used here.
    suffix = "a" if major == 9 else ""
    arguments = (source, f"sm_{major}{minor}{suffix}", dict(definitions))
    if _compilers:
        return CudaKernel(_compilers[0].submit(find_or_compile, *arguments), name, device)
    cubin: Future[bytes] = Future()
    cubin.set_result(find_or_compile(*arguments))
    return CudaKernel(cubin, name, device)


@cache
def _bindings() -> ModuleType:
    """`cuda.bindings` with its parts; only loaded where a GPU runs."""
    import cuda.bindings
    import cuda.bindings.driver
    import cuda.bindings.nvrtc

    bindings: ModuleType = cuda.bindings
    return bindings


@cache
def _launch_attributes(cluster: int, *, is_dependent: bool) -> list[Any]:
    driver = _bindings().driver
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimensions = attribute.value.clusterDim
        dimensions.x, dimensions.y, dimensions.z = cluster, 1, 1
        attributes.append(attribute)
    if is_dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes


def _value(result: tuple[Any, ...]) -> Any:
    """What a call returned, behind its status; of several, all."""
    status, *values = result
    assert int(status) == 0, f"{status!r}"
    return values[0] if len(values) == 1 else tuple(values)
