"""The rules of the house: imports run one way, files stay small, and ``--help`` is light.

Proven twice: from the source (every import statement, those inside functions included) and by running.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "pulp", "networkx", "numpy", "highspy", "rich")
SOURCES = sorted(path for folder in ("planner", "launcher", "pdcli", "profiles") for path in (ROOT / folder).rglob("*.py"))

# package -> what it may import beyond the standard library
ALLOWED = {
    "planner/spec": {"planner.spec"},
    "planner": {"planner", "networkx", "numpy", "pulp", "highspy", "profiles", "tomli"},
    "launcher": {"launcher", "planner.spec", "torch"},
    "pdcli": {"pdcli", "planner", "launcher", "profiles", "click", "rich"},
    "profiles": set(),
}


def package_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return "planner/spec" if relative.parts[:2] == ("planner", "spec") else relative.parts[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement; ``from a import b`` counts as ``a.b`` where that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                candidate = ROOT.joinpath(*full.split("."))
                yield node.lineno, full if candidate.is_dir() or candidate.with_suffix(".py").is_file() else str(node.module)


def allowed(module: str, package: str) -> bool:
    if module.split(".")[0] in sys.stdlib_module_names:
        return True
    return any(module == prefix or module.startswith(prefix + ".") for prefix in ALLOWED[package])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_one_way(path: Path) -> None:
    package = package_of(path)
    wrong = [f"line {line}: {module}" for line, module in imported(path) if not allowed(module, package)]
    assert not wrong, f"{package} may import the standard library and {sorted(ALLOWED[package])} only"


def test_the_solver_is_used_where_the_program_is_written_only() -> None:
    users = {path.relative_to(ROOT).as_posix() for path in SOURCES
             for _, module in imported(path) if module.split(".")[0] in ("pulp", "highspy")}
    programs = {"planner/search/ilp.py", "planner/search/coarse.py", "planner/published/path_program.py",
                "planner/model/min_cuts.py"}  # each writes a program
    assert {"planner/search/ilp.py", "planner/solver.py"} <= users <= programs | {"planner/solver.py"}


def test_heavy_imports_of_the_commands_are_inside_functions() -> None:
    for path in (ROOT / "pdcli").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                heavy = [name for name in names if name.split(".")[0] in (*HEAVY, "launcher")]
                assert not heavy, f"{path.name}:{node.lineno} imports {heavy} at the top"


def test_every_folder_of_sources_is_a_package() -> None:
    folders = {path.parent for path in SOURCES}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()], "it would not be installed"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_are_small_typed_and_of_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400, "one idea a file, 400 lines at most"
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not tree.body, "a module says what it is for"
    assert not re.search(r"(?<![\w.])/(work|root|home|tmp)/", text), "a path of one machine"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.returns is not None, f"line {node.lineno}: {node.name} has no return type"


def loaded_by(code: str, *, block: tuple[str, ...] = ()) -> set[str]:
    """Top-level modules in memory after ``code`` ran in a fresh interpreter; importing one of ``block`` fails."""
    prelude = f"import sys\nfor name in {block!r}: sys.modules[name] = None\n"
    ending = "\nprint('LOADED', *sorted({name.split('.')[0] for name, module in sys.modules.items() if module is not None}))"
    done = subprocess.run([sys.executable, "-c", prelude + code + ending], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def importing(folder: str) -> str:
    """Python text that imports every module of ``folder``."""
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in sorted((ROOT / folder).rglob("*.py")) if path.stem[:2] != "__"]
    return "".join(f"import {'.'.join(part)}\n" for part in parts)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_is_light(arguments: list[str]) -> None:
    loaded = loaded_by(f"from pdcli.main import main\nassert main({arguments!r}) == 0")
    assert "click" in loaded
    assert not loaded.intersection(HEAVY)


def test_spec_runs_on_the_standard_library_alone() -> None:
    loaded = loaded_by(importing("planner/spec"))
    assert loaded - {"planner"} <= set(sys.stdlib_module_names) | {"__main__"} | loaded_by("pass")


def test_planning_runs_without_torch() -> None:
    loaded = loaded_by(importing("planner"), block=("torch", "click", "rich"))
    assert "planner" in loaded


def test_training_runs_without_the_planner_and_the_commands() -> None:
    loaded = loaded_by(importing("launcher"), block=("pulp", "highspy", "click"))
    # torch itself may import rich, so that one is left to the source check above
    assert "torch" in loaded and not loaded.intersection({"pulp", "highspy", "click", "pdcli"})


def test_one_version() -> None:
    from pdcli import __version__

    done = subprocess.run([sys.executable, "-m", "pdcli", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["pipedream,", "version", __version__]
