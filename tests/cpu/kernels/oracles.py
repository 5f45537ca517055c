"""Reference functions of other projects, run as they were published.

fla-core's package imports Triton, so single functions are taken out of its files by name.
Both projects compute in float32 whatever they are given; `in_float64` runs the same
code with the float types widened, which tells rounding from a wrong formula.
"""

import ast
import importlib.util
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import einops
import torch
import torch.nn.functional as F


def fla_function(file: str, name: str) -> Callable[..., Any]:
    """Function `name` of `file` (relative to the fla package), without importing fla."""
    spec = importlib.util.find_spec("fla")
    assert spec is not None and spec.origin is not None, "the tests need fla-core"
    path = Path(spec.origin).parent / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(tree.body) == 1, f"{path} defines {name} {len(tree.body)} times"
    future = ast.parse("from __future__ import annotations").body
    tree.body = future + tree.body
    names = {"torch": torch, "F": F, "rearrange": einops.rearrange, "einsum": einops.einsum}
    exec(compile(tree, str(path), "exec"), names)
    return names[name]


def torch_path(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain PyTorch function that transformers may have wrapped for fused kernels."""
    return inspect.unwrap(function)


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same code with `torch.float` and `torch.float32` standing for float64."""
    module = types.ModuleType("torch")
    module.__dict__.update(torch.__dict__, float=torch.float64, float32=torch.float64)
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, "torch": module},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
