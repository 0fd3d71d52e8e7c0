"""What a model costs, layer by layer, on one device: the planner's input.

Layers stand in execution order, which is a topological order of the graph. Every time and every
byte count is for one microbatch, except ``update_us`` and ``copy_us``, which are for one update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from planner.spec.errors import InvalidValue
from planner.spec.files import require

__all__ = ["AtSize", "Device", "JobReference", "Layer", "Measured", "Profile", "Tensor", "TiedParameter"]


@dataclass(frozen=True)
class JobReference:
    """Which job was profiled: ``FILE.py`` or ``package.module:function``, and what its factory was given."""

    target: str
    settings: dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Device:
    """The device the profile was measured on, and the machine around it (``--cluster local``)."""

    kind: str  # "cpu" or "cuda"
    name: str
    count: int  # devices of this kind on the machine
    threads: int  # threads one worker computes with (CPU)
    memory_bytes: int  # what one worker may use
    link_bandwidth_bytes_per_s: float  # between two workers on the machine
    link_latency_us: float

    def __post_init__(self) -> None:
        require(bool(self.kind), "kind is empty")
        for field, least, most in (("count", 1, 1_000_000), ("threads", 1, 1_000_000), ("memory_bytes", 1, 10**18),
                                   ("link_bandwidth_bytes_per_s", 1e-18, 1e18), ("link_latency_us", 0, 1e12)):
            value = getattr(self, field)
            require(least <= value <= most, f"{field} {value} is not between {least} and {most:g}")


@dataclass(frozen=True)
class Layer:
    """One node of the model graph: normally the operations of one leaf module.

    ``saved_bytes`` counts what this layer's backward needs, each storage once and at the layer that
    made it; parameters are not in it. ``copy_us`` is the time to copy this layer's parameters once,
    which a policy that stashes versions pays per update.
    """

    name: str
    forward_us: float
    backward_us: float
    forward_spread_us: float  # interquartile range of the repeats
    backward_spread_us: float
    update_us: float
    copy_us: float
    parameter_bytes: int  # trainable; gradients are as large
    buffer_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    workspace_bytes: int  # peak beyond inputs, outputs and saved tensors
    reads: tuple[str, ...]  # data inputs this layer uses

    def __post_init__(self) -> None:
        for field in ("forward_us", "backward_us", "forward_spread_us", "backward_spread_us", "update_us", "copy_us",
                      "parameter_bytes", "buffer_bytes", "optimizer_bytes", "saved_bytes", "workspace_bytes"):
            value = getattr(self, field)
            require(0 <= value < 1e18, f"{field} {value} is not between 0 and 1e18")
        require(bool(self.name), "name is empty")


@dataclass(frozen=True)
class Tensor:
    """A value one layer makes and later layers use. It crosses a cut once, however many use it."""

    name: str
    source: int  # index of the layer that makes it
    consumers: tuple[int, ...]  # indices of the layers that use it, ascending
    forward_bytes: int
    gradient_bytes: int  # 0 for a tensor without gradient

    def __post_init__(self) -> None:
        require(0 <= self.source, f"source {self.source} is below 0")
        require(bool(self.consumers), "consumers is empty")
        require(list(self.consumers) == sorted(set(self.consumers)), f"consumers {list(self.consumers)} are not ascending and distinct")
        require(self.consumers[0] > self.source, f"consumer {self.consumers[0]} is not after source {self.source}")
        for field in ("forward_bytes", "gradient_bytes"):
            value = getattr(self, field)
            require(0 <= value < 1e18, f"{field} {value} is not between 0 and 1e18")


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several layers use (a tied embedding): each stage with one of them holds a copy.

    Where ``parameter_bytes`` is 0 it is none, but something of which there can be one only: a buffer that they
    update, or ``--together``. Its layers are then in one stage.
    """

    name: str
    parameter_bytes: int  # trainable; counted at the first of the layers
    layers: tuple[int, ...]

    @property
    def one_stage(self) -> bool:
        """Whether its layers must be in one stage."""
        return self.parameter_bytes == 0

    def __post_init__(self) -> None:
        require(0 <= self.parameter_bytes < 1e18, f"parameter_bytes {self.parameter_bytes} is not between 0 and 1e18")
        require(len(self.layers) >= 2, f"layers {list(self.layers)} are fewer than 2")
        require(list(self.layers) == sorted(set(self.layers)), f"layers {list(self.layers)} are not ascending and distinct")


@dataclass(frozen=True)
class Measured:
    """The whole model's step, measured uncut on the same device, to hold the sum of layers against."""

    forward_us: float
    backward_us: float
    update_us: float

    def __post_init__(self) -> None:
        for field in ("forward_us", "backward_us", "update_us"):
            value = getattr(self, field)
            require(0 <= value < 1e18, f"{field} {value} is not between 0 and 1e18")


@dataclass(frozen=True)
class AtSize:
    """The same model measured at another microbatch size: the fields of :class:`Profile` that differ."""

    microbatch_size: int
    fingerprint: str
    measured: Measured | None
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Profile:
    """A profiled model. ``fingerprint`` names the captured graph, so that a plan refuses another one.

    ``other_sizes`` has the same layers and tensors at other microbatch sizes, which a planner may choose from.
    """

    FORMAT: ClassVar[str] = "pipedream-profile"
    VERSION: ClassVar[int] = 2

    model: str
    job: JobReference | None
    command: str
    fingerprint: str
    device: Device
    microbatch_size: int
    estimated: bool
    measured: Measured | None
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    tied: tuple[TiedParameter, ...]
    other_sizes: tuple[AtSize, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every microbatch size that was measured, its own first."""
        return (self.microbatch_size, *(other.microbatch_size for other in self.other_sizes))

    def at(self, microbatch_size: int) -> Profile:
        """The profile at one measured size, without the others.

        Raises:
            InvalidValue: the size is not in :attr:`sizes`.
        """
        if microbatch_size == self.microbatch_size:
            return replace(self, other_sizes=())
        for other in self.other_sizes:
            if other.microbatch_size == microbatch_size:
                return replace(self, microbatch_size=microbatch_size, fingerprint=other.fingerprint, measured=other.measured,
                               layers=other.layers, tensors=other.tensors, other_sizes=())
        raise InvalidValue(f"microbatches of {microbatch_size} were not measured", hint=f"measured: {', '.join(map(str, self.sizes))}")

    def __post_init__(self) -> None:
        require(1 <= self.microbatch_size < 1e12, f"microbatch_size {self.microbatch_size} is not between 1 and 1e12")
        require(bool(self.layers), "layers is empty: there is nothing to plan")
        seen: set[str] = set()
        for index, layer in enumerate(self.layers):
            require(layer.name not in seen, f"layers[{index}].name {layer.name!r} appears twice")
            seen.add(layer.name)
        for index, tensor in enumerate(self.tensors):
            last = tensor.consumers[-1]
            require(last < len(self.layers), f"tensors[{index}].consumers names layer {last}, there are {len(self.layers)}")
        for index, tied in enumerate(self.tied):
            inside = 0 <= tied.layers[0] and tied.layers[-1] < len(self.layers)
            require(inside, f"tied[{index}].layers {list(tied.layers)} are not among {len(self.layers)} layers")
        require(len(set(self.sizes)) == len(self.sizes), f"microbatch sizes {list(self.sizes)} have one twice")
        for index, other in enumerate(self.other_sizes):
            alike = [layer.name for layer in other.layers] == [layer.name for layer in self.layers]
            require(alike, f"other_sizes[{index}].layers are not the layers of microbatches of {self.microbatch_size}")
            joined = [(tensor.source, tensor.consumers) for tensor in self.tensors]
            require([(tensor.source, tensor.consumers) for tensor in other.tensors] == joined,
                    f"other_sizes[{index}].tensors do not join the same layers as those of microbatches of {self.microbatch_size}")
            require(1 <= other.microbatch_size < 1e12, f"other_sizes[{index}].microbatch_size {other.microbatch_size} "
                    "is not between 1 and 1e12")
