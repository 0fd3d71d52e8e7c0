"""What every test shares: published inputs, when they are there, and a quiet environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests that run together must not fight for cores


settings.register_profile("pipedream", deadline=None)  # no test asserts a wall-clock time
settings.load_profile("pipedream")


@pytest.fixture(scope="session")
def published_data() -> Path:
    """The folder of published inputs; the test skips where there is none."""
    path = Path(os.environ.get("PIPEDREAM_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip("published inputs are absent: set PIPEDREAM_DATA")
    return path
