"""Ctrl-C while a large library is loaded.

Python raises KeyboardInterrupt wherever it happens to be. In the middle of ``import torch`` that may be
code called from C++, which loses the exception (the command goes on) or ends the process with "terminate
called". So while it loads, the interrupt waits.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator

__all__ = ["interrupts_deferred"]


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise the KeyboardInterrupt that comes during the block at its end."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours:  # somebody else answers it, or it is ignored
        yield
        return
    came = False

    def note(number: int, frame: types.FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
