"""Cluster descriptions in TOML, with human units.

::

    [[device_types]]
    name = "V100"
    memory = "16 GiB"            # optional: without it no limit is known
    speed = 1.0                  # optional: relative to the profiled device

    [[nodes]]                    # two servers, each with one network card
    name = "server"
    count = 2
    bandwidth = "1.25 GB/s"      # of the link to what is above, full duplex
    latency = "10 us"            # optional

    [[nodes.children]]           # four devices in each
    name = "device"
    count = 4
    device = "V100"
    bandwidth = "12 GB/s"

A device's bandwidth, a group's bandwidth and a type's memory may be left out and given as
``--intra-bandwidth``, ``--inter-bandwidth`` and ``--memory``; an option for what the file says is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.errors import BadInput, InvalidFile, InvalidValue, shown
from planner.spec.units import parse_bandwidth, parse_bytes, parse_duration_us

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["parse_cluster"]

T = TypeVar("T")


def parse_cluster(
    content: str,
    *,
    source: str,
    name: str,
    intra_bandwidth: float | None = None,
    inter_bandwidth: float | None = None,
    memory_bytes: int | None = None,
) -> Cluster:
    """The cluster that TOML ``content`` describes; ``source`` is named in errors.

    Raises:
        InvalidFile: not TOML, or an unknown, missing or wrong value at a named place.
        BadInput: an option answers what the file already says.
    """
    try:
        data = tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidFile(f"{source} is not TOML: {error}", hint="correct the file at that line") from error
    except ValueError as error:  # Python reads 4300 digits
        raise InvalidFile(f"{source} has a whole number of too many digits", hint="write quantities in larger units: '80 GiB'") from error
    options = {"--intra-bandwidth": intra_bandwidth, "--inter-bandwidth": inter_bandwidth, "--memory": memory_bytes}
    reader = _Reader({option: value for option, value in options.items() if value is not None})
    try:
        cluster = reader.cluster(data, name)
    except InvalidValue as error:
        raise InvalidFile(f"{source}: {error.message}", hint=error.hint or "correct the file at that place") from error
    for option, value in reader.options.items():
        if option not in reader.used:
            raise BadInput(f"{option} {value:g} is given, but {source} already says it",
                           hint=f"leave {option} out, or remove the value from {source}")
    return cluster


@dataclass
class _Reader:
    options: dict[str, float | int]
    used: set[str] = field(default_factory=set)

    def cluster(self, data: dict[str, Any], default_name: str) -> Cluster:
        _keys(data, "", required=("device_types", "nodes"), optional=("name",))
        name = data.get("name", default_name)
        if not isinstance(name, str):
            raise InvalidValue(f"name is {shown(name)}, not text")
        types = tuple(self._device_type(table, f"device_types[{i}]") for i, table in enumerate(_tables(data, "device_types", "")))
        return Cluster(name, types, tuple(self._node(table, f"nodes[{i}]") for i, table in enumerate(_tables(data, "nodes", ""))))

    def _device_type(self, table: dict[str, Any], where: str) -> DeviceType:
        _keys(table, where, required=("name",), optional=("speed", "memory"))
        if "memory" in table:
            memory: float | None = _located(f"{where}.memory", parse_bytes, _text(table, "memory", where))
        else:
            memory = self._option("--memory")
        return _located(where, DeviceType, _text(table, "name", where), _number(table, "speed", where, 1.0),
                        None if memory is None else int(memory))

    def _node(self, table: dict[str, Any], where: str) -> Node:
        _keys(table, where, required=("name",), optional=("count", "bandwidth", "latency", "device", "children"))
        children = tuple(self._node(child, f"{where}.children[{i}]") for i, child in enumerate(_tables(table, "children", where)))
        option = "--inter-bandwidth" if children else "--intra-bandwidth"
        bandwidth = _located(f"{where}.bandwidth", parse_bandwidth, _text(table, "bandwidth", where)) if "bandwidth" in table else (
            self._option(option))
        if bandwidth is None:
            raise InvalidValue(f"missing key {where}.bandwidth", hint=f'write it, for example bandwidth = "12 GB/s", or give {option}')
        latency_us = _located(f"{where}.latency", parse_duration_us, _text(table, "latency", where)) if "latency" in table else 0.0
        count = table.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool):
            raise InvalidValue(f"{where}.count is {shown(count)}, not a whole number")
        link = _located(where, Link, float(bandwidth), latency_us)
        device = _text(table, "device", where) if "device" in table else None
        return _located(where, Node, _text(table, "name", where), count, link, device, children)

    def _option(self, option: str) -> float | int | None:
        if option in self.options:
            self.used.add(option)
        return self.options.get(option)


def _located(where: str, make: Callable[..., T], *arguments: Any) -> T:
    try:
        return make(*arguments)
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error.message}", hint=error.hint) from error


def _keys(table: dict[str, Any], where: str, *, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in required + optional:
            raise InvalidValue(f"unknown key {prefix}{key}", hint=f"keys known there: {', '.join(required + optional)}")
    for key in required:
        if key not in table:
            raise InvalidValue(f"missing key {prefix}{key}")


def _tables(table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidValue(f"{where + '.' if where else ''}{key} is not a list of tables", hint=f"write [[{key}]] above each")
    return value


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str):
        raise InvalidValue(f"{where}.{key} is {shown(value)}, not text in quotes")
    return value


def _number(table: dict[str, Any], key: str, where: str, default: float) -> float:
    value = table.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidValue(f"{where}.{key} is {shown(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidValue(f"{where}.{key} is {shown(value)}, which is too large") from None
