"""Train demo drafts against the frozen target on one GPU, for a given time.

The schedule runs over the training time, not over steps: warm-up, constant, linear decay.
"""

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.draft.configuration import BLOCK_LENGTH, draft_config
from training.draft.data import Batch, blocks_per_row, training_batches
from training.draft.export import write_checkpoint
from training.draft.frozen_target import FrozenTarget, TargetOutput
from training.draft.model import Draft
from training.draft.objective import (
    CHUNK,
    DraftTokens,
    Heads,
    Losses,
    heads,
    losses,
    place_weights,
)
from training.target.data import TOKENS_PER_BATCH, BatchStream
from training.target.optimizer import Muon
from training.target.train import rate_factor, take_first_working_configuration

# A batch of this weight counts as the mean of its tokens, others by the square root of theirs.
REFERENCE_WEIGHT = 2e4
# The target's pass costs as much as an update; other blocks are drawn for each update.
UPDATES_PER_BATCH = 2
LossPiece = Callable[[DraftTokens, Heads], Losses]


def block_tokens(
    batch: Batch, output: TargetOutput, draft: Draft, target: FrozenTarget, place_weight_K: Tensor
) -> DraftTokens:
    """The draft's view of random blocks in each answer, one in each equal part of it."""
    device = output.taps_BTC.device
    ids_BT, start_B, end_B = (
        torch.from_numpy(array).to(device, torch.long, non_blocking=True) for array in batch[:3]
    )
    num_blocks = blocks_per_row(ids_BT.shape[1])
    part_BW = torch.arange(num_blocks, device=device) + torch.rand(
        len(ids_BT), num_blocks, device=device
    )
    # The last token of an answer is no anchor: nothing follows it.
    num_anchors_B1 = (end_B - 1 - start_B)[:, None]
    anchor_BW = start_B[:, None] + (part_BW / num_blocks * num_anchors_B1).long()
    hidden_BWKH = draft(
        output.taps_BTC, anchor_BW, ids_BT.gather(1, anchor_BW), target.embedding_VH, BLOCK_LENGTH
    )
    position_BWK = anchor_BW[..., None] + torch.arange(BLOCK_LENGTH, device=device)
    is_inside_BWK = position_BWK + 1 < end_B[:, None, None]
    position_BQ = position_BWK.clamp_max(ids_BT.shape[1] - 2).flatten(1)
    row_B1 = torch.arange(len(ids_BT), device=device)[:, None]
    return DraftTokens(
        hidden_BWKH.flatten(0, 2),
        ids_BT.gather(1, position_BQ).flatten(),
        ids_BT.gather(1, position_BQ + 1).flatten(),
        output.hidden_BTH[row_B1, position_BQ].flatten(0, 1),
        (is_inside_BWK * place_weight_K).flatten(),
    )


class DraftTraining:
    """A draft, its optimizers, and its losses since the last report."""

    def __init__(
        self, config: dict[str, Any], target: FrozenTarget, *, gamma: float, device: torch.device
    ) -> None:
        self.config = config
        self.name = f"layers-{config['num_hidden_layers']}"
        self.target = target
        self.draft = Draft(config).to(device)
        self.place_weight_K = place_weights(BLOCK_LENGTH, gamma, device)
        is_gpu = device.type == "cuda"
        self._losses: LossPiece = torch.compile(losses, dynamic=False) if is_gpu else losses
        named = dict(self.draft.named_parameters())
        # Muon takes the matrices inside the network, Adam the tables, norms, and single rows.
        of_adam = {name for name in named if named[name].ndim < 2 or "_head." in name}
        self.muon = Muon([value for name, value in named.items() if name not in of_adam])
        self.adam = torch.optim.AdamW(
            [named[name] for name in sorted(of_adam)],
            betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=is_gpu,
        )  # fmt: skip
        self._sums: dict[int, list[Tensor]] = defaultdict(list)

    def update(self, batch: Batch, output: TargetOutput, rate: float) -> None:
        """One step."""
        tokens = block_tokens(batch, output, self.draft, self.target, self.place_weight_K)
        weights = heads(self.draft, self.target.head_VH)
        chunks = zip(*(part.split(CHUNK) for part in tokens), strict=True)
        parts = [self._losses(DraftTokens(*chunk), weights) for chunk in chunks]
        summed = Losses(*(torch.stack(part).sum() for part in zip(*parts, strict=True)))
        weight = tokens.weight_M.sum()
        (summed.total() / (weight * REFERENCE_WEIGHT).sqrt()).backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.muon.step(rate)
        self.draft.zero_grad(set_to_none=True)
        self._sums[batch.ids_BT.shape[1]].append(torch.stack((*summed, weight)).detach())

    def report(self) -> dict[str, Any]:
        """Means since the last report: by loss, and the share accepted by row length."""
        totals = {length: torch.stack(sums).sum(0) for length, sums in sorted(self._sums.items())}
        self._sums.clear()
        overall = torch.stack(list(totals.values())).sum(0)
        means = (overall[:3] / overall[3]).tolist()
        accepted = {
            length: round(1 - 0.5 * (total[1] / total[3]).item(), 4)
            for length, total in totals.items()
        }
        return {name: round(mean, 4) for name, mean in zip(Losses._fields, means, strict=True)} | {
            "accepted": accepted
        }


class Clock:
    """Time of a call: what was trained, and how far the schedule is."""

    def __init__(self, call_seconds: float) -> None:
        self._started = self._last = time.monotonic()
        self._call_seconds = call_seconds
        self.trained = 0.0

    def tick(self) -> None:
        """Count the time since the last tick. Steps that compile are long and count little."""
        now = time.monotonic()
        self.trained += min(now - self._last, 1.0)
        self._last = now

    @property
    def call(self) -> float:
        """Seconds since the start of the call."""
        return time.monotonic() - self._started

    @property
    def progress(self) -> float:
        """The share of the training that is over, if the rest of the call is training."""
        return self.trained / (self.trained + max(self._call_seconds - self.call, 1e-6))


def run(arguments: argparse.Namespace) -> None:
    """Train until the call's time is over."""
    clock = Clock(arguments.call_seconds)
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    stream = BatchStream(
        arguments.workers,
        functools.partial(
            training_batches,
            seed=arguments.seed,
            tokenizer_folder=arguments.target,
            tokens_per_batch=arguments.tokens_per_batch,
        ),
    )
    if device.type == "cuda":
        take_first_working_configuration()
    configs = [draft_config(num_hidden_layers=layers) for layers in arguments.layers]
    target = FrozenTarget(arguments.target, configs[0]["target_layer_ids"], device)
    trainings = [
        DraftTraining(config, target, gamma=arguments.gamma, device=device) for config in configs
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = (arguments.out / "log.jsonl").open("a")
    step, last_report = 0, 0.0
    while clock.call < arguments.call_seconds:
        batch: Batch = stream.next()
        output = target(torch.from_numpy(batch.ids_BT).to(device, torch.long, non_blocking=True))
        for _ in range(UPDATES_PER_BATCH):
            rate = arguments.rate * rate_factor(step, clock.progress, arguments.decay_from)
            for training in trainings:
                training.update(batch, output, rate)
            step += 1
        if step % 8 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        clock.tick()
        if clock.call - last_report > arguments.report_every:
            last_report = clock.call
            counts = {"step": step, "trained": round(clock.trained, 1), "waiting": stream.size()}
            for training in trainings:
                line = json.dumps(counts | {"draft": training.name} | training.report())
                print(line, flush=True)
                log.write(line + "\n")
                write_checkpoint(training.draft, training.config, arguments.out / training.name)
            log.flush()
    stream.close()
    for training in trainings:
        write_checkpoint(training.draft, training.config, arguments.out / training.name)
    print(json.dumps({"step": step, "trained": round(clock.trained, 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("stagecoach/demo/checkpoint"))
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and log")
    parser.add_argument("--call-seconds", type=float, default=540.0)
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[2], help="one draft of each depth, side by side"
    )
    parser.add_argument("--gamma", type=float, default=4.0, help="decay of the places' weights")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--decay-from", type=float, default=0.4, help="share of the training")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--tokens-per-batch", type=int, default=TOKENS_PER_BATCH)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--report-every", type=float, default=20.0, help="seconds")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
