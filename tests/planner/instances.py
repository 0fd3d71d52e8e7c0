"""Small models and clusters for the planner's tests: by hand, and at random."""

from __future__ import annotations

from hypothesis import strategies as st

from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.profile import Device, Layer, Profile, Tensor, TiedParameter

GB = 1_000_000_000


def layer(name: str, **values: float) -> Layer:
    """A layer whose costs are zero except those given."""
    zero = dict.fromkeys(
        ("forward_us", "backward_us", "forward_spread_us", "backward_spread_us", "update_us", "copy_us", "parameter_bytes",
         "buffer_bytes", "optimizer_bytes", "saved_bytes", "workspace_bytes"), 0)
    return Layer(name=name, reads=(), **(zero | values))  # type: ignore[arg-type]


def profile(layers: list[Layer], tensors: list[Tensor] | None = None, tied: tuple[TiedParameter, ...] = (), *, kind: str = "cpu",
            count: int = 4, memory_bytes: int = 2**40, latency_us: float = 10.0) -> Profile:
    """A profile; without ``tensors`` nothing crosses any cut."""
    device = Device(kind, "test device", count, 1, memory_bytes, 1.0 * GB, latency_us)
    return Profile("model", None, "pipedream profile", "fingerprint", device, 8, False, None, tuple(layers), tuple(tensors or ()), tied)


def flat(count: int, *, bandwidth: float = GB, memory_bytes: int | None = None, latency_us: float = 0.0) -> Cluster:
    """Equal devices on one server."""
    kind = DeviceType("test", 1.0, memory_bytes)
    return Cluster("flat", (kind,), (Node("device", count, Link(bandwidth, latency_us), "test", ()),))


def two_level(servers: int, devices: int, *, intra: float = GB, inter: float = GB, memory_bytes: int | None = None,
              latency_us: float = 0.0) -> Cluster:
    """Equal servers of equal devices."""
    kind = DeviceType("test", 1.0, memory_bytes)
    inner = Node("device", devices, Link(intra, latency_us), "test", ())
    return Cluster("two-level", (kind,), (Node("server", servers, Link(inter, latency_us), None, (inner,)),))


def unequal(fast: int, slow: int, *, speed: float, intra: float = GB, inter: float = GB, memory_bytes: int | None = None) -> Cluster:
    """Two servers with different devices."""
    kinds = (DeviceType("fast", 1.0, None), DeviceType("slow", speed, memory_bytes))
    return Cluster("unequal", kinds, (
        Node("fast", 1, Link(inter, 0.0), None, (Node("device", fast, Link(intra, 0.0), "fast", ()),)),
        Node("slow", 1, Link(inter / 2, 3.0), None, (Node("device", slow, Link(intra / 2, 0.0), "slow", ()),)),
    ))


@st.composite
def profiles(draw: st.DrawFn, *, most_layers: int = 5) -> Profile:
    """Unbalanced layers, tensors that skip stages, sometimes tied parameters or layers that must be in one stage."""
    n = draw(st.integers(1, most_layers))
    times = st.one_of(st.sampled_from([0.0, 100.0, 200.0]), st.floats(0, 1000))
    scale = draw(st.sampled_from([10**3, 10**5, 10**7]))
    amount = st.integers(0, scale)
    layers = [
        layer(f"layer{i}", forward_us=draw(times), backward_us=draw(times), update_us=draw(times) / 3, copy_us=draw(times) / 5,
              parameter_bytes=draw(amount), buffer_bytes=draw(st.integers(0, 100)), optimizer_bytes=draw(amount),
              saved_bytes=draw(amount), workspace_bytes=draw(amount) // 10)
        for i in range(n)
    ]
    tensors = []
    for source in range(n - 1):
        later = draw(st.sets(st.integers(source + 1, n - 1), max_size=2))
        tensors.append(Tensor(f"tensor{source}", source, tuple(sorted(later | {source + 1})), draw(amount), draw(amount)))
    tied: tuple[TiedParameter, ...] = ()
    if n >= 3 and draw(st.integers(0, 9)) == 0:
        pair = sorted(draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=2)))
        tied = (TiedParameter("weight", draw(st.sampled_from([0, 5])), tuple(pair)),)
    return profile(layers, tensors, tied)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """One server, equal servers, unequal servers, or three levels; up to six devices, any bandwidths, memory limits."""
    bandwidth = st.sampled_from([3e7, 3e8, 1e9, 1e10, 1e11])
    memory = draw(st.one_of(st.none(), st.integers(10**3, 10**8)))
    shape = draw(st.sampled_from(["flat", "flat", "2x2", "2x2", "2x3", "3x1", "3x2", "unequal", "2x2x1"]))
    latency_us = draw(st.sampled_from([0.0, 7.0]))
    if shape == "flat":
        return flat(draw(st.integers(1, 6)), bandwidth=draw(bandwidth), memory_bytes=memory, latency_us=latency_us)
    if shape == "unequal":
        return unequal(draw(st.integers(1, 3)), draw(st.integers(1, 2)), speed=draw(st.sampled_from([0.5, 1.0, 2.0])),
                       intra=draw(bandwidth), inter=draw(bandwidth), memory_bytes=memory)
    if shape == "2x2x1":
        leaf = Node("device", 1, Link(draw(bandwidth), 0.0), "test", ())
        server = Node("server", 2, Link(draw(bandwidth), latency_us), None, (leaf,))
        return Cluster("racks", (DeviceType("test", 1.0, memory),), (Node("rack", 2, Link(draw(bandwidth), 0.0), None, (server,)),))
    servers, devices = (int(part) for part in shape.split("x"))
    return two_level(servers, devices, intra=draw(bandwidth), inter=draw(bandwidth), memory_bytes=memory, latency_us=latency_us)
