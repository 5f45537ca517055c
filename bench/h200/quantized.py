"""The bundled model on a GPU with narrower weights and cache rows, beside bfloat16.

Scores of held-out examples by family, tokens of a verify round, and greedy answers beside those of
bfloat16. Every engine drafts, and its draft has the target's formats. A mean score more than a
point below that of bfloat16 ends the run with status 1. One engine after the other, each with a
process of its own.

    python -m bench.h200.quantized --out DIR
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.h200.demo import DRAFT, compare, examples_of, measure_engine
from bench.h200.parts import write_part
from stagecoach.outputs import RequestOutput

MOST_POINTS_LOST = 1.0


class Formats(NamedTuple):
    """What is narrower than bfloat16."""

    packed: bool = False
    fp8_weights: bool = False
    fp8_rows: bool = False

    @property
    def name(self) -> str:
        parts = {
            "packed experts": self.packed,
            "ptpc_fp8": self.fp8_weights,
            "fp8 rows": self.fp8_rows,
        }
        return ", ".join(name for name, is_on in parts.items() if is_on) or "bfloat16"

    def options(self) -> dict[str, Any]:
        """Of the engine."""
        rows = "fp8" if self.fp8_rows else "auto"
        return {
            "device": "cuda",
            "dtype": "bfloat16",
            "distributed_executor_backend": "mp",
            "mxfp4_experts": "packed" if self.packed else "decoded",
            "online_quantization": "ptpc_fp8" if self.fp8_weights else "none",
            "kv_cache_dtype": rows,
            "speculative_config": DRAFT
            | {
                "online_quantization": "follow" if self.fp8_weights else "none",
                "kv_cache_dtype": rows,
            },
            "cudagraph_capture_sizes": (1, 16, 64),
            "gpu_memory_utilization": 0.5,
        }


ENGINES = (
    Formats(),
    Formats(fp8_weights=True),
    Formats(fp8_rows=True),
    Formats(fp8_weights=True, fp8_rows=True),
    Formats(packed=True),
    Formats(packed=True, fp8_weights=True, fp8_rows=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=50, help="examples of a family that count")
    parser.add_argument("--prompts", type=int, default=4, help="of a family, for the answers")
    parser.add_argument(
        "--only", help="formats beside bfloat16, as `ptpc_fp8; fp8 rows`; by default all"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    engines = chosen(arguments.only)
    examples = examples_of(arguments.prompts)
    reference: list[RequestOutput] | None = None
    rows: list[dict[str, Any]] = []
    for engine in engines:
        began = time.perf_counter()
        got, scores, rounds = measure_engine(engine.options(), examples, arguments.limit)
        reference = reference or got
        assert rounds is not None, "every engine drafts"
        agreement = compare(reference, got)
        row = {
            "engine": engine.name,
            **{family: 100 * score for family, score in scores.items()},
            "mean": 100 * sum(scores.values()) / len(scores),
            "tokens a round": rounds,
            "answers equal": f"{agreement.num_equal}/{agreement.num_answers}",
            "largest difference": agreement.noise,
        }
        rows.append(row)
        print(
            f"{engine.name:34s} score {row['mean']:.2f} round {rounds:.3f} "
            f"equal {row['answers equal']} difference {agreement.noise:.3g} "
            f"({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
        if arguments.out:
            write_part(arguments.out, "quantized", {"rows": rows})
    lost = [row["engine"] for row in rows if rows[0]["mean"] - row["mean"] > MOST_POINTS_LOST]
    if lost:
        sys.exit(f"more than {MOST_POINTS_LOST} point below bfloat16: {'; '.join(lost)}")


def chosen(only: str | None) -> tuple[Formats, ...]:
    """bfloat16 and those that are named, or all.

    Raises:
        SystemExit: there are no such formats.
    """
    if only is None:
        return ENGINES
    names = [name.strip() for name in only.split(";")]
    known = {engine.name: engine for engine in ENGINES}
    if unknown := set(names) - known.keys():
        sys.exit(f"--only: no formats {sorted(unknown)}; there are {list(known)}")
    return (ENGINES[0], *(known[name] for name in names if name != ENGINES[0].name))


if __name__ == "__main__":
    main()
