"""The trained target, which training only asks: taps, final hidden states, answers of its own.

Shapes: B rows, T tokens a row, N = B * T, H hidden, A places of an answer, V vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.target.configuration import END_OF_MESSAGE_ID, PAD_TOKEN_ID, text_config
from training.target.export import load_checkpoint
from training.target.model import Geometry, Target
from training.target.operations import fused_kda, kda_chunked, linear


class TargetOutput(NamedTuple):
    """What the target computes for whole rows."""

    taps_BTC: Tensor  # running sums after the tapped layers, side by side
    hidden_BTH: Tensor  # what the head reads


class Answers(NamedTuple):
    """Rows whose answers are the target's own."""

    ids_BT: Tensor
    end_B: Tensor  # behind the last token of the answer
    output: TargetOutput


class FrozenTarget:
    """The target of a checkpoint, in bfloat16 on a GPU and float32 elsewhere."""

    def __init__(self, folder: Path, tap_layers: list[int], device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if is_gpu else torch.float32
        model = Target(
            text_config(),
            is_compiled=is_gpu,
            kernel=fused_kda() if is_gpu else kda_chunked,
            dtype=self.dtype,
        )
        load_checkpoint(model, folder)
        self._model = model.eval().to(device)
        self._is_compiled = is_gpu
        self._tap_layers = tap_layers
        self.embedding_VH = self._model.model.embed_tokens.weight.detach().to(self.dtype)
        self.head_VH = self._model.lm_head.weight.detach().to(self.dtype)

    def __call__(self, ids_BT: Tensor) -> TargetOutput:
        """Run whole rows; int64 ids."""
        # Compiled without gradients, outputs change from run to run (torch 2.11, H200); compiled
        # as for the target's training they are right.
        with torch.set_grad_enabled(self._is_compiled):
            output = self._run(ids_BT)
        return TargetOutput(*(part.detach() for part in output))

    def _run(self, ids_BT: Tensor) -> TargetOutput:
        backbone = self._model.model
        num_rows, row_length = ids_BT.shape
        position_N = torch.arange(row_length, device=ids_BT.device).repeat(num_rows)
        geometry = Geometry(num_rows, row_length, position_N)
        partial = F.embedding(ids_BT.flatten(), self.embedding_VH)
        taps = [partial] if -1 in self._tap_layers else []
        blocks: list[Tensor] = []
        for index, layer in enumerate(backbone.layers):
            partial, blocks = layer(partial, blocks, geometry)
            if index in self._tap_layers:
                taps.append(partial)
        hidden = backbone.ops.mix_and_norm(
            blocks, partial, backbone.output_attn_res_norm.weight,
            backbone.output_attn_res_proj.weight, backbone.norm.weight, backbone.eps,
        )  # fmt: skip
        return TargetOutput(
            torch.cat(taps, dim=-1).view(num_rows, row_length, -1),
            hidden.view(num_rows, row_length, -1),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits of final hidden states."""
        return linear(hidden, self.head_VH).float()

    @torch.no_grad()
    def own_answers(
        self, ids_BT: Tensor, start_B: Tensor, num_places: int, noise_BAV: Tensor | None = None,
        *, max_passes: int = 8,
    ) -> Answers:  # fmt: skip
        """The answers that the target itself gives, by fixed-point iteration.

        Given rows with likely answers, each pass replaces every answer token by the target's
        choice after the tokens before it. Each pass makes at least one more token final, so an
        answer equals token-by-token decoding once a pass changes nothing. What still changes in
        the last pass is cut off.

        Args:
            start_B: where answers begin; 0 for a row without one.
            num_places: longest answer, A.
            noise_BAV: what to add to the logits of each answer place; None: greedy.
        """
        place_A = torch.arange(num_places, device=ids_BT.device)
        position_BA = (start_B[:, None] + place_A).clamp_max(ids_BT.shape[1] - 1)
        is_inside_BA = (start_B[:, None] > 0) & (start_B[:, None] + place_A < ids_BT.shape[1])
        row_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
        rows, places = is_inside_BA.nonzero(as_tuple=True)
        ids_BT = ids_BT.clone()
        for remaining in reversed(range(max_passes)):
            output = self(ids_BT)
            chosen_BA = self._choose(output.hidden_BTH[row_B1, position_BA - 1], noise_BAV)
            is_stop_BA = chosen_BA == END_OF_MESSAGE_ID
            is_past_BA = is_stop_BA.cumsum(1) - is_stop_BA.long() > 0
            is_answer_BA = is_inside_BA & ~is_past_BA
            differs_BA = (chosen_BA != ids_BT[row_B1, position_BA]) & is_answer_BA
            if remaining == 0 or not differs_BA.any():
                break
            after_BA = torch.where(is_past_BA, PAD_TOKEN_ID, chosen_BA)
            ids_BT[rows, position_BA[rows, places]] = after_BA[rows, places]
        is_same_BA = is_answer_BA & (differs_BA.cumsum(1) == 0)
        return Answers(ids_BT, start_B + is_same_BA.sum(1), output)

    def _choose(self, hidden_BAH: Tensor, noise_BAV: Tensor | None) -> Tensor:
        """Argmax of the noisy logits, some rows at a time."""
        chosen = []
        for start in range(0, len(hidden_BAH), 64):
            logits = self.logits(hidden_BAH[start : start + 64])
            if noise_BAV is not None:
                logits += noise_BAV[start : start + 64]
            chosen.append(logits.argmax(-1))
        return torch.cat(chosen)
