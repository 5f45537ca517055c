"""Forms that the rehearsal of a small model finds: another process would compile just those.

A script, as `launch_keys.py`, whose model and stand-ins for a GPU it takes.
"""

import importlib
import pickle
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import get_cache_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from stagecoach.kernels.compile_ahead import Form, found_forms
from stagecoach.kernels.compile_server import options_of
from stagecoach.runner.device_memory import shapes_of
from tests.cpu.runner import launch_keys

TARGET = GPUTarget("cuda", 90, 32)


def key_of(source: ASTSource, options: Any) -> str:
    """By which Triton finds machine code on disk."""
    return get_cache_key(source, make_backend(TARGET), options, {})


def key_of_told(form: Form) -> str:
    function = getattr(importlib.import_module(form.module), form.name)
    source = ASTSource(function, form.signature, form.constants, form.attributes)
    return key_of(source, options_of(form, TARGET))


def main() -> None:
    wanted: dict[str, str] = {}
    run, compile_kernel = JITFunction.run, JITFunction._do_compile

    def noting(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any,
        attributes: Any, warmup: bool,
    ) -> Any:  # fmt: skip
        source = ASTSource(self, signature, constants, attributes)
        wanted[key_of(source, options)] = self.fn.__name__
        return compile_kernel(self, key, signature, device, constants, options, attributes, warmup)

    with tempfile.TemporaryDirectory() as folder:
        config, runner = launch_keys.runner_of(Path(folder), "bfloat16")
    JITFunction.run, JITFunction._do_compile = run, noting
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: TARGET,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )  # type: ignore[arg-type]
    )
    assert runner._pass is not None
    with torch.inference_mode(), found_forms() as forms:
        steps = runner._device_steps(runner._pass)
        memory = shapes_of(config, runner._stage, runner._dtype)
        launch_keys.rehearse(
            config,
            steps,
            memory.allocate(8, 64 * config.engine.block_size, "cpu"),
            has_graphs=False,
        )
    told = {key_of_told(form) for form in pickle.loads(pickle.dumps(forms))}
    assert told == set(wanted), {wanted[key] for key in set(wanted) - told}
    assert len(forms) == len(told), "found once each"
    sys.stdout.write(f"{len(told)} forms of {len(set(wanted.values()))} kernels\n")


if __name__ == "__main__":
    main()
