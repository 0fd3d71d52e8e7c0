"""The documents say what the code does: their pictures, keys and links are checked."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pdcli.main import COMMANDS
from planner.spec.plan import Plan
from planner.spec.profile import Profile
from planner.spec.schedule import Op, Pipeline, default_in_flight, operations

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def timeline(pipeline: Pipeline) -> list[list[str]]:
    """Cells of each worker when a forward and a backward take one column and an update none, with the version used."""
    last = len(pipeline.replicas) - 1
    todo = {(k, i): list(operations(pipeline, k, i)) for k, r in enumerate(pipeline.replicas) for i in range(r)}
    rows: dict[tuple[int, int], dict[int, str]] = {worker: {} for worker in todo}
    newest, free_at = dict.fromkeys(todo, 0), dict.fromkeys(todo, 0)
    used: dict[tuple[int, int], int] = {}
    ends: dict[Op, int] = {}
    while any(todo.values()):
        for worker, ops in todo.items():
            if not ops:
                continue
            stage, kind, index = op = ops[0]
            if kind == "U":
                peers = [peer for peer in todo if peer[0] == stage]
                if any(op in todo[peer][1:] for peer in peers):
                    continue  # a replica has not come to its update yet
                for peer in peers:
                    free_at[peer] = max(free_at[other] for other in peers)
                    newest[peer] += 1
                    todo[peer].pop(0)
                continue
            own = [Op(stage, "F", index)] if kind == "B" else []
            neighbour = stage - 1 if kind == "F" else stage + 1
            needs = own + ([Op(neighbour, kind, index)] if 0 <= neighbour <= last else [])
            if not all(need in ends for need in needs):
                continue
            start = max([free_at[worker], *(ends[need] for need in needs)])
            version = used.setdefault((stage, index), newest[worker])
            rows[worker][start] = f"{kind}{index}({version})"
            free_at[worker] = ends[op] = start + 1
            ops.pop(0)
    return [[row.get(column, "") for column in range(max(row) + 1)] for row in rows.values()]


def pictures() -> list[list[list[str]]]:
    """The timelines drawn in the document, as cells."""
    found: list[list[list[str]]] = []
    gap = True
    for line in (ROOT / "docs" / "schedule.md").read_text(encoding="utf-8").splitlines():
        if re.match(r"    stage \d", line):
            if gap:
                found.append([])
            found[-1].append([cell.strip() for cell in line.split("|")[1:-1]])
            gap = False
        else:
            gap = True
    return found


def test_the_timelines_are_what_the_schedule_does() -> None:
    chain, replicated = pictures()
    assert chain == timeline(Pipeline((1, 1, 1), default_in_flight((1, 1, 1)), 1, 6))
    assert replicated == timeline(Pipeline((2, 1), default_in_flight((2, 1)), 2, 4))


def test_the_versions_in_the_picture_follow_the_rule() -> None:
    """Microbatch t uses version t - n + 1 + k at stage k of n, or 0."""
    chain, _ = pictures()
    for k, row in enumerate(chain):
        for cell in filter(None, row):
            microbatch, version = map(int, re.findall(r"\d+", cell))
            assert version == max(0, microbatch - len(chain) + 1 + k)


@pytest.mark.parametrize("document", [Profile, Plan], ids=lambda document: document.FORMAT)
def test_every_key_of_a_file_is_described(document: Any) -> None:
    text = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    section = text.partition(f"format `{document.FORMAT}`")[2].partition("\n## ")[0]
    described = {name for row in re.findall(r"^\|(.+?)\|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert described == {field.name for field in dataclasses.fields(document)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_folders_that_are_named_exist(path: Path) -> None:
    for name in re.findall(r"`((?:planner|launcher|pdcli|tests|examples)/[\w/]*[\w.]*)`", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_options_that_are_named_exist() -> None:
    import importlib

    known = {"--help", "--version", "--plain", "--steps", "--seed", "--strict", "--editable"}
    for module in (*COMMANDS.values(), "pdcli.import_cmd"):
        command = importlib.import_module(module).command
        known |= {name for parameter in command.params for name in parameter.opts}
    for path in DOCUMENTS:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?!-)\b", path.read_text(encoding="utf-8")))
        assert named <= known, f"{path.name} names {sorted(named - known)}"
