"""Train the demo target on one GPU, for a given time, and resume where the last call ended.

The schedule runs over the training time, not over steps: warm-up, constant, linear decay.
"""

import argparse
import functools
import json
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.target.configuration import text_config
from training.target.data import (
    MIXES,
    TOKENS_PER_BATCH,
    BatchStream,
    longest_row,
    training_batches,
)
from training.target.export import load_checkpoint, write_checkpoint
from training.target.model import Target
from training.target.operations import fused_kda, kda_chunked
from training.target.optimizer import Muon, split_parameters

WARM_UP_STEPS = 100
LAST_RATE = 0.01
REFERENCE_WEIGHT = 1e4
BALANCE_RATE = 1e-3


def rate_factor(step: int, progress: float, decay_from: float) -> float:
    """The learning rate as a share of its peak."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    if progress <= decay_from:
        return warm_up
    left = max(0.0, (1 - progress) / (1 - decay_from))
    return warm_up * (LAST_RATE + (1 - LAST_RATE) * left)


class Training:
    """The model, its optimizers, and how far they are."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        is_gpu = self.device.type == "cuda"
        torch.manual_seed(arguments.seed)
        self.model = Target(
            text_config(),
            is_compiled=is_gpu,
            is_grouped=arguments.grouped,
            kernel=fused_kda() if is_gpu else kda_chunked,
            dtype=torch.bfloat16 if is_gpu else torch.float32,
        ).to(self.device)
        matrices, others = split_parameters(self.model)
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [
                {"params": others["embedding"], "scale": 1.0},
                {"params": others["head"], "scale": 0.5},
                {"params": others["rest"], "scale": 0.6},
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=is_gpu,
        )
        self.step = 0
        self.seconds = 0.0
        self.num_tokens = 0

    @property
    def progress(self) -> float:
        """The share of the training time that is over."""
        return min(1.0, self.seconds / self.arguments.total_seconds)

    def update(self, ids_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """One step; returns the mean loss of the weighted tokens."""
        loss_sum = self.model.loss(ids_BT, weights_BT)
        total_weight = weights_BT.float().sum()
        # Between a mean, which makes few answers loud, and a sum, which makes them silent.
        (loss_sum / (total_weight * REFERENCE_WEIGHT).sqrt()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = rate_factor(self.step, self.progress, self.arguments.decay_from)
        for group in self.adam.param_groups:
            group["lr"] = self.arguments.rate * factor * group["scale"]
        self.adam.step()
        self.muon.step(self.arguments.rate * factor)
        self.model.zero_grad(set_to_none=True)
        for layer in self.model.moe_layers():
            layer.balance(BALANCE_RATE * factor)
        self.step += 1
        return loss_sum.detach() / total_weight

    def save(self, path: Path) -> None:
        """Keep everything needed to go on."""
        torch.save(
            {
                "model": self.model.state_dict(),
                "muon": self.muon.state(),
                "adam": self.adam.state_dict(),
                "counts": (self.step, self.seconds, self.num_tokens),
            },
            path,
        )

    def load(self, path: Path) -> None:
        """Go on from a saved file."""
        saved = torch.load(path, map_location=self.device)
        self.model.load_state_dict(saved["model"])
        self.muon.load(saved["muon"])
        self.adam.load_state_dict(saved["adam"])
        self.step, self.seconds, self.num_tokens = saved["counts"]


def take_first_working_configuration() -> None:
    """Spare a short call Triton's search: each kernel takes its first configuration that runs."""
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        configs = prune(self, *arguments, **named)
        self.has_found = False
        middle = len(configs) // 2
        return [*configs[middle:], *configs[:middle]]

    def bench_until_found(self: Any, *arguments: Any, **named: Any) -> list[float]:
        if self.has_found:
            return [float("inf")] * 3
        times = bench(self, *arguments, **named)
        self.has_found = min(times) < float("inf")
        return times

    Autotuner.prune_configs, Autotuner._bench = prune_configs, bench_until_found


def run(arguments: argparse.Namespace) -> None:
    """Train until the call's time is over."""
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    longest = multiprocessing.get_context("fork").Value("i", longest_row(0.0, arguments.mix))
    stream = BatchStream(
        arguments.workers,
        functools.partial(
            training_batches,
            seed=arguments.seed,
            tokenizer_folder=arguments.tokenizer,
            documents=json.loads(arguments.documents.read_text()) if arguments.documents else [],
            mix=MIXES[arguments.mix],
            longest=longest,
            tokens_per_batch=arguments.tokens_per_batch,
        ),
    )
    if arguments.skip_search:
        take_first_working_configuration()
    training = Training(arguments)
    if arguments.resume.exists():
        training.load(arguments.resume)
    elif arguments.from_checkpoint is not None:
        load_checkpoint(training.model, arguments.from_checkpoint)
    log = (arguments.out / "log.jsonl").open("a")

    def report(**values: object) -> None:
        line = json.dumps({"step": training.step, "seconds": round(training.seconds, 1)} | values)
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    losses: dict[int, list[Tensor]] = defaultdict(list)
    last_report = clock = time.monotonic()
    is_half_kept = False
    report(ready_after=round(clock - started, 1))
    while training.progress < 1.0 and time.monotonic() - started < arguments.call_seconds:
        longest.value = longest_row(training.progress, arguments.mix)
        batch = stream.next()
        ids_BT = torch.from_numpy(batch.ids_BT).to(training.device, torch.long, non_blocking=True)
        weights_BT = torch.from_numpy(batch.weights_BT).to(training.device, non_blocking=True)
        losses[ids_BT.shape[1]].append(training.update(ids_BT, weights_BT))
        training.num_tokens += ids_BT.numel()
        if training.step % 8 == 0 and training.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        # Steps that compile are long; the schedule does not count them in full.
        training.seconds += min(now - clock, 1.0)
        clock = now
        if arguments.fill_call:
            left = arguments.call_seconds - (now - started)
            arguments.total_seconds = training.seconds + max(left, 0.0)
        if now - last_report > arguments.report_every:
            means = {
                length: round(torch.stack(values).mean().item(), 4)
                for length, values in sorted(losses.items())
            }
            report(
                call_seconds=round(now - started, 1),
                million_tokens=round(training.num_tokens / 1e6, 1),
                waiting=stream.size(),
                loss=means,
            )
            losses.clear()
            last_report = now
        if training.progress > 0.6 and not is_half_kept:
            write_checkpoint(training.model.state_dict(), arguments.out)
            is_half_kept = True
    stream.close()
    write_checkpoint(training.model.state_dict(), arguments.out)
    training.save(arguments.resume)
    report(million_tokens=round(training.num_tokens / 1e6, 1), after=time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("stagecoach/demo/checkpoint"))
    parser.add_argument("--documents", type=Path, help="JSON list of plain-text documents")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and log")
    parser.add_argument("--resume", type=Path, required=True, help="file to resume and to save")
    parser.add_argument("--from-checkpoint", type=Path, help="start from these packed weights")
    parser.add_argument("--mix", choices=sorted(MIXES), default="whole")
    parser.add_argument("--total-seconds", type=float, default=930.0, help="of the whole training")
    parser.add_argument("--call-seconds", type=float, default=545.0, help="of this call")
    parser.add_argument("--fill-call", action="store_true", help="end the schedule with the call")
    parser.add_argument("--decay-from", type=float, default=0.55, help="share of the training")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=100, help="another for every call")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--tokens-per-batch", type=int, default=TOKENS_PER_BATCH)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--skip-search", action="store_true", help="do not tune Triton kernels")
    parser.add_argument("--grouped", action="store_true", help="sorted experts, not dense ones")
    parser.add_argument("--report-every", type=float, default=20.0, help="seconds")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
