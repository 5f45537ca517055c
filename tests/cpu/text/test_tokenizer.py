"""The tokenizer: both file formats, specials that text never becomes, bytes that come back."""

import base64
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from stagecoach.errors import CheckpointError
from stagecoach.text.tokenizer import (
    MAX_RUN_CHARS,
    SPECIAL_TOKEN_OFFSETS,
    Tokenizer,
    build_encoding,
    load_tokenizer,
    read_ranks,
)

DEMO = Path(__file__).parents[3] / "stagecoach" / "demo" / "checkpoint"
K3_NUM_BASE_TOKENS = 163_584

BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(DEMO)


def write_folder(folder: Path, tokens: list[bytes], specials: dict[int, str]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    added = {str(token_id): {"content": name} for token_id, name in specials.items()}
    config = {"added_tokens_decoder": added, "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def pieces(text: str) -> list[str]:
    """How the split pattern cuts `text`, seen through a vocabulary that holds every run of it."""
    runs = {text[i:j].encode() for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    # Prefixes of a piece come first, so that every piece merges into one token.
    longer = sorted((run for run in runs if len(run) > 1), key=len)
    ranks = {token: rank for rank, token in enumerate([*BYTES, *longer])}
    encoding = build_encoding(ranks)
    tokens = encoding.encode_ordinary(text)
    return [encoding.decode_single_token_bytes(token).decode() for token in tokens]


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = load_tokenizer(DEMO)
    assert tokenizer.decode_bytes(tokenizer.encode(text)).decode() == text


def test_vocabulary_of_the_demo(demo: Tokenizer) -> None:
    assert demo.vocab_size == 4096
    assert demo.eos_token_ids == (3841, 3842, 3849)
    for name, offset in SPECIAL_TOKEN_OFFSETS.items():
        assert demo.special_id(name) == 3840 + offset
        assert demo.special_name(3840 + offset) == name
        assert demo.token_bytes(3840 + offset) == name.encode()
    assert demo.special_name(3839) is None
    assert demo.special_name(3850) == "<|reserved_token_3850|>"


def test_numbers_are_a_token_a_digit(demo: Tokenizer) -> None:
    assert len(demo.encode("2024")) == 4
    assert len(demo.encode("1234567")) == 7


def test_special_tokens_in_text_are_text(demo: Tokenizer) -> None:
    text = "".join(SPECIAL_TOKEN_OFFSETS)
    assert max(demo.encode(text)) < 3840
    assert demo.decode_bytes(demo.encode(text)).decode() == text


def test_split_characters_give_partial_bytes(demo: Tokenizer) -> None:
    ids = demo.encode("🂡")
    assert len(ids) > 1
    with pytest.raises(UnicodeDecodeError):
        demo.decode_bytes(ids[:1]).decode()


def test_half_a_surrogate_pair_is_a_replacement_character(demo: Tokenizer) -> None:
    assert demo.encode("a\ud800b") == demo.encode("a\ufffdb")
    assert demo.encode("\ud83d\ude00") == demo.encode("😀")


def test_unknown_names_and_ids_are_refused(demo: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no special token"):
        demo.special_id("<|nothing|>")
    for token_id in (-1, 4096):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            demo.token_bytes(token_id)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello World's", ["Hello", " World's"]),
        ("HTTPServer", ["HTTPServer"]),
        ("camelCase", ["camel", "Case"]),
        ("x12345", ["x", "123", "45"]),
        ("漢字abc", ["漢字", "abc"]),
        ("a == b\n", ["a", " ==", " b", "\n"]),
        ("end.\n\nNext", ["end", ".\n\n", "Next"]),
        ("a   b", ["a", "  ", " b"]),
        ('role="user"', ["role", '="', "user", '"']),
    ],
)
def test_split_pattern(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


def test_long_runs_are_cut_where_the_original_cuts_them(demo: Tokenizer) -> None:
    for text in ("a" * (MAX_RUN_CHARS + 1), " " * (2 * MAX_RUN_CHARS), "ab " * 140_000):
        assert demo.decode_bytes(demo.encode(text)).decode() == text
    whole, rest = demo.encode("a" * MAX_RUN_CHARS), demo.encode("a")
    assert demo.encode("a" * (MAX_RUN_CHARS + 1)) == [*whole, *rest]


def test_vocabulary_of_kimi_k3(tmp_path: Path) -> None:
    longer = (number.to_bytes(3, "big") for number in range(K3_NUM_BASE_TOKENS - 256))
    tokens = [*BYTES, *longer]
    named = {K3_NUM_BASE_TOKENS + offset: name for name, offset in SPECIAL_TOKEN_OFFSETS.items()}
    tokenizer = load_tokenizer(write_folder(tmp_path, tokens, named))
    assert tokenizer.vocab_size == 163_840
    assert tokenizer.special_id("[BOS]") == 163_584
    assert tokenizer.special_id("<|media_pad|>") == 163_605
    assert tokenizer.special_id("<osagent_mode>") == 163_649
    assert tokenizer.special_id("[PAD]") == 163_839
    assert tokenizer.special_name(163_837) == "<|reserved_token_163837|>"
    assert tokenizer.eos_token_ids == (163_585, 163_586, 163_593)


def test_end_tokens_of_the_generation_config_count_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, BYTES, {257: "[EOS]"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 300]}')
    assert load_tokenizer(folder).eos_token_ids == (257, 258, 300)


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, BYTES, {256: "[EOS]", 257: "[EOS]"})
    with pytest.raises(ValueError, match="names one token twice"):
        load_tokenizer(folder)


@pytest.mark.parametrize("line", ["QQ==", "QQ== x", "?? 1", "QQ== 7"])
def test_a_bad_rank_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text(f"IQ== 0\n{line}\n")
    with pytest.raises(ValueError, match=r"tiktoken\.model"):
        read_ranks(path)


@pytest.mark.parametrize(
    "added", [[], {"abc": {"content": "[EOS]"}}, {"256": {}}, {"256": "[EOS]"}, None]
)
def test_added_tokens_of_another_form_are_refused(tmp_path: Path, added: object) -> None:
    folder = write_folder(tmp_path, BYTES, {})
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: added_tokens_decoder must map"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff{}"])
def test_an_unreadable_tokenizer_config_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    folder = write_folder(tmp_path, BYTES, {})
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        load_tokenizer(folder)


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiktoken\.model: holds no token"):
        load_tokenizer(write_folder(tmp_path, [], {}))


def test_the_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, BYTES, {})
    assert load_tokenizer(folder, model_vocab_size=512).vocab_size == 512
    for size in (511, 513):
        with pytest.raises(ValueError, match=f"has 512 tokens, the model's vocab_size={size}"):
            load_tokenizer(folder, model_vocab_size=size)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither tiktoken"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_json_serves_as_well(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["[EOS]", "<|end_of_msg|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat and the hat"] * 5, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = "the hat — 漢 [EOS]"
    ids = tokenizer.encode(text)
    assert tokenizer.special_id("[EOS]") not in ids
    assert tokenizer.decode_bytes(ids).decode() == text
    assert tokenizer.eos_token_ids == (0, 1)
    size = backend.get_vocab_size()
    assert tokenizer.vocab_size == size
    padded = load_tokenizer(tmp_path, model_vocab_size=size + 2)
    assert padded.decode_bytes([*ids, size + 1]).decode() == text
    with pytest.raises(ValueError, match=f"vocab_size={size - 1}"):
        load_tokenizer(tmp_path, model_vocab_size=size - 1)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)
