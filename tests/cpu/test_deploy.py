"""deploy/, as far as it can be checked without a container: forms, flags, paths, ports, metrics."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer
import yaml

from stagecoach.__main__ import app
from tests.cpu.api.operations.metrics_text import TABLE

_ROOT = Path(__file__).parents[2]
_DEPLOY = _ROOT / "deploy"
_COMPOSE = yaml.safe_load((_DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
_PROMETHEUS = yaml.safe_load((_DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
_PROVISIONING = _DEPLOY / "grafana" / "provisioning"
_DASHBOARD = json.loads((_DEPLOY / "grafana/dashboards/stagecoach.json").read_text("utf-8"))
_SERVE: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]

# By the name that an expression uses; test_metrics.py finds the same table in /metrics.
_HTTP = {"stagecoach:http_requests_total": {"handler", "method", "status"}}
_LABELS: dict[str, set[str]] = dict(_HTTP)
for _name, (_kind, _own) in TABLE.items():
    _all = {"model_name", "engine", *_own}
    if _kind == "histogram":
        _LABELS[f"stagecoach:{_name}_bucket"] = _all | {"le"}
        _LABELS |= {f"stagecoach:{_name}_{part}": _all for part in ("sum", "count")}
    else:
        _LABELS[f"stagecoach:{_name}"] = _all


def _expressions() -> Iterator[tuple[str, str, str]]:
    """Panel, expression and legend."""
    for panel in _DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


@pytest.mark.parametrize(("title", "expression", "legend"), list(_expressions()))
def test_a_panel_asks_for_what_is_measured(title: str, expression: str, legend: str) -> None:
    names = set(re.findall(r"stagecoach:\w+", expression))
    assert names and names <= _LABELS.keys(), title
    known = set.union(*(_LABELS[name] for name in names))
    used = {
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    used |= set(re.findall(r"(\w+)=\"", expression)) | set(re.findall(r"{{(\w+)}}", legend))
    assert used <= known, (title, used - known)
    # A counter says nothing but how fast it grows; totals of rare events may be shown as they are.
    for name in names:
        if name.endswith(("_total", "_bucket", "_sum", "_count")) and "prefix_cache" not in name:
            assert re.search(rf"(rate|increase)\({name}[{{\[]", expression), title
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing), title


def test_every_metric_of_the_pipeline_and_the_cache_is_drawn() -> None:
    drawn = " ".join(expression for _, expression, _ in _expressions())
    not_drawn = {
        name for name in TABLE if name not in drawn and not name.startswith("request_params_")
    }
    assert not_drawn == {
        *("build_info", "cache_config_info", "engine_up"),
        *("request_inference_time_seconds", "request_max_num_generation_tokens"),
        "request_time_per_output_token_seconds",
    }


def test_panels_lie_beside_each_other() -> None:
    panels = _DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24 and (x, y) not in places, panel["title"]
                places.add((x, y))
    variables = {item["name"] for item in _DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables


def test_grafana_finds_its_data_and_its_dashboards() -> None:
    [source] = yaml.safe_load((_PROVISIONING / "datasources/prometheus.yaml").read_text("utf-8"))[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == _PROMETHEUS["global"]["scrape_interval"]
    [provider] = yaml.safe_load((_PROVISIONING / "dashboards/stagecoach.yaml").read_text("utf-8"))[
        "providers"
    ]
    mounts = _mounts("grafana")
    folder = PurePosixPath(provider["options"]["path"])
    assert (mounts[folder] / "stagecoach.json").is_file()
    assert mounts[PurePosixPath("/etc/grafana/provisioning")] == _PROVISIONING
    home = _COMPOSE["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert PurePosixPath(home).parent == folder


def _mounts(service: str) -> dict[PurePosixPath, Path]:
    """Folders and files of the tree by their place in the container."""
    mounts = {}
    for volume in _COMPOSE["services"][service]["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("."):
            mounts[PurePosixPath(target)] = (_DEPLOY / source).resolve()
            assert mounts[PurePosixPath(target)].exists(), volume
        else:
            assert source in _COMPOSE["volumes"], volume
    return mounts


def test_prometheus_reads_the_server() -> None:
    config = PurePosixPath("/etc/prometheus/prometheus.yml")
    assert _mounts("prometheus")[config] == _DEPLOY / "prometheus.yml"
    assert f"--config.file={config}" in _COMPOSE["services"]["prometheus"]["command"]
    [job] = _PROMETHEUS["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in _COMPOSE["services"]
    command = _COMPOSE["services"][host]["command"]
    assert command[command.index("--port") + 1] == port


def _instructions() -> list[tuple[str, str]]:
    """Of the container file, continued lines joined."""
    text = (_DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_index_of_packages_is_the_builders_choice() -> None:
    assert "://" not in "".join(rest for name, rest in _instructions() if name != "HEALTHCHECK")
    assert ("ARG", "PIP_EXTRA_ARGS") in _instructions()
    installs = [rest for name, rest in _instructions() if rest.startswith("pip install")]
    assert installs and all(" ${PIP_EXTRA_ARGS} " in rest for rest in installs)
    build = _COMPOSE["services"]["stagecoach"]["build"]
    assert build["args"] == {"PIP_EXTRA_ARGS": "${PIP_EXTRA_ARGS:-}"}


def test_commands_are_lists_with_flags_that_exist() -> None:
    last = dict(_instructions())
    entry, default = json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])
    assert entry == ["stagecoach", "serve"]
    for command in (default, _COMPOSE["services"]["stagecoach"]["command"]):
        # Parsed as the program would; nothing is started.
        context = _SERVE.make_context("serve", list(command))
        assert context.params["model"] == "demo"
        # Nobody reaches a container's loopback.
        assert context.params["host"] == "0.0.0.0"
        assert str(context.params["port"]) == last["EXPOSE"]


def test_the_health_check_asks_the_port_that_is_served() -> None:
    _, _, check = dict(_instructions())["HEALTHCHECK"].partition("CMD ")
    program = json.loads(check)
    assert program[:2] == ["python", "-c"]
    compile(program[2], "health check", "exec")
    assert f"http://127.0.0.1:{dict(_instructions())['EXPOSE']}/health" in program[2]


def test_the_image_holds_what_it_is_built_from_and_runs_as_nobody_special() -> None:
    ignored = (_DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied: set[str] = set()
    for name, rest in _instructions():
        if name == "COPY" and not rest.startswith("--from"):
            copied |= {source.removeprefix("./") for source in shlex.split(rest)[:-1]}
    assert copied == kept
    assert all((_ROOT / path).exists() for path in copied)
    names = [name for name, _ in _instructions()]
    users = [rest for name, rest in _instructions() if name == "USER"]
    assert users == ["stagecoach"]
    assert names.index("USER") < names.index("ENTRYPOINT")
    build = _COMPOSE["services"]["stagecoach"]["build"]
    assert (_DEPLOY / build["context"]).resolve() == _ROOT
    assert _ROOT / build["dockerfile"] == _DEPLOY / "Dockerfile"


def test_the_image_for_gpus_is_the_same_file_with_another_base() -> None:
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    bases = [rest for name, rest in _instructions() if name == "FROM"]
    settings = dict(zip((rest.split()[-1] for rest in bases), _settings(), strict=False))
    assert set(settings) >= {"settings-cpu", "settings-cuda"} and ("ARG", "DEVICE=cpu") in (
        _instructions()
    )
    for name, given in settings.items():
        if name.startswith("settings-"):
            assert set(given["EXTRAS"].split(",")) <= extras.keys()
    assert settings["settings-cpu"]["CONSTRAINTS"] == "constraints.txt"
    # The rest is built and run on either.
    assert bases[2:] == ["settings-${DEVICE} AS build", "settings-${DEVICE}"]
    gpu = yaml.safe_load((_DEPLOY / "compose.gpu.yaml").read_text("utf-8"))["services"]
    assert gpu.keys() <= _COMPOSE["services"].keys()
    assert f"settings-{gpu['stagecoach']['build']['args']['DEVICE']}" in settings


def _settings() -> list[dict[str, str]]:
    """The variables of each base, in the order of the file."""
    return [
        dict(item.split("=", 1) for item in shlex.split(rest))
        for name, rest in _instructions()
        if name == "ENV" and "EXTRAS" in rest
    ]


def test_an_installed_package_has_all_its_files() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["stagecoach"]
    package = _ROOT / "stagecoach"
    found = {path for pattern in patterns for path in package.glob(pattern)}
    files = {
        path
        for path in package.rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc", ".md")
        and not any(part.startswith(".") for part in path.relative_to(package).parts)
    }
    assert files and files <= found


def test_open_requests_may_finish_before_the_container_is_killed() -> None:
    service = _COMPOSE["services"]["stagecoach"]
    command = service["command"]
    seconds = float(command[command.index("--shutdown-timeout") + 1])
    assert float(service["stop_grace_period"].removesuffix("s")) >= seconds + 10


def _leader_worker_set() -> dict[str, Any]:
    [workers, service] = yaml.safe_load_all(
        (_DEPLOY / "kubernetes/leader-worker-set.yaml").read_text("utf-8")
    )
    assert (workers["kind"], service["kind"]) == ("LeaderWorkerSet", "Service")
    template: dict[str, Any] = workers["spec"]["leaderWorkerTemplate"]
    leader = template["leaderTemplate"]
    assert service["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    return template


def test_pods_of_a_group_run_one_engine() -> None:
    """The same options on all but for what a server needs; parsed as the program would."""
    template = _leader_worker_set()
    variables = {"LWS_GROUP_SIZE": template["size"], "LWS_LEADER_ADDRESS": "leader.example"}
    parsed = []
    for index, name in enumerate(("leaderTemplate", "workerTemplate")):
        spec = template[name]["spec"]
        [container] = spec["containers"]
        known = {**variables, "LWS_WORKER_INDEX": index}
        arguments = [
            re.sub(r"\$\((\w+)\)", lambda found, known=known: str(known[found[1]]), argument)
            for argument in container["args"]
        ]
        parsed.append(_SERVE.make_context("serve", arguments).params)
        ranks = parsed[-1]["pipeline_parallel_size"] * parsed[-1]["tensor_parallel_size"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == ranks // template["size"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
    leader, worker = parsed
    different = {name for name in leader if leader[name] != worker[name]}
    assert different == {"node_rank", "host", "port", "shutdown_timeout_seconds"}
    assert (leader["node_rank"], worker["node_rank"]) == (0, 1)
    assert leader["nnodes"] == template["size"] and leader["master_addr"] == "leader.example"
    [port] = template["leaderTemplate"]["spec"]["containers"][0]["ports"]
    assert port["containerPort"] == leader["port"]
    spec = template["leaderTemplate"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= leader["shutdown_timeout_seconds"] + 10
    # The others wait for the leader.
    spec = template["workerTemplate"]["spec"]
    program, seconds = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep" and int(seconds) >= leader["shutdown_timeout_seconds"] + 5
    assert spec["terminationGracePeriodSeconds"] > int(seconds)


def test_the_batch_script_starts_a_task_a_node() -> None:
    text = (_DEPLOY / "slurm/serve.sbatch").read_text("utf-8")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, flags=re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    # As bash would see it in the second task.
    environment = {
        "SLURM_NNODES": asked["nodes"],
        "SLURM_PROCID": "1",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "MODEL": "demo",
        "PATH": os.environ["PATH"],
    }
    shown = text.replace("exec stagecoach", "echo")
    functions = 'scontrol() { echo gpu1; }; srun() { shift; "$@"; }; '
    done = subprocess.run(
        ["bash", "-c", functions + shown],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    program, *words = done.stdout.split()
    params = _SERVE.make_context("serve", words).params
    assert program == "serve" and (params["model"], params["node_rank"]) == ("demo", 1)
    assert params["master_addr"] == "gpu1" and params["master_port"] == 29500 + 711
    ranks = params["pipeline_parallel_size"] * params["tensor_parallel_size"]
    assert ranks == params["nnodes"] * int(asked["gpus-per-node"])
