"""The bodies of /tokenize and /detokenize."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from stagecoach.api.chat_api.request import Messages, Tools
from stagecoach.api.protocol import Body, Refused, TokenIds
from stagecoach.errors import RequestError


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt, or a conversation to be rendered."""

    refused: ClassVar = {"add_special_tokens": Refused((True, False))}

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool | None, Field(description="Also the text of each token.")] = (
        None
    )

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "give it or messages, and not both")


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: TokenIds
