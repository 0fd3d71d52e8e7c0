"""How much memory training adds to a worker: the number that a plan predicts.

On a CUDA device the allocator counts it. On a CPU only the process as a whole is known, with some
hundred MiB of interpreter and libraries, so the memory resident before training began is taken off.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterable
from pathlib import Path

import torch

from launcher import devices

__all__ = ["PeakMemory"]

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Made when a worker holds its weights and nothing else of the job; ``weights`` count as training's."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
        self._cuda = devices.device_kind() == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):  # glibc: give what capture freed back to the system
                ctypes.CDLL("libc.so.6").malloc_trim(0)
            with contextlib.suppress(OSError):  # Linux: forget the peak so far
                (_PROCESS / "clear_refs").write_text("5")
            self._before_bytes = _resident_bytes("VmRSS")

    def read_bytes(self) -> int:
        """The most memory training has held since."""
        if self._cuda:
            return devices.peak_memory_bytes()
        return max(0, _resident_bytes("VmHWM") - self._before_bytes) + self._weights_bytes


def _resident_bytes(key: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process; its lifetime peak where Linux does not tell."""
    with contextlib.suppress(OSError):
        for line in (_PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return devices.peak_memory_bytes()
