"""The way of a request from its Submit into the scheduler's queue.

Owns what is checked on the way and the wait for a grammar. One that waits is in no queue, so
that it holds up nobody; its place in the order of arrival is that of its compiled grammar.
"""

from collections.abc import Callable

from stagecoach.config.engine import ResolvedConfig, speculation_key
from stagecoach.engine.compiling import CompilePool
from stagecoach.engine.messages import RequestRefused, RequestTrace, Submit
from stagecoach.engine.ports import CLIENT_SHIFT
from stagecoach.engine.telemetry import Telemetry
from stagecoach.errors import RequestError
from stagecoach.request import Constraint, Request
from stagecoach.schedule.scheduler import Scheduler

Refuse = Callable[[int, RequestRefused], None]


class Intake:
    """Takes in the requests of all clients."""

    def __init__(
        self,
        config: ResolvedConfig,
        scheduler: Scheduler,
        pool: CompilePool,
        telemetry: Telemetry,
        refuse: Refuse,
    ) -> None:
        """`refuse` is told the client and why its request is refused."""
        self._config = config
        self._scheduler = scheduler
        self._pool = pool
        self._telemetry = telemetry
        self._refuse = refuse

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._pool.waiting)

    def traces(self) -> tuple[RequestTrace, ...]:
        """The requests that wait for their grammars."""
        return tuple(
            RequestTrace(
                request_id=item.message.request_id,
                state="compiling",
                num_prompt_tokens=len(item.message.prompt_token_ids),
                num_cached_tokens=0,
                num_computed_tokens=0,
                num_output_tokens=0,
                slot=None,
                num_pages=0,
            )
            for item in self._pool.waiting
        )

    def submit(self, client: int, message: Submit) -> None:
        """Queue a request, or have its grammar compiled first; or refuse it."""
        try:
            if message.params.structured_outputs is None:
                self._queue(message, None)
                return
            self._check_acceptance()
            # A grammar is costly: what is wrong besides is told before.
            self._scheduler.check(self._make_request(message, None))
        except RequestError as error:
            self._tell(client, message, error)
        else:
            self._pool.submit(client, message)

    def queue_compiled(self) -> None:
        """Queue the requests whose grammars have come; refuse those that have none."""
        for client, message, outcome in self._pool.take_compiled():
            if isinstance(outcome, RequestError):
                self._tell(client, message, outcome)
            else:
                self._queue(message, outcome)

    def abort(self, request_id: int) -> None:
        """Forget a request, wherever it is; unknown ids are ignored."""
        self._pool.abort(request_id)
        self._scheduler.abort(request_id)

    def forget_client(self, client: int) -> None:
        """Forget all requests of a client."""
        compiling = [item.message.request_id for item in self._pool.waiting]
        for request_id in compiling + self._scheduler.request_ids:
            if request_id >> CLIENT_SHIFT == client:
                self.abort(request_id)

    def _check_acceptance(self) -> None:
        speculation = self._config.speculation
        length = speculation and speculation.synthetic_acceptance_length
        if length is not None:
            raise RequestError(
                "structured_outputs",
                f"cannot be obeyed with {speculation_key('synthetic_acceptance_length')}={length}, "
                "where drafts stand whatever the target says",
            )

    def _make_request(self, message: Submit, constraint: Constraint | None) -> Request:
        return Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            params=message.params,
            seed=message.seed,
            max_tokens=message.params.max_tokens or self._config.max_model_len,
            cache_salt=message.cache_salt,
            checkpoint_position=message.checkpoint_position,
            constraint=constraint,
        )

    def _queue(self, message: Submit, constraint: Constraint | None) -> None:
        self._scheduler.add(self._make_request(message, constraint))
        self._telemetry.num_prompt_tokens += len(message.prompt_token_ids)

    def _tell(self, client: int, message: Submit, error: RequestError) -> None:
        refused = RequestRefused(
            request_id=message.request_id, field=error.field, reason=error.reason
        )
        self._refuse(client, refused)
