"""The facts of a draft that is never loaded, for what depends on its shape alone."""

from stagecoach.config.draft import DraftConfig, DraftGqaConfig, DraftMlaConfig
from stagecoach.config.model import Taps


def small_draft(attention: DraftMlaConfig | DraftGqaConfig, num_layers: int) -> DraftConfig:
    return DraftConfig(
        taps=Taps((0, 2)),
        hidden_size=16,
        vocab_size=32,
        num_layers=num_layers,
        attention=attention,
        rope=None,
        is_causal=False,
        intermediate_size=16,
        rms_norm_eps=1e-5,
        has_tap_norms=False,
        markov_rank=4,
        has_confidence_head=False,
        confidence_reads_markov=False,
        confidence_temperatures=(),
        mask_token_id=31,
        block_length=None,
    )
