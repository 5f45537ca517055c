"""The launcher that an engine's options name, as a meeting.

Owns the choice alone: which process is the head's and who starts the others is each launcher's.
"""

from stagecoach.config.engine import EngineConfig, ResolvedConfig, option
from stagecoach.engine.hosts.meeting import Meeting, meeting_of_nodes
from stagecoach.errors import ConfigError


def own_meeting(engine: EngineConfig) -> Meeting | None:
    """What this process takes part in; None: it needs nobody, or starts the others itself.

    Raises:
        ConfigError: the environment says nothing of it, or something else than the options.
    """
    if engine.launcher == "torchrun":
        from stagecoach.engine.hosts.torchrun import meeting_of_ranks

        return meeting_of_ranks(engine)
    if engine.launcher == "local" and engine.nnodes > 1:
        return meeting_of_nodes(engine)
    return None


def meeting_of(config: ResolvedConfig) -> Meeting | None:
    """The meeting whose head this process is; None: all workers are its own.

    Raises:
        ConfigError: as of `own_meeting`, or this process is a member of another head's.
    """
    if config.engine.launcher == "ray":
        from stagecoach.engine.hosts.ray_cluster import meeting_on_ray

        return meeting_on_ray(config)
    meeting = own_meeting(config.engine)
    if meeting is not None and meeting.member != 0:
        raise ConfigError(
            f"{meeting.noun} {meeting.member}: ranks of an engine that {meeting.noun} 0 serves are "
            f"run by `stagecoach serve` with its options; {option('launcher')}="
            f"{config.engine.launcher}"
        )
    return meeting
