"""The timeline in the terminal: one row a worker, time to the right, a letter for what fills most of a column.

    stage 0  |FFFF....BBFBBFBBF|      F forward  B backward  U update  R all-reduce  . waiting
    stage 1  |.FFBBFBBFBBFBBFBB|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from planner.spec.trace import Span

__all__ = ["LEGEND", "cells", "coloured"]

LETTERS = {"forward": "F", "backward": "B", "update": "U", "allreduce": "R", "evaluate": "E", "wait": "."}
LEGEND = "F forward  B backward  U update  R all-reduce  . waiting"
STYLES = {"F": "blue", "B": "green", "U": "yellow", "R": "red", ".": "dim"}
_ORDER = "FBURE."  # which letter wins a column that two fill alike


def cells(spans: Iterable[Span], start_us: float, column_us: float, columns: int) -> str:
    """One worker's row from ``start_us``: for each column the letter of what fills most of it; blank where nothing is.

    >>> from planner.spec.trace import Span
    >>> cells([Span(0, 0, "0F0", "forward", 0, 2), Span(0, 0, "wait 0B0", "wait", 2, 2), Span(0, 0, "0B0", "backward", 4, 3)], 0, 1, 8)
    'FF..BBB '
    """
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        letter = LETTERS.get(span.category, "?")
        first_us, last_us = span.start_us - start_us, span.start_us + span.duration_us - start_us
        column = max(0, int(first_us / column_us))
        while column < columns and column * column_us < last_us:
            part_us = min(last_us, (column + 1) * column_us) - max(first_us, column * column_us)
            if part_us > 0:
                filled[column][letter] = filled[column].get(letter, 0.0) + part_us
            column += 1
    return "".join(_letter(parts, column_us) for parts in filled)


def _letter(parts: dict[str, float], column_us: float) -> str:
    if sum(parts.values()) < column_us / 2:  # before the first operation, or after the last
        return " "
    return max(parts, key=lambda letter: (round(parts[letter] / column_us, 6), -_ORDER.find(letter)))


def coloured(label: str, row: str, blocks: bool) -> Text:
    """``label`` and ``row`` as a line; the letters coloured where ``blocks`` says that the terminal can show it."""
    from rich.text import Text

    line = Text(f"{label} |")
    for letter in row:
        line.append(letter, style=STYLES.get(letter, "") if blocks else "")
    line.append("|")
    return line


def labels(workers: Sequence[tuple[int, int]], replicas: Sequence[int]) -> list[str]:
    """A name for each row, all of one width.

    >>> labels([(0, 0), (0, 1), (1, 0)], (2, 1))
    ['stage 0.0', 'stage 0.1', 'stage 1  ']
    """
    names = [f"stage {stage}.{replica}" if replicas[stage] > 1 else f"stage {stage}" for stage, replica in workers]
    width = max(map(len, names))
    return [name.ljust(width) for name in names]
