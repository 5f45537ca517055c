"""What one worker executes, recorded by torch's profiler between two messages.

Owns the recording and the file that it becomes. A profiler belongs to a process: workers that
are threads of one cannot have one each.
"""

from pathlib import Path

from torch.profiler import profile, supported_activities

from stagecoach.observe.log import get_logger
from stagecoach.pipeline.topology import WorkerId

_log = get_logger(__name__)


class WorkerProfile:
    """Records nothing until `start`."""

    def __init__(self, worker: WorkerId) -> None:
        self._name = f"worker-{worker.stage}-{worker.tp_rank}.pt.trace.json"
        self._folder = Path()
        self._recording: profile | None = None

    def start(self, folder: str) -> None:
        """Record from now on, on the CPU and on the device if there is one.

        Raises:
            OSError: the folder cannot be made.
            RuntimeError: the profiler cannot begin.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._recording = profile(activities=supported_activities())
        self._recording.start()

    def stop(self) -> Path:
        """End the recording; returns the file with it, in the form of Chrome's trace viewer.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: nothing is recorded, or the profiler has failed.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            raise RuntimeError("nothing is recorded")
        recording.stop()
        path = self._folder / self._name
        recording.export_chrome_trace(str(path))
        if not path.is_file():
            # The library says so on stderr only, and leaves what it could write.
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
            raise OSError(f"{path} could not be written: is the disk full?")
        _log.info("wrote a profile of %d bytes to %s", path.stat().st_size, path)
        return path
