"""What a plan says, as data: the JSON of `stagecoach plan` and the source of its tables.

Owns the names and units of every figure: bytes, tokens, seconds. Makes none of them.
"""

import msgspec


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a stage; rank 0, which holds most."""

    stage: int
    first_layer: int
    num_layers: int
    kda_layers: int
    mla_layers: int
    weight_bytes: int  # of the target, with what is derived from it
    drafter_bytes: int
    context_bytes: int  # estimated: driver and libraries
    activation_bytes: int  # estimated
    graph_bytes: int  # estimated
    bytes_per_page: int
    bytes_per_slot: int
    page_bytes: int  # all pages, the reserved one too
    slot_bytes: int  # all slots of requests, the reserved one too
    checkpoint_bytes: int  # all slots of checkpoints
    host_bytes: int  # of the host tier
    total_bytes: int  # on the device
    spare_bytes: int  # what --gpu-memory-utilization allows beyond; below 0: does not fit
    boundary_bytes_per_token: int  # to the next stage, over all its ranks
    boundary_bytes_per_step: int  # of a decode step of the largest cohort
    boundary_bytes_per_chunk: int  # of the longest chunk


class DecodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated: all of so many requests decode."""

    num_requests: int
    context: int
    step_seconds: float  # until each has another row of tokens
    stage_seconds: tuple[float, ...]  # of one cohort
    tokens_per_second: float  # one a row: without accepted drafts


class PrefillReport(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated: one prompt alone, and the rate of many."""

    prompt_tokens: int
    seconds: float
    tokens_per_second: float
    saturated_tokens_per_second: float  # prompts of a full plan each, all stages busy


class ContextReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of a length there is memory for."""

    context: int  # tokens of each, prompt and output
    planned: int  # at once, with the pages and slots of the plan
    most: int  # with all of the pools' memory given to them: --max-num-seqs as high, no checkpoints


class PartitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """One way to share the layers out."""

    balances: tuple[str, ...]  # what it makes most even
    partition: tuple[int, ...]
    fits: bool
    most_requests: int  # of the longest there may be, as in ContextReport
    num_requests: int  # as many as decode in the step
    step_seconds: float
    prefill_tokens_per_second: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    model: str
    gpu: str | None  # None: on CPUs
    gpu_bytes: int  # 0: on CPUs
    is_measured: bool  # whether that kind of GPU's rates are
    pipeline_parallel_size: int
    tensor_parallel_size: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_draft_tokens: int
    partition: tuple[int, ...]
    fits: bool
    problems: tuple[str, ...]  # why not
    remedies: tuple[str, ...]  # each alone would do
    num_pages: int  # 0 where it does not fit
    num_slots: int
    num_checkpoints: int
    num_host_pages: int
    num_host_slots: int
    stages: tuple[StageReport, ...]
    contexts: tuple[ContextReport, ...]
    decode: tuple[DecodeReport, ...]
    prefill: tuple[PrefillReport, ...]
    partitions: tuple[PartitionReport, ...]
