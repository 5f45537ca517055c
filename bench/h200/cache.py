"""A prefix hit beside computing the prefix, and what filing checkpoints costs.

The Kimi-Linear shape with random weights. One prompt of 32,768 tokens is computed, once with a
checkpoint every 512 tokens and once with none but at its end; then prompts that share all but
their last 64 tokens are answered from the cache, and without it.

    python -m bench.h200.cache --out DIR
"""

import argparse
import random
import statistics
from typing import Any

from bench.h200 import engine, shapes
from bench.h200.parts import write_part
from stagecoach import LLM

PREFIX_TOKENS = 32768
SUFFIX_TOKENS = 64
RUNS = 3


def measure(options: dict[str, Any], source: random.Random) -> dict[str, float]:
    folder = shapes.write_folder(shapes.kimi_linear_48b())
    with LLM(str(folder), show_progress=False, **options) as llm:
        vocab_size = llm.config.model.vocab_size
        engine.run_batch(llm, [engine.random_prompt(source, PREFIX_TOKENS, vocab_size)], 2)
        computed, hits = [], []
        for _ in range(RUNS):
            llm.reset_prefix_cache()
            prefix = engine.random_prompt(source, PREFIX_TOKENS, vocab_size)
            for seconds in (computed, hits):
                suffix = engine.random_prompt(source, SUFFIX_TOKENS, vocab_size)
                seconds.append(engine.run_batch(llm, [prefix + suffix], 1).seconds)
        return {
            "computed_seconds": statistics.median(computed),
            "hit_seconds": statistics.median(hits),
            "ratio": statistics.median(computed) / statistics.median(hits),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engine.add_options(parser)
    parser.set_defaults(max_num_seqs=8, max_model_len=36864)
    arguments = parser.parse_args()
    results = {}
    for interval in (512, 0):
        options = engine.engine_options(arguments) | {
            "enable_prefix_caching": True,
            "state_checkpoint_interval": interval,
            "max_state_checkpoints": 2 * PREFIX_TOKENS // 512,
        }
        point = measure(options, random.Random(0))
        results[str(interval)] = point
        where = f"every {interval} tokens" if interval else "at the end only"
        print(
            f"checkpoints {where}: computed "
            f"{1e3 * point['computed_seconds']:.1f} ms, hit {1e3 * point['hit_seconds']:.1f} ms, "
            f"ratio {point['ratio']:.1f}",
            flush=True,
        )
    if arguments.out:
        write_part(arguments.out, "cache", results)


if __name__ == "__main__":
    main()
