"""All checks of a checkpoint, in their order, and what each of them needs.

Owns that order, and what is told before anything takes long. A check that has nothing to stand on
is skipped with the reason; the others go on.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from stagecoach.checking.drafting import DraftCheckup
from stagecoach.checking.generation import NUM_GENERATED, GenerationCheckup, layout_of
from stagecoach.checking.groups import Architecture, LayerGroup, make_groups
from stagecoach.checking.layers import LayerRun
from stagecoach.checking.steps import (
    FEW_TOKENS,
    TEXTS,
    CheckStep,
    made_up_texts,
    make_steps,
)
from stagecoach.checking.texts import Opened
from stagecoach.checking.values import ScannedReader, read_all
from stagecoach.checking.verdict import CheckSkippedError, Report, Verdict, Verdicts, counted
from stagecoach.config.engine import EngineConfig, ResolvedConfig
from stagecoach.model.checkpoint_reader import target_naming
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.ledger import check_checkpoint, model_tensors
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.slot_reads import check_slot
from stagecoach.model.weights import LoadProgress
from stagecoach.pipeline.stage import make_stages, whole_model
from stagecoach.resolve import resolve

CONFIGURATION = "configuration"
FILES = "files"
TENSORS = "tensors"
TOKENIZER = "tokenizer"
CHAT = "chat format"
VALUES = "values"
LAYERS = "layers"
BOUNDARIES = "stage boundaries"
ENGINES = "engines"
DRAFT_CONFIGURATION = "draft configuration"
DRAFT = "draft tensors"
DRAFT_VALUES = "draft values"
DRAFT_PASS = "draft pass"
DRAFT_ACCEPTANCE = "draft acceptance"

# Of the free memory, for the weights of one group; the rest is for what reads and computes.
_SHARE_OF_MEMORY = 0.6
# Beside its weights an engine holds caches, and copies of what is read several times.
_ENGINE_FACTOR = 1.3
_PROBE_BYTES = 2**27
_TELL_SECONDS = 60
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Watch(Protocol):
    """Who follows a run."""

    def tell(self, line: str) -> None:
        """What is about to be done, and what it takes."""

    def reach(self, verdict: Verdict) -> None:
        """A check has ended."""

    def advance(self, task: str, done_bytes: int, total_bytes: int) -> None:
        """How far a long check is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What is checked.

    Attributes:
        engine: options of EngineConfig but for the model.
        memory_bytes: most that the weights of a layer group may take; None: a share of what is
            free.
    """

    model: str
    engine: dict[str, Any]
    has_values: bool = True
    has_layers: bool = True
    memory_bytes: int | None = None


class _Sizes(NamedTuple):
    num_bytes: int  # of all files
    num_files: int


def run_checks(options: CheckOptions, watch: Watch) -> Report:
    """Every check; see `docs/checking.md` for what each means."""
    checkup = _Checkup(options, watch)
    checkup.run()
    return checkup.report()


class _Checkup:
    """What one check leaves for the next."""

    def __init__(self, options: CheckOptions, watch: Watch) -> None:
        self._options = options
        self._watch = watch
        self._verdicts = Verdicts(watch.reach)
        self._config: ResolvedConfig | None = None
        self._reader: ScannedReader | None = None
        self._opened: Opened | None = None
        self._draft: DraftCheckup | None = None
        self._engines: GenerationCheckup | None = None
        self._run: LayerRun | None = None
        self._sizes = _Sizes(0, 0)

    def run(self) -> None:
        judge, has_draft = self._verdicts.judge, self._has_draft
        judge(CONFIGURATION, self._check_configuration)
        judge(FILES, self._check_files, (CONFIGURATION,))
        judge(TENSORS, self._check_tensors, (FILES,))
        judge(TOKENIZER, self._check_tokenizer, (CONFIGURATION,))
        judge(CHAT, self._check_chat, (TOKENIZER,))
        if has_draft:
            judge(DRAFT_CONFIGURATION, self._check_draft_configuration, (CONFIGURATION,))
            judge(DRAFT, self._check_draft, (DRAFT_CONFIGURATION,))
        judge(LAYERS, self._check_layers, (TENSORS,))
        judge(BOUNDARIES, self._check_boundaries, (LAYERS,))
        judge(VALUES, self._check_values, (TENSORS,))
        if has_draft:
            judge(DRAFT_PASS, self._check_draft_pass, (DRAFT, LAYERS))
            judge(DRAFT_VALUES, self._check_draft_values, (DRAFT,))
        judge(ENGINES, self._check_engines, (TOKENIZER, LAYERS))
        if has_draft:
            judge(DRAFT_ACCEPTANCE, self._check_acceptance, (DRAFT_PASS, ENGINES))

    def report(self) -> Report:
        engine = self._options.engine
        speculation = engine.get("speculative_config")
        found = self._verdicts.found
        return Report(
            model=self._options.model,
            draft=speculation.model if speculation else None,
            layout=layout_of(engine),
            is_ok=all(verdict.status != "failed" for verdict in found),
            verdicts=found,
        )

    @property
    def _has_draft(self) -> bool:
        return self._options.engine.get("speculative_config") is not None

    @property
    def _resolved(self) -> ResolvedConfig:
        assert self._config is not None, "the configuration was not read"
        return self._config

    @property
    def _opened_reader(self) -> ScannedReader:
        assert self._reader is not None, "the files were not opened"
        return self._reader

    @property
    def _layer_run(self) -> LayerRun:
        assert self._run is not None, "the layers did not run"
        return self._run

    def _check_configuration(self) -> str:
        # Without the draft first: what is wrong with that says nothing of the model.
        engine = {**self._options.engine, "speculative_config": None}
        config = resolve(EngineConfig(model=self._options.model, **engine))
        self._config = config
        model = config.model
        return (
            f"{model.model_type}, {model.num_layers} layers of width {model.hidden_size}, as "
            f"stages of {' + '.join(map(str, config.partition))}"
        )

    def _check_draft_configuration(self) -> str:
        config = resolve(EngineConfig(model=self._options.model, **self._options.engine))
        self._config = config
        assert config.speculation is not None, "no draft was asked for"
        draft = config.speculation.draft
        taps = ", ".join(map(str, draft.taps.layers))
        return (
            f"{counted(draft.num_layers, 'layer')} that fit the target and read it behind layers "
            f"{taps}; stages of {' + '.join(map(str, config.partition))}"
        )

    def _check_files(self) -> str:
        config = self._resolved
        naming = target_naming(
            has_tied_head=config.model.tie_word_embeddings, num_layers=config.model.num_layers
        )
        reader = ScannedReader(config.checkpoint, naming, is_scanning=self._options.has_values)
        files = reader.open_all()
        self._reader = reader
        self._sizes = _Sizes(sum(file.num_bytes for file in files), len(files))
        skipped = ", ".join(f"{count} {rule}" for rule, count in reader.skipped.items())
        return (
            f"{counted(len(files), 'file')}, {_gigabytes(self._sizes.num_bytes)}, as long as the "
            f"headers say; {len(reader.stored)} tensors, passed over: {skipped or 'none'}"
        )

    def _check_tensors(self) -> str:
        config, reader = self._resolved, self._opened_reader
        needed = model_tensors(config.model)
        check_checkpoint(config.checkpoint, reader.stored, needed)
        for slot in needed.values():
            check_slot(reader, slot)
        return f"{len(needed)} weights, each there once in its shape and type; none is unused"

    def _check_tokenizer(self) -> str:
        config = self._resolved
        self._opened = Opened(config.checkpoint, config.model)
        return self._opened.check_tokenizer()

    def _check_chat(self) -> str:
        assert self._opened is not None, "the tokenizer was not checked"
        return self._opened.check_chat()

    def _check_draft(self) -> str:
        speculation = self._resolved.speculation
        assert speculation is not None, "no draft was asked for"
        draft = DraftCheckup(
            speculation.checkpoint,
            speculation.draft,
            speculation.num_speculative_tokens,
            is_scanning=self._options.has_values,
        )
        found = draft.check_tensors()
        self._draft = draft
        return found

    def _check_layers(self) -> str:
        if not self._options.has_layers:
            raise CheckSkippedError("--skip-layers")
        config = self._resolved
        if config.engine.num_threads is not None:
            torch.set_num_threads(config.engine.num_threads)
        architecture = self._architecture()
        groups = make_groups(architecture, config.partition, self._most_bytes)
        largest = max(groups, key=lambda group: group.num_bytes)
        if largest.num_bytes > self._most_bytes:
            raise CheckSkippedError(
                f"{largest.name} alone takes {_gigabytes(largest.num_bytes)} of memory, and "
                f"{_gigabytes(self._most_bytes)} may be used (--memory-gib, --dtype bfloat16)"
            )
        self._tell_plan(groups, largest)
        fits = len(groups) == len(config.partition)
        steps = self._steps() if fits else make_steps(self._texts()[:1], FEW_TOKENS)
        run = LayerRun(architecture, make_stages(config.partition), steps)
        self._run_groups(run, groups, steps, architecture.dtype)
        self._run = run
        return run.findings.judge_layers(config.model.num_layers)

    def _run_groups(
        self, run: LayerRun, groups: list[LayerGroup], steps: list[CheckStep], dtype: torch.dtype
    ) -> None:
        total = sum(group.num_bytes for group in groups)
        done = 0
        pace = _Pace(self._watch)
        for group in groups:

            def report(progress: LoadProgress, done: int = done, name: str = group.name) -> None:
                self._watch.advance(name, done + progress.num_bytes, total)

            model = run.run_group(group, self._opened_reader, report)
            done += group.num_bytes
            pace.note(group.name, done, total)
            if group.layers.is_last and self._draft is not None:
                self._draft.run(model, dtype, steps, run.findings.ends)

    def _check_boundaries(self) -> str:
        if len(self._resolved.partition) == 1:
            raise CheckSkippedError("there is one stage (-pp says how many)")
        return self._layer_run.findings.judge_boundaries()

    def _check_values(self) -> str:
        if not self._options.has_values:
            raise CheckSkippedError("--skip-values")
        reader = self._opened_reader
        if self._run is None:
            self._tell_reading()
            done = 0

            def report(num_bytes: int) -> None:
                nonlocal done
                done += num_bytes
                self._watch.advance("values", done, self._sizes.num_bytes)

            read_all(reader, report)
        return reader.judge()

    def _check_draft_pass(self) -> str:
        assert self._draft is not None, "the draft's tensors were not checked"
        return self._draft.judge()

    def _check_draft_values(self) -> str:
        if not self._options.has_values:
            raise CheckSkippedError("--skip-values")
        assert self._draft is not None and self._draft.reader is not None
        if not self._draft.reader.num_scanned:
            read_all(self._draft.reader, lambda num_bytes: None)
        return self._draft.reader.judge()

    def _check_engines(self) -> str:
        config = self._resolved
        room = config.max_model_len - NUM_GENERATED
        if room < 1:
            raise CheckSkippedError(f"--max-model-len={config.max_model_len} leaves no room")
        needed = int(_ENGINE_FACTOR * self._num_engine_bytes)
        if needed > self._most_bytes:
            raise CheckSkippedError(
                f"the whole model in float64 takes about {_gigabytes(needed)} of memory, and "
                f"{_gigabytes(self._most_bytes)} may be used"
            )
        assert self._opened is not None, "the tokenizer was not checked"
        self._engines = GenerationCheckup(
            self._options.model,
            self._options.engine,
            [prompt[:room] for prompt in self._opened.prompts()],
        )
        return self._engines.check_layouts()

    def _check_acceptance(self) -> str:
        assert self._engines is not None, "no engine ran"
        return self._engines.check_draft(self._options.engine["speculative_config"])

    @property
    def _most_bytes(self) -> int:
        if self._options.memory_bytes is not None:
            return self._options.memory_bytes
        return int(_SHARE_OF_MEMORY * psutil.virtual_memory().available)

    @property
    def _num_engine_bytes(self) -> int:
        """Weights of the whole model in float64, nothing packed."""
        config = self._resolved.model
        whole = whole_model(config.num_layers)
        model = StageModel(config, whole, SingleRank(), torch.float64, device="meta")
        return model.num_parameter_bytes

    def _architecture(self) -> Architecture:
        config = self._resolved
        taps = config.speculation.draft.taps if config.speculation else None
        return Architecture(config.model, _DTYPES[config.dtype], taps, self._opened_reader.stored)

    def _steps(self) -> list[CheckStep]:
        """Over conversations, where there is a chat format: a draft knows these best."""
        if self._opened is not None and self._opened.has_chat:
            return make_steps(self._opened.conversations())
        return make_steps(self._texts())

    def _texts(self) -> list[list[int]]:
        if self._verdicts.is_ok(TOKENIZER):
            assert self._opened is not None
            return self._opened.encode(TEXTS)
        return made_up_texts(self._resolved.model.vocab_size)

    def _tell_plan(self, groups: list[LayerGroup], largest: LayerGroup) -> None:
        self._tell_reading()
        free = psutil.virtual_memory().available
        self._watch.tell(
            f"runs {counted(len(groups), 'layer group')} one after the other, the largest "
            f"({largest.name}) with {_gigabytes(largest.num_bytes)} of weights; "
            f"{_gigabytes(free)} of memory are free"
        )

    def _tell_reading(self) -> None:
        num_bytes, num_files = self._sizes
        rate = _reading_rate(self._opened_reader.paths)
        seconds = num_bytes / rate
        self._watch.tell(
            f"reads {_gigabytes(num_bytes)} in {counted(num_files, 'file')}, at "
            f"{_gigabytes(rate)}/s (what the largest of them gave) in about {_duration(seconds)}, "
            "computing aside"
        )


class _Pace:
    """Tells how far a long run is, now and then."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._began = self._told = time.perf_counter()

    def note(self, name: str, done: int, total: int) -> None:
        """So many of `total` bytes are done, `name` the latest."""
        now = time.perf_counter()
        if now - self._told >= _TELL_SECONDS and done < total:
            self._told = now
            left = (now - self._began) * (total - done) / done
            self._watch.tell(f"{name} done, {100 * done / total:.0f}%, {_duration(left)} left")


def _reading_rate(paths: tuple[Path, ...]) -> float:
    """Bytes a second of the beginning of the largest file."""
    largest = max(paths, key=lambda path: path.stat().st_size)
    began, num_bytes = time.perf_counter(), 0
    with largest.open("rb", buffering=0) as file:
        while num_bytes < _PROBE_BYTES and (piece := file.read(2**22)):
            num_bytes += len(piece)
    return num_bytes / max(time.perf_counter() - began, 1e-9)


def _gigabytes(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
