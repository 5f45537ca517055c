"""Headline figures and tables of the parts that a run left.

    python -m bench.h200.summary bench/results/h200

reads every part in the folder and writes `summary.json` and `results.md` beside them. A figure
whose part is missing is null.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from bench.h200 import peer
from bench.h200.parts import read_parts

Parts = dict[str, dict[str, Any]]
NUM_PROFILED_KERNELS = 8


class Headline:
    """Figures by name, each with the commit it was measured at."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.figures: dict[str, dict[str, Any]] = {}

    def add(self, name: str, part: str, value: Any, **details: Any) -> None:
        commit = self._parts[part]["environment"]["commit"] if part in self._parts else None
        self.figures[name] = {"value": value, "commit": commit, "part": part, **details}

    def add_ratio(self, name: str, part: str) -> None:
        """The least of `vllm_ratios`, and the concurrencies it is the least of."""
        engine = self.results(part)
        ratios = vllm_ratios(engine) if engine else {}
        least = min(ratios.values(), default=None)
        self.add(name, part, least, concurrencies=list(ratios))

    def results(self, part: str) -> dict[str, Any] | None:
        return self._parts[part]["results"] if part in self._parts else None


def engine_part(num_stages: int, tp_size: int) -> str:
    return f"kimi-linear-pp{num_stages}-tp{tp_size}"


def vllm_ratios(engine: dict[str, Any]) -> dict[int, float]:
    """The peer's step time over ours, by concurrency: above 1 we are faster."""
    points = peer.DECODE[engine["pp"], engine["tp"]]
    return {
        point["concurrency"]: points[point["concurrency"]].step_ms / point["step_ms"]
        for point in engine["decode"]
        if point["concurrency"] in points
    }


def make_headline(parts: Parts) -> dict[str, dict[str, Any]]:
    headline = Headline(parts)
    one, two = engine_part(1, 1), engine_part(2, 1)
    single, pipeline = headline.results(one), headline.results(two)
    headline.add("graphs_under_pp", two, pipeline["has_graphs"] if pipeline else None)
    kda = headline.results("kernels-kda_window")
    for name, key in (
        ("kda_verify_speedup_vs_fla", "verify_speedup_vs_fla"),
        ("kda_verify_bandwidth_fraction", "verify_bandwidth_fraction"),
    ):
        headline.add(name, "kernels-kda_window", kda.get(key) if kda else None)
    mla = headline.results("kernels-mla")
    headline.add(
        "mla_decode_bandwidth_fraction",
        "kernels-mla",
        mla.get("decode_bandwidth_fraction") if mla else None,
    )
    headline.add_ratio("pp2_vs_vllm_min_ratio", two)
    headline.add_ratio("pp1_vs_vllm_min_ratio", one)
    headline.add_ratio("tp2_vs_vllm_min_ratio", engine_part(1, 2))
    for concurrency in (1, 64):
        fractions = {
            point["concurrency"]: point["fraction_of_limit"]
            for point in (single or {}).get("decode", ())
        }
        headline.add(f"decode_fraction_of_limit_c{concurrency}", one, fractions.get(concurrency))
    scaling = _prefill_scaling(parts)
    headline.add(
        "prefill_pp2_scaling",
        scaling.part if scaling else two,
        scaling.ratio if scaling else None,
        **({"prompt": scaling.length, "over": scaling.single} if scaling else {}),
    )
    demo = headline.results("demo")
    headline.add("acceptance_pp2_over_pp1", "demo", _acceptance_ratio(demo))
    return headline.figures


class Scaling(NamedTuple):
    """Tokens a second of one prompt, two stages over one."""

    length: int
    part: str
    single: str  # part of one stage
    ratio: float


def _prefill_scaling(parts: Parts) -> Scaling | None:
    """Of the longest prompt that both ran.

    A run that was cut short may lack its prompts; another, with a name that goes on, may have them.
    """
    rates = {
        name: {point["length"]: point["tokens_per_second"] for point in part["results"]["prefill"]}
        for name, part in parts.items()
        if name.startswith((engine_part(1, 1), engine_part(2, 1)))
    }
    found = [
        Scaling(length, part, single, rate / rates[single][length])
        for single in sorted(rates)
        for part in sorted(rates)
        if single.startswith(engine_part(1, 1)) and part.startswith(engine_part(2, 1))
        for length, rate in rates[part].items()
        if length in rates[single]
    ]
    # The first of the longest: names without an ending come first.
    return max(found, key=lambda item: item.length, default=None)


def _acceptance_ratio(demo: dict[str, Any] | None) -> float | None:
    if not demo:
        return None
    rounds = demo["tokens_per_round"]
    one, two = rounds.get("pp1 bfloat16 draft"), rounds.get("pp2 bfloat16 draft")
    return two / one if one and two else None


def make_tables(parts: Parts) -> str:
    lines = ["# Measured on H200s", ""]
    for name, part in parts.items():
        environment = part["environment"]
        versions = ", ".join(f"{key} {value}" for key, value in environment["versions"].items())
        lines += [
            f"## {name}",
            "",
            f"{len(environment['gpus'])} x {environment['gpus'][0]}, {environment['cores']} cores, "
            f"Python {environment['python']}, {versions}, CUDA {environment['cuda']}. "
            f"Commit {environment['commit']}.",
            "",
            *_table(name, part["results"]),
            "",
        ]
    return "\n".join(lines)


def _table(name: str, results: dict[str, Any]) -> list[str]:
    if "decode" in results:
        return _engine_table(results)
    if "bytes" in results:
        return _memory_table(results["bytes"])
    if "rows" in results:
        columns = list(results["rows"][0])
        return _rows(
            columns, [[_shown(row.get(column)) for column in columns] for row in results["rows"]]
        )
    if name == "demo":
        return _demo_table(results)
    if name.startswith("profile"):
        return _profile_table(results)
    if name == "cache":
        return _cache_table(results)
    return ["```json", json.dumps(results, indent=1), "```"]


def _engine_table(results: dict[str, Any]) -> list[str]:
    is_like_peer = (
        results["shape"] == "kimi-linear"
        and (results["pp"], results["tp"]) in peer.DECODE
        and results["has_graphs"]
        and not _is_narrower(results)
    )
    ratios = vllm_ratios(results) if is_like_peer else {}
    lines = _rows(
        [
            "requests",
            "step ms",
            "limit ms",
            "of limit",
            "request ms",
            "out tok/s",
            "vLLM step / ours",
            "loop ms",
            "busy",
        ],
        [
            [
                str(point["concurrency"]),
                f"{point['step_ms']:.2f}",
                _shown(point.get("limit_ms")),
                _shown(point.get("fraction_of_limit")),
                f"{point['request_ms']:.2f}",
                f"{point['output_tokens_per_second']:.0f}",
                _shown(ratios.get(point["concurrency"])),
                f"{point['loop_ms_per_step']:.2f}",
                " ".join(f"{share:.0%}" for share in point["stage_busy_share"]),
            ]
            for point in results["decode"]
        ],
    )
    if results["prefill"]:
        lines += [
            "",
            *_rows(
                ["prompt", "seconds", "tok/s", "vLLM tok/s", "busy"],
                [
                    [
                        str(point["length"]),
                        f"{point['seconds']:.3f}",
                        f"{point['tokens_per_second']:.0f}",
                        _peer_prefill(results, point["length"]),
                        " ".join(f"{share:.0%}" for share in point["stage_busy_share"]),
                    ]
                    for point in results["prefill"]
                ],
            ),
        ]
    return [*lines, "", f"Start: {results['start_seconds']:.1f} s."]


def _is_narrower(results: dict[str, Any]) -> bool:
    """Whether weights or rows are quantised: the peer was measured without."""
    weights = results.get("online_quantization", "none")
    return weights != "none" or results.get("kv_cache_dtype", "auto") == "fp8"


def _peer_prefill(results: dict[str, Any], length: int) -> str:
    """The peer's tokens a second, where it was measured."""
    if results["shape"] != "kimi-linear" or length != peer.PREFILL_TOKENS or _is_narrower(results):
        return ""
    rate = peer.PREFILL.get((results["pp"], results["tp"]))
    return "" if rate is None else f"{rate:.0f}"


def _profile_table(results: dict[str, Any]) -> list[str]:
    return _rows(
        ["", "step us", "no kernel runs, us", "largest kernels, us a step"],
        [
            [
                title,
                f"{point['step_us']:.0f}",
                f"{point['between_us']:.0f}",
                ", ".join(
                    f"{row['kernel']} {row['us']:.0f}"
                    for row in point["kernels"][:NUM_PROFILED_KERNELS]
                )
                + _exchanges(point.get("exchanges")),
            ]
            for title, point in results.items()
        ],
    )


def _exchanges(exchanges: dict[str, Any] | None) -> str:
    """What exchanges between two ranks take of a step, and for how long each rank waits."""
    if exchanges is None:
        return ""
    waits = " and ".join(f"{wait:.0f}" for wait in exchanges["wait_us_a_step"])
    return f"; exchanges {exchanges['itself_us_a_step']:.0f}, waits {waits}"


def _cache_table(results: dict[str, Any]) -> list[str]:
    return _rows(
        ["checkpoints", "computed ms", "hit ms", "ratio"],
        [
            [
                f"every {interval} tokens" if int(interval) else "at the end only",
                f"{1e3 * point['computed_seconds']:.1f}",
                f"{1e3 * point['hit_seconds']:.1f}",
                f"{point['ratio']:.1f}",
            ]
            for interval, point in results.items()
        ],
    )


def _memory_table(results: dict[str, dict[str, int]]) -> list[str]:
    return _rows(
        ["bytes of", "planned", "measured", "planned / measured"],
        [
            [
                name,
                f"{both['planned']:,}",
                f"{both['measured']:,}",
                _shown(both["planned"] / both["measured"] if both["measured"] else None),
            ]
            for name, both in results.items()
        ],
    )


def _demo_table(results: dict[str, Any]) -> list[str]:
    return _rows(
        ["engine", "answers equal", "tokens", "noise", "unexplained", "score", "tokens a round"],
        [
            [
                name,
                f"{agreement['num_equal']}/{agreement['num_answers']}",
                str(agreement["num_tokens"]),
                f"{agreement['noise']:.3g}",
                str(agreement["num_unexplained"]),
                f"{sum(results['scores'][name].values()) / len(results['scores'][name]):.3f}",
                _shown(results["tokens_per_round"][name]),
            ]
            for name, agreement in results["agreement"].items()
        ],
    )


def _rows(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    parts = read_parts(folder)
    headline = make_headline(parts)
    (folder / "summary.json").write_text(json.dumps(headline, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(make_tables(parts), encoding="utf-8")
    for name, figure in headline.items():
        print(f"{name:34s} {_shown(figure['value']):>8s}  {figure['commit'] or ''}")


if __name__ == "__main__":
    main()
