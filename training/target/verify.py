"""Check an exported checkpoint against mlx-lm's kimi_k3, which nobody here wrote.

It loads the file strictly, compares logits with the training model's in float32, and lets the
oracle answer held-out examples greedily.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models import kimi_k3

from stagecoach.demo.tasks import FAMILIES, generate, grade
from stagecoach.text.chat import parse_answer
from stagecoach.text.chat_format import render
from stagecoach.text.tokenizer import load_tokenizer
from training.target.configuration import text_config
from training.target.export import load_checkpoint, read_tensors
from training.target.model import Target


def load_oracle(folder: Path) -> kimi_k3.Model:
    """mlx-lm's model with the checkpoint's weights, in float32 except the packed experts."""
    config = json.loads((folder / "config.json").read_text())
    model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(config))
    arrays = {}
    for name, value in read_tensors(folder).items():
        is_packed = value.dtype == torch.uint8
        arrays[name] = mx.array(value.numpy() if is_packed else value.float().numpy())
    weights = model.sanitize(arrays)
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        mode="mxfp4",
        class_predicate=lambda path, part: "switch_mlp" in path and hasattr(part, "to_quantized"),
    )
    model.load_weights(list(weights.items()), strict=True)
    mx.eval(model.parameters())
    return model


def load_training_model(folder: Path) -> Target:
    """The training model with the checkpoint's weights, in float32."""
    model = Target(text_config())
    load_checkpoint(model, folder)
    return model.eval()


def greedy(model: kimi_k3.Model, prompt: list[int], eos: tuple[int, ...], limit: int) -> list[int]:
    """Greedy decoding through the oracle's own cache."""
    cache = model.make_cache()
    logits = model(mx.array([prompt]), cache=cache)
    answer: list[int] = []
    while len(answer) < limit:
        token = int(mx.argmax(logits[0, -1]))
        answer.append(token)
        if token in eos:
            break
        logits = model(mx.array([[token]]), cache=cache)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--examples", type=int, default=0, help="per family, answered greedily")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.folder)
    oracle = load_oracle(arguments.folder)
    ours = load_training_model(arguments.folder)
    worst = 0.0
    for family in ("arithmetic", "extraction"):
        example = generate(family, arguments.seed, 0)
        ids = render(tokenizer, example.messages, response_format=example.response_format)[:160]
        expected = np.array(oracle(mx.array([ids])).astype(mx.float32))
        with torch.no_grad():
            logits = ours(torch.tensor([ids])).numpy()
        worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
    print(f"largest difference of logits, relative to the largest logit: {worst:.2e}")
    for family in FAMILIES if arguments.examples else ():
        right = 0
        for index in range(arguments.examples):
            example = generate(family, arguments.seed, index)
            prompt = render(
                tokenizer,
                example.messages,
                tools=example.tools,
                response_format=example.response_format,
                thinking=example.thinking,
            )
            answer = greedy(oracle, prompt, tokenizer.eos_token_ids, limit=300)
            right += grade(
                example, parse_answer("kimi_k3", tokenizer, answer, prompt_token_ids=prompt)
            )
        print(f"{family}: {right}/{arguments.examples} right", flush=True)
    if worst > 1e-4:
        raise SystemExit("the training model and the oracle differ")


if __name__ == "__main__":
    main()
