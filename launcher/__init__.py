"""Everything that needs torch: capture, profiling, stage programs, the runtime and its supervision.

A job file needs one name from here: ``from launcher import Job``.
"""

from launcher.job import Job

__all__ = ["Job"]
