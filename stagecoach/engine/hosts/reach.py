"""Whether the members of a meeting reach each other, tried before anything depends on it.

A process group that does not come together says little of why; a connection that is refused says
which host, which address and which interface.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from stagecoach.config.engine import option
from stagecoach.engine.hosts.messages import Roll
from stagecoach.engine.hosts.network import why_unreachable

_SECONDS = 5.0
_MOST_AT_ONCE = 32


def failures_to_reach(roll: Roll, member: int) -> Iterator[str]:
    """What fails when this member tries every other, in words."""
    own = roll.places[member]
    others = [place for number, place in enumerate(roll.places) if number != member]

    def why(address: str, port: int) -> str | None:
        return why_unreachable(address, port, own.address, _SECONDS)

    with ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, len(others)))) as pool:
        reasons = pool.map(why, *zip(*((item.address, item.port) for item in others), strict=True))
        for place, reason in zip(others, reasons, strict=True):
            if reason is not None:
                yield (
                    f"{own.name} at {own.address} ({own.interface}) does not reach {place.name} "
                    f"at {place.address} ({place.interface}): {reason}; "
                    f"{option('network_interface')} names another way"
                )
