"""``pipedream profile import``: a profile from what others measured."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdcli import options
from pdcli.profile_view import show, totals

if TYPE_CHECKING:
    from pdcli.output import Output

__all__ = ["WithImport", "command"]

FORMATS = ("pipedream-graph", "dnn-partitioning")


@click.command("profile import", context_settings=options.SETTINGS)
@click.argument("file", metavar="FILE")
@click.option("--from", "form", type=click.Choice(FORMATS), required=True, help="What wrote FILE.")
@click.option("-o", "--output", default="profile.json", show_default=True, help="File to write.")
@click.option("--microbatch-size", type=options.COUNT, default=1, show_default=True, help="Samples in the microbatch that was measured.")
@options.common
@click.pass_context
def command(context: click.Context, out: Output, file: str, form: str, output: str, microbatch_size: int) -> None:
    """Make a profile of FILE, a model that somebody else measured.

    \b
    pipedream-graph    the original PipeDream's graph.txt
    dnn-partitioning   JSON inputs of "Efficient Algorithms for Device Placement of DNN Graph Operators"

    What FILE does not say is assumed: layers save their outputs, and updates cost nothing.
    """
    from planner.imports import import_profile
    from planner.spec.files import write_document

    profile = import_profile(file, form, command=options.command_line(context), microbatch_size=microbatch_size)
    write_document(profile, output)
    show(out, profile)
    next_command = shlex.join(["pipedream", "plan", output, "--cluster", "8", "--intra-bandwidth", "10GB/s"])
    message = f"wrote {output}: {len(profile.layers)} layers of {Path(file).name}"
    out.text(message)
    out.next(next_command)
    out.json(message, next_command, {"profile": output, **totals(profile)})


class WithImport(click.Command):
    """``profile JOB`` as ever, and ``profile import FILE``."""

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        if args[:1] == ["import"]:
            return command.make_context(f"{info_name} import", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
