"""What /v1/responses answers with: the response, its items, and the events of a stream.

Names and fields are OpenAI's. A struct's tag is its `type`. Knows nothing of how they are
filled.
"""

from typing import Any, Literal

import msgspec

from stagecoach.api.logprobs import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseReasoningText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    text: str


class ResponseOutputText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"
):
    """`logprobs` has one entry for each token of the text, where asked for."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class ResponseReasoningItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"
):
    """What the model thought; its text as it is, so that there is no summary."""

    id: str
    summary: list[dict[str, str]] = []
    content: list[ResponseReasoningText]
    status: ItemStatus


class ResponseOutputMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"
):
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[ResponseOutputText]
    status: ItemStatus


class ResponseFunctionToolCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """`call_id` is what a function_call_output refers to."""

    id: str
    call_id: str
    name: str
    arguments: str  # JSON text
    status: ItemStatus


OutputItem = ResponseReasoningItem | ResponseOutputMessage | ResponseFunctionToolCall
ContentPart = ResponseReasoningText | ResponseOutputText


class ResponseInputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # OpenAI's bill has them


class ResponseOutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response; what ends it counts."""

    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed that had begun."""

    code: Literal["server_error"] = "server_error"
    message: str


class ResponseIncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/responses; what the request did not say has its default here."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since 1970
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: ResponseIncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    background: Literal[False] = False
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events; they are numbered from 0."""

    sequence_number: int


class ResponseCreatedEvent(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    response: ResponseObject


class ResponseInProgressEvent(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompletedEvent(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    response: ResponseObject


class ResponseIncompleteEvent(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailedEvent(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    response: ResponseObject


class ResponseErrorEvent(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """Comes before response.failed; fields as of an error's body."""

    code: str | None
    message: str
    param: str | None


class _ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class ResponseOutputItemAddedEvent(
    _ItemEvent, frozen=True, kw_only=True, tag="response.output_item.added"
):
    pass


class ResponseOutputItemDoneEvent(
    _ItemEvent, frozen=True, kw_only=True, tag="response.output_item.done"
):
    pass


class _InItemEvent(ResponseEvent, frozen=True, kw_only=True):
    output_index: int
    item_id: str


class _PartEvent(_InItemEvent, frozen=True, kw_only=True):
    content_index: Literal[0] = 0  # an item has one part
    part: ContentPart


class ResponseContentPartAddedEvent(
    _PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"
):
    pass


class ResponseContentPartDoneEvent(
    _PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"
):
    pass


class ResponseTextDeltaEvent(
    _InItemEvent, frozen=True, kw_only=True, tag="response.output_text.delta"
):
    content_index: Literal[0] = 0
    delta: str
    logprobs: list[TokenLogprob]


class ResponseTextDoneEvent(
    _InItemEvent, frozen=True, kw_only=True, tag="response.output_text.done"
):
    content_index: Literal[0] = 0
    text: str
    logprobs: list[TokenLogprob]


class ResponseReasoningTextDeltaEvent(
    _InItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"
):
    content_index: Literal[0] = 0
    delta: str


class ResponseReasoningTextDoneEvent(
    _InItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"
):
    content_index: Literal[0] = 0
    text: str


class ResponseFunctionCallArgumentsDeltaEvent(
    _InItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ResponseFunctionCallArgumentsDoneEvent(
    _InItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


# All that a stream is made of.
StreamEvent = (
    ResponseCreatedEvent
    | ResponseInProgressEvent
    | ResponseOutputItemAddedEvent
    | ResponseContentPartAddedEvent
    | ResponseTextDeltaEvent
    | ResponseTextDoneEvent
    | ResponseReasoningTextDeltaEvent
    | ResponseReasoningTextDoneEvent
    | ResponseFunctionCallArgumentsDeltaEvent
    | ResponseFunctionCallArgumentsDoneEvent
    | ResponseContentPartDoneEvent
    | ResponseOutputItemDoneEvent
    | ResponseCompletedEvent
    | ResponseIncompleteEvent
    | ResponseErrorEvent
    | ResponseFailedEvent
)
