"""From dead and complaining workers to one sentence: who failed, doing what, and why.

A failing worker takes its neighbours down: they see closed connections and silence. Those are
consequences. The cause is the worker that raised an error of its own, was killed, or stopped moving.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from launcher.blame import one_line, user_line
from launcher.runtime.channel import PeerLost, Worker, workers
from launcher.supervision.rundir import RunDirectory
from launcher.supervision.status import Slot, StatusBoard
from planner.spec.errors import BadInput, Infeasible, Mismatch, PipedreamError, WorkerFailure

__all__ = ["Failure", "explain", "record_failure"]

_NO_ROOM_BYTES = 1 << 14
_KINDS: dict[str, type[PipedreamError]] = {kind.__name__: kind for kind in (BadInput, Mismatch, Infeasible, PipedreamError)}


@dataclass(frozen=True)
class Failure:
    """What a worker wrote before it exited. ``kind`` "peer": it only lost another worker."""

    kind: Literal["error", "peer", "pipedream"]
    error_class: str
    message: str
    hint: str
    code: str
    where: str  # the user's own line
    preparing: bool
    doing: str
    pid: int
    host: str
    rank: int


def record_failure(path: Path, worker: Worker, rank: int, slot: Slot, error: BaseException) -> None:
    """Write why this worker fails to ``path``, and the whole traceback to its log."""
    traceback.print_exception(error)
    if isinstance(error, PeerLost):
        kind, message, hint, code = "peer", str(error), "", ""
    elif isinstance(error, PipedreamError):
        kind, message, hint, code = "pipedream", error.message, error.hint, error.code
    else:
        kind, message, hint, code = "error", one_line(error), "", ""
    name = next((known for known, cls in _KINDS.items() if isinstance(error, cls)), type(error).__name__)
    failure = Failure(kind, name, message, hint, code, user_line(error), slot.state == "preparing", slot.text, slot.pid,  # type: ignore[arg-type]
                      socket.gethostname(), rank)
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    temporary.replace(path)


def explain(
    directory: RunDirectory, replicas: tuple[int, ...], board: StatusBoard, exit_codes: Mapping[int, int], timeout_s: float
) -> PipedreamError:
    """The error to raise when the engine saw workers end with these exit codes (negative: a signal), by rank."""
    everyone = workers(replicas)
    failures = {rank: failure for rank, worker in enumerate(everyone) if (failure := _read(directory.failure(*worker))) is not None}
    own = {rank: failure for rank, failure in failures.items() if failure.kind != "peer"}
    for rank, code in exit_codes.items():  # the engine stops at the first it sees; its own SIGTERMs come later
        if rank not in failures and code != 0:
            return _ended(directory, everyone[rank], rank, board.get(rank), code)
    if own:
        first = own[next((rank for rank in exit_codes if rank in own), next(iter(own)))]
        return _raised(directory, everyone[first.rank], first)
    stuck = [(rank, slot) for rank, slot in enumerate(board.all()) if rank not in failures and _busy(slot)]
    if stuck:
        rank, slot = min(stuck, key=lambda item: item[1].changed_ns)
        worker = everyone[rank]
        name, doing, log = _name(worker, rank, slot.pid), slot.text or "starting", directory.stderr(*worker)
        if not any("timed out" in failure.message.lower() or "timeout" in failure.message.lower() for failure in failures.values()):
            return WorkerFailure(f"{name} ended without a word while {doing}", hint=f"its log is {log}")
        silent_s = (time.monotonic_ns() - slot.changed_ns) / 1e9
        return WorkerFailure(f"{name} has been in {doing} for {silent_s:.0f} s; the others gave up after {timeout_s:g} s",
                             hint=f"its log is {log}; a longer --timeout gives slow steps more time")
    if failures:
        first = next(iter(failures.values()))
        worker = everyone[first.rank]
        return WorkerFailure(f"{_name(worker, first.rank, first.pid)} lost another worker at {first.doing}: {first.message}",
                             hint=f"see the logs in {directory.logs}")
    return WorkerFailure("the workers ended without saying why", hint=f"see {directory.launcher_log} and the logs beside it")


def _busy(slot: Slot) -> bool:
    """Whether the worker was at something of its own, not waiting for others."""
    return slot.state in ("new", "running") or (slot.state == "preparing" and slot.text not in ("connecting", "saving"))


def _raised(directory: RunDirectory, worker: Worker, failure: Failure) -> PipedreamError:
    log = directory.stderr(*worker)
    if failure.kind == "pipedream" and failure.preparing:  # not this worker's own: any of them would have said so
        return _KINDS[failure.error_class](failure.message, hint=failure.hint, code=failure.code)
    doing = f"while {failure.doing}" if failure.preparing else f"at {failure.doing}"
    where = f" ({failure.where})" if failure.where else ""
    hint = f"{failure.hint}; the log is {log}" if failure.hint else f"the whole traceback is in {log}"
    if "DataLoader worker" in failure.message and not where:  # one that raised would have told a line
        hint += "; the system kills a loader process when memory runs out, and fewer loader_processes need less"
    return WorkerFailure(f"{_name(worker, failure.rank, failure.pid, failure.host)} failed {doing}: {failure.message}{where}", hint=hint)


def _ended(directory: RunDirectory, worker: Worker, rank: int, slot: Slot, code: int) -> WorkerFailure:
    doing = f"while {slot.text}" if slot.state == "preparing" else f"at {slot.text}" if slot.text else "before its first operation"
    name = _name(worker, rank, slot.pid)
    log = directory.stderr(*worker)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(directory.path).free < _NO_ROOM_BYTES:  # it could not even write why
            return WorkerFailure(f"{name} exited with code {code} {doing}; the disk of {directory.path} is full",
                                 hint="make room on that disk, or give another run directory")
    if code < 0:
        try:
            signal_name = signal.Signals(-code).name
        except ValueError:
            signal_name = f"signal {-code}"
        memory = "; the system kills a process like this when memory runs out" if signal_name == "SIGKILL" else ""
        return WorkerFailure(f"{name} was killed by {signal_name} {doing}", hint=f"its log is {log}{memory}")
    return WorkerFailure(f"{name} exited with code {code} {doing}", hint=f"its log is {log}")


def _name(worker: Worker, rank: int, pid: int, host: str = "") -> str:
    return f"{worker} (rank {rank}, {host or socket.gethostname()}, pid {pid})"


def _read(path: Path) -> Failure | None:
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        return None
