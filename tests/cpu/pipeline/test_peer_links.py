"""Messages through peer memory, in Triton's interpreter."""

import pytest
import torch

from stagecoach.pipeline import peer_links
from stagecoach.pipeline.peer_links import HopReceiver, HopSender, RegionLayout, takes_hop
from tests.compiling_process import run_compiling
from tests.peer_regions import Regions, Stage

pytestmark = pytest.mark.cpu


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few small programs, so that the interpreter has little to do."""
    monkeypatch.setattr(peer_links, "MAX_PROGRAMS", 4)
    monkeypatch.setattr(peer_links, "MAX_EXCHANGE_BYTES", {2: 2048, 3: 2048})
    monkeypatch.setattr(peer_links, "MAX_HOP_BYTES", 2048)
    monkeypatch.setattr(peer_links, "_TILE_BYTES", 128)
    monkeypatch.setattr(peer_links, "MAX_WORD_BYTES", 512)
    monkeypatch.setattr(peer_links, "_WORD_TILE", 32)


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_the_same_bits_on_all_ranks_whatever_came_before(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word by word and in parts: single values, parts of a tile, several tiles, all that fits."""
    stage = Stage(size, monkeypatch)
    for num_values in (1, 31, 129, 33, 512, 7, 128, 200, 512, 1):
        parts = [torch.randn(num_values) * 10.0**rank for rank in range(size)]
        expected = torch.zeros(num_values)
        for part in parts:
            expected += part
        given = [part.clone() for part in parts]
        for total in stage.exchange(
            lambda exchange, rank, given=given: exchange.all_reduce(given[rank])
        ):
            assert torch.equal(total, expected), f"{num_values} values"


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize("num_values", [2, 66, 256, 257, 1024])
def test_bfloat16_goes_two_values_a_word(num_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in parts where their number is odd or large. Whole numbers: the interpreter truncates."""
    stage = Stage(3, monkeypatch)
    parts = [torch.randint(-80, 81, (num_values,)).bfloat16() for _ in range(3)]
    expected = parts[0] + parts[1] + parts[2]
    given = [part.clone() for part in parts]
    for total in stage.exchange(lambda exchange, rank: exchange.all_reduce(given[rank])):
        assert total.dtype == torch.bfloat16 and torch.equal(total, expected)


@pytest.mark.usefixtures("small_messages")
def test_a_message_may_begin_within_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(2, monkeypatch)
    parts = [torch.randint(-80, 81, (41,)).bfloat16() for _ in range(2)]
    expected = parts[0][1:] + parts[1][1:]
    for total in stage.exchange(lambda exchange, rank: exchange.all_reduce(parts[rank][1:])):
        assert torch.equal(total, expected)


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 40), torch.float32),
        ((5, 50), torch.float32),
        ((5,), torch.int64),
        ((5, 50), torch.int64),
        ((3, 3), torch.uint8),
    ],
)
def test_parts_are_laid_in_rank_order(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(2, monkeypatch)
    for round_number in range(3):
        parts = [torch.randint(2**30, shape).to(dtype) + round_number for _ in range(2)]
        for joined in stage.exchange(
            lambda exchange, rank, parts=parts: exchange.all_gather(parts[rank])
        ):
            assert torch.equal(joined, torch.stack(parts))


@pytest.mark.usefixtures("small_messages")
def test_counters_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 2^31 messages a channel goes on."""
    stage = Stage(2, monkeypatch)
    newest = 2**31 - 2
    for exchange in stage.exchanges:
        exchange._counts.fill_(newest)
        exchange._flags.fill_(newest)
        exchange._word_counts.fill_(newest)
    for turn in range(8):
        num_values = 40 if turn % 2 else 400
        parts = [torch.randn(num_values), torch.randn(num_values)]
        given = [part.clone() for part in parts]
        for total in stage.exchange(
            lambda exchange, rank, given=given: exchange.all_reduce(given[rank])
        ):
            assert torch.equal(total, parts[0] + parts[1])
    assert int(stage.exchanges[0]._counts[0]) < 0
    assert int(stage.exchanges[0]._word_counts[0]) < 0


@pytest.mark.usefixtures("small_messages")
def test_messages_to_the_next_stage_keep_their_order() -> None:
    """Of many sizes and types, and as many unread as the ring holds."""
    layout = RegionLayout(1)
    regions = Regions(2, layout)
    sender = HopSender(regions.of(0), 1, layout)  # type: ignore[arg-type]
    receiver = HopReceiver(regions.of(1), 0, layout)  # type: ignore[arg-type]
    sizes = (1, 512, 33, 100, 512, 7, 64, 3)
    for _ in range(3):
        messages = [torch.randn(size) for size in sizes]
        messages[3] = torch.randint(99, (40,))
        for message in messages:
            # What was sent lies in the ring: its tensor may be rewritten.
            tensor = message.clone()
            sender.send(tensor)
            tensor.zero_()
        for message in messages:
            into = torch.empty_like(message)
            receiver.receive(into)
            assert torch.equal(into, message)


def test_what_goes_through_peer_memory_is_a_matter_of_size() -> None:
    limit = peer_links.MAX_HOP_BYTES
    assert [takes_hop(size, torch.bfloat16) for size in (0, 1, limit // 2, limit // 2 + 1)] == [
        False,
        True,
        True,
        False,
    ]
    # Whole tiles of the largest type fill a program's part.
    for size in (2, 3, 4, 8, 16):
        assert peer_links.max_exchange_bytes(size) % (peer_links.MAX_PROGRAMS * 8192) == 0
    assert limit % (peer_links.MAX_PROGRAMS * 8192) == 0


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stagecoach.kernels.peer import peer_kernel, word_kernel

WORDS = dict(RANK=1, SIZE=2, MAX_WORDS=16384, TILE=512, SUMMED_BYTES=2, IS_DEPENDENT=True)
EXCHANGE = dict(
    RANK=1, SIZE=2, MAX_PROGRAMS=64, PROGRAM_VALUES=32768, TILE=4096, SUMS=True, VALUE_BYTES=2,
    IS_DEPENDENT=True,
)
HOP = dict(DEPTH=8, MAX_PROGRAMS=64, PROGRAM_VALUES=32768, TILE=4096)
for kernel, constants in (
    (peer_kernel.exchange_kernel, EXCHANGE),
    (peer_kernel.send_kernel, HOP),
    (peer_kernel.receive_kernel, HOP),
):
    types = {"x_ptr": "*bf16", "out_ptr": "*bf16", "data_ptr": "*bf16", "their_data_ptr": "*bf16",
             "distances_ptr": "*i64", "num_values": "i32", "tiles_per_program": "i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32")
        for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and name != "tiles_per_program"
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 16, "launch_pdl": kernel is peer_kernel.exchange_kernel},
    )
    ptx = compiled.asm["ptx"]
    assert "st.global.v4.b32" in ptx, "stores to a peer are 16 bytes wide"
    assert "sys.release" in ptx and "sys.acquire" in ptx
    assert "st.global.b16" not in ptx
    if kernel is peer_kernel.exchange_kernel:
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global"), "the message is complete"
signature = dict.fromkeys(("x_ptr", "out_ptr", "counts_ptr"), "*i32")
signature |= dict.fromkeys(("marked_ptr", "distances_ptr"), "*i64") | {"num_words": "i32"}
aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(signature))}
compiled = triton.compile(
    ASTSource(
        word_kernel.exchange_words_kernel,
        signature | dict.fromkeys(WORDS, "constexpr"),
        WORDS,
        aligned,
    ),
    target=GPUTarget("cuda", 90, 32),
    options={"launch_pdl": True},
)
ptx = compiled.asm["ptx"]
assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global"), "the message is complete"
assert "st.global.v2.b64" in ptx and "ld.volatile.global.v2.b64" in ptx, "words and marks together"
print("compiled")
"""


def test_the_kernels_compile_for_hopper_with_wide_stores() -> None:
    assert run_compiling("-c", _COMPILE).stdout.strip() == "compiled"
