"""From an engine's config and its memory to the scheduler.

Owns which option becomes which argument. Imports no torch.
"""

from stagecoach.cache.memory_plan import MemoryPlan
from stagecoach.cache.prefix_cache import PrefixCache
from stagecoach.cache.prefix_hash import model_root
from stagecoach.config.engine import ResolvedConfig
from stagecoach.engine.cache_identity import cache_identity
from stagecoach.pipeline.partition import attention_balance
from stagecoach.schedule.draft_policy import DraftPolicy
from stagecoach.schedule.prefill_shares import PrefillShares
from stagecoach.schedule.scheduler import Scheduler
from stagecoach.schedule.shadow import TOLERANCES, Shadows


def make_scheduler(
    config: ResolvedConfig, memory: MemoryPlan, policy: DraftPolicy | None, first_step: int
) -> Scheduler:
    """A scheduler without requests, over an empty cache.

    Args:
        policy: None where nothing is drafted.
        first_step: number of its first plan.
    """
    engine = config.engine
    cache = PrefixCache(
        num_pages=memory.num_pages,
        num_slots=memory.num_slots,
        block_size=engine.block_size,
        num_host_pages=memory.num_host_pages,
        num_host_slots=memory.num_host_slots,
        is_enabled=engine.enable_prefix_caching,
        debug_poison=engine.debug_poison,
    )
    return Scheduler(
        num_stages=engine.pipeline_parallel_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        max_model_len=config.max_model_len,
        cache=cache,
        cache_root=model_root(
            model=cache_identity(config),
            dtype=config.dtype,
            block_size=engine.block_size,
        ),
        state_checkpoint_interval=engine.state_checkpoint_interval,
        eos_token_ids=config.model.eos_token_ids,
        vocab_size=config.model.vocab_size,
        policy=policy,
        num_draft_tokens=config.num_draft_tokens,
        first_step=first_step,
        shadows=Shadows(
            cache,
            rate=engine.verify_cache,
            tolerance=TOLERANCES[config.dtype],
            num_workers=engine.num_workers,
        ),
        prefill=PrefillShares(
            num_stages=engine.pipeline_parallel_size,
            budget=engine.max_num_batched_tokens,
            balance=attention_balance(config.model),
        ),
        is_chaining=config.is_chaining,
        debug_poison=engine.debug_poison,
    )
