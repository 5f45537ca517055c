"""Bytes that are written down for models at their real sizes, beside those of the modules."""

import pytest
import torch

from bench.h200 import quantized, shapes
from stagecoach.config.model import parse_model_config
from stagecoach.config.quantization import NamePatterns, QuantizationChoice
from stagecoach.kernels.quantization import Fp8Weight
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.weight_formats import expected_formats
from stagecoach.pipeline.stage import whole_model

pytestmark = pytest.mark.cpu


def test_what_fp8_shortens_is_what_the_model_quantises() -> None:
    config = parse_model_config(shapes.kimi_linear_48b())
    stage = whole_model(config.num_layers)
    formats = expected_formats(config, QuantizationChoice(fp8=NamePatterns()), stage)
    model = StageModel(config, stage, SingleRank(), torch.bfloat16, "meta", None, formats)
    targets = [slot.target for slot in model.slots if isinstance(slot.target, Fp8Weight)]
    num_values = sum(target.weight.nbytes for target in targets)
    assert num_values == pytest.approx(shapes.FP8_VALUES, rel=0.01)


def test_narrower_bytes_lower_the_limit() -> None:
    def limit(**formats: bool) -> float:
        return shapes.decode_limit_seconds(8, 1e5, sizes=shapes.linear_bytes(**formats))

    plain = limit(has_fp8_weights=False, has_fp8_rows=False)
    assert plain == shapes.decode_limit_seconds(8, 1e5)
    saved = shapes.FP8_VALUES / shapes.COPY_BYTES_PER_SECOND
    assert limit(has_fp8_weights=True, has_fp8_rows=False) == pytest.approx(plain - saved)
    saved = 8 * 1e5 * 8064 / 2 / shapes.COPY_BYTES_PER_SECOND
    assert limit(has_fp8_weights=False, has_fp8_rows=True) == pytest.approx(plain - saved)


def test_formats_are_chosen_by_name() -> None:
    names = [formats.name for formats in quantized.chosen("fp8 rows; packed experts")]
    assert names == ["bfloat16", "fp8 rows", "packed experts"]
    assert quantized.chosen(None) == quantized.ENGINES
    with pytest.raises(SystemExit, match="no formats \\['int8'\\]"):
        quantized.chosen("int8")
