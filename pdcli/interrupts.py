"""Ctrl-C and SIGTERM: both end a command as an interruption, with its two lines, wherever it is.

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

__all__ = ["Terminated", "interrupts_deferred", "terminations_raised"]


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def terminations_raised() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM, which would end the process without a word and leave its children to themselves."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not ours:  # somebody else answers it, or it is ignored
        yield
        return
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(number: int, frame: types.FrameType | None) -> None:
    raise Terminated("stopped by SIGTERM")


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise what comes during the block at its end."""
    answers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _terminated}
    if threading.current_thread() is not threading.main_thread():
        answers = {}
    ours = {number: answer for number, answer in answers.items() if signal.getsignal(number) is answer}
    came: list[int] = []
    for number in ours:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, answer in ours.items():
            signal.signal(number, answer)
    if came:
        signal.raise_signal(came[0])
