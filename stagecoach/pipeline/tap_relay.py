"""The tap relay: which taps a stage makes, receives and passes on.

Taps cross boundaries as one field whose columns are ascending tap ids. Every stage that
receives taps receives a prefix of the list, and makes the next few or none. Where a stage
makes them is the model's affair; how they travel is the handoff's.

    taps       [ received, from the stages before | made here | made later ]
                 taps_before(start)                            ^ taps_before(end)

Dimensions: T tokens, N taps, H hidden size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from stagecoach.config.model import Taps
from stagecoach.pipeline.stage import Stage


def final_after(taps: Taps, tap: int) -> int:
    """The decoder layer whose run completes a tap; -1 for the embedding itself.

    A mixture is made by its reader, the layer behind the tapped one.
    """
    return tap + 1 if taps.are_mixtures else tap


def taps_before(taps: Taps, layer: int) -> tuple[int, ...]:
    """Ids that a stage starting at decoder layer `layer` receives."""
    return tuple(tap for tap in taps.layers if max(0, final_after(taps, tap)) < layer)


class TapRelay:
    """One stage's part in bringing the taps to the last stage.

    Attributes:
        received: ids that come from the stage before.
        own: ids that this stage makes.
    """

    def __init__(self, taps: Taps, stage: Stage, hidden_size: int) -> None:
        self.received = taps_before(taps, stage.start)
        known = taps.layers if stage.is_last else taps_before(taps, stage.end)
        self.own = known[len(self.received) :]
        self._stage = stage
        self._hidden_size = hidden_size

    def join(self, received_TNH: Tensor | None, own_TH: Mapping[int, Tensor]) -> Tensor:
        """All taps known on this stage, for the next one or for the drafter.

        Args:
            received_TNH: the block from the stage before; None if it sends none.
            own_TH: this stage's taps by id, [T, H] each.

        Returns:
            [T, N, H], columns in ascending tap id; the received block itself where the stage
            makes no tap.
        """
        assert self.received or self.own, f"no taps are known on {self._stage}"
        if received_TNH is None:
            assert not self.received, f"{self._stage}: taps {self.received} are due, none came"
        else:
            due = (len(self.received), self._hidden_size)
            assert received_TNH.shape[1:] == due, (
                f"{self._stage}: {tuple(received_TNH.shape)} came, but taps {self.received} are "
                f"[tokens, {due[0]}, {due[1]}]"
            )
        assert set(own_TH) == set(self.own), (
            f"{self._stage}: made taps {sorted(own_TH)}, but its own are {self.own}"
        )
        parts = [] if received_TNH is None else [received_TNH]
        parts += [own_TH[tap].unsqueeze(1) for tap in self.own]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
