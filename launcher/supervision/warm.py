"""Imported by the fork server before it forks a worker: what every worker would otherwise load for itself.

The first export of any model imports more than a thousand modules, about two seconds. Done here once,
while the launcher checks the plan, it costs the workers nothing.
"""

from __future__ import annotations

import contextlib
import io

import torch

import launcher.supervision.process  # noqa: F401 - all of the launcher

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
