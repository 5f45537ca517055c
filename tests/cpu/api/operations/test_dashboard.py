"""The dashboard's routes: a page that holds nothing, and its data in every state of a server."""

import asyncio
import base64
import hashlib
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from stagecoach.engine.messages import MAX_PLANS, PlanTrace, StageSpan
from stagecoach.errors import EngineDeadError, WorkerDiedError
from tests.cpu.api.asgi import call
from tests.cpu.api.conftest import Server
from tests.cpu.api.scripted import scripted_server

DATA = "/dashboard/data"


def plan(step: int, *, is_done: bool = True) -> PlanTrace:
    span = StageSpan(step + 0.25, step + 0.5, 0.0) if is_done else None
    return PlanTrace(step, float(step), step + 0.75 if is_done else None, 1, 0, 1, 0, 0, (span,))


def steps(answer: Any) -> list[int]:
    return [fields[0] for fields in answer.json["timeline"]["plans"]]


def test_the_page_is_one_file_and_its_policy_lets_nothing_else_run(server: Server) -> None:
    answer = server.get("/dashboard")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    page = answer.body.decode()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    # Text that comes from elsewhere never becomes markup.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert " style=" not in page and not re.search(r"\son\w+=", page)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    assert "unsafe" not in policy and "http" not in policy
    for tag in ("style", "script"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_data_are_those_of_the_other_routes(server: Server) -> None:
    server.post("/v1/completions", prompt="abc", max_tokens=9, ignore_eos=True, temperature=0)
    data = server.get(DATA).json
    info = server.get("/server_info").json
    assert (data["status"], data["reason"]) == ("ok", None)
    assert (data["version"], data["models"]) == (info["version"], info["models"])
    for name in ("dtype", "max_model_len", "partition"):
        assert data["engine"][name] == info[name]
    for name in ("pipeline_parallel_size", "tensor_parallel_size", "max_num_seqs", "block_size"):
        assert data["engine"][name] == info["engine"][name]
    assert data["stats"].keys() == info["stats"].keys()
    assert data["stats"]["num_steps"] == info["stats"]["num_steps"]
    timeline = data["timeline"]
    assert timeline["next_step"] == info["stats"]["num_steps"]
    assert timeline["plans"][-1][0] == timeline["next_step"] - 1
    slots = base64.b64decode(timeline["slot_states"])
    assert len(slots) == info["stats"]["num_slots"]
    assert slots.count(2) == info["stats"]["prefix_cache"]["num_checkpoints"]


def test_a_page_gets_what_it_has_not_seen(server: Server) -> None:
    server.post("/v1/completions", prompt="abc", max_tokens=9, ignore_eos=True)
    newest = server.get(DATA).json["timeline"]["next_step"] - 1
    assert steps(server.get(f"{DATA}?first_step={newest - 2}")) == [newest - 2, newest - 1, newest]
    assert steps(server.get(f"{DATA}?first_step={newest + 1}")) == []


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "%D9%A3", "9" * 19])
def test_what_is_no_step_is_refused(server: Server, text: str) -> None:
    answer = server.get(f"{DATA}?first_step={text}")
    assert (answer.status, answer.error["param"]) == (400, "first_step")


def test_the_engine_is_asked_for_what_is_new_and_no_more_is_kept_than_it_keeps(
    model_folder: Path,
) -> None:
    with scripted_server(model_folder) as (server, engine):
        engine.plans = (plan(0), plan(1), plan(2, is_done=False), plan(3, is_done=False))
        assert steps(server.get(DATA)) == [0, 1, 2, 3]
        engine.plans = tuple(plan(step) for step in range(5))
        assert steps(server.get(f"{DATA}?first_step=1")) == [1, 2, 3, 4]
        assert server.get(DATA).json["timeline"]["plans"][2][2] == 2.75
        engine.plans = tuple(plan(step) for step in range(5, 5 + MAX_PLANS))
        assert steps(server.get(DATA)) == list(range(5, 5 + MAX_PLANS))
        assert engine.asked_steps == [0, 2, 5, 5]


def test_many_pages_ask_the_engine_once(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):
        has_begun, may_answer = threading.Event(), threading.Event()
        timeline = engine.timeline

        def slow_timeline(first_step: int, timeout_seconds: float) -> Any:
            has_begun.set()
            assert may_answer.wait(20)
            return timeline(first_step, timeout_seconds)

        engine.timeline = slow_timeline  # type: ignore[method-assign]

        async def look() -> list[int]:
            calls = [asyncio.ensure_future(call(server.app, "GET", DATA)) for _ in range(9)]
            await asyncio.to_thread(has_begun.wait, 20)
            # Every one of them has got to the question.
            for _ in range(50):
                await asyncio.sleep(0)
            may_answer.set()
            return [(await one).status for one in calls]

        assert server.run(look()) == [200] * 9
        assert len(engine.asked_steps) == 1


def test_a_server_that_loads_drains_or_has_died_says_so(model_folder: Path) -> None:
    with scripted_server(model_folder, is_loaded=False) as (server, engine):
        data = server.get(DATA).json
        assert data["status"] == "loading" and data["stats"] is data["timeline"] is None
        server.run(server.service.load())
        engine.plans = (plan(0),)
        assert server.get(DATA).json["status"] == "ok"

        async def drain() -> None:
            server.service.drain(0.0)

        server.run(drain())
        data = server.get(DATA).json
        # Those who watch it end want to see it.
        assert data["status"] == "draining" and data["stats"] is not None
        engine.die(WorkerDiedError("worker[1,0] was killed"))
        answer = server.get(DATA)
        assert answer.status == 200 and answer.json["stats"] is None
        assert answer.json["status"] == "dead" and "worker[1,0] was killed" in answer.json["reason"]
        # Its last moments stay.
        assert steps(answer) == [0]


def test_an_engine_that_does_not_answer_is_stalled(model_folder: Path) -> None:
    with scripted_server(model_folder) as (server, engine):
        engine.plans = (plan(0),)
        server.get(DATA)
        engine.stats_error = EngineDeadError("the engine loop did not answer in 5 s")
        data = server.get(DATA).json
        assert data["status"] == "stalled" and data["stats"] is None
        assert [fields[0] for fields in data["timeline"]["plans"]] == [0]


def test_where_keys_are_set_the_page_is_open_and_the_data_are_not(model_folder: Path) -> None:
    with scripted_server(model_folder, api_keys=("right",)) as (server, _):
        assert server.get("/dashboard").status == 200
        assert server.get(DATA).status == 401
        for key, status in (("wrong", 401), ("right", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert server.call("GET", DATA, headers=headers).status == status
