"""`stagecoach generate`: what it prints for one prompt, for many, and as JSON."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.cli.command_run import (
    FAST,
    Stagecoach,
    always_drafting,
    spoil_first_request,
)

LETTERS = ("--dtype", "float64", "--ignore-eos", "--max-tokens", "6")


@pytest.fixture
def generate(stagecoach: Stagecoach, folder: Path) -> Any:
    def run(*arguments: object) -> str:
        result = stagecoach("generate", "--model", folder, *FAST, *LETTERS, *arguments)
        assert result.status == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    return run


def test_json_has_outputs_and_stats(generate: Any) -> None:
    text = generate("--prompt", "hello", "--json")
    assert len(text.splitlines()) == 1
    answer = json.loads(text)
    assert set(answer) == {"outputs", "stats"}
    [output] = answer["outputs"]
    assert output["prompt_token_ids"] == list(b"hello")
    assert len(output["token_ids"]) == 6
    assert output["finish_reason"] == "length" and output["stop_reason"] is None
    assert isinstance(output["text"], str)
    assert output["num_cached_tokens"] == 0
    assert output["logprobs"] is None and output["prompt_logprobs"] is None
    assert output["timings"]["num_steps"] == 6
    assert 0 < output["timings"]["first_token_seconds"] <= output["timings"]["total_seconds"]
    stats = answer["stats"]
    assert stats["num_steps"] == 6
    assert (stats["num_prompt_tokens"], stats["num_generated_tokens"]) == (5, 6)
    assert stats["num_free_pages"] == stats["num_pages"]
    assert "query_id" not in stats


def test_json_tells_how_drafts_fared(generate: Any, draft: Path) -> None:
    [plain] = json.loads(generate("--prompt", "hello", "--json"))["outputs"]
    assert plain["timings"]["num_windows"] == 0
    assert plain["timings"]["mean_acceptance_length"] is None
    answer = json.loads(generate("--prompt", "hello", "--json", *always_drafting(draft, 3)))
    [output] = answer["outputs"]
    assert output["token_ids"] == plain["token_ids"]
    timings, stats = output["timings"], answer["stats"]["speculation"]
    assert timings["num_windows"] == stats["num_windows"] >= 1
    assert timings["num_draft_tokens"] == stats["num_draft_tokens"] >= timings["num_windows"]
    assert timings["num_accepted_tokens"] == stats["num_accepted_tokens"]
    mean = timings["mean_acceptance_length"]
    assert mean == 1 + timings["num_accepted_tokens"] / timings["num_windows"]
    assert stats["mean_acceptance_length"] == mean
    assert len(stats["drafted_per_position"]) == len(stats["accepted_per_position"]) == 3
    assert sum(stats["drafted_per_position"]) == stats["num_draft_tokens"]


def test_acceptance_is_told_on_stderr(stagecoach: Stagecoach, folder: Path, draft: Path) -> None:
    forced = always_drafting(draft, 2, synthetic_acceptance_length=3)
    for prompts in (("--prompt", "a"), ("--prompt", "a", "--prompt", "b")):
        run = stagecoach("generate", "--model", folder, *FAST, *LETTERS, *prompts, *forced)
        assert run.status == 0, run.stderr
        # The first token comes from the prompt; then a row of 3, and one of the 2 left.
        num_rounds = 2 * prompts.count("--prompt")
        num_drafts = 3 * prompts.count("--prompt")
        assert run.stderr == (
            f"{num_rounds} verify rounds accepted {num_drafts} of {num_drafts} drafts: "
            "2.50 tokens a round\n"
        )


ONE_BY_ONE = ("--max-num-seqs", 1, "--block-size", 8)
TWICE = ("--prompt", "say it again", "--prompt", "say it again")


def test_json_tells_what_the_cache_spared(generate: Any) -> None:
    answer = json.loads(generate(*TWICE, *ONE_BY_ONE, "--json"))
    first, second = answer["outputs"]
    assert (first["num_cached_tokens"], second["num_cached_tokens"]) == (0, 11)
    assert first["token_ids"] == second["token_ids"]
    cache = answer["stats"]["prefix_cache"]
    assert (cache["num_queries"], cache["num_hits"]) == (2, 1)
    assert cache["hit_rate"] == 11 / 24
    assert cache["device_bytes"] > 0 and not any(cache["evictions"].values())
    plain = json.loads(generate(*TWICE, *ONE_BY_ONE, "--json", "--no-enable-prefix-caching"))
    assert plain["stats"]["prefix_cache"] is None
    assert [output["num_cached_tokens"] for output in plain["outputs"]] == [0, 0]
    assert [output["token_ids"] for output in plain["outputs"]] == 2 * [first["token_ids"]]


def test_cached_tokens_are_told_on_stderr(stagecoach: Stagecoach, folder: Path) -> None:
    for flags, told in (
        ((), "11 of 24 prompt tokens came from the cache\n"),
        (("--cache-salt", "mine"), "11 of 24 prompt tokens came from the cache\n"),
        (("--no-enable-prefix-caching",), ""),
    ):
        run = stagecoach(
            "generate", "--model", folder, *FAST, *LETTERS, *TWICE, *ONE_BY_ONE, *flags
        )
        assert (run.status, run.stderr) == (0, told)


@pytest.mark.parametrize("prompts", [("--prompt", "a"), ("--prompt", "a", "--prompt", "b")])
def test_an_error_of_a_completion_is_told_and_is_the_status(
    stagecoach: Stagecoach, folder: Path, monkeypatch: pytest.MonkeyPatch, prompts: tuple[str, ...]
) -> None:
    spoil_first_request(monkeypatch, start=2)
    run = stagecoach("generate", "--model", folder, *FAST, *LETTERS, *prompts)
    assert run.status == 1 and run.stdout != ""
    [line] = run.stderr.splitlines()
    assert line.startswith("stagecoach: NonFiniteError: ")
    assert line.endswith(" (prompt 0, completion 0)")
    run = stagecoach("generate", "--model", folder, *FAST, *LETTERS, *prompts, "--json")
    assert run.status == 1
    first, *others = json.loads(run.stdout)["outputs"]
    assert first["finish_reason"] == "error" and first["error"].startswith("NonFiniteError: ")
    assert len(first["token_ids"]) == 2
    assert [(output["finish_reason"], output["error"]) for output in others] == [
        ("length", None)
    ] * len(others)


@pytest.mark.usefixtures("_no_engine")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("generate", "--prompt", "x", "--top-p", 7), "top_p: must be a number in (0, 1]"),
        (("generate", "--prompt", "x", "--max-tokens", -3), "max_tokens: must be an integer"),
        (("eval", "--temperature", -1), "temperature: must be a number in [0, 100]"),
    ],
)
def test_what_no_request_may_ask_for_is_refused_before_weights_are_loaded(
    stagecoach: Stagecoach, folder: Path, options: tuple[object, ...], told: str
) -> None:
    command, *others = options
    model = (folder,) if command == "eval" else ("--model", folder)
    run = stagecoach(command, *model, *FAST, *others)
    assert (run.status, run.stdout) == (1, "")
    assert run.stderr.startswith(f"stagecoach: RequestError: {told}")


def test_an_empty_salt_is_refused(stagecoach: Stagecoach, folder: Path) -> None:
    run = stagecoach("generate", "--model", folder, *FAST, "--prompt", "x", "--cache-salt", "")
    assert run.status == 1
    assert run.stderr.startswith("stagecoach: RequestError: cache_salt: must be a text")


def test_prompts_come_from_everywhere_in_order(generate: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("é\nfour\n", encoding="utf-8")
    text = generate(
        "--prompt", "one", "--prompt", "two", "--prompt-file", prompts,
        "--prompt-token-ids", "[5, 6]", "--json",
    )  # fmt: skip
    outputs = json.loads(text)["outputs"]
    assert [output["prompt_token_ids"] for output in outputs] == [
        list(b"one"),
        list(b"two"),
        list("é".encode()),
        list(b"four"),
        [5, 6],
    ]
    assert [output["prompt_index"] for output in outputs] == [0, 1, 2, 3, 4]


def test_lists_of_token_ids_come_from_a_file_too(
    generate: Any, stagecoach: Stagecoach, folder: Path, tmp_path: Path
) -> None:
    lists = tmp_path / "prompts.jsonl"
    lists.write_text("[5, 6]\n[7]\n", encoding="utf-8")
    text = generate("--prompt-token-ids", f"@{lists}", "--prompt-token-ids", "[8]", "--json")
    outputs = json.loads(text)["outputs"]
    assert [output["prompt_token_ids"] for output in outputs] == [[5, 6], [7], [8]]
    lists.write_text("[5, 6]\nsix\n", encoding="utf-8")
    for path, told in ((lists, "must be a JSON list"), (tmp_path / "none", "No such file")):
        run = stagecoach("generate", "--model", folder, *FAST, "--prompt-token-ids", f"@{path}")
        assert run.status == 1
        assert run.stderr.startswith("stagecoach: RequestError: prompt_token_ids: ")
        assert told in run.stderr


def test_n_gives_an_entry_a_completion(generate: Any) -> None:
    arguments = ("--prompt", "a", "--prompt", "b", "-n", "2", "--temperature", "1", "--json")
    outputs = json.loads(generate(*arguments, "--sampling-seed", "3"))["outputs"]
    places = [(output["prompt_index"], output["index"]) for output in outputs]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    again = json.loads(generate(*arguments, "--sampling-seed", "3"))["outputs"]
    other = json.loads(generate(*arguments, "--sampling-seed", "4"))["outputs"]
    tokens = [[item["token_ids"] for item in items] for items in (outputs, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_logprobs_are_objects_with_names(generate: Any) -> None:
    text = generate("--prompt", "ab", "--logprobs", "2", "--prompt-logprobs", "1", "--json")
    [output] = json.loads(text)["outputs"]
    assert len(output["logprobs"]) == 6
    entry = output["logprobs"][0]
    assert set(entry) == {"token_id", "logprob", "rank", "top_ids", "top_logprobs"}
    assert entry["token_id"] == output["token_ids"][0] == entry["top_ids"][0]
    assert entry["rank"] == 1
    assert output["prompt_logprobs"][0] is None
    assert output["prompt_logprobs"][1]["token_id"] == ord("b")


def test_a_bias_is_read_by_token_id(generate: Any, stagecoach: Stagecoach, folder: Path) -> None:
    assert generate("--prompt", "x", "--logit-bias", '{"65": 100}') == "AAAAAA\n"
    for text in ("[1]", '{"A": 1}', '{"65": "high"}', "{"):
        result = stagecoach("generate", "--model", folder, "--prompt", "x", "--logit-bias", text)
        assert result.status == 1 and result.stdout == ""
        assert result.stderr.startswith("stagecoach: RequestError: logit_bias: must be a JSON")


def test_one_prompt_is_printed_as_it_is_written(generate: Any) -> None:
    [output] = json.loads(generate("--prompt", "hello", "--json"))["outputs"]
    assert generate("--prompt", "hello") == output["text"] + "\n"


def test_several_prompts_are_printed_in_blocks(generate: Any) -> None:
    outputs = json.loads(generate("--prompt", "a", "--prompt", "b", "--json"))["outputs"]
    printed = generate("--prompt", "a", "--prompt", "b")
    assert printed == "".join(
        f"--- prompt {output['prompt_index']}, completion 0\n{output['text']}\n"
        for output in outputs
    )


def test_chat_renders_each_prompt_and_shows_markers(generate: Any) -> None:
    [output] = json.loads(generate("--chat", "--prompt", "Hi!", "--json"))["outputs"]
    prompt = output["prompt_token_ids"]
    assert len(prompt) > 10 and prompt[0] == 256 + 3  # <|open|>
    assert bytes(token for token in prompt if token < 256).count(b"Hi!") == 1


def test_the_default_length_never_exceeds_the_model(stagecoach: Stagecoach, folder: Path) -> None:
    run = stagecoach(
        "generate", "--model", folder, *FAST, "--max-model-len", 32, "--prompt", "hello",
        "--ignore-eos", "--json",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert len(json.loads(run.stdout)["outputs"][0]["token_ids"]) == 27


def test_a_config_file_reaches_the_engine(generate: Any, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("max-num-seqs: 3\nblock_size: 8\nmax-state-checkpoints: 2\n")
    stats = json.loads(generate("--prompt", "a", "--json", "--config", config))["stats"]
    assert stats["num_slots"] == 3 + 2
    stats = json.loads(
        generate("--prompt", "a", "--json", "--config", config, "--max-num-seqs", 5)
    )["stats"]
    assert stats["num_slots"] == 5 + 2


def test_dummy_weights_need_no_checkpoint_data(
    stagecoach: Stagecoach, folder: Path, tmp_path: Path
) -> None:
    for path in folder.iterdir():
        if path.suffix in (".json", ".model") and "index" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    run = stagecoach(
        "generate", "--model", tmp_path, *FAST, "--load-format", "dummy", "--prompt", "x",
        "--max-tokens", 2, "--json",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    run = stagecoach("generate", "--model", tmp_path, *FAST, "--prompt", "x")
    assert run.status == 1
    assert run.stderr.startswith("stagecoach: CheckpointError: ")


def test_a_text_obeys_what_it_is_told_to(
    stagecoach: Stagecoach, folder: Path, tmp_path: Path
) -> None:
    arguments = ("--model", folder, *FAST, "--dtype", "float64", "--prompt", "hello")
    result = stagecoach("generate", *arguments, "--structured-outputs", '{"regex": "[a-c]{3}-1"}')
    assert result.status == 0, result.stderr
    assert re.fullmatch(r"[a-c]{3}-1\n", result.stdout)
    file = tmp_path / "choice.json"
    file.write_text('{"choice": ["perhaps"]}', encoding="utf-8")
    result = stagecoach("generate", *arguments, "--structured-outputs", f"@{file}")
    assert result.stdout == "perhaps\n"
    for text in ("{}", '{"regex": "("}', "no JSON", f"@{tmp_path / 'nowhere'}"):
        result = stagecoach("generate", *arguments, "--structured-outputs", text)
        assert result.status != 0 and "structured_outputs" in result.stderr
