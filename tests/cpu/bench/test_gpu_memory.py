"""The models that planned memory is compared on: published ones, cut to what is quick."""

import pytest

from bench.h200.memory import shortened
from stagecoach.config.model import LayerKind, parse_model_config

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", ["kimi-linear", "kimi-k3"])
def test_a_shortened_model_keeps_its_widths(name: str) -> None:
    whole = parse_model_config(shortened(name, None, None))
    short = parse_model_config(shortened(name, 5, 32))
    assert short.num_layers == 5 and short.moe is not None and short.moe.num_experts == 32
    assert short.layer_kinds == whole.layer_kinds[:5]
    assert {LayerKind.KDA, LayerKind.MLA} == set(short.layer_kinds)
    assert (short.hidden_size, short.kda, short.mla) == (whole.hidden_size, whole.kda, whole.mla)
