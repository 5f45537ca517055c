"""Average two checkpoints of one run: what the second learnt, with less of what it forgot.

Weights of a model and of its own continued training lie in one basin, and a point between them
often keeps the skills of both (Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR
2022). Experts are rounded to MXFP4 again.
"""

import argparse
from pathlib import Path

import torch

from training.target.configuration import text_config
from training.target.export import load_checkpoint, write_checkpoint
from training.target.model import Target


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Write `(1 - share) * first + share * second`."""
    models = []
    for folder in (first, second):
        model = Target(text_config())
        load_checkpoint(model, folder)
        models.append(model.state_dict())
    mixed = {
        name: torch.lerp(value.float(), models[1][name].float(), share)
        for name, value in models[0].items()
    }
    write_checkpoint(mixed, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("out", type=Path, help="folder of the new checkpoint")
    parser.add_argument("--share", type=float, default=0.5, help="of the second")
    arguments = parser.parse_args()
    average(arguments.first, arguments.second, arguments.share, arguments.out)


if __name__ == "__main__":
    main()
