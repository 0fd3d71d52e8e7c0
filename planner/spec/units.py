"""Quantities as people write them: ``"16 GiB"``, ``"12.5 GB/s"``, ``"5 us"``.

Inside the program a quantity is a plain number whose name carries the unit
(``memory_bytes``, ``bandwidth_bytes_per_s``, ``latency_us``). Text is parsed here and nowhere else.
"""

from __future__ import annotations

import re

from planner.spec.errors import InvalidValue, shown

_BYTES = {
    "B": 1.0,
    **{f"{p}B": 1000.0 ** (i + 1) for i, p in enumerate("kMGTP")},
    **{f"{p}iB": 1024.0 ** (i + 1) for i, p in enumerate("KMGTP")},
}
_BITS = {f"{p}bit": 1000.0 ** (i + 1) / 8 for i, p in enumerate("kMGTP")} | {"bit": 1 / 8}
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "min": 60e6, "h": 3600e6}
_MOST_BYTES = 1e18  # what the value types hold, also for bytes per second
_MOST_US = 1e12
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([a-zA-Zµ/]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """A number of bytes from text such as ``"16GiB"``, ``"500 MB"`` or ``"1024"``.

    >>> parse_bytes("1 KiB"), parse_bytes("16GB"), parse_bytes("12")
    (1024, 16000000000, 12)
    """
    return round(_parse(text, _BYTES | {"": 1.0}, "a size in bytes such as '16 GiB'", _MOST_BYTES))


def parse_bandwidth(text: str) -> float:
    """Bytes per second from ``"12.5 GB/s"``, ``"100 Gbit/s"`` or ``"10Gbps"``.

    >>> parse_bandwidth("12 GB/s"), parse_bandwidth("10 Gbit/s"), parse_bandwidth("1Gbps")
    (12000000000.0, 1250000000.0, 125000000.0)
    """
    per_second = {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}
    per_second |= {unit.replace("bit", "bps"): factor for unit, factor in _BITS.items()}
    value = _parse(text, per_second, "a bandwidth such as '12.5 GB/s' or '10 Gbit/s'", _MOST_BYTES)
    if value <= 0:
        raise InvalidValue(f"bandwidth {shown(text)} is not above zero", hint="give the link's rate, for example '1.25 GB/s'")
    return value


def parse_duration_us(text: str) -> float:
    """Microseconds from ``"5 us"``, ``"0.2 ms"`` or ``"3s"``.

    >>> parse_duration_us("0.2 ms"), parse_duration_us("3s")
    (200.0, 3000000.0)
    """
    return _parse(text, _MICROSECONDS, "a duration such as '5 us'", _MOST_US)


def _parse(text: str, factors: dict[str, float], expected: str, most: float) -> float:
    """Units may be written in any case."""
    match = _QUANTITY.match(text)
    known = {unit.lower(): factor for unit, factor in factors.items()}
    factor = known.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        rate = match is not None and len(text) < 40 and f"{match.group(2)}/s".lower() in known
        raise InvalidValue(f"{shown(text)} is not {expected}", hint=f"did you mean '{text.strip()}/s'?" if rate else
                           f"units: {', '.join(unit for unit in factors if unit)}")
    value = float(match.group(1)) * factor
    if not value < most:
        raise InvalidValue(f"{shown(text)} is too large: {value:g}, the most is {most:g}", hint=f"give {expected}")
    return value


def format_bytes(count: float) -> str:
    """A size for people, in binary units.

    >>> format_bytes(1536), format_bytes(80 * 2**30), format_bytes(12)
    ('1.5 KiB', '80.0 GiB', '12 B')
    """
    for unit, factor in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def format_duration_us(duration_us: float) -> str:
    """A duration for people.

    >>> format_duration_us(12.34), format_duration_us(45_600), format_duration_us(7.2e6)
    ('12.3 us', '45.6 ms', '7.20 s')
    """
    if abs(duration_us) >= 1e6:
        return f"{duration_us / 1e6:.2f} s"
    if abs(duration_us) >= 1e3:
        return f"{duration_us / 1e3:.1f} ms"
    return f"{duration_us:.1f} us"


def format_bandwidth(bandwidth_bytes_per_s: float) -> str:
    """A rate for people, in decimal units as links are sold.

    >>> format_bandwidth(1.25e9)
    '1.25 GB/s'
    """
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth_bytes_per_s >= factor:
            return f"{bandwidth_bytes_per_s / factor:.3g} {unit}"
    return f"{bandwidth_bytes_per_s:.3g} B/s"
