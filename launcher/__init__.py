"""Everything that needs torch: capture, profiling, stage programs, the runtime and its supervision.

A job file needs one name from here: ``from launcher import Job``; one that scales its loss also ``LossScaling``.
"""

from launcher.job import Job, LossScaling

__all__ = ["Job", "LossScaling"]
