"""All differences between CPU and CUDA: what the device is, threads, synchronising, timing, peak memory.

The rest of the launcher never asks which kind of device it runs on.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from itertools import pairwise
from pathlib import Path

import torch

from planner.spec.errors import BadInput
from planner.spec.profile import Device

__all__ = [
    "Laps",
    "backend",
    "default_threads",
    "describe",
    "device_kind",
    "peak_memory_bytes",
    "seed_generators",
    "set_threads",
    "synchronise",
    "torch_device",
    "usable_cores",
]


def device_kind() -> str:
    """``"cuda"`` where this process sees a CUDA device, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_device(index: int = 0) -> torch.device:
    """The device of the worker with this index on its machine."""
    return torch.device("cuda", index) if device_kind() == "cuda" else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend that joins such devices."""
    return "nccl" if device_kind() == "cuda" else "gloo"


def usable_cores() -> int:
    """CPU cores this process may run on: affinity, not what is built in."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def default_threads() -> int:
    """Threads one CPU worker computes with: one, so that the machine has as many devices as cores."""
    return 1


def set_threads(threads: int) -> None:
    """Compute with ``threads`` threads in this process."""
    torch.set_num_threads(threads)


def describe(*, threads: int | None = None, link_bandwidth_bytes_per_s: float, link_latency_us: float) -> Device:
    """This machine's devices. CPU: one device per ``threads`` cores, memory divided between them.

    Raises:
        BadInput: ``threads`` is not between 1 and the number of cores.
    """
    cores = usable_cores()
    threads = default_threads() if threads is None else threads
    if not 1 <= threads <= cores:
        raise BadInput(f"{threads} threads per worker on a machine with {cores} cores", hint=f"use 1 to {cores} threads")
    if device_kind() == "cuda":
        properties = torch.cuda.get_device_properties(0)
        kind, name, count, memory_bytes = "cuda", properties.name, torch.cuda.device_count(), int(properties.total_memory)
    else:
        kind, name, count = "cpu", _cpu_name(), cores // threads
        memory_bytes = _memory_bytes() // count
    return Device(kind=kind, name=name, count=count, threads=threads, memory_bytes=memory_bytes,
                  link_bandwidth_bytes_per_s=link_bandwidth_bytes_per_s, link_latency_us=link_latency_us)


def synchronise() -> None:
    """Wait until everything queued on the device is done (nothing to wait for on CPU)."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Laps:
    """Moments in the device's own order of work, and the times between them.

    On CUDA a mark is an event in the queue, so that marking does not hold up the work it times. With
    one CPU thread it is the time that this thread has computed: the same as the wall clock's when the
    machine is idle, and free of other processes' turns when it is not.
    """

    def __init__(self) -> None:
        self._clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
        self._cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._moments: list[int] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Note this moment."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._moments.append(self._clock())

    def read_us(self) -> list[float]:
        """Microseconds between each two marks that follow one another; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            return [1e3 * first.elapsed_time(second) for first, second in pairwise(self._events)]
        return [(second - first) / 1e3 for first, second in pairwise(self._moments)]


def peak_memory_bytes() -> int:
    """The most memory this process has held: on the device, or resident (CPU)."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024  # Linux counts KiB


def seed_generators(seed: int) -> None:
    """Seed the generators that operations of this process draw from."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def _cpu_name() -> str:
    """The processor's model name, or the architecture where none is known."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


def _memory_bytes() -> int:
    """Memory of the machine, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit():
            return min(total, int(text))
    return total
