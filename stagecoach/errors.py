"""Every exception that Stagecoach raises on purpose.

StagecoachError
├── ConfigError            the engine was asked for something it cannot be (also a ValueError)
│   └── CapacityError      the configuration does not fit the memory; carries the numbers
├── CheckpointError        a checkpoint is incomplete, mis-shaped or unreadable; names the tensor
├── RequestError           one request is invalid (also a ValueError); names the field
│   └── PromptTooLongError  its prompt leaves no room for an answer; carries the numbers
├── ServerError            a server that a client command talks to refused or broke off
├── NonFiniteError         what one request computed is not finite; only that request ends
├── GrammarError           the grammar of one request cannot go on; only that request ends
├── LethalRequestError     workers died whenever they computed one request; only that one ends
└── EngineDeadError        the engine ended while somebody waited
    ├── WorkerDiedError    a worker process ended or raised
    ├── RendezvousError    the hosts of an engine did not come together; names host and reason
    ├── HostLostError      a host of a running engine ended or was cut off; names it
    ├── PlanDivergenceError  a worker executed other plans than the head made
    └── StalledError       requests wait and nothing can be planned; names what blocks each

Our own mistakes are `assert`s; they end the process that made them and reach
callers as an EngineDeadError.
"""


class StagecoachError(Exception):
    """Base of every error that is raised on purpose."""


class ConfigError(StagecoachError, ValueError):
    """An option or a combination of options is refused; the text names them and their values."""


class CapacityError(ConfigError):
    """The configuration needs more memory than there is; the text carries the numbers.

    Attributes:
        cause: the text without what would help.
        remedies: options with values; each alone would do.
    """

    def __init__(self, cause: str, remedies: tuple[str, ...] = ()) -> None:
        self.cause, self.remedies = cause, remedies
        super().__init__(f"{cause}. It fits with {' or '.join(remedies)}" if remedies else cause)


class CheckpointError(StagecoachError):
    """A checkpoint cannot be loaded as it is; the text names the file and the tensor."""


class RequestError(StagecoachError, ValueError):
    """A request is refused before it touches anything.

    Attributes:
        field: name of the request field that is wrong, as the caller spells it.
        reason: what is wrong with it.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def about(self, field: str, place: str = "") -> "RequestError":
        """The same of a field that the caller calls by this name; `place` says where in it."""
        return type(self)(field, f"{self.reason} {place}" if place else self.reason)


class PromptTooLongError(RequestError):
    """A prompt leaves no room for an answer: agents that are told so shorten it and try again."""


class ServerError(StagecoachError):
    """A server that a client command talks to refused, broke off or does not answer."""


class NonFiniteError(StagecoachError):
    """NaN or infinity in what a request computed; the text names the request and the place.

    It is not raised in a caller: the request ends with finish reason "error", and its text,
    which opens with this name, is the `error` of its completion.
    """


class GrammarError(StagecoachError):
    """A request's grammar cannot go on: it ran into a limit, or a token did not obey; says which.

    Like NonFiniteError it is the `error` of a completion, not raised in a caller.
    """


class LethalRequestError(StagecoachError):
    """Workers died whenever they computed this request; the others go on without it.

    Like NonFiniteError it is the `error` of a completion, not raised in a caller.
    """


class EngineDeadError(StagecoachError):
    """The engine is gone; every request that waited for it ends with this error."""


class WorkerDiedError(EngineDeadError):
    """A worker process ended or raised; the text names the worker and its last words."""


class RendezvousError(EngineDeadError):
    """The hosts of an engine did not come together; the text names the host and what is wrong."""


class HostLostError(EngineDeadError):
    """A host of a running engine ended or was cut off; the text names it."""


class PlanDivergenceError(EngineDeadError):
    """A worker echoed another plan digest than the head's; the text names worker and step."""


class StalledError(EngineDeadError):
    """Nothing can be planned although requests wait; the text says what blocks each of them."""


def error_class(name: str) -> type[StagecoachError]:
    """The class of that name above; EngineDeadError for a name that is not ours."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, StagecoachError):
        return found
    return EngineDeadError
