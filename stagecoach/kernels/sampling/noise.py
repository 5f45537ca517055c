"""Counter-based noise: the only source of randomness in sampling.

Owns the map (seed, position, token id, stream) -> noise. Nothing else enters it: not the
batch, not the rank, not how a prompt was chunked. Knows no request and no logits.

Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, §3.3), in int64 arithmetic because torch has no complete uint32.

Dimensions: R rows, V vocabulary, K chosen tokens of a row, B blocks of four tokens.
"""

import torch
from torch import Tensor

# The fourth counter word: one number for each use of noise.
TOKEN_STREAM = 0  # the target's choice of a token
DRAFT_STREAM = 1  # the drafter's, where it must not depend on the target's
ACCEPT_STREAM = 2  # whether a draft stands, where equality does not decide

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD_MASK = 0xFFFFFFFF
_TOKENS_PER_BLOCK = 4


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> Tensor:
    """Four pseudo-random 32-bit words for each counter.

    Args:
        counter: four int64 tensors of 32-bit words that broadcast together to shape S.
        key: two int64 tensors of 32-bit words that broadcast to S.

    Returns:
        int64 [*S, 4], each in [0, 2**32).
    """
    # The even and the odd words of the state are kept as one tensor each: [2, *S].
    even = torch.stack(torch.broadcast_tensors(counter[0], counter[2], key[0])[:2])
    odd = torch.stack(torch.broadcast_tensors(counter[1], counter[3], even[0])[:2])
    product = torch.empty_like(even)
    even_0, even_1 = even.unbind()
    product_halves, odd_halves = product.unbind(), odd.unbind()
    for round_key in _round_keys(key):
        # int64 products wrap, which leaves all 64 bits of the unsigned product in place.
        torch.mul(even_1, _MULTIPLIERS[1], out=product_halves[0])
        torch.mul(even_0, _MULTIPLIERS[0], out=product_halves[1])
        torch.bitwise_right_shift(product, 32, out=even)
        even.bitwise_xor_(odd).bitwise_xor_(round_key)
        # Bits above the word come from `odd` and from the sign; they are cut here once.
        even.bitwise_and_(_WORD_MASK)
        product, odd = odd, product
        product_halves, odd_halves = odd_halves, product_halves
    odd.bitwise_and_(_WORD_MASK)
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)


def gumbel_noise(
    seeds_R: Tensor,
    positions_R: Tensor,
    vocab_size: int,
    device: torch.device | str,
    stream: int = TOKEN_STREAM,
) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    Token v takes word v % 4 of the block whose counter is (v // 4, position low, position
    high, stream) under the key (seed low, seed high).

    Args:
        seeds_R: int64, the seed of each row's request.
        positions_R: int64, index of the token being sampled within its request.

    Returns:
        float64 [R, V], finite; each value depends on its seed, position and token id alone.
    """
    num_blocks = -(-vocab_size // _TOKENS_PER_BLOCK)
    blocks_1B = torch.arange(num_blocks, device=device).unsqueeze(0)
    words_RB4 = _words(seeds_R.to(device), positions_R.to(device), blocks_1B, stream)
    return _gumbel(words_RB4.flatten(1))[:, :vocab_size]


def gumbel_noise_at(seeds_R: Tensor, positions_R: Tensor, token_ids_RK: Tensor) -> Tensor:
    """The values of `gumbel_noise` at chosen token ids: float64 [R, K]."""
    words_RK4 = _words(seeds_R, positions_R, token_ids_RK // _TOKENS_PER_BLOCK, TOKEN_STREAM)
    word_RK1 = (token_ids_RK % _TOKENS_PER_BLOCK).unsqueeze(-1)
    return _gumbel(words_RK4.gather(-1, word_RK1).squeeze(-1))


def uniform_noise(seeds_R: Tensor, positions_R: Tensor, stream: int) -> Tensor:
    """One uniform number a row, strictly inside (0, 1): float64 [R], from word 0 of block 0."""
    block_1 = torch.zeros(1, dtype=torch.int64, device=positions_R.device)
    return _uniform(_words(seeds_R, positions_R, block_1, stream)[:, 0, 0])


def _round_keys(key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The two key words of each round, as one tensor [2, *S] a round."""
    words = torch.stack(torch.broadcast_tensors(*key))
    ones = (1,) * (words.dim() - 1)
    # Made where the words are: an accelerator would be waited for on the way there.
    first, second = _KEY_STEPS
    steps = (first + (second - first) * torch.arange(2, device=words.device)).reshape(1, 2, *ones)
    rounds = torch.arange(_NUM_ROUNDS, device=words.device).reshape(-1, 1, *ones)
    return (words + steps * rounds).unbind()


def _words(seeds_R: Tensor, positions_R: Tensor, blocks: Tensor, stream: int) -> Tensor:
    position_low, position_high = _split_words(positions_R.unsqueeze(1))
    counter = (blocks, position_low, position_high, torch.full_like(position_low, stream))
    return philox4x32(counter, _split_words(seeds_R.unsqueeze(1)))


def _split_words(numbers: Tensor) -> tuple[Tensor, Tensor]:
    return numbers & _WORD_MASK, (numbers >> 32) & _WORD_MASK


def _uniform(words: Tensor) -> Tensor:
    # Half a step off both ends: never 0 or 1.
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def _gumbel(words: Tensor) -> Tensor:
    """Finite, because the uniform numbers are never 0 or 1."""
    return _uniform(words).log_().neg_().log_().neg_()
