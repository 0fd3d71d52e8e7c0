"""A small profile and summary made by hand, for tests of what the commands print."""

from __future__ import annotations

from planner.spec.profile import Device, JobReference, Layer, Measured, Profile, Tensor
from planner.spec.summary import Evaluation, StageMeasurement, Summary


def profile(layers: int = 6, *, job: str | None = "job.py", name: str = "net.block{}") -> Profile:
    """``layers`` equal layers: 1 ms forward, 2 ms backward, 4 MB of weights, 1 MB between neighbours."""
    return Profile(
        model="Net",
        job=None if job is None else JobReference(job, {"width": 64}),
        command="pipedream profile job.py",
        fingerprint="f" * 64,
        device=Device("cpu", "test processor", 2, 1, 8 * 2**30, 1e9, 50.0),
        microbatch_size=8,
        estimated=False,
        measured=Measured(1000.0 * layers * 1.05, 2000.0 * layers * 1.05, 300.0 * layers),
        layers=tuple(
            Layer(name=name.format(i), forward_us=1000.0, backward_us=2000.0, forward_spread_us=10.0, backward_spread_us=20.0,
                  update_us=300.0, copy_us=100.0, parameter_bytes=4_000_000, buffer_bytes=0, optimizer_bytes=8_000_000,
                  saved_bytes=3_000_000, workspace_bytes=100_000, reads=("inputs",) if i == 0 else ())
            for i in range(layers)
        ),
        tensors=tuple(Tensor(f"t{i}", i, (i + 1,), 1_000_000, 1_000_000) for i in range(layers - 1)),
        tied=(),
    )


def summary(stages: int = 2) -> Summary:
    """A finished run of ``stages`` stages."""
    return Summary(
        plan_digest="d" * 64, seed=0, updates=300, microbatches=300, samples=2400, duration_s=30.0, microbatch_us=10_000.0,
        samples_per_s=800.0, final_train_loss=2.5, evaluations=(Evaluation(300, {"loss": 2.75, "accuracy": 0.5}),),
        stages=tuple(StageMeasurement(3000.0, 6000.0, 900.0, 0.0, 9900.0, 0.01, 200 * 2**20) for _ in range(stages)),
    )
