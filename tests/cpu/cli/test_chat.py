"""`stagecoach chat`: piped against a server on a socket, and with keys that nobody presses."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stagecoach.benchmarks.answer import TextDelta
from stagecoach.benchmarks.connection import setup_client
from stagecoach.cli.chat import AnswerPrinter, Conversation, obey, read_message
from stagecoach.errors import ServerError
from tests.cpu.benchmarks.fake_server import FakeServer, served
from tests.cpu.cli.command_run import Run, Stagecoach

_LENGTH = ("--max-tokens", 5)

Pipe = Callable[..., Run]


@pytest.fixture
def pipe(stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """`pipe(server, text, *arguments)`."""

    def run(server: FakeServer, text: str, *arguments: object) -> Run:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        with served(server) as url:
            return stagecoach("chat", "--url", url, *_LENGTH, *arguments)

    return run


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def talk(stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """`talk(server, *lines)`: what is typed; an exception is raised in its place."""

    def run(server: FakeServer, *lines: str | BaseException) -> Run:
        typed = iter(lines)

        def read(prompt: str) -> str:
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("sys.stdin", _Terminal())
        monkeypatch.setattr("builtins.input", read)
        with served(server) as url:
            return stagecoach("chat", "--url", url + "/v1/", *_LENGTH)

    return run


def _said(server: FakeServer, number: int = -1) -> list[tuple[str, str]]:
    messages = server.requests[number]["messages"]
    return [(message["role"], message["content"]) for message in messages]


def test_each_line_is_a_message_and_stdout_has_the_answers_alone(pipe: Pipe) -> None:
    server = FakeServer(answer="hello", reasoning="let me see")
    run = pipe(server, "one\n\ntwo")
    assert (run.status, run.stdout, run.stderr) == (0, "hello\nhello\n", "")
    assert _said(server) == [("user", "one"), ("assistant", "hello"), ("user", "two")]


def test_options_are_sent(pipe: Pipe) -> None:
    server = FakeServer(api_key="key")
    run = pipe(
        server, "hi", "--api-key", "key", "--system", "be brief", "--temperature", 0.5,
        "--top-p", 0.9, "--seed", 3, "--reasoning-effort", "low", "--model", "mine",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert server.requests == [
        {
            "model": "mine",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
            ],
            "stream": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "max_completion_tokens": 5,
            "reasoning_effort": "low",
        }
    ]


def test_commands_work_in_a_pipe(pipe: Pipe, tmp_path: Path) -> None:
    server = FakeServer(answer="yes")
    path = tmp_path / "talk.json"
    run = pipe(
        server, f"one\n/reset\n/system be kind\n//etc\n/save {path}\n/dance\n/quit\nnever sent\n"
    )
    assert (run.status, run.stdout) == (0, "yes\nyes\n")
    assert _said(server) == [("system", "be kind"), ("user", "/etc")]
    assert json.loads(path.read_text())[-1] == {"role": "assistant", "content": "yes"}
    assert "/dance is no command" in run.stderr


def test_an_error_ends_a_pipe_with_status_1(pipe: Pipe) -> None:
    server = FakeServer(faults={1: "status"})
    run = pipe(server, "one\ntwo\nthree")
    assert run.status == 1
    assert run.stderr == ("stagecoach: ServerError: HTTP status 503: too many requests\n")
    assert len(server.requests) == 2


def test_no_server_is_one_line(stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    run = stagecoach("chat", "--url", "http://127.0.0.1:9")
    assert (run.status, run.stdout) == (1, "")
    assert run.stderr.startswith("stagecoach: ServerError: http://127.0.0.1:9: /v1/models: ")


def test_an_address_that_is_none_is_refused_by_its_flag(stagecoach: Stagecoach) -> None:
    run = stagecoach("chat", "--url", "localhost:8000/v1")
    assert run.status != 0
    assert "--url=localhost:8000: must begin with http:// or https://" in run.stderr


def test_a_talk_shows_thoughts_dimmed_before_the_answer(talk: Pipe) -> None:
    run = talk(FakeServer(answer="hello", reasoning="hm"), "hi", "/quit")
    assert run.status == 0
    first, *rest = run.stdout.split("\n")
    assert first.startswith("fake at http://127.0.0.1:")
    assert "\n".join(rest) == "\x1b[2mhm\x1b[0m\nhello\n"


def test_a_talk_survives_errors_and_forgets_what_had_no_answer(talk: Pipe) -> None:
    server = FakeServer(answer="hello", faults={0: "status", 1: "cut"})
    run = talk(server, "one", "two", "three", "/quit")
    assert run.status == 0
    assert "ServerError: HTTP status 503: too many requests" in run.stderr
    assert "ServerError: the stream ended before the answer did" in run.stderr
    # Of the answer that was cut, what came is part of the conversation.
    assert _said(server) == [("user", "two"), ("assistant", "he"), ("user", "three")]


def test_ctrl_c_while_typing_and_the_end_of_input(talk: Pipe) -> None:
    server = FakeServer()
    run = talk(server, KeyboardInterrupt(), "   ", "hi \\", "there")
    assert run.status == 0
    assert _said(server) == [("user", "hi \nthere")]


def test_ctrl_c_stops_the_answer_and_not_the_program(
    talk: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = AnswerPrinter.show

    def interrupted(printer: AnswerPrinter, delta: TextDelta) -> None:
        show(printer, delta)
        if delta.content == "e" and len(server.requests) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerPrinter, "show", interrupted)
    server = FakeServer(answer="hello")
    run = talk(server, "one", "two")
    assert run.status == 0
    assert run.stdout.splitlines()[1:] == ["he", "hello", ""]
    assert _said(server) == [("user", "one"), ("assistant", "he"), ("user", "two")]


def _conversation(pieces: list[bytes]) -> Conversation:
    class Stream(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from pieces

    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Stream()))
    return Conversation(setup_client("http://fake", {}, transport=transport), "fake", {})


def test_a_broken_stream_is_an_error_after_what_came() -> None:
    event = json.dumps({"choices": [{"delta": {"content": "he"}}]}).encode()
    conversation = _conversation([b"data: " + event + b"\n\n"])
    shown: list[TextDelta] = []
    with pytest.raises(ServerError, match="the stream ended before the answer did"):
        conversation.ask("hi", shown.append)
    assert [delta.content for delta in shown] == ["he"]
    assert [turn["content"] for turn in conversation.turns] == ["hi", "he"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["plain"], "plain"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""', "a", "", '  b"""'], "a\n\n  b"),
        (['"""one"""'], "one"),
        (['"""a', "b\\", '"""  '], "a\nb\\"),
        ([""], ""),
    ],
)
def test_a_message_may_have_many_lines(lines: list[str], message: str) -> None:
    rest = iter(lines[1:])
    assert read_message(lines[0], lambda: next(rest)) == message
    assert next(rest, None) is None


def test_commands_tell_what_they_did(tmp_path: Path) -> None:
    conversation = _conversation([])
    conversation.turns.append({"role": "user", "content": "hi"})
    assert obey("/system  be kind ", conversation) == "The system message is set.\n"
    assert [message["content"] for message in conversation.messages] == ["be kind", "hi"]
    assert obey("/save", conversation) == "/save needs the name of a file.\n"
    assert "cannot be written" in obey(f"/save {tmp_path}/no/x.json", conversation)
    assert obey(f"/save {tmp_path}/x.json", conversation).endswith("x.json has 2 messages.\n")
    assert obey("/reset", conversation) == "The conversation is forgotten.\n"
    assert [message["content"] for message in conversation.messages] == ["be kind"]
    assert obey("/system", conversation) == "There is no system message.\n"
    assert conversation.messages == []
    help_text = obey("/help", conversation)
    assert all(name in help_text for name in ("/reset", "/system", "/save", "/quit"))
    assert obey("/nothing", conversation) == "/nothing is no command; /help shows them.\n"


def _printed(*deltas: tuple[str, str], **options: Any) -> str:
    out = io.StringIO()
    printer = AnswerPrinter(out, **({"shows_reasoning": True} | options))
    for reasoning, content in deltas:
        printer.show(TextDelta(reasoning, content, has_tool_call=False))
    printer.close()
    return out.getvalue()


def test_thoughts_end_dimmed_text_once() -> None:
    assert _printed(("a", ""), ("b", ""), ("", "c")) == "\x1b[2mab\x1b[0m\nc\n"
    assert _printed(("a", "")) == "\x1b[2ma\x1b[0m\n"
    assert _printed(("a", ""), ("", "c"), shows_reasoning=False) == "c\n"


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert _printed(("", "a\x1b[31m\x07\r\x9b2J\tb\n")) == "a[31m2J\tb\n\n"
