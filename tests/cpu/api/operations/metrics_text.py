"""What /metrics must tell, by name, and its text as values."""

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.cpu.api.conftest import Server

ENGINE = ("engine", "model_name")

# As in vLLM, with its prefix: type, and labels beside those two.
AS_IN_VLLM: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "kv_cache_usage_perc": ("gauge", ()),
    "num_preemptions_total": ("counter", ()),
    "prompt_tokens_total": ("counter", ()),
    "prompt_tokens_cached_total": ("counter", ()),
    "generation_tokens_total": ("counter", ()),
    "request_success_total": ("counter", ("finished_reason",)),
    "prefix_cache_queries_total": ("counter", ()),
    "prefix_cache_hits_total": ("counter", ()),
    "spec_decode_num_drafts_total": ("counter", ()),
    "spec_decode_num_draft_tokens_total": ("counter", ()),
    "spec_decode_num_accepted_tokens_total": ("counter", ()),
    "spec_decode_num_accepted_tokens_per_pos_total": ("counter", ("position",)),
    "iteration_tokens_total": ("histogram", ()),
    "time_to_first_token_seconds": ("histogram", ()),
    "inter_token_latency_seconds": ("histogram", ()),
    "request_time_per_output_token_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
    "request_queue_time_seconds": ("histogram", ()),
    "request_inference_time_seconds": ("histogram", ()),
    "request_prefill_time_seconds": ("histogram", ()),
    "request_decode_time_seconds": ("histogram", ()),
    "request_prompt_tokens": ("histogram", ()),
    "request_generation_tokens": ("histogram", ()),
    "request_max_num_generation_tokens": ("histogram", ()),
    "request_params_n": ("histogram", ()),
    "request_params_max_tokens": ("histogram", ()),
}
CACHE_CONFIG = (
    *("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks", "num_state_slots"),
)
OUR_OWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "cache_config_info": ("gauge", CACHE_CONFIG),
    "build_info": ("gauge", ("version",)),
    "engine_up": ("gauge", ()),
    "num_recoveries_total": ("counter", ()),
    "recovery_seconds_total": ("counter", ()),
    "num_steps_total": ("counter", ()),
    "plans_in_flight": ("gauge", ()),
    "window_length": ("histogram", ()),
    "loop_seconds_total": ("counter", ()),
    "forward_seconds_total": ("counter", ()),
    "stage_busy_seconds_total": ("counter", ("stage",)),
    "stage_hop_seconds_total": ("counter", ("stage",)),
    "stage_idle_seconds_total": ("counter", ("stage",)),
    "num_state_slots": ("gauge", ()),
    "num_state_slots_used": ("gauge", ()),
    "num_checkpoint_slots": ("gauge", ()),
    "num_checkpoint_slots_used": ("gauge", ()),
    "prefix_cache_lost_tokens_total": ("counter", ()),
    "prefix_cache_checkpoints_filed_total": ("counter", ()),
    "prefix_cache_checkpoints_unfiled_total": ("counter", ()),
    "prefix_cache_verified_total": ("counter", ()),
    "prefix_cache_mismatches_total": ("counter", ()),
    "prefix_cache_unverified_total": ("counter", ()),
    "prefix_cache_stored_total": ("counter", ()),
    "prefix_cache_loaded_total": ("counter", ()),
    "prefix_cache_evictions_total": ("counter", ("cause",)),
    "prefix_cache_bytes": ("gauge", ("tier",)),
    "spec_decode_paused": ("gauge", ()),
    "spec_decode_pauses_total": ("counter", ()),
}
TABLE = AS_IN_VLLM | OUR_OWN


class Scrape(NamedTuple):
    """Families by name, counters as they are written; values by sample and labels."""

    types: dict[str, str]
    labels: dict[str, set[str]]
    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float:
        return self.values[
            f"stagecoach:{name}",
            frozenset({"engine": "0", "model_name": "small", **labels}.items()),
        ]


def read(text: str) -> Scrape:
    types: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        types[name] = family.type
        labels[name] = set()
        for sample in family.samples:
            labels[name] |= sample.labels.keys()
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, f"twice: {sample}"
            values[key] = sample.value
    return Scrape(types, labels, values)


def scrape(server: Server) -> Scrape:
    answer = server.get("/metrics")
    assert answer.status == 200, answer
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return read(answer.body.decode())
