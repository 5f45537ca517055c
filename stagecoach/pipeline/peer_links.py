"""Small messages between the GPUs of one host, without a communicator.

Owns the layout of a worker's region of peer memory, which messages fit it, and how a message is cut
into programs. A launch is one kernel on the current stream, waits for nothing on the host, and can
be captured. The protocols are those of `kernels/peer/`.

    region   [ flags of the stage | flags, taken of the hop | words | parts of the stage | ring ]
"""

import torch
from torch import Tensor

from stagecoach.pipeline.peer_memory import PeerMemory, share_memory
from stagecoach.pipeline.topology import Topology, WorkerId

MAX_PROGRAMS = 64
# A tile is 16 bytes of each thread.
_NUM_WARPS = 16
_TILE_BYTES = 16 * 32 * _NUM_WARPS
# A message of the stage of at most so many bytes goes word by word, which takes a way over the
# link less and twice the bytes; there is room for more. Between two H200s 294,912 bytes take 4.2
# us so and 5.0 in parts.
WORD_LIMIT_BYTES = 320 << 10
MAX_WORD_BYTES = 512 << 10
_WORD_BYTES = 4
_WORD_TILE = 512
_MIN_WORD_TILE = 32
_WORD_WARPS = 4
# What a rank of the stage sends to each other in one exchange; larger goes through NCCL. Every
# rank sends everybody all of its message, which pays as long as latency outweighs bytes.
MAX_EXCHANGE_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 2 << 20}
_MAX_EXCHANGE_BYTES_OF_MANY = 1 << 20
MAX_HOP_BYTES = 4 << 20
# A power of two: messages to the next stage that may lie unread.
_RING_DEPTH = 8
_FLAG_BYTES = 4


class Launch:
    """How a message of some values is cut; the same on all sides."""

    def __init__(self, tensor: Tensor, max_bytes: int) -> None:
        """A contiguous tensor of at most `max_bytes`, not empty."""
        self.tile = _TILE_BYTES // tensor.element_size()
        num_tiles = -(-tensor.numel() // self.tile)
        self.tiles_per_program = -(-num_tiles // MAX_PROGRAMS)
        self.num_programs = -(-num_tiles // self.tiles_per_program)
        self.program_values = max_bytes // MAX_PROGRAMS // tensor.element_size()
        assert tensor.is_contiguous(), "a message in one piece"
        assert self.tiles_per_program * self.tile <= self.program_values, (
            f"{tensor.nbytes} bytes are more than {max_bytes}"
        )


class StageExchange:
    """Sums and joins among the ranks of one stage."""

    def __init__(self, memory: PeerMemory, ranks: tuple[int, ...], layout: "RegionLayout") -> None:
        """`ranks`: those of this worker's stage, in order."""
        self.size = len(ranks)
        self.max_bytes = max_exchange_bytes(self.size)
        self.word_limit = min(WORD_LIMIT_BYTES, MAX_WORD_BYTES)
        self._rank = ranks.index(memory.rank)
        own, num_flags = memory.rank, self.size * MAX_PROGRAMS
        num_words = 2 * self.size * MAX_WORD_BYTES // _WORD_BYTES
        num_bytes = 2 * self.size * self.max_bytes
        self._flags = memory.view(own, 0, num_flags, torch.int32)
        self._words = memory.view(own, layout.words, num_words, torch.int64)
        self._data = memory.view(own, layout.parts, num_bytes, torch.uint8)
        device = self._flags.device
        distances = [memory.addresses[rank] - memory.addresses[own] for rank in ranks]
        self._distances = torch.tensor(distances, dtype=torch.int64, device=device)
        self._counts = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        num_word_programs = MAX_WORD_BYTES // _WORD_BYTES // _MIN_WORD_TILE
        self._word_counts = torch.zeros(num_word_programs, dtype=torch.int32, device=device)

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and 0 < tensor.nbytes <= self.max_bytes

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in float32 and in rank order: the same bits on all.

        Args:
            tensor: contiguous bfloat16 or float32; overwritten with what is returned, or not.
        """
        if not self._is_tiny(tensor):
            return self._exchange(tensor, tensor, sums=True)
        words = _words_of(tensor)
        summed = self._exchange_words(words, words, summed_bytes=tensor.element_size())
        return summed.view(tensor.dtype).view(tensor.shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] -> [size, ...] in rank order."""
        out = tensor.new_empty(self.size, *tensor.shape)
        if self._is_tiny(tensor):
            self._exchange_words(_words_of(tensor), _words_of(out), summed_bytes=0)
            return out
        return self._exchange(tensor, out, sums=False)

    def _is_tiny(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= self.word_limit and tensor.nbytes % _WORD_BYTES == 0

    def _exchange_words(self, words: Tensor, out: Tensor, *, summed_bytes: int) -> Tensor:
        from stagecoach.kernels.dependent_launch import launch_options
        from stagecoach.kernels.peer.word_kernel import exchange_words_kernel

        exchange_words_kernel[(-(-words.numel() // _WORD_TILE),)](
            words,
            out,
            self._word_counts,
            self._words,
            self._distances,
            words.numel(),
            RANK=self._rank,
            SIZE=self.size,
            MAX_WORDS=MAX_WORD_BYTES // _WORD_BYTES,
            TILE=_WORD_TILE,
            SUMMED_BYTES=summed_bytes,
            num_warps=_WORD_WARPS,
            **launch_options(words),
        )
        return out

    def _exchange(self, tensor: Tensor, out: Tensor, *, sums: bool) -> Tensor:
        from stagecoach.kernels.dependent_launch import launch_options
        from stagecoach.kernels.peer.peer_kernel import exchange_kernel

        launch = Launch(tensor, self.max_bytes)
        exchange_kernel[(launch.num_programs,)](
            tensor,
            out,
            self._counts,
            self._flags,
            self._data.view(tensor.dtype),
            self._distances,
            tensor.numel(),
            launch.tiles_per_program,
            RANK=self._rank,
            SIZE=self.size,
            MAX_PROGRAMS=MAX_PROGRAMS,
            PROGRAM_VALUES=launch.program_values,
            TILE=launch.tile,
            SUMS=sums,
            VALUE_BYTES=tensor.element_size(),
            num_warps=_NUM_WARPS,
            **launch_options(tensor),
        )
        return out


class HopSender:
    """The sending end of the way to the same tensor rank of the next stage."""

    def __init__(self, memory: PeerMemory, to_rank: int, layout: "RegionLayout") -> None:
        self._taken = memory.view(memory.rank, layout.taken, MAX_PROGRAMS, torch.int32)
        self._flags = memory.view(to_rank, layout.flags, MAX_PROGRAMS, torch.int32)
        self._data = memory.view(to_rank, layout.ring, _RING_DEPTH * MAX_HOP_BYTES, torch.uint8)
        self._counts = torch.zeros_like(self._taken)
        self._launch(_first_message(self._taken.device), compiles_only=True)

    def send(self, tensor: Tensor) -> None:
        """Enqueue a send; work enqueued behind it may rewrite the tensor."""
        self._launch(tensor, compiles_only=False)

    def _launch(self, tensor: Tensor, *, compiles_only: bool) -> None:
        from stagecoach.kernels.peer.peer_kernel import send_kernel

        launch = Launch(tensor, MAX_HOP_BYTES)
        send_kernel.run(
            tensor,
            self._counts,
            self._taken,
            self._flags,
            self._data.view(tensor.dtype),
            tensor.numel(),
            launch.tiles_per_program,
            DEPTH=_RING_DEPTH,
            MAX_PROGRAMS=MAX_PROGRAMS,
            PROGRAM_VALUES=launch.program_values,
            TILE=launch.tile,
            num_warps=_NUM_WARPS,
            grid=(launch.num_programs,),
            warmup=compiles_only,
        )


class HopReceiver:
    """The receiving end of the way from the same tensor rank of the stage before."""

    def __init__(self, memory: PeerMemory, from_rank: int, layout: "RegionLayout") -> None:
        own = memory.rank
        self._taken = memory.view(from_rank, layout.taken, MAX_PROGRAMS, torch.int32)
        self._flags = memory.view(own, layout.flags, MAX_PROGRAMS, torch.int32)
        self._data = memory.view(own, layout.ring, _RING_DEPTH * MAX_HOP_BYTES, torch.uint8)
        self._counts = torch.zeros_like(self._flags)
        self._launch(_first_message(self._flags.device), compiles_only=True)

    def receive(self, into: Tensor) -> None:
        """Enqueue the copy of the next message, of the tensor's type and number of values."""
        self._launch(into, compiles_only=False)

    def _launch(self, into: Tensor, *, compiles_only: bool) -> None:
        from stagecoach.kernels.peer.peer_kernel import receive_kernel

        launch = Launch(into, MAX_HOP_BYTES)
        receive_kernel.run(
            into,
            self._data.view(into.dtype),
            self._counts,
            self._flags,
            self._taken,
            into.numel(),
            launch.tiles_per_program,
            DEPTH=_RING_DEPTH,
            MAX_PROGRAMS=MAX_PROGRAMS,
            PROGRAM_VALUES=launch.program_values,
            TILE=launch.tile,
            num_warps=_NUM_WARPS,
            grid=(launch.num_programs,),
            warmup=compiles_only,
        )


class RegionLayout:
    """Offsets in bytes within a worker's region; the flags of the stage come first."""

    def __init__(self, tp_size: int) -> None:
        flags_bytes = MAX_PROGRAMS * _FLAG_BYTES
        # Two halves for each rank of the stage, if there are others.
        num_places = 2 * tp_size if tp_size > 1 else 0
        # Of the hop: messages that came, messages that the receiver has taken.
        self.flags = tp_size * flags_bytes
        self.taken = self.flags + flags_bytes
        self.words = self.taken + flags_bytes
        self.parts = self.words + num_places * MAX_WORD_BYTES // _WORD_BYTES * 8
        self.ring = self.parts + num_places * max_exchange_bytes(tp_size)
        self.num_bytes = self.ring + _RING_DEPTH * MAX_HOP_BYTES


class PeerLinks:
    """What one worker reaches through peer memory; None where it has no such neighbour."""

    def __init__(
        self, memory: PeerMemory, worker: WorkerId, topology: Topology, hosts: tuple[int, ...]
    ) -> None:
        layout = RegionLayout(topology.tp_size)
        ranks = tuple(topology.stage_ranks(worker.stage))
        self.exchange: StageExchange | None = None
        self.sender: HopSender | None = None
        self.receiver: HopReceiver | None = None
        if topology.tp_size > 1:
            self.exchange = StageExchange(memory, ranks, layout)
        host, to_rank = hosts[worker.rank], worker.rank + topology.tp_size
        if worker.stage + 1 < topology.num_stages and hosts[to_rank] == host:
            self.sender = HopSender(memory, to_rank, layout)
        from_rank = worker.rank - topology.tp_size
        if worker.stage > 0 and hosts[from_rank] == host:
            self.receiver = HopReceiver(memory, from_rank, layout)


def connect_peers(
    worker: WorkerId, topology: Topology, device: torch.device, hosts: tuple[int, ...]
) -> PeerLinks | None:
    """Every worker calls it together; None on all where GPUs of a host do not reach each other, or
    each host has one.

    Args:
        hosts: on which host each rank is; those of a stage are on one.
    """
    if len(set(hosts)) == len(hosts):
        return None  # nobody has a neighbour on its host
    memory = share_memory(RegionLayout(topology.tp_size).num_bytes, device, hosts)
    return PeerLinks(memory, worker, topology, hosts) if memory is not None else None


def _first_message(device: torch.device) -> Tensor:
    """What kernels of the hop are compiled for, before the first request sends anything."""
    return torch.empty(_TILE_BYTES, dtype=torch.bfloat16, device=device)


def _words_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes as int32; a copy where it does not begin at a word."""
    flat = tensor.view(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int32)


def max_exchange_bytes(tp_size: int) -> int:
    return MAX_EXCHANGE_BYTES.get(tp_size, _MAX_EXCHANGE_BYTES_OF_MANY)


def takes_hop(num_values: int, dtype: torch.dtype) -> bool:
    """Whether a message to the next stage goes through peer memory; the same on both sides."""
    return 0 < num_values * dtype.itemsize <= MAX_HOP_BYTES
