"""What a linter cannot see: which way imports point, what needs torch, which options exist."""

import ast
import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stagecoach.api.settings import ServerSettings
from stagecoach.config.engine import EngineConfig, SpeculativeConfig

_PACKAGE = Path(__file__).parents[2] / "stagecoach"
_MAX_LINES = 500

# A name stands for a module or for a folder with all that is in it.
_EVERYONE_MAY_READ = {
    "config",
    "errors",
    "request",
    "json_file",
    "observe",
    "version",
}

# Plain data that others than its folder's readers need.
_DATA = {
    "schedule.step_plan",
    "schedule.verify_window",
    "cache.memory_plan",
    "cache.memory_moves",
    "cache.page_pool",
    "cache.state_slots",
    "cache.prefix_hash",
    "pipeline.stage",
}

_MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "request": {"errors"},
    "json_file": {"errors"},
    "config": {"errors", "json_file"},
    "observe": set(),
    "checkpoint_folder": {"model.tiny", "draft.tiny"},
    "compatibility": {"cache.page_pool"},
    "visible_gpus": set(),
    "resolve": {
        "visible_gpus",
        "checkpoint_folder",
        "compatibility",
        "pipeline.partition",
        "pipeline.topology",
        "costs",
    },
    # What layers read and compute: balanced over stages by one, timed in plans by the other.
    "costs": {"pipeline.stage"},
    "published": set(),
    "text": set(),
    "cache": set(),
    "schedule": {"cache"},
    "kernels": set(),
    "model": {"kernels", "pipeline.stage", "published"},
    "draft": {"model", "kernels", *_DATA},
    # The layers declare what they need of a tensor-parallel group; pipeline/ provides it.
    "pipeline": {
        *("model.parallel_linear", "costs", "kernels.peer", "kernels.dependent_launch"),
        *_DATA,
    },
    "runner": {"model", "pipeline", "draft", "kernels", *_DATA},
    # Reads the vocabulary; knows neither requests in flight nor processes.
    "grammar": {"text"},
    "engine": {
        *("schedule", "pipeline", "runner", "cache", "resolve", "grammar", "text"),
        # Where compiled kernels are kept is a matter of the process.
        "kernels.kernel_cache",
    },
    "outputs": {"text", "schedule.commit", "schedule.speculation_stats"},
    "live_request": {"outputs", "engine.client", "schedule.commit"},
    "benchmarks": {"text"},
    "api": {
        *("text", "engine.client", "engine.messages", "outputs", "live_request"),
        # Several API processes: who starts them, and how they reach the engine.
        *("engine.launch", "engine.attach", "engine.child_processes"),
        # What the engine counts, as it is told.
        *("cache.cache_stats", "schedule.speculation_stats"),
    },
}

# What a folder of api/ may know of the others: only the table of routes knows all of them, and the
# modules that every protocol needs know none.
_API_MAY_IMPORT: dict[str, set[str]] = {
    "chat_api": set(),
    "completions_api": set(),
    "messages_api": {"chat_api"},
    "responses_api": {"chat_api"},
    "operations": {"chat_api"},
    "processes": set(),
}

# Where a program starts: they may import anything, and nothing below may import them.
_EDGES = {"__init__", "__main__", "cli", "llm", "demo", "fuzz", "checking", "planning"}

_TORCH_FREE = (
    "schedule",
    "cache",
    "config",
    "errors",
    "request",
    "compatibility",
    "resolve",
    "costs",
    "published",
    "checkpoint_folder",
    "observe",
    "engine.loop",
    "engine.messages",
    "grammar",
    "api.processes",
)

# engine/children.py tells the collective library its interface, torchrun each rank what it is, the
# supervisor the library of metrics its folder; the other finds ~/.cache.
_MAY_USE_ENVIRONMENT = {
    "engine.children",
    "engine.hosts.torchrun",
    "checkpoint_folder",
    "api.processes.supervisor",
}

_OPTIONS = (
    "model",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "pp_partition",
    "dtype",
    "mxfp4_experts",
    "online_quantization",
    "online_quantization_include",
    "online_quantization_exclude",
    "kv_cache_dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "seed",
    "load_format",
    "hf_overrides",
    "distributed_executor_backend",
    "launcher",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "network_interface",
    "host_key_file",
    "distributed_timeout_seconds",
    "execute_model_timeout_seconds",
    "recover",
    "max_recoveries",
    "recovery_window_seconds",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "async_scheduling",
    "num_threads",
    "log_level",
    "speculative_config",
    "enable_prefix_caching",
    "state_checkpoint_interval",
    "max_state_checkpoints",
    "kv_offloading_size",
    "verify_cache",
    "debug_poison",
)


class Import(NamedTuple):
    """One import of a module of this package, by its name within the package."""

    imported: str
    line: int


def _name(path: Path) -> str:
    parts = path.relative_to(_PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


_MODULES = {_name(path): path for path in sorted(_PACKAGE.rglob("*.py"))}


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(_MODULES[name].read_text(encoding="utf-8"))


def _imports(name: str) -> Iterator[Import]:
    """Every import of the package's own modules, late ones too."""
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "stagecoach":
                    yield Import(alias.name.removeprefix("stagecoach."), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: imports are absolute"
            if node.module is None or node.module.split(".")[0] != "stagecoach":
                continue
            base = node.module.removeprefix("stagecoach").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield Import(inner if inner in _MODULES else base or "__init__", node.lineno)


def _covers(allowed: set[str], module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:depth]) in allowed for depth in range(1, len(parts) + 1))


def test_every_part_of_the_package_has_a_place_in_the_list() -> None:
    tops = {name.split(".")[0] for name in _MODULES}
    assert tops <= set(_MAY_IMPORT) | _EDGES, tops - set(_MAY_IMPORT) - _EDGES


def test_imports_point_down_the_list() -> None:
    upward = []
    for name in _MODULES:
        top = name.split(".")[0]
        if top in _EDGES:
            continue
        allowed = _MAY_IMPORT[top] | {top}
        if top not in _EVERYONE_MAY_READ:
            allowed |= _EVERYONE_MAY_READ
        upward += [
            f"{name}, line {item.line}: {item.imported}"
            for item in _imports(name)
            if not _covers(allowed, item.imported)
        ]
    assert not upward


def test_protocols_know_each_other_only_as_listed() -> None:
    def folder(name: str) -> str | None:
        parts = name.split(".")
        return parts[1] if parts[0] == "api" and len(parts) > 2 else None

    used = {name: folder(name) for name in _MODULES if name.startswith("api.")}
    assert set(used.values()) == {None, *_API_MAY_IMPORT}
    sideways = [
        f"{name}, line {item.line}: {item.imported}"
        for name, own in used.items()
        if name != "api.app"
        for item in _imports(name)
        if folder(item.imported) not in {None, own, *_API_MAY_IMPORT.get(own or "", ())}
    ]
    assert not sideways


def test_no_modules_import_each_other_in_a_circle() -> None:
    ordered: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in ordered:
            return
        for item in _imports(name):
            if item.imported in _MODULES:
                visit(item.imported, (*path, name))
        ordered.add(name)

    for name in _MODULES:
        visit(name, ())


def _private_members(name: str) -> set[str]:
    """What classes of a module keep to themselves: methods, and attributes that they set."""
    members = set()
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            members.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            members.add(node.attr)
    return {member for member in members if re.match(r"_[^_]", member)}


def test_no_module_reaches_into_what_another_keeps_to_itself() -> None:
    members = {name: _private_members(name) for name in _MODULES}
    private = set().union(*members.values())
    assert len(private) > 100
    prying = []
    for name, own in members.items():
        foreign = private - own
        prying += [
            f"{name}, line {node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(_tree(name))
            if isinstance(node, ast.Attribute) and node.attr in foreign
        ]
    assert not prying


def test_a_folder_exports_names_and_does_nothing_else() -> None:
    acting = []
    for name, path in _MODULES.items():
        if path.name != "__init__.py":
            continue
        for node in _tree(name).body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_name = isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom)
            is_late_lookup = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            if not (is_docstring or is_name or is_late_lookup):
                acting.append(f"{name}, line {node.lineno}")
    assert not acting


def _torch_free_modules() -> list[str]:
    return [name for name in _MODULES if _covers(set(_TORCH_FREE), name)]


def test_what_decides_imports_without_torch() -> None:
    modules = [f"stagecoach.{name}" for name in _torch_free_modules()]
    assert len(modules) >= len(_TORCH_FREE)
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=_PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_torch_free_list_names_modules_that_exist() -> None:
    for name in _TORCH_FREE:
        assert importlib.util.find_spec(f"stagecoach.{name}") is not None, name


def test_no_file_is_longer_than_the_cap() -> None:
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in _MODULES.items()
    }
    assert not {name: length for name, length in lengths.items() if length > _MAX_LINES}


def test_the_environment_changes_nothing() -> None:
    names = ("environ", "getenv", "putenv")
    readers = []
    for name in _MODULES.keys() - _MAY_USE_ENVIRONMENT:
        for node in ast.walk(_tree(name)):
            is_attribute = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and node.attr in names
            )
            is_taken = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in names for alias in node.names)
            )
            if is_attribute or is_taken:
                readers.append(name)
    assert not readers


def test_a_module_opens_with_what_it_owns() -> None:
    silent = [
        name
        for name, path in _MODULES.items()
        if path.name != "__init__.py" and not ast.get_docstring(_tree(name))
    ]
    assert not silent


def test_the_options_are_the_pinned_list() -> None:
    assert tuple(item.name for item in dataclasses.fields(EngineConfig)) == _OPTIONS


@pytest.mark.parametrize("options", [EngineConfig, SpeculativeConfig, ServerSettings])
def test_an_option_has_a_doc_line(options: Any) -> None:
    for item in dataclasses.fields(options):
        # The log's level comes from the engine's options.
        if (options, item.name) != (ServerSettings, "log_level"):
            assert len(item.metadata["doc"]) > 10, item.name
