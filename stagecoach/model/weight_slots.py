"""Which checkpoint tensor, or which part of it, goes where in this rank's parameters.

Modules allocate their parameters and bind each to published names while they are built; the
loader walks the slots afterwards. Owns that list. Knows no file.

    checkpoint tensor   |..........| region |..........|      (whole where not split)
                                      v
    parameter           |.... other slots ....| target |      (a fused matrix has many)

A parameter may be quantised: then its target has two tensors, and the loader makes them of what
is stored.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from stagecoach.kernels.quantization import FP8_DTYPE, MXFP4_GROUP_SIZE, Fp8Weight, Mxfp4Weight
from stagecoach.model.weight_formats import PLAIN, WeightFormats

Target = Tensor | Mxfp4Weight | Fp8Weight
# NaN in the scale's type, so that what no slot fills shows.
_SCALE_NAN = 255


class WeightKind(Enum):
    """What a tensor is for: how it is stored, and how a random one is drawn."""

    MATRIX = "matrix"
    ROUTER = "router"  # a matrix that stays at least float32 here, though stored as others are
    EXPERT = "expert"  # a matrix that may be stored packed as MXFP4
    NORM = "norm"
    HEAD_NORM = "head_norm"
    CONVOLUTION = "convolution"
    DECAY = "decay"  # A_log, possibly padded and with axes of length one
    DECAY_BIAS = "decay_bias"
    ROUTER_BIAS = "router_bias"
    DRAFT_HEAD = "draft_head"  # of a draft's last steps; at least float32 here, stored as others

    @property
    def is_stored_as_float32(self) -> bool:
        return self in (
            WeightKind.HEAD_NORM,
            WeightKind.CONVOLUTION,
            WeightKind.DECAY,
            WeightKind.DECAY_BIAS,
            WeightKind.ROUTER_BIAS,
        )

    @property
    def is_at_least_float32(self) -> bool:
        return self.is_stored_as_float32 or self in (WeightKind.ROUTER, WeightKind.DRAFT_HEAD)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """One checkpoint tensor's place on this rank."""

    name: str  # as published, without the text model's prefix
    shape: tuple[int, ...]  # of the whole tensor
    region: tuple[slice, ...]  # this rank's part of it, one slice a dim, with start and stop
    target: Target  # view of a parameter, of the region's shape
    kind: WeightKind
    can_become_fp8: bool = False  # it is multiplied by activations that can be quantised, too


class WeightScope:
    """Builds the slots of one module; children share the list and extend the name.

    Args:
        dtype: of the parameters; kinds that need it stay at least float32.
        device: where the parameters live; "meta" names and shapes them without memory.
        tp_rank, tp_size: the part of split tensors that this rank takes.
        formats: which matrices are quantised.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        tp_rank: int = 0,
        tp_size: int = 1,
        formats: WeightFormats = PLAIN,
    ) -> None:
        self.dtype = dtype
        self.formats = formats
        self.device = device
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.slots: list[WeightSlot] = []
        self.parameters: list[Tensor] = []
        self._padding: list[Tensor] = []
        self._asked: set[str] = set()  # names that may choose E4M3
        self._prefix = ""

    def child(self, name: str) -> "WeightScope":
        """The scope of a part called `name`."""
        scope = WeightScope(
            self.dtype,
            device=self.device,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            formats=self.formats,
        )
        scope.slots, scope.parameters = self.slots, self.parameters
        scope._padding, scope._asked = self._padding, self._asked
        scope._prefix = f"{self._prefix}{name}."
        return scope

    def parameter(self, *shape: int, kind: WeightKind = WeightKind.MATRIX) -> Tensor:
        """A parameter filled with NaN: what no slot fills shows."""
        dtype = self.dtype
        if kind.is_at_least_float32:
            dtype = torch.promote_types(dtype, torch.float32)
        tensor = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        self.parameters.append(tensor)
        return tensor

    def matrix(self, *shape: int, kind: WeightKind = WeightKind.MATRIX) -> Tensor:
        """A parameter [..., outputs, inputs]; on a CPU it lies as [..., inputs, outputs].

        With few rows of input the CPU's product with it is up to twice as fast so (8 rows,
        512 inputs, 4,096 outputs, float32, AVX2: 387 instead of 899 µs); with many, the same.
        On a GPU a row of weights lies in one piece.
        """
        if torch.device(self.device).type == "cuda":
            return self.parameter(*shape, kind=kind)
        *batch, num_outputs, num_inputs = shape
        return self.parameter(*batch, num_inputs, num_outputs, kind=kind).transpose(-1, -2)

    def becomes_fp8(self, name: str) -> bool:
        """Whether the matrix of this name, bound later, is to be quantised while it is loaded."""
        self._asked.add(self._prefix + name)
        fp8 = self.formats.fp8
        return fp8 is not None and fp8.selects(self._prefix + name)

    def fp8_matrix(self, *shape: int) -> Fp8Weight:
        """A parameter [..., outputs, inputs] of E4M3 with a factor for each row of inputs."""
        weight = Fp8Weight(
            torch.zeros(shape, dtype=FP8_DTYPE, device=self.device),
            torch.full(shape[:-1], float("nan"), dtype=torch.float32, device=self.device),
        )
        self.parameters += weight
        return weight

    def mxfp4_matrix(self, *shape: int) -> Mxfp4Weight:
        """A parameter [..., outputs, inputs] of FP4 codes with a scale for 32 inputs."""
        *rows, num_inputs = shape
        assert num_inputs % MXFP4_GROUP_SIZE == 0, f"{num_inputs} inputs are no whole groups"

        def full(width: int, value: int) -> Tensor:
            return torch.full((*rows, width), value, dtype=torch.uint8, device=self.device)

        weight = Mxfp4Weight(
            full(num_inputs // 2, 0), full(num_inputs // MXFP4_GROUP_SIZE, _SCALE_NAN)
        )
        self.parameters += weight
        return weight

    def pad(self, target: Tensor) -> None:
        """Zero a part of a parameter that no checkpoint tensor fills."""
        target.zero_()
        self._padding.append(target)

    def bind(
        self,
        name: str,
        target: Target,
        kind: WeightKind = WeightKind.MATRIX,
        *,
        split_dim: int | None = None,
    ) -> None:
        """Fill `target` from the tensor `name`; with `split_dim`, from this rank's equal share."""
        shape = list(target.shape)
        region = [slice(0, size) for size in shape]
        if split_dim is not None:
            share = shape[split_dim]
            shape[split_dim] = share * self.tp_size
            start = share * self.tp_rank
            region[split_dim] = slice(start, start + share)
        self.bind_region(name, target, tuple(shape), tuple(region), kind)

    def bind_region(
        self,
        name: str,
        target: Target,
        shape: tuple[int, ...],
        region: tuple[slice, ...],
        kind: WeightKind = WeightKind.MATRIX,
    ) -> None:
        """Fill `target` from `region` of the tensor `name`, whose whole shape is `shape`."""
        part = tuple(span.stop - span.start for span in region)
        assert part == tuple(target.shape), f"{name}: region {part}, target {tuple(target.shape)}"
        name = self._prefix + name
        slot = WeightSlot(name, shape, region, target, kind, name in self._asked)
        self.slots.append(slot)

    def check_covered(self) -> None:
        """Assert that slots and padding so far fill every parameter, and none twice."""
        targets = [*(slot.target for slot in self.slots), *self._padding]
        num_bound = sum(target.nbytes for target in targets)
        num_bytes = sum(parameter.nbytes for parameter in self.parameters)
        assert num_bound == num_bytes, f"slots hold {num_bound} of {num_bytes} bytes"
