"""Where tokens come from: a server, a tokenizer, or words."""

import httpx
import pytest

from stagecoach.benchmarks.connection import setup_client
from stagecoach.benchmarks.vocabulary import (
    ServerVocabulary,
    TokenizerVocabulary,
    WordVocabulary,
    alphabet,
    server_vocabulary,
)
from stagecoach.checkpoint_folder import checkpoint_folder
from stagecoach.errors import ServerError
from stagecoach.text.tokenizer import load_tokenizer
from tests.cpu.benchmarks.fake_server import FakeServer, setup_transport


def _client(server: FakeServer) -> httpx.Client:
    return setup_client("http://fake", {}, transport=setup_transport(server))


def test_a_server_with_tokenize_speaks_its_own_tokens() -> None:
    with _client(FakeServer()) as client:
        vocabulary = server_vocabulary(client, "fake")
        assert vocabulary.is_exact
        assert vocabulary.encode("a b") == [97, 98]
        assert vocabulary.decode([5, 6]) == "t5 t6"
        assert len(alphabet(vocabulary, 0)) > 100


def test_a_server_without_tokenize_is_spoken_to_in_words() -> None:
    with _client(FakeServer(has_tokenize=False)) as client:
        vocabulary = server_vocabulary(client, "fake")
        assert not vocabulary.is_exact
        assert vocabulary.decode(vocabulary.encode("one two one")) == "one two one"
        with pytest.raises(ServerError, match="HTTP status 404: no /tokenize here"):
            ServerVocabulary(client, "fake").encode("a")


@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_refuses_is_not_taken_for_one_without_tokenize(status: int) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text="no"))
    with (
        setup_client("http://fake", {}, transport=transport) as client,
        pytest.raises(ServerError, match=f"HTTP status {status}: no"),
    ):
        server_vocabulary(client, "fake")


@pytest.mark.parametrize("reply", [{}, [], "text"])
def test_an_answer_of_another_shape_is_an_error(reply: object) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=reply))
    with setup_client("http://fake", {}, transport=transport) as client:
        vocabulary = ServerVocabulary(client, "fake")
        with pytest.raises(ServerError, match="/tokenize answered with"):
            vocabulary.encode("a")
        with pytest.raises(ServerError, match="/detokenize answered with"):
            vocabulary.decode([1])


def test_no_server_is_an_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with (
        setup_client("http://fake", {}, transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(ServerError, match=r"no answer from http://fake.*connection refused"),
    ):
        server_vocabulary(client, "fake")


def test_the_alphabet_of_a_tokenizer_has_no_special_token() -> None:
    tokenizer = load_tokenizer(checkpoint_folder("demo"))
    token_ids = alphabet(TokenizerVocabulary(tokenizer), 0)
    assert len(token_ids) > 200
    assert token_ids == sorted(set(token_ids))
    assert all(tokenizer.special_name(token_id) is None for token_id in token_ids)


def test_words_are_the_same_for_a_seed() -> None:
    assert len(alphabet(WordVocabulary(), 1)) == 3000
    texts = []
    for seed in (1, 1, 2):
        words = WordVocabulary()
        texts.append(words.decode(alphabet(words, seed)))
    assert texts[0] == texts[1] != texts[2]
