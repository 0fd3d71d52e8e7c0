"""Clusters as people name them: ``local``, ``2x4``, a TOML file, or a shipped description.

A shorthand counts from the outside in: ``8`` is one server with eight devices, ``2x4`` two servers
with four each, ``2x4x8`` two racks of four servers of eight. Its devices are like the profiled one.
A TOML file describes any tree; :mod:`planner.hardware.cluster_file` reads it.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from planner.hardware.cluster_file import parse_cluster
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.errors import BadInput, InvalidFile
from planner.spec.profile import Device

__all__ = ["load_cluster", "shipped_clusters"]

_SHORTHAND = re.compile(r"[0-9]+([x×][0-9]+)*\Z")
_LEVELS = ("device", "server", "rack", "pod")  # names of the levels, from the inside out
_MOST_DEVICES = 1_000_000


def load_cluster(
    text: str,
    *,
    device: Device,
    intra_bandwidth: float | None = None,
    inter_bandwidth: float | None = None,
    memory_bytes: int | None = None,
) -> Cluster:
    """The cluster that ``text`` names; ``device`` is what the profile was measured on.

    ``intra_bandwidth`` (bytes/s) is the link of each device to its server, ``inter_bandwidth`` the
    link of each server (and rack) to what is above it, ``memory_bytes`` what each device holds.

    ``local`` is the profiled machine: its devices, their memory and the measured link. A shorthand
    must be told its bandwidths, as nothing here can know them; its links have no latency, and
    without ``memory_bytes`` its memory is that of the profiled device if that is an accelerator,
    otherwise unlimited (a share of one machine's main memory says nothing about other machines).

    Raises:
        BadInput: an unknown name, a missing bandwidth, or an option the description already answers.
        InvalidFile: a TOML file that cannot be read or has a wrong value at a named place.
    """
    for name, value in (("--intra-bandwidth", intra_bandwidth), ("--inter-bandwidth", inter_bandwidth), ("--memory", memory_bytes)):
        if value is not None and not value > 0:
            raise BadInput(f"{name} is {value}, which is not above zero", hint=f"give {name} a positive quantity")
    if text == "local":
        return _local(device, intra_bandwidth, inter_bandwidth, memory_bytes)
    if _SHORTHAND.match(text):
        return _shorthand(text, device, intra_bandwidth, inter_bandwidth, memory_bytes)
    source, content = _read(text)
    return parse_cluster(content, source=source, name=Path(source).stem, intra_bandwidth=intra_bandwidth,
                         inter_bandwidth=inter_bandwidth, memory_bytes=memory_bytes)


def shipped_clusters() -> tuple[str, ...]:
    """Names of the descriptions that come with the package."""
    folder = resources.files("profiles")
    return tuple(sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def _local(device: Device, intra: float | None, inter: float | None, memory_bytes: int | None) -> Cluster:
    if inter is not None:
        raise BadInput(f"--inter-bandwidth {inter:g} is given, but --cluster local is one machine",
                       hint="leave --inter-bandwidth out, or describe several servers, for example --cluster 2x4")
    # The measured latency is from device to device: each of the two links on that path carries half.
    link = Link(device.link_bandwidth_bytes_per_s if intra is None else intra, device.link_latency_us / 2)
    if memory_bytes is None and device.kind != "unknown":  # an imported profile does not say what it was measured on
        memory_bytes = device.memory_bytes
    kind = DeviceType(device.name or device.kind, 1.0, memory_bytes)
    return Cluster("local", (kind,), (Node("device", device.count, link, kind.name, ()),))


def _shorthand(text: str, device: Device, intra: float | None, inter: float | None, memory_bytes: int | None) -> Cluster:
    counts = [int(part) if len(part) < 10 else 10**9 for part in re.split("[x×]", text)]  # beyond any limit either way
    if len(counts) > len(_LEVELS):
        raise BadInput(f"--cluster {text} has {len(counts)} levels, a shorthand has at most {len(_LEVELS)}",
                       hint="describe deeper trees in a TOML file")
    total = 1
    for count in counts:
        total *= count
    if not 1 <= total <= _MOST_DEVICES:
        raise BadInput(f"--cluster {text} has {total if total < 10**9 else 'over a billion'} devices, not between 1 and {_MOST_DEVICES}",
                       hint="for example --cluster 2x4")
    groups, per_server = counts[:-1], counts[-1]
    if len(groups) == 1 and groups[0] == 1 and inter is None:
        groups = []  # one server: nothing is outside it
    if inter is None and groups:
        raise BadInput(f"--cluster {text} has {total // per_server} servers, but the bandwidth between them is not given",
                       hint="add --inter-bandwidth, for example --inter-bandwidth 1.25GB/s")
    if inter is not None and not groups:
        raise BadInput(f"--inter-bandwidth {inter:g} is given, but --cluster {text} is one server",
                       hint="leave --inter-bandwidth out, or describe several servers, for example --cluster 2x4")
    if intra is None and per_server == 1:
        intra = inter if inter is not None else device.link_bandwidth_bytes_per_s  # a lone device has nothing to share a server with
    if intra is None:
        raise BadInput(f"--cluster {text} has {per_server} devices in a server, but the bandwidth between them is not given",
                       hint="add --intra-bandwidth, for example --intra-bandwidth 12GB/s")
    if memory_bytes is None and device.kind not in ("cpu", "unknown"):
        memory_bytes = device.memory_bytes
    kind = DeviceType(device.name or device.kind, 1.0, memory_bytes)
    node = Node(_LEVELS[0], per_server, Link(intra, 0.0), kind.name, ())
    for level, count in enumerate(reversed(groups), start=1):
        node = Node(_LEVELS[level], count, Link(inter or 0.0, 0.0), None, (node,))
    return Cluster(text, (kind,), (node,))


def _read(text: str) -> tuple[str, str]:
    """Source name and content of the TOML file or shipped description called ``text``."""
    if text.endswith(".toml"):
        try:
            return text, Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InvalidFile(f"cannot read {text}: {reason}", hint="give the path of a cluster description in TOML") from error
    if text in shipped_clusters():
        return f"{text}.toml", resources.files("profiles").joinpath(f"{text}.toml").read_text(encoding="utf-8")
    raise BadInput(f"no cluster is called {text!r}",
                   hint=f"give local, a shorthand such as 2x4, a path ending in .toml, or one of: {', '.join(shipped_clusters())}")
