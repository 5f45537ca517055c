"""Kernels that are found without a launch, compiled by another process, and then run."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from stagecoach.kernels.compile_ahead import CompileServer, found_forms
from stagecoach.kernels.norm import reference, rms_norm

pytestmark = pytest.mark.gpu


def test_what_another_process_compiled_is_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hits: dict[str, bool] = {}

    def note(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        hits[metadata["name"]] = cache_hit

    # Of a width that nobody else has.
    x, weight = (torch.randn(shape, device="cuda") for shape in ((5, 1234), (1234,)))
    server = CompileServer(2)
    with found_forms() as forms:
        rms_norm(x, weight, 1e-5)
    assert [form.name for form in forms] == ["rms_norm_kernel"]
    compiled = server.compile(forms)
    server.close()
    assert not compiled.failures
    monkeypatch.setattr(knobs.compilation, "listener", note)
    normed = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, reference.rms_norm(x, weight, 1e-5))
    assert hits == {"rms_norm_kernel": True}
