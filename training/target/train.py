"""Train the demo target on one GPU, for a given time, and resume where the last call ended.

The schedule runs over the training time, not over steps: warm-up, constant, linear decay.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from training.target.configuration import text_config
from training.target.data import BatchStream, evaluation_batches
from training.target.model import Target, fused_kda, kda_chunked
from training.target.mxfp4 import fake_quantize
from training.target.optimizer import Muon, split_parameters

NUM_MASTER_PARTS = 4
WARM_UP_STEPS = 100
DECAY_FROM = 0.55
LAST_RATE = 0.01
REFERENCE_WEIGHT = 1e4
BALANCE_RATE = 1e-3


def rate_factor(step: int, progress: float) -> float:
    """The learning rate as a share of its peak."""
    if progress > DECAY_FROM:
        left = max(0.0, (1 - progress) / (1 - DECAY_FROM))
        return LAST_RATE + (1 - LAST_RATE) * left
    return min(1.0, (step + 1) / WARM_UP_STEPS)


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
        factor = rate_factor(self.step, self.progress)
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

    def export_masters(self, folder: Path) -> None:
        """Write the float32 weights in parts of equal numbers of bytes."""
        state = {name: value.detach().cpu() for name, value in self.model.state_dict().items()}
        total = sum(value.numel() for value in state.values())
        parts: list[dict[str, Tensor]] = [{} for _ in range(NUM_MASTER_PARTS)]
        used = [0] * NUM_MASTER_PARTS
        for name, value in sorted(state.items(), key=lambda item: -item[1].numel()):
            smallest = used.index(min(used))
            parts[smallest][name] = value
            used[smallest] += value.numel()
        for number, part in enumerate(parts):
            torch.save(part, folder / f"masters-{number}.pt")
        print(f"{total} parameters and buffers written", flush=True)


@torch.no_grad()
def evaluate(training: Training, num_examples: int, seed: int) -> dict[str, float]:
    """Share of held-out examples whose whole answer is the argmax at every token.

    The answer's tokens are given as prefix, so this is what greedy decoding would get exactly
    right, think channel included. Weights are as the checkpoint holds them.
    """
    model = training.model.eval()
    masters = {name: value.clone() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        if "experts.w" in name:
            value.copy_(fake_quantize(value))
        elif "conv1d" not in name and not name.endswith(("A_log", "dt_bias", "o_norm.weight")):
            value.copy_(value.bfloat16())
    right: dict[str, int] = defaultdict(int)
    for batch in evaluation_batches(num_examples, seed, training.arguments.tokenizer):
        ids_BT = torch.from_numpy(batch.ids_BT).to(training.device, torch.long)
        answer_BT = torch.from_numpy(batch.answer_BT).to(training.device)
        hidden = model.model(ids_BT, model.dtype)
        head = model.lm_head.weight.to(model.dtype)
        chosen_BT = torch.cat([(part @ head.T).argmax(-1) for part in hidden.split(16384)])
        chosen_BT = torch.roll(chosen_BT.view(ids_BT.shape), 1, dims=1)
        is_right = ((chosen_BT == ids_BT) | ~answer_BT).all(dim=1).tolist()
        for family, row_is_right in zip(batch.families, is_right, strict=False):
            right[family] += row_is_right
    for name, value in model.named_parameters():
        value.copy_(masters[name])
    model.train()
    return {family: count / num_examples for family, count in right.items()}


def run(arguments: argparse.Namespace) -> None:
    """Train until the call's time is over."""
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    training_seed = arguments.seed + (1 if arguments.resume.exists() else 0)
    stream = BatchStream(
        arguments.workers, training_seed, arguments.tokenizer, arguments.documents
    )
    training = Training(arguments)
    if arguments.resume.exists():
        training.load(arguments.resume)
    log = (arguments.out / "log.jsonl").open("a")

    def report(**values: object) -> None:
        line = json.dumps({"step": training.step, "seconds": round(training.seconds, 1)} | values)
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    losses: dict[int, list[Tensor]] = defaultdict(list)
    last_report = clock = time.monotonic()
    next_evaluation = time.monotonic() + arguments.evaluate_every
    report(ready_after=round(clock - started, 1))
    while training.progress < 1.0 and time.monotonic() - started < arguments.call_seconds:
        batch = stream.next()
        ids_BT = torch.from_numpy(batch.ids_BT).to(training.device, torch.long, non_blocking=True)
        weights_BT = torch.from_numpy(batch.weights_BT).to(training.device, non_blocking=True)
        losses[ids_BT.shape[1]].append(training.update(ids_BT, weights_BT))
        training.num_tokens += ids_BT.numel()
        if training.step % 8 == 0 and training.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        training.seconds += now - clock
        clock = now
        stream.progress.value = training.progress
        if now - last_report > arguments.report_every:
            means = {
                length: round(torch.stack(values).mean().item(), 4)
                for length, values in sorted(losses.items())
            }
            report(
                million_tokens=round(training.num_tokens / 1e6, 1),
                waiting=stream.size(),
                loss=means,
                imbalance=[
                    round(layer.gate.e_score_correction_bias.abs().max().item(), 3)
                    for layer in training.model.moe_layers()
                ][::3],
            )
            losses.clear()
            last_report = now
        if now > next_evaluation:
            report(scores=evaluate(training, arguments.examples // 2, seed=1))
            next_evaluation = clock = time.monotonic()
            next_evaluation += arguments.evaluate_every
    stream.close()
    training.save(arguments.resume)
    training.export_masters(arguments.out)
    report(million_tokens=round(training.num_tokens / 1e6, 1), after=time.monotonic() - started)
    report(scores=evaluate(training, arguments.examples, seed=2))
    if training.device.type == "cuda":
        report(memory_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("stagecoach/demo/checkpoint"))
    parser.add_argument("--documents", type=Path, help="JSON list of plain-text documents")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--resume", type=Path, required=True, help="file to go on from, and to save")
    parser.add_argument("--total-seconds", type=float, default=1080.0, help="of the whole training")
    parser.add_argument("--call-seconds", type=float, default=560.0, help="of this call")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--grouped", action="store_true", help="sorted experts, not dense ones")
    parser.add_argument("--examples", type=int, default=400, help="held-out, per family")
    parser.add_argument("--evaluate-every", type=float, default=150.0, help="seconds")
    parser.add_argument("--report-every", type=float, default=20.0, help="seconds")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
