"""Two places for two processes: this machine as it is, or two network namespaces joined by a link of limited rate.

A namespace has its own network and nothing else; the two ends of a veth pair are all that joins them, each behind a
token bucket (``tc tbf``). Needs root and iproute2. Nothing outside the two namespaces is touched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Place", "places"]


class Place(NamedTuple):
    """How to start a process there, the address of the first place, and the interface to use."""

    prefix: tuple[str, ...]
    master: str
    interface: str


@contextlib.contextmanager
def places(rate: str | None) -> Iterator[tuple[Place, Place]]:
    """``rate`` as ``tc`` writes it (``200mbit``), or None for loopback."""
    if rate is None:
        here = Place((), "127.0.0.1", "lo")
        yield here, here
        return
    names = [f"pipedream{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            inside = ("ip", "netns", "exec", name)
            for words in (("ip", "addr", "add", f"10.231.7.{number}/24", "dev", "veth0"), ("ip", "link", "set", "veth0", "up"),
                          ("ip", "link", "set", "lo", "up"),
                          ("tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")):
                subprocess.run([*inside, *words], check=True)
        yield tuple(Place(("ip", "netns", "exec", name), "10.231.7.1", "veth0") for name in names)  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
