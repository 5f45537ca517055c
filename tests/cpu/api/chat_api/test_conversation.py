"""Chat requests to a model whose chat format is a template: what it cannot say, a grammar keeps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagecoach.api.chat_api.conversation import answer_params, render_chat
from stagecoach.api.chat_api.request import ChatCompletionRequest
from stagecoach.api.engine_service import EngineService
from stagecoach.errors import RequestError
from stagecoach.text.chat_template import ChatTemplate
from stagecoach.text.tokenizer import load_tokenizer

TOOL = {"type": "function", "function": {"name": "f"}}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def service(model_folder: Path) -> EngineService:
    """As much of one as a conversation needs."""
    tokenizer = load_tokenizer(model_folder)
    tokenizer.chat_template = ChatTemplate(TEMPLATE)
    config = SimpleNamespace(model=SimpleNamespace(model_type="kimi_linear"))
    return cast(EngineService, SimpleNamespace(tokenizer=tokenizer, config=config))


def request(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return ChatCompletionRequest.parse(json.dumps(body).encode())


def prompt_of(service: EngineService, body: ChatCompletionRequest) -> str:
    return service.tokenizer.decode_bytes(render_chat(service, body).token_ids).decode()


def test_a_forced_call_is_asked_of_nobody_in_words(service: EngineService) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    prompts = {
        prompt_of(service, request(tools=[TOOL], tool_choice=choice))
        for choice in ("auto", "required", named)
    }
    assert len(prompts) == 1 and prompts.pop().startswith('[{"type": "function"')


def test_tools_that_must_not_be_called_are_not_named(service: EngineService) -> None:
    rendered = render_chat(service, request(tools=[TOOL], tool_choice="none"))
    text = service.tokenizer.decode_bytes(rendered.token_ids).decode()
    assert text == "user: hi\nassistant: "
    # The next turn will have no tools in its prompt either.
    assert rendered.checkpoint_position == len("user: hi\n")


def test_the_form_of_the_content_is_kept_though_not_said(service: EngineService) -> None:
    body = request(response_format={"type": "json_object"})
    assert prompt_of(service, body) == "user: hi\nassistant: "
    constraint = answer_params(service, body, render_chat(service, body).token_ids)
    assert constraint is not None and constraint.grammar


def test_an_effort_that_the_template_does_not_read_is_refused(service: EngineService) -> None:
    with pytest.raises(RequestError) as caught:
        render_chat(service, request(reasoning_effort="low"))
    assert caught.value.field == "reasoning_effort"
    assert prompt_of(service, request(reasoning_effort="none")) == "user: hi\nassistant: "
    service.tokenizer.chat_template = ChatTemplate("{{ reasoning_effort }}")
    assert prompt_of(service, request(reasoning_effort="low")) == "low"
