"""The options of ``pipedream plan`` that say what a plan may be, and what they mean to the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pdcli import options
from planner.spec.errors import BadInput

if TYPE_CHECKING:
    from planner.options import PlanOptions

__all__ = ["decision_options", "wanted"]

POLICIES = ("stash", "vertical", "2bw", "flush", "latest", "auto")
COST_MODELS = ("measured", "pipedream-2019")

_OPTIONS = (
    click.option("--policy", type=click.Choice(POLICIES), default="stash", show_default=True,
                 help="Which weights a microbatch sees. auto: the fastest of flush, 2bw and stash, the less stale where they are close."),
    click.option("--microbatch-size", type=options.COUNT,
                 help="Samples in a microbatch, one of those in the profile.  [default: the fastest]"),
    click.option("--batch-microbatches", type=options.COUNT,
                 help="Microbatches between two updates.  [default: as few as the replicas allow; flush: 4 a device]"),
    click.option("--recompute", type=click.Choice(("auto", "never", "always")), default="auto", show_default=True,
                 help="Whether stages keep their inputs only and run the forward again in the backward. auto: where memory needs it."),
    click.option("--extra-in-flight", type=click.IntRange(0, 64),
                 help="Microbatches in flight for each link, to hide transfers.  [default: as many as the simulated plan needs]"),
    click.option("--stages", type=options.COUNT, help="Exactly so many stages.  [default: the best number]"),
    click.option("--max-replicas", type=options.COUNT, help="At most so many replicas of a stage."),
    click.option("--equal-replicas", is_flag=True, help="Every stage has as many replicas: parallel pipelines, as PipeDream-2BW has them."),
    click.option("--devices", type=options.COUNT, help="Use at most so many devices."),
    click.option("--pin", "pins", metavar="LAYER=STAGE", multiple=True, help="This layer is in this stage, from 0; may be repeated."),
    click.option("--together", metavar="LAYER,LAYER", multiple=True, help="These layers share a stage; may be repeated."),
    click.option("--objective", type=click.Choice(("throughput", "devices", "memory")), default="throughput", show_default=True,
                 help="The fastest plan, or of those that are fast enough the one with the fewest devices or least memory."),
    click.option("--min-samples-per-s", type=options.RATE, metavar="RATE", help="What a plan must be predicted to reach."),
    click.option("--time-limit", type=options.SECONDS, default=60.0, show_default=True, metavar="SECONDS",
                 help="After this, give the best plan found with its gap."),
    click.option("--cost-model", type=click.Choice(COST_MODELS), default="measured", show_default=True,
                 help="What a plan costs: our formulas, or those of the original PipeDream."),
)


def decision_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare them; the command gets them as keywords, to be passed on to :func:`wanted`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def wanted(*, pins: tuple[str, ...], together: tuple[str, ...], time_limit: float, **others: Any) -> PlanOptions:
    """The planner's options.

    Raises:
        BadInput: a ``--pin`` or ``--together`` that is not of its form.
    """
    from planner.options import PlanOptions

    return PlanOptions(pins=tuple(_pin(text) for text in pins), together=tuple(_group(text) for text in together),
                       time_limit_s=time_limit, **others)


def _pin(text: str) -> tuple[str, int]:
    name, equals, stage = text.rpartition("=")
    if not equals or not name or not (stage.isascii() and stage.isdigit() and len(stage) < 10):
        raise BadInput(f"--pin {text!r} is not LAYER=STAGE", hint="write for example --pin blocks.3=1: stages count from 0")
    return name, int(stage)


def _group(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(names) < 2 or not all(names):
        raise BadInput(f"--together {text!r} is not two or more layers", hint="write for example --together embedding,head")
    return names
