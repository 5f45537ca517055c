"""Does a server answer everything once, and does it keep anything of it?

Sends thousands of requests of all kinds at once: whole and streamed, of every protocol, with
several completions, stop strings and grammars, readers that are slow, clients that go before the
first token or in the middle, and bodies that are wrong. Each answer is checked for being whole.
At the end nothing may be left: no completion, page, task, thread, connection or descriptor.

    scripts/bench soak --requests 10000 --out bench/results/soak.md
"""

import argparse
import asyncio
import collections
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil

from bench.report import machine_line

CONCURRENCY = 64
_MAX_SECONDS = 3600.0
_REQUEST_SECONDS = 120.0
# Of pools that make them when they are first needed.
_POOL_THREADS = 16
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
_GOES = ("never",) * 5 + ("at once", "before a token", "in the middle")


class Ask(NamedTuple):
    """One request, and how its client behaves."""

    kind: str
    path: str
    body: dict[str, Any]
    goes: str  # when the client goes
    delay: float  # seconds until it does, or between two reads of one that is slow
    is_slow: bool
    is_wrong: bool


def draw(rng: random.Random) -> Ask:
    """A random request."""
    kind = rng.choice(("completion", "chat", "response", "message"))
    is_stream = rng.random() < 0.6
    num_tokens = rng.randint(1, 12)
    text = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 60)))
    body: dict[str, Any] = {"stream": is_stream, "temperature": rng.choice((0, 1))}
    messages = [{"role": "user", "content": text}]
    match kind:
        case "completion":
            path, body["prompt"], body["max_tokens"] = "/v1/completions", text, num_tokens
            body["n"] = rng.choice((1, 1, 2, 3))
            body |= rng.choice(({}, {"stop": [rng.choice("aeiou")]}, {"ignore_eos": True}))
        case "chat":
            path, body["messages"] = "/v1/chat/completions", messages
            body |= {"max_completion_tokens": num_tokens, "n": rng.choice((1, 1, 2))}
            if rng.random() < 0.2:
                schema = {"name": "answer", "schema": _SCHEMA}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case "response":
            path, body["input"], body["max_output_tokens"] = "/v1/responses", text, num_tokens + 15
        case "message":
            path, body["messages"], body["max_tokens"] = "/v1/messages", messages, num_tokens
    is_wrong = rng.random() < 0.04
    if is_wrong:
        body["temperature"] = -1
    goes = rng.choice(_GOES)
    is_slow = goes == "never" and is_stream and rng.random() < 0.15
    delay = rng.uniform(0, 0.3 if goes == "before a token" else 0.02)
    return Ask(kind, path, body, goes, delay, is_slow, is_wrong)


class Tally:
    """What became of the requests.

    Attributes:
        faults: answers that were not what they should be.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def fault(self, ask: Ask, text: str) -> None:
        self.counts["faults"] += 1
        if len(self.faults) < 20:
            self.faults.append(f"{ask.kind} {ask.body}: {text}")


async def send(client: httpx2.AsyncClient, ask: Ask, tally: Tally) -> None:
    """Send one request, and check what comes back of it."""
    work = _read(client, ask, tally)
    if ask.goes in ("at once", "before a token"):
        try:
            await asyncio.wait_for(work, ask.delay)
        except TimeoutError:
            tally.counts[f"client went {ask.goes}"] += 1
        return
    try:
        await asyncio.wait_for(work, _REQUEST_SECONDS)
    except TimeoutError:
        tally.fault(ask, "no end")
    except httpx2.HTTPError as error:
        tally.fault(ask, repr(error))


async def _read(client: httpx2.AsyncClient, ask: Ask, tally: Tally) -> None:
    async with client.stream("POST", ask.path, json=ask.body) as response:
        if ask.is_wrong:
            if response.status_code != 400:
                tally.fault(ask, f"status {response.status_code}")
            await response.aread()
            tally.counts["refused with 400"] += 1
            return
        if response.status_code == 429:
            await response.aread()
            tally.counts["refused with 429"] += 1
            return
        if response.status_code != 200:
            tally.fault(ask, f"status {response.status_code}: {await response.aread()!r}")
            return
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if ask.is_slow:
                await asyncio.sleep(ask.delay)
            if ask.goes == "in the middle" and ask.body["stream"] and len(lines) > 2:
                tally.counts["client went in the middle"] += 1
                return
    fault = check(ask, lines)
    if fault is not None:
        tally.fault(ask, fault)
    else:
        tally.counts["answered" + (", reader slow" if ask.is_slow else "")] += 1


def check(ask: Ask, lines: list[str]) -> str | None:
    """What is wrong with an answer, or None: it must be whole, and end exactly once."""
    if not ask.body["stream"]:
        return _check_whole(ask, json.loads("".join(lines)))
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    match ask.kind:
        case "completion" | "chat":
            if data[-1:] != ["[DONE]"] or data.count("[DONE]") != 1:
                return f"ends with {data[-1:]}"
            choices = [choice for text in data[:-1] for choice in json.loads(text)["choices"]]
            ended = sorted(choice["index"] for choice in choices if choice["finish_reason"])
            return None if ended == list(range(ask.body["n"])) else f"choices ended: {ended}"
        case _:
            last = {"message": {"message_stop"}, "response": _RESPONSE_ENDS}[ask.kind]
            kinds = [json.loads(text)["type"] for text in data if text != "[DONE]"]
            num_ends = sum(kind in last for kind in kinds)
            return None if num_ends == 1 and kinds[-1] in last else f"events: {kinds}"


_RESPONSE_ENDS = {"response.completed", "response.incomplete"}


def _check_whole(ask: Ask, answer: dict[str, Any]) -> str | None:
    match ask.kind:
        case "completion" | "chat":
            choices = answer["choices"]
            is_whole = len(choices) == ask.body["n"] and all(c["finish_reason"] for c in choices)
        case "message":
            is_whole = answer["stop_reason"] is not None
        case _:
            is_whole = answer["status"] in ("completed", "incomplete")
    return None if is_whole else f"not whole: {answer}"


class Snapshot(NamedTuple):
    """What a server at rest holds: of its processes, summed, and of its engine."""

    num_threads: int
    num_descriptors: int
    num_connections: int
    num_tasks: int  # of the API process that answered
    num_open: int
    num_used_pages: int
    num_used_slots: int
    memory_mib: float

    def leaks(self, before: "Snapshot") -> list[str]:
        """What there is more of than before; memory is judged by its trend elsewhere."""
        allowed = before._replace(num_threads=before.num_threads + _POOL_THREADS)
        return [
            f"{name}: {now} after {was}"
            for name, now, was in zip(self._fields[:-1], self, allowed, strict=False)
            if now > was
        ]


async def snapshot(client: httpx2.AsyncClient, process: psutil.Process) -> Snapshot:
    """Wait until nothing runs, and look.

    Raises:
        TimeoutError: something still runs after half a minute.
    """
    async with asyncio.timeout(30):
        while True:
            info = (await client.get("/server_info", headers={"connection": "close"})).json()
            stats = info["stats"]
            num_open = info["num_open_requests"] + stats["num_running"] + stats["num_waiting"]
            if not num_open and stats["num_free_slots"] == stats["num_slots"]:
                break
            await asyncio.sleep(0.1)
    # Connections that were cut are noticed by the loops of both sides.
    await asyncio.sleep(0.5)
    processes = [process, *process.children(recursive=True)]
    return Snapshot(
        num_threads=sum(item.num_threads() for item in processes),
        num_descriptors=sum(item.num_fds() for item in processes),
        num_connections=sum(
            item.status == psutil.CONN_ESTABLISHED
            for each in processes
            for item in each.net_connections("tcp")
        ),
        num_tasks=info["num_tasks"],
        num_open=num_open,
        num_used_pages=stats["num_pages"] - stats["num_free_pages"],
        num_used_slots=stats["num_slots"] - stats["num_free_slots"],
        memory_mib=sum(item.memory_info().rss for item in processes) / 2**20,
    )


class Soaked(NamedTuple):
    """What came of it."""

    tally: Tally
    seconds: float
    before: Snapshot
    quarters: list[Snapshot]  # after each quarter of the requests, at rest

    def faults(self) -> list[str]:
        """What should not be; memory may grow by a tenth after the first quarter."""
        found = list(self.tally.faults)
        found += [f"left at the end: {leak}" for leak in self.quarters[-1].leaks(self.before)]
        first, last = self.quarters[0].memory_mib, self.quarters[-1].memory_mib
        if last > 1.1 * first + 20:
            found.append(f"memory grew from {first:.0f} to {last:.0f} MiB")
        return found


async def soak(
    url: str, process_id: int, *, num_requests: int, concurrency: int = CONCURRENCY, seed: int = 0
) -> Soaked:
    """Send that many requests to a running server, and look at it before and after."""
    rng = random.Random(seed)
    process = psutil.Process(process_id)
    tally = Tally()
    began = time.monotonic()

    async def part(num_requests: int) -> Snapshot:
        asks = [draw(rng) for _ in range(num_requests)]
        async with _client(url) as client:
            queue = iter(asks)

            async def work() -> None:
                for ask in queue:
                    await send(client, ask, tally)

            await asyncio.gather(*(work() for _ in range(concurrency)))
        async with _client(url) as client:
            return await snapshot(client, process)

    async with asyncio.timeout(_MAX_SECONDS):
        # Threads and descriptors that are made at first use.
        await part(max(concurrency, num_requests // 20))
        async with _client(url) as client:
            before = await snapshot(client, process)
        tally.counts.clear()
        quarters = [await part(num_requests // 4) for _ in range(4)]
    return Soaked(tally, time.monotonic() - began, before, quarters)


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=CONCURRENCY)
    async with httpx2.AsyncClient(
        base_url=url, limits=limits, timeout=_REQUEST_SECONDS, trust_env=False
    ) as client:
        yield client


def report(soaked: Soaked, num_requests: int, options: list[str]) -> str:
    """A page of results."""
    lines = [
        machine_line(["fastapi", "uvicorn", "torch"]),
        "",
        f"`stagecoach serve tiny {' '.join(options)}`, {num_requests} requests, "
        f"{CONCURRENCY} at a time, {soaked.seconds:.0f} s.",
        "",
        "| became of a request | number |",
        "| --- | --: |",
        *(f"| {name} | {count} |" for name, count in sorted(soaked.tally.counts.items())),
        f"| all | {soaked.tally.counts.total()} |",
        "",
        "| at rest | before | " + " | ".join(f"{25 * n} %" for n in range(1, 5)) + " |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for index, name in enumerate(Snapshot._fields):
        values = [f"{shot[index]:.0f}" for shot in (soaked.before, *soaked.quarters)]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(values)} |")
    faults = soaked.faults()
    lines += ["", *(f"- FAULT: {fault}" for fault in faults)] if faults else ["", "No faults."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Start a server, soak it, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--options", default="-pp 2 --num-threads 1 --api-server-count 2")
    arguments = parser.parse_args()
    options = arguments.options.split()
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "stagecoach", "serve", "tiny", "--port", "0", *options]
        server = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
        try:
            url = _wait_until_ready(server, log)
            work = soak(url, server.pid, num_requests=arguments.requests, seed=arguments.seed)
            soaked = asyncio.run(work)
        finally:
            server.terminate()
            status = server.wait()
    page = report(soaked, arguments.requests, options)
    sys.stdout.write(page)
    if arguments.out is not None:
        arguments.out.write_text(page, encoding="utf-8")
    if soaked.faults() or status:
        raise SystemExit(1)


def _wait_until_ready(server: "subprocess.Popen[Any]", log: Any) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        log.seek(0)
        found = re.search(r"listening on (\S+)", log.read())
        if found and httpx2.get(f"{found[1]}/ready", timeout=60).status_code == 200:
            return found[1]
        time.sleep(0.2)
    log.seek(0)
    raise SystemExit(f"the server did not start:\n{log.read()}")


if __name__ == "__main__":
    main()
