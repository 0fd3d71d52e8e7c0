"""The smoke run: the installed ``pipedream`` command from profile to a trained model, and how it fails.

    python tests/smoke.py .venv/bin/pipedream

Works in a temporary folder on a small transformer; checks exit codes, ``--json`` and the files made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "bytes_gpt.py"
SMALL = [word for name, value in {"layers": 2, "width": 64, "context": 32, "train_bytes": 100_000, "evaluation_bytes": 2_000}.items()
         for word in ("--set", f"{name}={value}")]
KEYS = {"status", "code", "message", "hint", "exit_code"}
LIMIT_S = 240


class Smoke:
    """Runs commands in one folder and counts what they got right."""

    def __init__(self, command: str, folder: Path) -> None:
        self.command, self.folder = command, folder
        self.passed = 0

    def check(self, what: str, condition: bool, detail: object = "") -> None:
        if not condition:
            raise SystemExit(f"FAILED {what}: {detail}\n{self.passed} passed, 1 failed")
        self.passed += 1

    def run(self, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
        """Run with ``--json``; stdout must be exactly one object that agrees with the exit code."""
        line = " ".join(["pipedream", *arguments])
        start_s = time.monotonic()
        done = subprocess.run([self.command, *arguments, "--json"], cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S,
                              stdin=subprocess.DEVNULL)
        self.check(f"{line}: exit code", done.returncode == exit_code, f"{done.returncode}, not {exit_code}\n{done.stdout}\n{done.stderr}")
        self.check(f"{line}: no traceback", "Traceback" not in done.stderr, done.stderr)
        try:
            body = json.loads(done.stdout)
        except ValueError:
            body = None
        self.check(f"{line}: one JSON object", isinstance(body, dict) and body.keys() >= KEYS, done.stdout)
        assert isinstance(body, dict)
        self.check(f"{line}: exit_code in JSON", body["exit_code"] == exit_code and (body["status"] == "ok") == (exit_code == 0), body)
        self.check(f"{line}: message and hint", bool(body["message"] and body["hint"]), body)
        print(f"ok {exit_code}  {time.monotonic() - start_s:5.1f} s  {line}", flush=True)
        return body


def main(command: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pipedream smoke ") as name:
        smoke = Smoke(str(Path(command).absolute()), Path(name))
        profile = smoke.run("profile", str(EXAMPLE), *SMALL, "--repeats", "2", "-o", "profile.json")
        smoke.check("profile lists layers", profile["layers"] >= 4, profile)
        two = ("--cluster", "1x2", "--intra-bandwidth", "1GB/s")
        plan = smoke.run("plan", "profile.json", *two, "--stages", "2", "-o", "plan.json")
        smoke.check("plan has two stages", len(plan["stages"]) == 2, plan)
        smoke.check("plan predicts", plan["predicted"]["microbatch_us"] > 0, plan)
        smoke.run("plan", "profile.json", *two, "--stages", "2", "-o", "plan.json", "--check")
        differs = smoke.run("plan", "profile.json", *two, "--stages", "1", "-o", "plan.json", "--check", exit_code=1)
        smoke.check("--check says so", differs["code"] == "differs", differs)
        train = smoke.run("train", "plan.json", "--steps", "8", "--run-dir", "run", "--oversubscribe")
        smoke.check("eight updates", train["updates"] == 8, train)
        smoke.check("an evaluation", train["evaluations"][-1]["values"]["loss"] > 0, train)
        for path in ("plan.json", "summary.json", "metrics.jsonl", "trace.json", "weights.pt"):
            smoke.check(f"run directory has {path}", (smoke.folder / "run" / path).is_file(), sorted((smoke.folder / "run").iterdir()))
        json.loads((smoke.folder / "run" / "trace.json").read_text(encoding="utf-8"))
        evaluated = smoke.run("eval", "plan.json", "--resume", "run", "--outputs", "outputs.pt", "--oversubscribe")
        difference = evaluated["values"]["loss"] - train["evaluations"][-1]["values"]["loss"]
        smoke.check("eval finds what train found", abs(difference) < 1e-6, evaluated)
        smoke.check("eval writes outputs", (smoke.folder / "outputs.pt").is_file() and evaluated["outputs"], evaluated)

        smoke.run("profile", "missing.py", exit_code=2)
        smoke.run("plan", "profile.json", "--policy", "no-such", exit_code=2)
        smoke.run("plan", "profile.json", *two, "--memory", "1KiB", "-o", "never.json", exit_code=3)
        smoke.check("no plan was written", not (smoke.folder / "never.json").exists())
        smoke.run("train", "plan.json", "--steps", "1", "--set", "width=32", "--run-dir", "other", exit_code=4)
        smoke.run("eval", "plan.json", "--resume", "run", "--set", "width=32", "--oversubscribe", exit_code=4)
        smoke.run("eval", "plan.json", "--resume", "other", exit_code=2)
        print(f"{smoke.passed} passed, 0 failed")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tests/smoke.py PATH_OF_PIPEDREAM")
    main(sys.argv[1])
