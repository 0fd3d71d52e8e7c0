"""One of our workers, started like the others' processes: ``python -m benchmarks.pair.ours TASK``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from launcher.supervision.process import work

if __name__ == "__main__":
    work(pickle.loads(Path(sys.argv[1]).read_bytes()))  # written by the benchmark a moment ago
