"""Starting and stopping worker processes with torch.distributed.elastic, which spawns, watches and ends them.

What a caller sees is a return, a :class:`WorkersFailed`, or a :class:`Stopped`; signal handlers, log
lines and the environment are as before.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from launcher.supervision.surroundings import interrupts_ignored, standard_output_to, torch_log_to, without_main
from planner.spec.errors import BadInput, WorkerFailure

__all__ = ["Stopped", "WorkersFailed", "run_workers", "warm_up"]

_PRELOAD = ["launcher.supervision.warm"]
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_server_output: IO[bytes] | None = None
_one_run = threading.Lock()


class WorkersFailed(Exception):
    """A worker ended badly. ``exit_codes`` by rank, those that the engine saw first; negative for a signal."""

    def __init__(self, exit_codes: Mapping[int, int]) -> None:
        super().__init__(f"exit codes {dict(exit_codes)}")
        self.exit_codes = dict(exit_codes)


class Stopped(Exception):
    """A signal told us to stop, and every worker has been stopped."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class _Logs(LogsSpecs):  # type: ignore[misc]
    """Where the engine redirects each worker's output to."""

    def __init__(self, folder: Path, outputs: Sequence[tuple[Path, Path]]) -> None:
        super().__init__(str(folder))
        self._outputs = outputs

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts={local: str(self._outputs[rank][0]) for local, rank in ranks.items()},
            stderrs={local: str(self._outputs[rank][1]) for local, rank in ranks.items()},
            error_files=dict.fromkeys(ranks, os.devnull),
        )


def warm_up() -> None:
    """Start the fork server, which loads torch once for all workers while the caller does other things.

    Its output, and a worker's before and after its own log is open, goes to a file without a name.
    """
    global _server_output
    while (lowest := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed stdin must not become a worker's pipe
        pass
    os.close(lowest)
    if _server_output is None:
        _server_output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        atexit.register(_end_server)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    with interrupts_ignored(), standard_output_to(_server_output):
        multiprocessing.forkserver.ensure_running()


def _end_server() -> None:
    """Kill the fork server at our own exit: busy loading torch, it would notice that we are gone only seconds later."""
    server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if server is not None:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if os.waitpid(server, os.WNOHANG) == (0, 0):  # still a child of ours, and running
                os.kill(server, signal.SIGKILL)


def run_workers(
    entry: Callable[[Any], None], task: Any, *, outputs: Sequence[tuple[Path, Path]], log: Path, stop_after_s: int = 10
) -> None:
    """Run ``entry(task)`` in one process per element of ``outputs`` (its stdout and stderr files), to the end.

    ``log`` takes what the engine says. On SIGINT, SIGTERM or SIGHUP the workers get SIGTERM, and after
    ``stop_after_s`` seconds SIGKILL. No worker is left when this returns or raises.

    Raises:
        WorkersFailed: with the exit codes that the engine saw.
        Stopped: by a signal.
        WorkerFailure: the process that starts them has ended.
        BadInput: another run is going on in this process, whose signal handlers and logs it uses.
    """
    if not _one_run.acquire(blocking=False):
        raise BadInput("this process is training already", hint="wait for the first run's end, or train in another process")
    try:
        _run_workers(entry, task, outputs, log, stop_after_s)
    finally:
        _one_run.release()


def _run_workers(entry: Callable[[Any], None], task: Any, outputs: Sequence[tuple[Path, Path]], log: Path, stop_after_s: int) -> None:
    warm_up()
    before = set(multiprocessing.active_children())
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older versions of torch have fewer
    newer: dict[str, Any] = {"signals_to_handle": "SIGTERM", "shutdown_timeout": stop_after_s}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=len(outputs), logs_specs=_Logs(log.parent, outputs), run_id=f"pipedream-{os.getpid()}",
        role="worker", rdzv_backend="c10d", rdzv_endpoint="localhost:0", rdzv_configs={"timeout": 60}, max_restarts=0, monitor_interval=0.1,
        start_method="forkserver", local_addr="127.0.0.1", **{name: value for name, value in newer.items() if name in known},
    )
    try:
        with torch_log_to(log), without_main(), _signals(before) as received:
            try:
                launch_agent(config, entry, [task])
            except SignalException as error:
                raise Stopped(signal.Signals(received[0] if received else error.sigval).name) from error
            except ChildFailedError as error:
                if received:  # the workers were killed because of a signal
                    raise Stopped(signal.Signals(received[0]).name) from error
                raise WorkersFailed({rank: failure.exitcode for rank, failure in error.failures.items()}) from error
            except (EOFError, ConnectionError) as error:  # what multiprocessing raises where it lost its fork server
                raise WorkerFailure(f"the process that starts the workers has ended: {type(error).__name__}: {error}",
                                    hint=f"run the command again; {log} has what it said") from error
    finally:
        _end(set(multiprocessing.active_children()) - before)
        if _server_output is not None:
            _append_new(_server_output, log)


@contextlib.contextmanager
def _signals(others: Collection[Any]) -> Iterator[list[int]]:
    """Turn the first stopping signal into the engine's own way to stop, with SIGTERM for the workers.

    They ignore SIGINT, which a terminal sends to all processes at once. A second signal kills them:
    every child process but ``others``. Python allows handlers in the main thread only.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def stop(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise SignalException(f"stopped by {signal.Signals(number).name}", signal.SIGTERM)
        for process in set(multiprocessing.active_children()) - set(others):
            process.kill()

    previous = {number: signal.getsignal(number) for number in _STOPPING}
    if previous[signal.SIGHUP] is signal.SIG_IGN:  # started with nohup, which is to survive its terminal
        del previous[signal.SIGHUP]
    environment = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    for number in previous:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if environment is None:
            os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        else:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = environment


def _end(processes: set[Any]) -> None:
    """Kill what the engine left, which it should not have."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(10)


def _append_new(source: IO[bytes], log: Path) -> None:
    """Move what was written to ``source`` to the end of ``log``."""
    size = os.fstat(source.fileno()).st_size
    if size and log.parent.is_dir():
        text = os.pread(source.fileno(), size, 0)
        os.ftruncate(source.fileno(), 0)
        with log.open("ab") as file:
            file.write(text.lstrip(b"\0"))
