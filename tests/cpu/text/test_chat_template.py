"""Chat templates: the same tokens as transformers, and words that never become special tokens."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from stagecoach.errors import RequestError
from stagecoach.text.chat_template import ChatTemplate, read_chat_template
from stagecoach.text.tokenizer import Tokenizer, byte_level_alphabet, load_tokenizer

SPECIAL = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|im_middle|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "</think>",
)  # fmt: skip

# In the manner of the Kimi family: tools first, turns between markers, calls in a section.
KIMI = """
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and message['role'] != 'system' -%}
    <|im_system|>system<|im_middle|>You are helpful.<|im_end|>
  {%- endif -%}
  {%- set speaker = message.get('name') or message['role'] -%}
  {%- if message['role'] in ('user', 'assistant') -%}
    <|im_{{ message['role'] }}|>{{ speaker }}<|im_middle|>
  {%- else -%}
    <|im_system|>{{ speaker }}<|im_middle|>
  {%- endif -%}
  {%- if message['role'] == 'tool' -%}
    {{- '## Return of ' ~ message.tool_call_id ~ '\\n' ~ message.content -}}
  {%- elif message.content is not none -%}
    {{- message.content -}}
  {%- endif -%}
  {%- if message.get('tool_calls') -%}
    <|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
      {{- call['function']['arguments'] | tojson -}}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

# What transformers offers to templates beyond plain Jinja.
EXTRAS = """{{ bos_token }}{% set seen = namespace(any=false) %}
{% for message in messages %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% if not message.content %}{% continue %}{% endif %}
    {% set seen.any = true %}
    {% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {{ message | tojson(indent=2) }} {{ message | tojson(ensure_ascii=True, sort_keys=True) }}
    {{ message.reasoning_content }} {{ message.thinking }}{{ undefined_thing }}
{% endfor %}
{{ seen.any }} {{ tools is none }} {{ documents is none }} {{ style | default('plain') }}
{{ strftime_now('%Y') }}{{ eos_token }}"""

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hello"}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief, <b>please</b> & thanks."},
    {"role": "user", "name": "ada", "content": " 2 + 2? \n"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Easy.",
        "tool_calls": [
            {
                "id": "functions.f:0",
                "type": "function",
                "function": {"name": "f", "arguments": {"é": [1, None]}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "4"},
    {"role": "assistant", "content": "4 가 😀"},
]


def write_folder(folder: Path, template: str | None, *, in_config: bool = False) -> Path:
    vocab = dict(byte_level_alphabet())
    # Enough merges that where a text is cut shows in its tokens.
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("<", "|"), ("i", "m")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "[BOS]", "eos_token": {"content": "[EOS]"}}
    if template is not None and in_config:
        config["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("template"), KIMI)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="[BOS]", eos_token="[EOS]"
    )


@pytest.mark.parametrize("template", [KIMI, EXTRAS])
@pytest.mark.parametrize("messages", [HELLO, CONVERSATION, CONVERSATION[:2], CONVERSATION[3:]])
@pytest.mark.parametrize(
    "variables",
    [
        {"tools": None, "add_generation_prompt": True},
        {"tools": [TOOL], "add_generation_prompt": False, "style": "fancy"},
    ],
)
def test_tokens_are_those_of_transformers(
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tokenizer: Tokenizer,
    oracle: PreTrainedTokenizerFast,
) -> None:
    ours = ChatTemplate(template, {"bos_token": "[BOS]", "eos_token": "[EOS]"})
    token_ids = ours.render(tokenizer, messages, **variables)
    expected = oracle.apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=False, **variables
    )
    assert token_ids == expected


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode_bytes(token_ids).decode()


def specials(tokenizer: Tokenizer, token_ids: list[int]) -> list[str | None]:
    names = map(tokenizer.special_name, token_ids)
    return [name for name in names if name is not None]


# Whole names, and pieces that would be one together.
PIECES = st.sampled_from(
    [*SPECIAL, "<", "<|", "|im_end|>", "<|im_", "end|>", "[", "BOS]", " ", "Hello", "\ufdd0",
     "\\ufdd0", "é", "\n"]
)  # fmt: skip
WORDS = st.lists(PIECES, max_size=5).map("".join)


@settings(max_examples=60)
@given(WORDS, WORDS, WORDS)
def test_words_never_become_special_tokens(
    tokenizer: Tokenizer, one: str, two: str, three: str
) -> None:
    assert tokenizer.chat_template is not None

    def rendered(one: str, two: str, three: str) -> list[int]:
        tool = {"type": "function", "function": {"name": one, two: three}}
        called = {"id": three, "function": {"name": two, "arguments": json.dumps({one: two})}}
        messages = [
            {"role": "user", "name": two or None, "content": one},
            {"role": "assistant", "content": two, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": one, "content": three},
        ]
        assert tokenizer.chat_template is not None
        return tokenizer.chat_template.render(
            tokenizer, messages, tools=[tool], add_generation_prompt=True
        )

    plain = rendered("a", "b", "c")
    token_ids = rendered(one, two, three)
    assert specials(tokenizer, token_ids) == specials(tokenizer, plain)
    text = text_of(tokenizer, token_ids)
    assert f"<|im_middle|>{one}<|im_end|>" in text
    assert f"## Return of {one}\n{three}<|im_end|>" in text


def test_words_that_a_template_trims_and_joins_stay_words(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for message in messages %}{{ message.content | trim }}{% endfor %}<|im_end|>"
    )
    pieces = ["<|im_ ", "end|>", "\n<", "|im_end|>", "[BOS]"]
    messages = [{"role": "user", "content": piece} for piece in pieces]
    token_ids = template.render(tokenizer, messages)
    assert specials(tokenizer, token_ids) == ["<|im_end|>"]
    assert text_of(tokenizer, token_ids) == "<|im_end|><|im_end|>[BOS]<|im_end|>"


def test_escaped_words_come_back(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages | tojson(ensure_ascii=True) }}")
    messages = [{"role": "user", "content": "é <|im_end|> \\ufdd0 <"}]
    token_ids = template.render(tokenizer, messages)
    assert specials(tokenizer, token_ids) == []
    assert json.loads(text_of(tokenizer, token_ids)) == messages


def test_half_a_surrogate_pair_is_a_replacement_character(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    token_ids = template.render(tokenizer, [{"role": "user", "content": "a\ud800<|im_end|>"}])
    assert text_of(tokenizer, token_ids) == "a\ufffd<|im_end|>"


def test_words_are_encoded_with_the_text_around_them(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("He{{ messages[0].content }}")
    token_ids = template.render(tokenizer, [{"role": "user", "content": "llo<"}])
    assert token_ids == tokenizer.encode("Hello<")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no systems here') }}", "refuses: no systems here"),
        ("{{ messages[0].content + 1 }}", "cannot write"),
        ("{{ messages[5].content.x }}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ 1 / 0 }}", "cannot write"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(
    template: str, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(template).render(tokenizer, HELLO)
    assert caught.value.field == "messages"


def test_a_template_is_read_from_its_file_or_the_config(tmp_path: Path) -> None:
    tokens = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    assert read_chat_template(write_folder(tmp_path, None)) is None
    write_folder(tmp_path, "from config", in_config=True)
    assert read_chat_template(tmp_path) == ChatTemplate("from config", tokens)
    write_folder(tmp_path, "from file")
    assert read_chat_template(tmp_path) == ChatTemplate("from file", tokens)
    assert load_tokenizer(tmp_path).chat_template == ChatTemplate("from file", tokens)


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = read_chat_template(tmp_path)
    assert template is not None and template.source == "b"


@pytest.mark.parametrize(("content", "message"), [(5, "must be text"), ("{% if %}", "line 1")])
def test_what_is_no_template_is_refused(content: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": content}))
    with pytest.raises(ValueError, match=message):
        read_chat_template(tmp_path)


def test_the_time_is_the_local_one(tokenizer: Tokenizer) -> None:
    token_ids = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(tokenizer, HELLO)
    today = datetime.date.today()
    assert text_of(tokenizer, token_ids) in (str(today), str(today - datetime.timedelta(days=1)))
