"""What runs in the processes and threads that an engine is made of.

Imports of torch and of all that needs it stand inside the workers' functions: the engine
loop imports this module too, and must stay free of torch.
"""

import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from stagecoach.config.engine import ResolvedConfig, option
from stagecoach.engine.contact import Contact, HostGate
from stagecoach.engine.loop import EngineLoop
from stagecoach.engine.messages import WorkerFailed
from stagecoach.engine.ports import QueueHub, WorkerPort, ZmqLoopPort, ZmqWorkerPort
from stagecoach.errors import RendezvousError, StagecoachError, WorkerDiedError
from stagecoach.observe import log
from stagecoach.pipeline.topology import Topology, WorkerId

if TYPE_CHECKING:
    import torch

    from stagecoach.pipeline.links import Links

_logger = log.get_logger(__name__)


def run_loop(
    config: ResolvedConfig, folder: Path, gate: HostGate | None, lifeline: Connection
) -> None:
    """Main function of the engine loop's process; `gate`: where other hosts come in."""
    _clean_up_after_owner(lifeline, folder)
    log.configure("engine", level=config.engine.log_level)
    if gate is None:
        port = ZmqLoopPort(folder, config.engine.num_workers)
    else:
        port = ZmqLoopPort(folder, config.engine.num_workers, gate.address, gate.keys)
        gate.told.send(port.plan_channel)
    try:
        EngineLoop(config, port, prepares_grammars=True).run()
    except StagecoachError as error:
        # Clients have been told; the text is theirs to show.
        _logger.debug("%s", error)
        raise SystemExit(1) from None
    finally:
        port.close()


def run_store(listener: socket.socket, lifeline: Connection) -> None:
    """Main function of the process that has the store where workers of several hosts meet."""
    from stagecoach.pipeline.rendezvous import serve_store

    store = serve_store(listener)
    wait([lifeline])
    del store


def run_worker(
    config: ResolvedConfig,
    worker: WorkerId,
    contact: Contact,
    generation: int,
    lifeline: Connection,
) -> None:
    """Main function of a worker process.

    Args:
        generation: 0 at the engine's start; otherwise this worker takes a lost one's place, and
            waits with its weights for the others.
    """
    from stagecoach.engine.worker import Worker
    from stagecoach.pipeline import process_links
    from stagecoach.pipeline.renewable_links import RenewableLinks

    _die_with_owner(lifeline)
    log.configure(worker.name, level=config.engine.log_level)
    _set_environment(config, contact)
    _use_threads(config, contact.hosts.count(contact.hosts[worker.rank]))
    port = ZmqWorkerPort(contact.plan_channel, worker.rank, contact.keys)
    status = 0

    def give_up(error: Exception) -> None:
        _report(port, worker, error, generation)
        port.close(has_last_words=True)
        os._exit(1)

    try:
        _flush_subnormals()
        device = _use_device(config, contact.place_on_host(worker.rank))
        if config.engine.recover:
            renewable = RenewableLinks(
                worker,
                Topology.of(config.engine),
                lambda number: _connect(config, worker, contact, number, device, give_up),
                # What a GPU has begun waits for others for ever.
                process_links.disconnect if device.type == "cpu" else None,
            )
            links = renewable.apart() if generation else renewable.meet(0)
            Worker(config, worker, links, port, renewable=renewable, clock=contact.clock).run(
                generation
            )
        else:
            links = _connect(config, worker, contact, generation, device, give_up)
            Worker(config, worker, links, port, clock=contact.clock).run()
        process_links.disconnect()
    except Exception as error:  # noqa: BLE001 - the process ends here and says why
        _report(port, worker, error, generation)
        status = 1
    finally:
        port.close(has_last_words=status > 0)
    if config.device == "cuda":
        # Freeing what is on a GPU waits for it, and it may wait for a neighbour that is gone.
        os._exit(status)
    if status:
        raise SystemExit(status)


def start_worker_threads(
    config: ResolvedConfig, topology: Topology, hub: QueueHub
) -> list[threading.Thread]:
    """All workers of the `uni` backend, started."""
    from stagecoach.engine.worker import Worker
    from stagecoach.pipeline.thread_links import ThreadMesh

    _use_threads(config, topology.num_workers)
    mesh = ThreadMesh(topology)
    meeting = threading.Barrier(topology.num_workers)

    def meet() -> None:
        # On a GPU they share, each one's measuring would take another's weights for its own steps.
        if config.device == "cuda":
            try:
                meeting.wait()
            except threading.BrokenBarrierError:
                raise WorkerDiedError("another worker thread ended") from None

    def run(worker: WorkerId) -> None:
        port = hub.worker_port(worker.rank)
        try:
            _flush_subnormals()
            device = _use_device(config, worker.rank)
            links = mesh.links(worker, device)
            Worker(config, worker, links, port, after_load=meet).run()
        except Exception as error:  # noqa: BLE001 - the thread ends here and says why
            _report(port, worker, error)
            meeting.abort()
            mesh.close()

    threads = [
        threading.Thread(target=run, args=(worker,), name=worker.name, daemon=True)
        for worker in topology.workers
    ]
    for thread in threads:
        thread.start()
    return threads


def _connect(
    config: ResolvedConfig,
    worker: WorkerId,
    contact: Contact,
    generation: int,
    device: "torch.device",
    give_up: Callable[[Exception], None],
) -> "Links":
    """This worker's links of one generation; this process ends where they take too long.

    Raises:
        RendezvousError: the workers do not reach each other.
    """
    from stagecoach.pipeline import process_links

    with _within(contact.rendezvous.timeout_seconds, give_up):
        return process_links.connect(
            worker,
            Topology.of(config.engine),
            contact.rendezvous,
            device,
            generation=generation,
            hosts=contact.hosts,
        )


@contextmanager
def _within(seconds: float, give_up: Callable[[Exception], None]) -> Iterator[None]:
    """End this process with a word where links take longer: a library may wait in vain for ever."""
    text = (
        f"the workers did not find each other within {seconds:g} s "
        f"({option('distributed_timeout_seconds')})"
    )
    timer = threading.Timer(seconds, give_up, [RendezvousError(text)])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(port: WorkerPort, worker: WorkerId, error: Exception, generation: int = 0) -> None:
    if not isinstance(error, StagecoachError):
        _logger.error("%s failed", worker.name, exc_info=error)
    reason = str(error) or repr(error)
    kind = type(error).__name__
    port.send(WorkerFailed(worker=worker.name, kind=kind, reason=reason, generation=generation))


def _set_environment(config: ResolvedConfig, contact: Contact) -> None:
    """What libraries of this process read once, when they start."""
    # On one host traffic stays on the loopback interface; gloo would pick one by host name.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if contact.is_interface_chosen:
            os.environ[name] = contact.interface
        os.environ.setdefault(name, contact.interface)
    if config.device == "cuda":
        # No multicast over NVLink: the fabric may be shared with other guests of the host.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        # A warning about ways that share a communicator; each has its own.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def _use_device(config: ResolvedConfig, place: int) -> "torch.device":
    """The worker's device, from now on the current one of this thread.

    Workers of a host take its GPUs in the order of their ranks; threads share them where there are
    fewer, and a process that sees one takes that.
    """
    import torch

    if config.device == "cpu":
        return torch.device("cpu")
    from stagecoach.kernels import kernel_cache

    kernel_cache.use_writable_folder()
    device = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _use_threads(config: ResolvedConfig, num_workers: int) -> None:
    """`num_workers`: those that share the cores of this host."""
    import torch

    num_threads = config.engine.num_threads
    if num_threads is None:
        # A core is left to the engine loop and its client: torch's threads spin while they
        # wait for each other, and lose far more to a busy core than a further thread gains.
        num_cores = len(os.sched_getaffinity(0)) - 1
        num_threads = max(1, num_cores // num_workers)
    torch.set_num_threads(num_threads)


def _flush_subnormals() -> None:
    """A decaying state reaches subnormal numbers, and arithmetic on them is many times slower.

    The setting belongs to the thread that computes.
    """
    import torch

    torch.set_flush_denormal(True)


def _die_with_owner(lifeline: Connection) -> None:
    """End this process when its owner's end of the pipe closes, however the owner died.

    The kernel sends SIGIO, which ends a process that does not handle it: a thread that waits
    would need the interpreter, and a worker may be stuck in a library that holds it.
    """
    descriptor = lifeline.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if lifeline.poll():
        raise SystemExit(1)


def _clean_up_after_owner(lifeline: Connection, folder: Path) -> None:
    """The same for the loop, which never is stuck and also removes the engine's folder."""

    def wait_for_owner() -> None:
        wait([lifeline])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait_for_owner, name="lifeline", daemon=True).start()
