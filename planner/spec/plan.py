"""What ``pipedream plan`` decides and ``pipedream train`` carries out: a self-contained file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from planner.spec.cluster import Cluster
from planner.spec.files import require
from planner.spec.profile import JobReference

__all__ = ["TOLERANCE", "Baseline", "LinkPrediction", "Memory", "Plan", "Policy", "Prediction", "SolverReport", "StagePlan",
           "StagePrediction"]

TOLERANCE = 0.01  # relative: what closed form and simulation may differ by without a word

Policy = Literal["stash", "vertical", "2bw", "flush", "latest"]


@dataclass(frozen=True)
class StagePlan:
    """A stage: layers in execution order, which may leave out layers of other branches; one device per replica."""

    layers: tuple[str, ...]
    devices: tuple[str, ...]  # replica i, which runs microbatches m with m mod r == i, on devices[i]
    in_flight: int  # forwards a replica admits before its first backward
    recompute: bool

    def __post_init__(self) -> None:
        require(bool(self.layers), "layers is empty")
        require(bool(self.devices), "devices is empty")
        require(1 <= self.in_flight < 1e12, f"in_flight {self.in_flight} is not between 1 and 1e12")


@dataclass(frozen=True)
class Memory:
    """Bytes one replica holds at its peak, by what they are for."""

    weights_bytes: int  # every live version, and buffers
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int  # saved for backward, over all microbatches in flight
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes + self.workspace_bytes


@dataclass(frozen=True)
class StagePrediction:
    """Predicted time of one stage, in microseconds per microbatch of the whole pipeline."""

    compute_us: float  # forward and backward, divided by the replicas
    update_us: float  # optimizer and weight copy, once per batch
    allreduce_us: float  # gradients over the replicas, once per batch
    fill_us: float  # waiting while the other stages fill and drain, with policy flush
    memory: Memory
    available_bytes: int | None  # the smallest of its devices

    @property
    def microbatch_us(self) -> float:
        return self.compute_us + self.update_us + self.allreduce_us + self.fill_us


@dataclass(frozen=True)
class LinkPrediction:
    """Predicted load of one link in its busier direction, per microbatch of the whole pipeline."""

    link: str  # path of the node below the link, such as "server0" or "server0/device1"
    load_bytes: float
    microbatch_us: float


@dataclass(frozen=True)
class Baseline:
    """Another way to train on the same devices, by the same cost model; ``fits`` says whether their memory holds it.

    ``microbatch_us`` None: it is not known, for the reason that ``note`` gives.
    """

    name: str  # such as "data parallelism"
    microbatch_us: float | None
    fits: bool
    note: str  # what it is exactly, in words


@dataclass(frozen=True)
class Prediction:
    """``microbatch_us`` is the pipeline's time per microbatch: the largest of all stages and links.

    That is a closed form, in which nothing waits. ``simulated_us`` is what the plan's own schedule takes in steady
    state by simulation; None where the plan is too large to simulate.
    """

    microbatch_us: float
    simulated_us: float | None
    bottleneck: str  # "stage 1" or "link server0"
    stages: tuple[StagePrediction, ...]
    links: tuple[LinkPrediction, ...]  # loaded links only
    baselines: tuple[Baseline, ...]

    def __post_init__(self) -> None:
        for field in ("microbatch_us", "simulated_us"):
            value = getattr(self, field)
            require(value is None or value >= 0, f"{field} {value} is below 0")

    @property
    def expected_us(self) -> float:
        """The time to expect per microbatch: simulated where it is known and longer, else the closed form's."""
        return self.microbatch_us if self.simulated_us is None else max(self.microbatch_us, self.simulated_us)

    @property
    def waits(self) -> bool:
        """Whether the simulated schedule takes more than :data:`TOLERANCE` longer than the closed form, in which nothing waits."""
        return self.simulated_us is not None and self.simulated_us > self.microbatch_us * (1 + TOLERANCE)

    def baseline_us(self, name: str) -> float:
        """The time of the baseline called ``name``, whether or not it fits; infinite when it is not known."""
        return next((one.microbatch_us for one in self.baselines if one.name == name and one.microbatch_us is not None), float("inf"))


@dataclass(frozen=True)
class SolverReport:
    """How far the answer is proven: ``optimal`` only when ``gap`` is closed."""

    name: str
    status: Literal["optimal", "feasible"]
    bound_us: float  # no plan is faster than this
    gap: float  # (microbatch_us - bound_us) / microbatch_us
    restricted: str  # what was left out of the search, empty when nothing was


@dataclass(frozen=True)
class Plan:
    """Stages, replicas and placement for one model on one cluster."""

    FORMAT: ClassVar[str] = "pipedream-plan"
    VERSION: ClassVar[int] = 2

    command: str
    model: str
    job: JobReference | None
    fingerprint: str
    profile_digest: str
    estimated: bool
    microbatch_size: int
    policy: Policy
    batch_microbatches: int  # microbatches between two updates
    stages: tuple[StagePlan, ...]
    predicted: Prediction
    solver: SolverReport
    cluster: Cluster

    def __post_init__(self) -> None:
        require(1 <= self.microbatch_size < 1e12, f"microbatch_size {self.microbatch_size} is not between 1 and 1e12")
        require(1 <= self.batch_microbatches < 1e12, f"batch_microbatches {self.batch_microbatches} is not between 1 and 1e12")
        require(bool(self.stages), "stages is empty")
        require(len(self.predicted.stages) == len(self.stages),
                f"predicted.stages has {len(self.predicted.stages)} entries for {len(self.stages)} stages")
        for index, stage_prediction in enumerate(self.predicted.stages):
            need = stage_prediction.memory.total_bytes
            require(need < 2**63, f"stages[{index}] needs {need} bytes on a device, more than a file can hold", "check the profile's bytes")
        known = {path for path, _ in self.cluster.devices()}
        used: set[str] = set()
        for index, stage in enumerate(self.stages):
            for device in stage.devices:
                require(device in known, f"stages[{index}] is on {device!r}, which is not in the cluster")
                require(device not in used, f"stages[{index}] is on {device!r}, which is taken already")
                used.add(device)
            r = len(stage.devices)
            require(self.batch_microbatches % r == 0,
                    f"batch_microbatches {self.batch_microbatches} is not a multiple of the {r} replicas of stages[{index}]")
        layers = [name for stage in self.stages for name in stage.layers]
        require(len(set(layers)) == len(layers), "a layer is in two stages")

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replica count of each stage."""
        return tuple(len(stage.devices) for stage in self.stages)

    @property
    def worker_count(self) -> int:
        return sum(self.replicas)
