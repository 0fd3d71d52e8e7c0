"""Each worker's current operation in a small shared file, readable after its death.

A worker that is killed cannot say what it was doing, and a worker that hangs does not. So each keeps
one slot of a memory-mapped file up to date (about a microsecond an operation), and the launcher reads
it: which process, since when, doing what, and whether it was only waiting for another worker.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Slot", "State", "StatusBoard"]

State = Literal["new", "preparing", "running", "waiting", "done"]
_STATES: tuple[State, ...] = ("new", "preparing", "running", "waiting", "done")
_LAYOUT = struct.Struct("=qqB47s")  # pid, monotonic ns of the last change, state, text


@dataclass(frozen=True)
class Slot:
    """What a worker last said: ``text`` is an operation such as ``1B17``, or a phase such as ``capturing``."""

    pid: int
    changed_ns: int
    state: State
    text: str


class StatusBoard:
    """A file with a slot a worker. :meth:`create` it once, then open it in every process."""

    def __init__(self, path: Path, workers: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), workers * _LAYOUT.size)
        self._workers = workers

    @classmethod
    def create(cls, path: Path, workers: int) -> StatusBoard:
        path.write_bytes(bytes(workers * _LAYOUT.size))
        return cls(path, workers)

    def set(self, rank: int, state: State, text: str) -> None:
        """Say what the worker with ``rank``, which is this process, does from now on."""
        _LAYOUT.pack_into(self._map, rank * _LAYOUT.size, os.getpid(), time.monotonic_ns(), _STATES.index(state), text.encode()[:47])

    def get(self, rank: int) -> Slot:
        pid, changed_ns, state, text = _LAYOUT.unpack_from(self._map, rank * _LAYOUT.size)
        return Slot(pid, changed_ns, _STATES[state], text.rstrip(b"\0").decode(errors="replace"))

    def all(self) -> tuple[Slot, ...]:
        """Every worker's slot, by rank."""
        return tuple(self.get(rank) for rank in range(self._workers))
