"""What a job, or starting processes, does to this process, undone: folder, log lines, ``__main__``, Ctrl-C, output."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["folder_kept", "interrupts_ignored", "standard_output_to", "torch_log_to", "without_main"]


@contextlib.contextmanager
def folder_kept() -> Iterator[None]:
    """Go back at the end to the folder we were in: a job may go to another, and our paths are relative to this one."""
    try:
        folder = os.getcwd()
    except OSError:  # it has been removed
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.chdir(folder)


@contextlib.contextmanager
def torch_log_to(path: Path) -> Iterator[None]:
    """Send torch's log lines to ``path``; a user's terminal shows only what we say."""
    with path.open("a", encoding="utf-8") as file:
        changed: dict[logging.StreamHandler[Any], Any] = {}  # loggers share handlers
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] != "torch":
                continue
            for handler in logging.getLogger(name).handlers:
                if type(handler) is logging.StreamHandler and handler not in changed:
                    changed[handler] = handler.stream
                    handler.stream = file  # setStream() fails where the caller has closed the old one
        own = logging.StreamHandler(file)
        torch_logger = logging.getLogger("torch")
        if not torch_logger.handlers:
            torch_logger.addHandler(own)
        loud = logging.raiseExceptions
        logging.raiseExceptions = False  # a full disk is told by us, not by a traceback for every line of the log
        try:
            yield
        finally:
            logging.raiseExceptions = loud
            torch_logger.removeHandler(own)
            for handler, stream in changed.items():
                handler.stream = stream


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide ``__main__`` from the processes started, which would otherwise run the caller's script again.

    A worker needs nothing from it: its entry and its task are found by their modules' names.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C here for a moment, and in a process started meanwhile for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def standard_output_to(file: IO[bytes]) -> Iterator[None]:
    """Point file descriptors 1 and 2 to ``file`` while a process is started."""
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        yield
    finally:
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
