"""How a profile is shown: its heaviest layers and its sums for people, the sums for ``--json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.spec.profile import Profile

__all__ = ["show", "totals"]

HEAVIEST = 12  # layers shown


def totals(profile: Profile) -> dict[str, Any]:
    """The sums of the layers, and the whole model's step measured uncut."""
    measured = profile.measured
    return {
        "model": profile.model, "device": profile.device.name, "microbatch_size": profile.microbatch_size,
        "microbatch_sizes": list(profile.sizes),
        "layers": len(profile.layers),
        "parameter_bytes": sum(layer.parameter_bytes for layer in profile.layers),  # a tied one is counted at its first layer
        "forward_us": sum(layer.forward_us for layer in profile.layers),
        "backward_us": sum(layer.backward_us for layer in profile.layers),
        "update_us": sum(layer.update_us for layer in profile.layers),
        "measured_forward_us": measured.forward_us if measured else None,
        "measured_backward_us": measured.backward_us if measured else None,
        "measured_update_us": measured.update_us if measured else None,
    }


def show(out: Output, profile: Profile) -> None:
    """The heaviest layers, and how the sum of all compares with the whole step."""
    from planner.spec.units import format_bytes, format_duration_us

    whole_us = sum(layer.forward_us + layer.backward_us for layer in profile.layers) or 1.0
    heaviest = sorted(profile.layers, key=lambda layer: -(layer.forward_us + layer.backward_us))[:HEAVIEST]
    rows = []
    for layer in heaviest:
        both_us = layer.forward_us + layer.backward_us
        spread = f"±{format_duration_us((layer.forward_spread_us + layer.backward_spread_us) / 2)}"  # half the interquartile range
        rows.append((layer.name, format_duration_us(layer.forward_us), format_duration_us(layer.backward_us), spread,
                     f"{both_us / whole_us:.1%}", format_bytes(layer.parameter_bytes), format_bytes(layer.saved_bytes)))
    device = profile.device
    out.text(f"{profile.model} on {device.name} ({device.kind}, {device.threads} thread{'s' * (device.threads > 1)}), "
             f"microbatches of {profile.microbatch_size}")
    title = f"heaviest {len(rows)} of {len(profile.layers)} layers" if len(rows) < len(profile.layers) else "layers"
    out.table(title, ("layer", "forward", "backward", "spread", "share", "parameters", "saved"), rows)
    out.text()
    sums = totals(profile)
    out.text(f"sum of layers   forward {format_duration_us(sums['forward_us'])}, backward {format_duration_us(sums['backward_us'])}, "
             f"update {format_duration_us(sums['update_us'])}")
    if profile.measured is not None:
        measured = profile.measured
        step_us = measured.forward_us + measured.backward_us
        out.text(f"whole step      forward {format_duration_us(measured.forward_us)}, backward {format_duration_us(measured.backward_us)}, "
                 f"update {format_duration_us(measured.update_us)}")
        if step_us > 0:
            out.text(f"the layers' forward and backward add up to {whole_us / step_us:.1%} of the whole step, measured uncut")
    for other in profile.other_sizes:
        both_us = sum(layer.forward_us + layer.backward_us for layer in other.layers)
        out.text(f"microbatches of {other.microbatch_size}: {format_duration_us(both_us)} for all layers, "
                 f"{format_duration_us(both_us / other.microbatch_size)} a sample "
                 f"({format_duration_us(whole_us / profile.microbatch_size)} with {profile.microbatch_size})")
