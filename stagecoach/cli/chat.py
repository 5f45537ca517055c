"""`stagecoach chat`: a conversation in the terminal with any OpenAI-compatible server.

Owns what the user types and sees. The conversation itself is a list of messages; the server
forgets it between turns.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import httpx
import typer

from stagecoach.benchmarks.answer import TextDelta, text_delta
from stagecoach.benchmarks.connection import first_model, request_headers, setup_client
from stagecoach.benchmarks.event_stream import EventDecoder, response_error
from stagecoach.errors import ServerError, StagecoachError

_HELP = """\
/reset         forget the conversation, but not the system message
/system TEXT   set the system message; without TEXT: none
/save FILE     write the conversation as JSON
/quit          end, as does Ctrl-D
//...          a message that begins with a slash
A line that ends with a backslash goes on in the next one, and \"\"\" begins and ends a message of
many lines. Ctrl-C stops the answer.
"""
_BLOCK = '"""'
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

# What a model writes must not steer the terminal: control characters but tab and newline go.
_UNSAFE = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10})


def chat(
    *,
    url: Annotated[
        str, typer.Option(help="The server, with or without /v1 at the end.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; default: the first of /v1/models.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = None,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="System message of the conversation.")
    ] = "",
    temperature: Annotated[
        float | None, typer.Option(help="Randomness; default: the server's.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Likeliest tokens to choose from; default: the server's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer; default: the server's.")
    ] = None,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="How much to think; default: the server's.")
    ] = None,
) -> None:
    """Chat with a model behind an OpenAI-compatible server.

    In a terminal, /help shows the commands, and what the model thinks is dimmed. With input from
    a pipe or a file, each line is one message, and the answers alone go to stdout.
    """
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "max_completion_tokens": max_tokens,
        "reasoning_effort": reasoning_effort,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    base_url = url.rstrip("/").removesuffix("/v1")
    with setup_client(base_url, request_headers(api_key, ()), option="--url") as client:
        # An answer may be long in coming; Ctrl-C ends the wait.
        client.timeout = httpx.Timeout(60.0, read=None)
        conversation = Conversation(client, model or first_model(client), fields, system=system)
        if sys.stdin.isatty():
            _talk(conversation)
        else:
            _answer_lines(conversation, sys.stdin)


@dataclass
class Conversation:
    """The messages so far, and the server that continues them."""

    client: httpx.Client
    model: str
    fields: dict[str, Any]
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, the system's first if there is one."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return opening + self.turns

    def ask(self, text: str, show: Callable[[TextDelta], None]) -> None:
        """Send a message and pass on the answer as it comes.

        What came before an error or Ctrl-C is kept as the answer. A message without any answer
        is forgotten.

        Raises:
            ServerError: the server refused, or broke off.
        """
        self.turns.append({"role": "user", "content": text})
        answer = ""
        try:
            for delta in self._stream():
                answer += delta.content
                show(delta)
        finally:
            if answer:
                self.turns.append({"role": "assistant", "content": answer})
            else:
                self.turns.pop()

    def _stream(self) -> Iterator[TextDelta]:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.fields}
        decoder = EventDecoder()
        is_finished = False
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise response_error(response.status_code, response.read())
                for chunk in response.iter_bytes():
                    for event in decoder.push(chunk):
                        for choice in (event.get("choices") or [])[:1]:
                            is_finished |= choice.get("finish_reason") is not None
                            yield text_delta(choice)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.client.base_url}: {error or type(error).__name__}") from None
        if not (decoder.is_done or is_finished):
            raise ServerError("the stream ended before the answer did")


def obey(line: str, conversation: Conversation) -> str:
    """Carry out a command other than /quit; what to tell the user."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name == "/reset":
        conversation.turns.clear()
        return "The conversation is forgotten.\n"
    if name == "/system":
        conversation.system = argument
        return "The system message is set.\n" if argument else "There is no system message.\n"
    if name == "/save":
        return _save(argument, conversation)
    if name == "/help":
        return _HELP
    return f"{name} is no command; /help shows them.\n"


def read_message(first_line: str, next_line: Callable[[], str]) -> str:
    """A message that may go on over several lines, without the marks that say so.

    Args:
        next_line: the next line that was typed, without its end; raises EOFError at the last.
    """
    if first_line.startswith(_BLOCK):
        lines = [first_line.removeprefix(_BLOCK)]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(next_line())
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [first_line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(next_line())
    return "\n".join(lines)


class AnswerPrinter:
    """Writes an answer as it comes; thoughts dimmed, or left out.

    Ended by `close`, which the next line of output needs.
    """

    def __init__(self, out: TextIO, *, shows_reasoning: bool) -> None:
        self._out = out
        self._shows_reasoning = shows_reasoning
        self._is_dimmed = False

    def show(self, delta: TextDelta) -> None:
        reasoning, content = (text.translate(_UNSAFE) for text in (delta.reasoning, delta.content))
        if reasoning and self._shows_reasoning:
            self._write(reasoning, is_dimmed=True)
        if content:
            self._write(content, is_dimmed=False)

    def close(self) -> None:
        self._write("", is_dimmed=False)
        self._out.write("\n")
        self._out.flush()

    def _write(self, text: str, *, is_dimmed: bool) -> None:
        if is_dimmed and not self._is_dimmed:
            self._out.write(_DIM)
        if self._is_dimmed and not is_dimmed:
            self._out.write(_PLAIN + ("\n" if text else ""))
        self._is_dimmed = is_dimmed
        self._out.write(text)
        self._out.flush()


def _talk(conversation: Conversation) -> None:
    """Until /quit or the end of input; no error of the server or a file ends it."""
    # Importing it gives `input` line editing and a history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    sys.stdout.write(f"{conversation.model} at {conversation.client.base_url}; /help for help\n")
    while True:
        try:
            line = input("> ")
            if line.startswith("/") and not line.startswith("//"):
                if line.split() == ["/quit"]:
                    return
                sys.stdout.write(obey(line, conversation))
                continue
            message = read_message(line.removeprefix("/"), lambda: input(". "))
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        if message.strip():
            _answer_or_tell(conversation, message)


def _answer_or_tell(conversation: Conversation, message: str) -> None:
    printer = AnswerPrinter(sys.stdout, shows_reasoning=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            conversation.ask(message, printer.show)
    except StagecoachError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
    finally:
        printer.close()


def _answer_lines(conversation: Conversation, lines: TextIO) -> None:
    """One message a line; the first error ends it, because what follows would mean nothing."""
    for line in map(str.rstrip, lines):
        if line == "/quit":
            return
        if line.startswith("/") and not line.startswith("//"):
            sys.stderr.write(obey(line, conversation))
        elif line:
            printer = AnswerPrinter(sys.stdout, shows_reasoning=False)
            try:
                conversation.ask(line.removeprefix("/"), printer.show)
            finally:
                printer.close()


def _save(name: str, conversation: Conversation) -> str:
    if not name:
        return "/save needs the name of a file.\n"
    text = json.dumps(conversation.messages, ensure_ascii=False, indent=2)
    try:
        Path(name).expanduser().write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        return f"{name} cannot be written: {error.strerror}\n"
    return f"{name} has {len(conversation.messages)} messages.\n"
