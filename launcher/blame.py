"""Where in the user's own source an exception came from: their file and line, not ours and not torch's."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from pathlib import Path

import torch

from planner.spec.errors import told

__all__ = ["one_line", "user_line"]

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_LONGEST = 500  # characters of a message or a source line that are shown
_OURS = Path(__file__).parent
_LIBRARIES = [Path(torch.__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib", "platstdlib"))]


def user_line(error: BaseException, prefer: Path | None = None) -> str:
    """``file.py:12 in forward: y = x.view(7)`` for the innermost frame that is the user's.

    A frame in the folder of ``prefer`` (the job's file) counts first, then any frame that is neither
    ours nor a library's. Empty when there is none.
    """
    best = _line_in_text(told(error))
    if best:
        return best
    for wanted in (lambda path: _is_beside(path, prefer), lambda path: not _is_library(path)):
        current: BaseException | None = error
        while current is not None:
            for frame in traceback.extract_tb(current.__traceback__):
                path = Path(frame.filename)
                if frame.filename.startswith("<") or not wanted(path):
                    continue
                best = f"{path}:{frame.lineno} in {frame.name}: {_source(frame.filename, frame.lineno)}".rstrip(": ")
            if best:
                return best
            current = current.__cause__ or current.__context__
    return best


def one_line(error: BaseException) -> str:
    """The exception's class and the first line of its message."""
    text = told(error).strip().splitlines()
    if len(text) > 1 and text[1].startswith("Original Traceback"):  # another process's, which torch hands on as text
        return _short(text[-1])
    return f"{type(error).__name__}: {_short(text[0])}" if text else type(error).__name__


def _line_in_text(text: str) -> str:
    """The user's innermost line of a traceback that is part of a message: a loader process's, which torch hands on."""
    if "\nOriginal Traceback" not in text:
        return ""
    frames = [match for match in _FRAME.finditer(text) if not _is_library(Path(match[1]))]
    return f"{frames[-1][1]}:{frames[-1][2]} in {frames[-1][3]}: {_source(frames[-1][1], int(frames[-1][2]))}" if frames else ""


def _source(filename: str, number: int | None) -> str:
    return _short(linecache.getline(filename, number or 0).strip())


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST - 3]}..."


def _is_beside(path: Path, prefer: Path | None) -> bool:
    """Whether ``path`` lies in the job's folder (and not in an environment inside it)."""
    return prefer is not None and path.is_relative_to(prefer.parent) and (not _is_library(path) or _is_library(prefer))


def _is_library(path: Path) -> bool:
    return path.is_relative_to(_OURS) or any(path.is_relative_to(folder) for folder in _LIBRARIES)
