"""Models that others described: one file a format, each read into a :class:`~planner.spec.profile.Profile`."""

from __future__ import annotations

from pathlib import Path

from planner.imports.dnn_partitioning import profile_of, read_dnn_partitioning
from planner.imports.pipedream_graph import read_pipedream_graph
from planner.spec.errors import BadInput
from planner.spec.profile import Profile

__all__ = ["FORMATS", "import_profile"]

FORMATS = ("pipedream-graph", "dnn-partitioning")


def import_profile(path: str, form: str, *, command: str, microbatch_size: int = 1) -> Profile:
    """The profile that ``path`` describes in format ``form``; ``command`` is recorded in it.

    Raises:
        BadInput: an unknown format.
        InvalidFile: the file cannot be read or is malformed; the message names the line or the place.
    """
    if form == "pipedream-graph":
        return read_pipedream_graph(Path(path), command=command, microbatch_size=microbatch_size)
    if form == "dnn-partitioning":
        return profile_of(read_dnn_partitioning(Path(path)), command=command, microbatch_size=microbatch_size)
    raise BadInput(f"{form!r} is not a format that can be imported", hint=f"give one of: {', '.join(FORMATS)}")
