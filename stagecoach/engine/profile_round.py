"""Profiles over all workers: who asked, what is recorded, and whose answer is missing.

Owns the state of recording and its messages. One start or stop at a time.
"""

from typing import NamedTuple

from stagecoach.engine.messages import ProfileAnswer, StartProfile, StopProfile
from stagecoach.engine.ports import LoopPort


class _Round(NamedTuple):
    client: int
    message: StartProfile | StopProfile
    answers: dict[int, ProfileAnswer]  # by rank


class ProfileRounds:
    """Asks are refused or become a round, which is over when every worker has answered."""

    def __init__(self, port: LoopPort, num_workers: int) -> None:
        self._port = port
        self._num_workers = num_workers
        self._is_recording = False
        self._is_suspended = False
        self._round: _Round | None = None

    def suspend(self) -> None:
        """Workers are lost: what is asked for is refused until `resume`."""
        self._is_suspended = True
        if self._round is not None:
            client, message, _ = self._round
            self._round = None
            error = "a worker ended meanwhile, and others may still be recording"
            self._port.send_client(client, ProfileAnswer(query_id=message.query_id, error=error))

    def resume(self) -> None:
        """All workers are there."""
        self._is_suspended = False

    @property
    def is_open(self) -> bool:
        """Workers are at it, and no step gets on meanwhile."""
        return self._round is not None

    def begin(self, client: int, message: StartProfile | StopProfile) -> None:
        """Have every worker do it, or tell the client why not."""
        refusal = self._refusal(message)
        if refusal is None:
            self._round = _Round(client, message, {})
            self._port.send_workers(message)
            return
        answer = ProfileAnswer(query_id=message.query_id, error=refusal, is_refused=True)
        self._port.send_client(client, answer)

    def _refusal(self, message: StartProfile | StopProfile) -> str | None:
        if self._is_suspended:
            return "lost workers are being brought back"
        if self._round is not None:
            return "a profile is being started or stopped"
        starts = isinstance(message, StartProfile)
        if starts and self._is_recording:
            return "a profile is being recorded already"
        if not starts and not self._is_recording:
            return "no profile is being recorded"
        return None

    def note(self, rank: int, answer: ProfileAnswer) -> None:
        """A worker answered; once all have, the client gets its answer."""
        assert self._round is not None, f"nobody asked: {answer}"
        client, message, answers = self._round
        answers[rank] = answer
        if len(answers) < self._num_workers:
            return
        self._round = None
        ordered = [answers[number] for number in sorted(answers)]
        errors = [item.error for item in ordered if item.error is not None]
        # After a start that failed on some, a stop ends it on the others.
        self._is_recording = isinstance(message, StartProfile) and len(errors) < self._num_workers
        told = ProfileAnswer(
            query_id=message.query_id,
            error="; ".join(errors) or None,
            paths=tuple(path for item in ordered for path in item.paths),
        )
        self._port.send_client(client, told)
