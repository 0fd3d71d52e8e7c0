"""Bandwidth and latency between two workers on this machine, measured with the runtime's own transport.

Two processes play ping-pong over gloo on the loopback interface: this one and a child that runs this
file. A small message gives the latency, large ones the bandwidth::

    parent  --- n bytes --->  child
            <-- n bytes ----            half of the fastest round trip is latency + n / bandwidth
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.spec.errors import WorkerFailure

__all__ = ["measure_link"]

_SIZES_BYTES = (4, 1 << 20, 8 << 20)
_ROUNDS = (50, 20, 8)
_TIMEOUT_S = 60.0
_HOST = "127.0.0.1"


def measure_link(timeout_s: float = _TIMEOUT_S) -> tuple[float, float]:
    """(bandwidth in bytes per second, latency in microseconds) between two processes of this machine.

    Raises:
        WorkerFailure: two processes could not talk to each other within ``timeout_s``.
    """
    limit = timedelta(seconds=timeout_s)
    child = None
    try:
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
        child = subprocess.Popen([sys.executable, "-m", __spec__.name if __spec__ else __name__, str(store.port), str(timeout_s)],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment())
        trips = _play(store, child, limit)
        child.wait(timeout_s)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WorkerFailure(f"two processes on this machine could not exchange data over {_HOST}: {reason}",
                            hint="allow connections on the loopback interface", code="link_failed") from error
    finally:
        if child is not None:
            child.kill()
            child.communicate()
    rates = [size / trip * 1e6 for size, trip in zip(_SIZES_BYTES[1:], trips[1:], strict=True)]
    return max(rates), trips[0]


def _play(store: dist.TCPStore, child: subprocess.Popen[bytes], limit: timedelta) -> list[float]:
    """Our side, on a thread of its own: this one sees Ctrl-C, and the child's early end, while that one waits for the child."""
    outcome: list[list[float] | Exception] = []

    def play() -> None:
        try:
            outcome.append(_ping_pong(store, 0, limit))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=play, name="ping-pong", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if child.poll():
            raise ChildProcessError(f"the second process ended with exit code {child.returncode}")
    (result,) = outcome
    if isinstance(result, Exception):
        raise result
    return result


def _ping_pong(store: dist.TCPStore, rank: int, limit: timedelta) -> list[float]:
    """Microseconds one way for each size, as rank 0 measures them."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # the public constructor looks the host name up, which may lead off the machine
    options._devices = [gloo.create_device(hostname=_HOST)]
    options._timeout = limit
    group = gloo(store, rank, 2, options)
    trips = []
    for size, rounds in zip(_SIZES_BYTES, _ROUNDS, strict=True):
        message = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(rounds + 2):
            start = time.perf_counter_ns()
            for step in (0, 1):
                if step == rank:
                    group.send([message], 1 - rank, 0).wait()
                else:
                    group.recv([message], 1 - rank, 0).wait()
            times.append((time.perf_counter_ns() - start) / 2e3)
        trips.append(min(times))  # the others waited for pages or for a core that something else used
    return trips


def _environment() -> dict[str, str]:
    """The child finds this package, also when it is not installed, and leaves the cores to the transfer."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _child(port: int, timeout_s: float) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    limit = timedelta(seconds=timeout_s)
    _ping_pong(dist.TCPStore(_HOST, port, is_master=False, timeout=limit), 1, limit)


def _follow_parent() -> None:
    """Exit when the parent is gone, even by ``kill -9``: its end of our stdin closes."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    _child(int(sys.argv[1]), float(sys.argv[2]))
