"""Long names in short: layers of a stage, devices of a stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["device_names", "layer_names", "short"]

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)", re.DOTALL)
LONGEST = 30  # characters of a layer's name in a table


def short(name: str, longest: int = LONGEST) -> str:
    """A name of at most so many characters, with its numbers: the parts of its path are shortened first, from the outermost.

    >>> short("encoder.layers.11.self_attention.output_projection")
    'enc.lay.11.sel.output_proje...'
    >>> short("encoder.layers.11.attention.query"), short("features.3")
    ('enc.layers.11.attention.query', 'features.3')
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > longest and not part.isdigit():
            parts[index] = part[:3]
    shorter = ".".join(parts)
    if len(shorter) <= longest:
        return shorter
    if len(parts) > 1:
        return f"{shorter[: longest - 3]}..."
    end = (longest - 3) // 2  # beginning and end tell more than the middle
    return f"{name[: longest - 3 - end]}...{name[-end:]}"


def layer_names(names: Sequence[str]) -> str:
    """The first and the last of a stage.

    >>> layer_names(("embedding", "blocks.0", "blocks.1")), layer_names(("head",))
    ('embedding .. blocks.1', 'head')
    """
    return short(names[0]) if len(names) == 1 else f"{short(names[0])} .. {short(names[-1])}"


def device_names(paths: Iterable[str]) -> str:
    """The devices of a stage, neighbours joined, and servers of which the same devices are taken.

    >>> device_names(("server0/device0", "server0/device1", "server1/device0", "server1/device1"))
    'server0..1/device0..1'
    >>> device_names(("server0/device0", "server1/device0", "server0/device1"))
    'server0/device0..1, server1/device0'
    >>> device_names(("device3",))
    'device3'
    """
    inside: dict[str, list[str]] = {}  # of each parent, its devices in the order of their numbers
    for path in paths:
        parent, _, name = path.rpartition("/")
        inside.setdefault(parent, []).append(name)
    alike: dict[str, list[str]] = {}  # of each such set of devices, the parents
    for parent, names in inside.items():
        alike.setdefault(_runs(names), []).append(parent)
    return ", ".join(devices if parents == [""] else ", ".join(f"{above}/{devices}" for above in _runs(parents, apart=", ").split(", "))
                     for devices, parents in alike.items())


def _runs(names: Iterable[str], apart: str = "+") -> str:
    """Names that differ in the number at their end only, as ranges; devices of a server that are no range are joined by ``+``."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        stem, number = _NUMBERED.fullmatch(name).groups()  # type: ignore[union-attr]  # every path ends in a number
        numbers.setdefault(stem, []).append(int(number))
    words = []
    for stem, found in numbers.items():
        ordered = sorted(found)
        while ordered:
            length = next((n for n in range(1, len(ordered)) if ordered[n] != ordered[0] + n), len(ordered))
            words.append(f"{stem}{ordered[0]}" if length == 1 else f"{stem}{ordered[0]}..{ordered[length - 1]}")
            ordered = ordered[length:]
    return apart.join(words)
