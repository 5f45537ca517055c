"""What LLM refuses: the field is named, and nothing of the call runs."""

import math
from pathlib import Path
from typing import Any

import pytest

from stagecoach import LLM, SamplingParams
from stagecoach.errors import CheckpointError, ConfigError, RequestError
from stagecoach.model.tiny import kimi_linear_config, write_tiny_model
from stagecoach.request import MAX_SEED
from tests.small_engine import (
    MAX_MODEL_LEN,
    SHAPE,
    assert_idle,
    thread_engine,
    write_small_draft,
    write_small_model,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "at least one token"),
    ([[]], "at least one token"),
    ([1] * MAX_MODEL_LEN, f"{MAX_MODEL_LEN} tokens > {MAX_MODEL_LEN - 1} maximum"),
    ([1, 512], "token id 512 is not in 0..511"),
    ([-1], "token id -1 is not in"),
    ([[1.5]], "must be text or a list of token ids"),
    ([["x"]], "must be text or a list of token ids"),
    ([None], "must be text or a list of token ids"),
    ({"prompt": "hello"}, "must be text or a list of token ids"),
    ([{"prompt": "hello"}], "must be text or a list of token ids"),
    (b"hello", "must be text or a list of token ids"),
    (5, "must be text or a list of token ids"),
]


@pytest.mark.parametrize(("prompt", "text"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused(llm: LLM, prompt: Any, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.field == "prompt"
    assert text in str(caught.value)


BAD_PARAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 10**9}, "max_tokens", f"at most {MAX_MODEL_LEN}"),
    ({"max_tokens": 2.5}, "max_tokens", "float"),
    ({"temperature": math.nan}, "temperature", "nan"),
    ({"temperature": math.inf}, "temperature", "inf"),
    ({"temperature": -0.1}, "temperature", "[0, 100]"),
    ({"temperature": "hot"}, "temperature", "str"),
    ({"top_p": 0.0}, "top_p", "(0, 1]"),
    ({"top_p": 1.01}, "top_p", "(0, 1]"),
    ({"top_p": math.nan}, "top_p", "nan"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"min_p": 1.5}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3.0}, "presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": -3.0}, "frequency_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "(0, 100]"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 10**6}, "n", "at most 128"),
    ({"min_tokens": 99}, "min_tokens", "at most 16"),
    ({"seed": -1}, "seed", "at least 0"),
    ({"seed": MAX_SEED, "n": 2}, "seed", "seed + n - 1"),
    ({"seed": 2**64}, "seed", "beyond 64 bits"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "at least 0"),
    ({"stop_token_ids": (512,)}, "stop_token_ids", "token id 512 is not in 0..511"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids", "token id -1"),
    ({"stop_token_ids": 5}, "stop_token_ids", "int"),
    ({"stop": ("",)}, "stop", "must not be empty"),
    ({"stop": ""}, "stop", "must not be empty"),
    ({"stop": (1,)}, "stop", "int"),
    ({"stop": 3}, "stop", "int"),
    ({"stop": ("\ud800",)}, "stop", "surrogates not allowed"),
    ({"logit_bias": {600: 1.0}}, "logit_bias", "token id 600"),
    ({"logit_bias": {5: math.nan}}, "logit_bias", "nan"),
    ({"logit_bias": {5: 101.0}}, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias", "str"),
    ({"ignore_eos": "yes"}, "ignore_eos", "str"),
    ({"skip_special_tokens": 1}, "skip_special_tokens", "int"),
]


@pytest.mark.parametrize(("fields", "field", "text"), BAD_PARAMS)
def test_a_bad_parameter_is_refused(
    llm: LLM, fields: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("hello", SamplingParams(**fields))
    assert caught.value.field == field
    assert text in caught.value.reason
    assert str(caught.value).startswith(f"{field}: ")


def test_a_refused_request_of_a_batch_stops_the_whole_call_before_it_starts(llm: LLM) -> None:
    before = llm.stats()
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    bad = SamplingParams(temperature=-1.0)
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "b", "c"], [long, long, bad])
    assert caught.value.field == "temperature"
    assert "prompt 2 of 0..2" in str(caught.value)
    assert_idle(llm)
    assert llm.stats().num_prompt_tokens == before.num_prompt_tokens


def test_parameters_must_be_one_or_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 given for 3 prompts") as caught:
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    assert caught.value.field == "sampling_params"


def test_a_bad_prompt_of_a_stream_is_refused_at_its_first_step(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt: "):
        next(llm.stream(""))


def test_a_conversation_that_cannot_be_written_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unknown role 'robot'") as caught:
        llm.chat([{"role": "robot", "content": "beep"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hello", "must be a list of objects"),
        ({"role": "user", "content": "hello"}, "must be a list of objects"),
        (None, "must be a list of objects"),
        (["hello"], "message 0 must be an object with a role"),
        ([{"role": "user", "content": "hi"}, {"content": "hello"}], "message 1 must be an object"),
    ],
)
def test_messages_of_another_form_are_refused(llm: LLM, messages: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        llm.chat(messages)
    assert caught.value.field == "messages"


def test_what_does_not_fit_the_pages_is_refused_and_stops_the_call(folder: Path) -> None:
    # 8 pages of 8 tokens: less than the 512 tokens that the model allows.
    with thread_engine(folder, max_model_len=None, num_gpu_blocks_override=9) as llm:
        running = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        with pytest.raises(RequestError) as caught:
            llm.generate([[1] * 10, [1] * 65], running)
        assert caught.value.field == "prompt"
        assert "65 tokens; all 8 pages of 8 tokens hold 64" in str(caught.value)
        assert_idle(llm)
        with pytest.raises(RequestError, match="leaves room for 25") as caught:
            llm.generate([1] * 40, running)
        assert caught.value.field == "max_tokens"
        # What fits exactly is served to its end, and pages are taken from others for it.
        outputs = llm.generate([[1] * 15] * 4, running)
        assert {len(output.outputs[0].token_ids) for output in outputs} == {50}
        assert llm.stats().num_preemptions > 0
        assert_idle(llm)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model")
    (folder / "tiktoken.model").unlink()
    with pytest.raises(CheckpointError, match=r"no usable tokenizer: .*holds neither"):
        thread_engine(folder)
    (folder / "tiktoken.model").write_text("not a vocabulary\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model, line 1"):
        thread_engine(folder)


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model")
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (folder / "tiktoken.model").write_text("\n".join(lines[:200]))
    with pytest.raises(CheckpointError, match="has 456 tokens, the model's vocab_size=512"):
        thread_engine(folder)


def test_a_conversation_is_refused_where_the_chat_format_is_unknown(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, kimi_linear_config(SHAPE), seed=3)
    with thread_engine(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"no chat template, .* kimi_linear") as caught:
            llm.chat([{"role": "user", "content": "hello"}], GREEDY)
        assert caught.value.field == "messages"
        assert llm.generate("hello", GREEDY)
        assert_idle(llm)


def test_a_damaged_checkpoint_is_refused_and_a_whole_one_then_served(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model")
    [shard, *_] = sorted(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    for options in ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}):
        with pytest.raises(CheckpointError, match=shard.name):
            thread_engine(folder, **options)
    shard.write_bytes(content)
    with thread_engine(folder) as llm:
        assert llm.generate("hello", GREEDY)


def test_a_draft_of_another_model_is_refused_before_anything_is_loaded(
    folder: Path, tmp_path: Path
) -> None:
    draft = write_small_draft(tmp_path)
    (draft / "model.safetensors").unlink()
    for keys, text in (
        ({"model": str(draft), "k": 3}, "unknown key 'k'; known are model, method"),
        ({"model": str(draft), "num_speculative_tokens": 0}, "num_speculative_tokens=0: must be"),
        ({"model": "demo"}, "--speculative-config model=demo: "),
        ({"model": str(folder)}, f"--speculative-config model={folder}: config.json: model_type"),
    ):
        with pytest.raises(ConfigError) as caught:
            thread_engine(folder, speculative_config=keys)
        assert text in str(caught.value)
    larger = write_small_model(tmp_path / "larger")
    config = (larger / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 96')
    (larger / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="hidden_size=64 and the target's hidden_size=96"):
        thread_engine(larger, speculative_config={"model": str(draft)})


def test_a_damaged_draft_is_refused_with_its_tensor(folder: Path, tmp_path: Path) -> None:
    draft = write_small_draft(tmp_path)
    content = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(content.replace(b"markov_w2", b"markov_w3"))
    for options in ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}):
        with pytest.raises(CheckpointError, match=r"markov_head\.markov_w2\.weight"):
            thread_engine(folder, speculative_config={"model": str(draft)}, **options)
