"""What a GPU does in a second, and what it holds.

Owns the rates behind every estimate of time. Those of an H200 were measured (`bench/results/h200`);
others are scaled from its by the vendor's figures, and say so.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of GPU, and the links to its neighbours in the host."""

    name: str
    memory_bytes: int  # that a process finds
    copy_bytes_per_second: float  # read + written
    matrix_flops_per_second: float  # bfloat16
    exchange_bytes_per_second: float  # of a sum over ranks, beside its latency
    hop_bytes_per_second: float  # to the next stage
    is_measured: bool


H200 = Machine(
    name="h200",
    memory_bytes=int(139.8 * 2**30),
    copy_bytes_per_second=4.25e12,
    matrix_flops_per_second=790e12,
    exchange_bytes_per_second=250e9,
    hop_bytes_per_second=230e9,
    is_measured=True,
)

# The same chip with other memory, and a smaller chip.
_H100 = Machine(
    name="h100",
    memory_bytes=int(79.1 * 2**30),
    copy_bytes_per_second=4.25e12 * 3.35 / 4.8,
    matrix_flops_per_second=790e12,
    exchange_bytes_per_second=250e9,
    hop_bytes_per_second=230e9,
    is_measured=False,
)
_H20 = Machine(
    name="h20",
    memory_bytes=int(95.1 * 2**30),
    copy_bytes_per_second=4.25e12 * 4.0 / 4.8,
    matrix_flops_per_second=790e12 * 148 / 989,
    exchange_bytes_per_second=250e9,
    hop_bytes_per_second=230e9,
    is_measured=False,
)

MACHINES = {machine.name: machine for machine in (H200, _H100, _H20)}
