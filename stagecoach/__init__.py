"""Stagecoach: Kimi-K3-class models across pipeline stages and tensor-parallel ranks."""

from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.errors import StagecoachError
from stagecoach.llm import LLM
from stagecoach.outputs import CompletionOutput, RequestOutput
from stagecoach.request import SamplingParams, StructuredOutputsParams
from stagecoach.version import __version__

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StagecoachError",
    "StructuredOutputsParams",
    "__version__",
]
