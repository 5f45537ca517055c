"""Routes for operators and tools: health, models, tokens, the cache.

Owns what is told about the server. Starts no completions.
"""

import asyncio
import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stagecoach.api.answers import ServedModels, json_response
from stagecoach.api.chat_api.conversation import render
from stagecoach.api.condition import Condition
from stagecoach.api.engine_service import EngineService
from stagecoach.api.error_body import LOADING_RETRY_SECONDS
from stagecoach.api.logprobs import token_name
from stagecoach.api.operations import objects
from stagecoach.api.operations.request import DetokenizeRequest, TokenizeRequest
from stagecoach.errors import RequestError


class Operations:
    """These routes and what they answer from."""

    def __init__(self, service: EngineService, models: ServedModels, version: str) -> None:
        self._service = service
        self._models = models
        self._version = version

    async def health(self, request: Request) -> Response:
        """200 while the engine lives and gets on; else 503: loading, dead or stalled.

        A server that drains is healthy, so that nobody kills it; so is one that recovers, which
        ends by itself if it cannot.
        """
        condition = await self._service.health()
        return _told(condition, is_fine=condition.status in ("ok", "draining", "recovering"))

    async def ready(self, request: Request) -> Response:
        """200 while new requests are taken and get on; else 503: also while it drains or
        recovers."""
        condition = await self._service.health()
        return _told(condition, is_fine=condition.status == "ok")

    async def version(self, request: Request) -> Response:
        """The version of Stagecoach."""
        return json_response(objects.Version(version=self._version))

    async def models(self, request: Request) -> Response:
        """The names under which the model is served."""
        models = [self._models.model(name) for name in self._models.names]
        return json_response(
            objects.ModelList(data=models, first_id=models[0].id, last_id=models[-1].id)
        )

    async def model(self, request: Request) -> Response:
        """One of them."""
        return json_response(self._models.model(request.path_params["name"]))

    async def server_info(self, request: Request) -> Response:
        """The options as they were resolved, and counts of the engine."""
        service = self._service
        config = service.config
        return json_response(
            objects.ServerInfo(
                version=self._version,
                models=list(self._models.names),
                engine=_plain(dataclasses.asdict(config.engine)),
                max_model_len=config.max_model_len,
                dtype=config.dtype,
                partition=list(config.partition),
                num_open_requests=service.num_open_requests,
                num_tasks=len(asyncio.all_tasks()),
                stats=objects.stats_fields(await service.known_stats()),
            )
        )

    async def reset_cache(self, request: Request) -> Response:
        """Forget all cached prefixes; running requests go on."""
        self._service.reset_prefix_cache()
        return json_response(objects.CacheReset())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt, or of a conversation as the model gets it."""
        body = TokenizeRequest.parse(await request.body())
        self._models.check(body.model)
        token_ids = await asyncio.to_thread(self._tokenize, body)
        tokenizer = self._service.tokenizer
        return json_response(
            objects.Tokens(
                count=len(token_ids),
                max_model_len=self._service.config.max_model_len,
                tokens=token_ids,
                token_strs=[token_name(tokenizer, token_id) for token_id in token_ids]
                if body.return_token_strs
                else None,
            )
        )

    def _tokenize(self, body: TokenizeRequest) -> list[int]:
        if body.messages is None:
            return self._service.tokenizer.encode(body.prompt or "")
        options = body.chat_template_kwargs or {}
        return render(self._service, body.messages, body.tools, options)

    async def tokenizer_info(self, request: Request) -> Response:
        """What clients that tokenize through the server must know of its tokenizer."""
        tokenizer = self._service.tokenizer
        template = tokenizer.chat_template
        return json_response(
            objects.TokenizerInfo(
                eos_token=tokenizer.special_name(self._service.config.model.eos_token_ids[0]),
                vocab_size=tokenizer.vocab_size,
                model_max_length=self._service.config.max_model_len,
                chat_template=None if template is None else template.source,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        body = DetokenizeRequest.parse(await request.body())
        self._models.check(body.model)
        tokenizer = self._service.tokenizer
        for token_id in body.tokens:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise RequestError(
                    "tokens", f"token id {token_id} is not in 0..{tokenizer.vocab_size - 1}"
                )
        text = tokenizer.decode_bytes(body.tokens).decode(errors="replace")
        return json_response(objects.Text(prompt=text))


def _told(condition: Condition, *, is_fine: bool) -> Response:
    health = objects.Health(status=condition.status, reason=condition.reason)
    response = json_response(health, 200 if is_fine else 503)
    if not is_fine:
        response.headers["retry-after"] = str(LOADING_RETRY_SECONDS)
    return response


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON has."""
    return msgspec.to_builtins(options, enc_hook=str)
