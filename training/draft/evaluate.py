"""Score a draft on held-out examples, and calibrate its confidence.

Scores count verify rounds over the target's own answers (`rounds`), each family alike. Calibration
fits one temperature a place of the block on other held-out examples (sequential temperature
scaling, DSpark paper, arXiv 2607.05147) and writes them to the draft's config.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stagecoach.demo.tasks import FAMILIES
from training.draft.configuration import BLOCK_LENGTH
from training.draft.data import Batch, held_out_batches
from training.draft.export import read_checkpoint, write_config
from training.draft.frozen_target import FrozenTarget
from training.draft.model import Draft
from training.draft.rounds import ROOM, Round, rounds, try_drafts
from training.target.data import TOKENS_PER_BATCH
from training.target.train import take_first_working_configuration

TEMPERATURES = (0.0, 1.0)
SCORE_SEED, CALIBRATION_SEED = 0, 1


class Place(NamedTuple):
    """One place of the block over many rounds: drafts whose predecessors were all accepted."""

    is_taken: list[bool]
    confidence: list[float]  # logits


def places(played: Sequence[Round]) -> list[Place]:
    """The drafts of each place."""
    found = [Place([], []) for _ in range(BLOCK_LENGTH)]
    for one in played:
        for place, (is_taken, logit) in enumerate(zip(one.is_taken, one.confidence, strict=True)):
            found[place].is_taken.append(is_taken)
            found[place].confidence.append(logit)
    return found


def fitted_temperature(place: Place) -> float:
    """The temperature with the least cross-entropy, on a grid from 1/4 to 4."""
    logits, taken = torch.tensor(place.confidence), torch.tensor(place.is_taken).float()
    grid = torch.logspace(math.log10(0.25), math.log10(4), 161)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits / grid[:, None], taken.expand(len(grid), -1), reduction="none"
    ).mean(1)
    return round(grid[losses.argmin()].item(), 4)


def tokens_per_round(played: Sequence[Round]) -> float:
    """Mean tokens that a round returns."""
    return round(sum(one.num_tokens for one in played) / len(played), 3)


def summary(played: Sequence[Round], temperatures: Sequence[float]) -> dict[str, Any]:
    """Scores of some rounds, and confidence beside acceptance at each place."""
    acceptance, confidence, reached = [], [], []
    for place, temperature in zip(places(played), temperatures, strict=True):
        scaled = torch.tensor(place.confidence) / temperature
        reached.append(len(place.is_taken))
        acceptance.append(round(sum(place.is_taken) / max(len(place.is_taken), 1), 4))
        confidence.append(round(torch.sigmoid(scaled).mean().item(), 4))
    return {
        "tokens_per_round": tokens_per_round(played),
        "families": {
            family: tokens_per_round([one for one in played if one.family == family])
            for family in FAMILIES
        },
        "acceptance": acceptance,
        "confidence": confidence,
        "drafts_reached": reached,
        "rounds": len(played),
    }


class Judge:
    """Plays rounds of drafts against one target."""

    def __init__(
        self, folder: Path, tap_layers: list[int], device: torch.device, tokens_per_batch: int
    ) -> None:
        self.target = FrozenTarget(folder, tap_layers, device)
        self._folder, self._tokens_per_batch = folder, tokens_per_batch

    def play(self, draft: Draft, *, seed: int, limit: int, temperature: float) -> list[Round]:
        """The rounds of `limit` held-out examples of each family."""
        return [
            one
            for index, batch in enumerate(self._batches(seed, limit))
            for one in rounds(
                try_drafts(
                    draft,
                    self.target,
                    batch,
                    temperature=temperature,
                    seed=seed * 1000 + index,
                    block_length=BLOCK_LENGTH,
                )
            )
        ]

    def _batches(self, seed: int, limit: int) -> Iterator[Batch]:
        return held_out_batches(
            seed=seed,
            limit=limit,
            tokenizer_folder=self._folder,
            tokens_per_batch=self._tokens_per_batch,
            room=ROOM,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path, help="the draft's checkpoint folder")
    parser.add_argument("--target", type=Path, default=Path("stagecoach/demo/checkpoint"))
    parser.add_argument("--limit", type=int, default=200, help="examples of each family")
    parser.add_argument("--calibrate", action="store_true", help="fit and write temperatures")
    parser.add_argument("--tokens-per-batch", type=int, default=TOKENS_PER_BATCH)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        take_first_working_configuration()
    draft, config = read_checkpoint(arguments.draft)
    draft.to(device)
    judge = Judge(arguments.target, config["target_layer_ids"], device, arguments.tokens_per_batch)
    if arguments.calibrate:
        played = [
            one
            for temperature in TEMPERATURES
            for one in judge.play(
                draft, seed=CALIBRATION_SEED, limit=arguments.limit, temperature=temperature
            )
        ]
        fitted = [fitted_temperature(place) for place in places(played)]
        config["confidence_temperatures"] = fitted
        write_config(config, arguments.draft)
        print(json.dumps({"confidence_temperatures": fitted}), flush=True)
    for temperature in TEMPERATURES:
        played = judge.play(draft, seed=SCORE_SEED, limit=arguments.limit, temperature=temperature)
        scores = summary(played, config["confidence_temperatures"])
        print(json.dumps({"temperature": temperature} | scores), flush=True)


if __name__ == "__main__":
    main()
