"""``pipedream profile``: what each layer of a job costs on this device."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from pdcli import options
from pdcli.import_cmd import WithImport
from pdcli.interrupts import interrupts_deferred
from pdcli.profile_view import show, totals

if TYPE_CHECKING:
    from pdcli.output import Output

__all__ = ["command"]


@click.command("profile", cls=WithImport, context_settings=options.SETTINGS)
@click.argument("job", metavar="JOB")
@options.settings
@click.option("-o", "--output", default="profile.json", show_default=True, help="File to write.")
@click.option("--microbatch-size", "microbatch_sizes", metavar="N[,N...]",
              help="Samples in a microbatch; of several, plan chooses.  [default: the job's]")
@click.option("--repeats", type=options.COUNT, default=10, show_default=True,
              help="Measurements of each layer; their median counts.")
@options.threads
@options.seed
@options.common
@click.pass_context
def command(context: click.Context, out: Output, job: str, settings: tuple[str, ...], output: str, microbatch_sizes: str | None,
            repeats: int, threads: int | None, seed: int) -> None:
    """Measure every layer of JOB on this device and write a profile.

    JOB is a Python file with a factory called `job`, or package.module:function. What others measured
    is read by `pipedream profile import FILE`.
    """
    from planner.spec.profile import JobReference

    reference = JobReference(job, options.parse_settings(settings))
    sizes = parse_sizes(microbatch_sizes)

    with interrupts_deferred():
        from launcher.profiling.profile import profile_job
        from launcher.supervision.surroundings import folder_kept
        from planner.spec.files import write_document

    with out.progress() as progress, folder_kept():
        profile = profile_job(reference, microbatch_sizes=sizes, repeats=repeats, threads=threads, seed=seed,
                              command=options.command_line(context), on_progress=progress)
    write_document(profile, output)
    show(out, profile)
    next_command = shlex.join(["pipedream", "plan", output])
    message = f"wrote {output}: {len(profile.layers)} layers of {profile.model}"
    out.text(message)
    out.next(next_command)
    out.json(message, next_command, {"profile": output, **totals(profile)})


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """``4,8,16`` as numbers.

    Raises:
        BadInput: not whole numbers from 1 to 1e9, or one twice.
    """
    from planner.spec.errors import BadInput

    parts = [] if text is None else [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= 9 and int(part) >= 1):
            raise BadInput(f"--microbatch-size {text}: {part!r} is not a whole number from 1",
                           hint="write for example --microbatch-size 4,8,16", code="usage")
    sizes = tuple(int(part) for part in parts)
    if len(set(sizes)) < len(sizes):
        raise BadInput(f"--microbatch-size {text} has a size twice", hint="give each size once", code="usage")
    return sizes
