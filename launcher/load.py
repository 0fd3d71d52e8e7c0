"""From a reference (``FILE.py``, ``FILE.py:function``, ``package.module:function``) to a checked :class:`Job`.

Whatever goes wrong in the user's file becomes one message with their own file and line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import random
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from launcher.blame import one_line, user_line
from launcher.data.microbatches import is_map_style, length_of
from launcher.graph.randomness import stable_hash
from launcher.job import Job, LossScaling
from launcher.precision import half_type
from planner.spec.errors import BadInput, PipedreamError
from planner.spec.profile import JobReference

__all__ = ["load_job"]

_DEFAULT_FACTORY = "job"
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def load_job(reference: JobReference, *, seed: int = 0) -> Job:
    """The job that ``reference`` names, built with its settings.

    torch, ``random`` and numpy are seeded with ``seed`` before the file runs and again before its
    factory is called, so that every process builds the same initial weights. What the file prints
    goes to stderr.

    Raises:
        BadInput: no such file or function, the file or the factory raises, a setting is unknown or has
            the wrong type, or the job cannot be trained (empty data, no full microbatch, ...).
    """
    with contextlib.redirect_stdout(sys.stderr):
        factory, path = _find_factory(reference.target, seed)
        with _blaming(f"the job factory {getattr(factory, '__name__', _DEFAULT_FACTORY)}()", path):
            keywords = _convert_settings(factory, reference)
            _seed_everything(seed)
            result = factory(**keywords)
        with _blaming("the job's data", path):
            return _check(result, reference.target)


def _find_factory(target: str, seed: int) -> tuple[Callable[..., Any], Path | None]:
    place, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    _seed_everything(seed)
    if place.endswith(".py") and "\0" not in place:  # no file has such a name
        path = Path(place).resolve()
        module = _run_file(path, place)
    elif name and place:
        module, path = _import_module(place), None
        if getattr(module, "__file__", None):
            path = Path(str(module.__file__)).resolve()
    else:
        raise BadInput(f"{target!r} does not name a job",
                       hint="give FILE.py, FILE.py:function or package.module:function", code="job_not_found")
    name = name or _DEFAULT_FACTORY
    factory = getattr(module, name, None)
    if not callable(factory):
        own = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__)
        found = f"; functions there: {', '.join(own)}" if own else ""
        raise BadInput(f"{place} has no function {name!r}{found}",
                       hint=f"define `def {name}() -> Job:` there, or name another function: {place}:FUNCTION", code="job_not_found")
    return factory, path


def _run_file(path: Path, place: str) -> types.ModuleType:
    if not path.is_file():
        raise BadInput(f"job file {place} does not exist",
                       hint="give the path of a Python file with a job() function", code="job_not_found")
    # A name of its own, so that a job file called `random.py` hides nothing; its folder is importable as with `python FILE.py`.
    name = f"pipedream_job_{path.stem}_{stable_hash(str(path)):x}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise BadInput(f"{place} cannot be loaded as Python", hint="give a .py file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and pickle look there
    with _blaming(f"job file {place}", path):
        specification.loader.exec_module(module)
    return module


def _import_module(name: str) -> types.ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    except (ModuleNotFoundError, ValueError) as error:
        raise BadInput(f"module {name!r} cannot be found: {error}", hint="install it, or run from the folder that contains it",
                       code="job_not_found") from error
    with _blaming(f"module {name}", None):
        return importlib.import_module(name)


@contextlib.contextmanager
def _blaming(what: str, path: Path | None) -> Iterator[None]:
    """Any exception of the user's code becomes a :class:`BadInput` that names their line."""
    try:
        yield
    except PipedreamError:
        raise
    except SyntaxError as error:
        raise BadInput(f"{what} is not valid Python: {error.msg} at {error.filename}:{error.lineno}: {(error.text or '').strip()}",
                       hint="correct that line", code="job_raised") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and whatever else a file may raise
        line = user_line(error, path)
        raise BadInput(f"{what} raised {one_line(error)}{f' at {line}' if line else ''}",
                       hint=f"correct it there; {path} is imported and the factory called, nothing else" if path else "correct it there",
                       code="job_raised") from error


def _convert_settings(factory: Callable[..., Any], reference: JobReference) -> dict[str, Any]:
    signature = inspect.signature(factory)
    try:
        hints = typing.get_type_hints(factory)
    except Exception:  # an annotation that only exists for type checkers
        hints = {}
    parameters = {name: parameter for name, parameter in signature.parameters.items()
                  if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    known = ", ".join(parameters) or "none"
    converted: dict[str, Any] = {}
    for name, value in reference.settings.items():
        if name in parameters:
            default = parameters[name].default
            expected = hints.get(name, type(default) if default not in (inspect.Parameter.empty, None) else None)
            converted[name] = _convert(name, value, expected)
        elif takes_any:
            converted[name] = value
        else:
            raise BadInput(f"{reference.target} has no setting {name!r}", hint=f"settings known there: {known}", code="unknown_setting")
    missing = [name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in converted]
    if missing:
        raise BadInput(f"{reference.target} needs the setting {missing[0]!r}", hint=f"add --set {missing[0]}=VALUE", code="missing_setting")
    return converted


def _convert(name: str, value: Any, expected: Any) -> Any:
    """``value`` as the annotation (or the default's type) says; unknown annotations leave it alone."""
    options = typing.get_args(expected) if typing.get_origin(expected) in (typing.Union, types.UnionType) else (expected,)
    if type(None) in options and value in ("none", "None", None):
        return None
    if typing.get_origin(expected) is typing.Literal:
        for choice in typing.get_args(expected):
            if str(choice) == str(value):
                return choice
        raise _wrong_type(name, value, f"one of {', '.join(map(repr, typing.get_args(expected)))}")
    for option in options:
        if isinstance(option, type) and type(value) is option:
            return value
    for option in options:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if option is bool:
                return _BOOLEANS[str(value).lower()]
            if option in (int, float):
                if not isinstance(value, bool):
                    return option(value if isinstance(value, str) else str(value))  # int("2.5") is refused, int(2.5) is not
            elif option in (str, Path):
                return option(value)
            elif option not in (type(None),):
                return value
    raise _wrong_type(name, value, " or ".join(getattr(option, "__name__", str(option)) for option in options))


def _wrong_type(name: str, value: Any, expected: str) -> BadInput:
    return BadInput(f"setting {name}={value!r} is not {expected}",
                    hint=f"write --set {name}=VALUE with such a value", code="invalid_setting")


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _check(job: Any, target: str) -> Job:
    """The job, if it can be trained at all."""
    if inspect.iscoroutine(job):
        job.close()  # it would complain later that nobody awaited it
    if not isinstance(job, Job):
        raise BadInput(f"{target} returned {type(job).__name__}, not a Job", hint="return launcher.Job(model=..., train_data=..., ...)")
    if not isinstance(job.model, torch.nn.Module):
        raise BadInput(f"{target}: model is a {type(job.model).__name__}, not a torch.nn.Module", hint="give Job(model=...) a module")
    if not any(parameter.requires_grad for parameter in job.model.parameters()):
        raise BadInput(f"{target}: the model has no trainable parameter", hint="give at least one parameter requires_grad=True")
    for field in ("optimizer", "loss", "scheduler"):
        value = getattr(job, field)
        if not callable(value) and not (field != "optimizer" and value is None):
            raise BadInput(f"{target}: {field} is a {type(value).__name__}, not callable", hint=f"give Job({field}=...) a function")
    if not isinstance(job.metrics, Mapping):
        raise BadInput(f"{target}: metrics is a {type(job.metrics).__name__}, not a dict", hint="give Job(metrics={'name': function})")
    for name, metric in job.metrics.items():
        if not isinstance(name, str) or not callable(metric):
            raise BadInput(f"{target}: metrics has {name!r}: {type(metric).__name__}, not a name and a function",
                           hint="give Job(metrics={'name': function})")
    if job.metrics and job.loss is None:
        raise BadInput(f"{target}: {len(job.metrics)} metrics but no loss function",
                       hint="metrics need Job(loss=...), which separates targets")
    if "loss" in job.metrics:
        raise BadInput(f"{target}: a metric is called 'loss'", hint="give it another name")
    if not isinstance(job.microbatch_size, int) or isinstance(job.microbatch_size, bool) or job.microbatch_size < 1:
        raise BadInput(f"{target}: microbatch_size {job.microbatch_size!r} is not a whole number from 1", hint="use for example 8")
    if not isinstance(job.loader_processes, int) or isinstance(job.loader_processes, bool) or job.loader_processes < 0:
        raise BadInput(f"{target}: loader_processes {job.loader_processes!r} is not a whole number from 0", hint="use 0 for none")
    for field in ("autocast", "transfer_dtype"):
        half_type(getattr(job, field), field)
    if not isinstance(job.loss_scaling, LossScaling | None):
        raise BadInput(f"{target}: loss_scaling is a {type(job.loss_scaling).__name__}, not a LossScaling",
                       hint="use launcher.LossScaling(), or None for none")
    if job.clip_norm is not None and not (isinstance(job.clip_norm, int | float) and 0 < job.clip_norm < float("inf")):
        raise BadInput(f"{target}: clip_norm {job.clip_norm!r} is not a number above 0", hint="use for example 1.0, or None for none")
    if job.train_data is None:
        raise BadInput(f"{target}: train_data is None", hint="give Job(train_data=...) a data set")
    _check_data(f"{target}: train_data", job.train_data)
    if job.evaluation_data is not None:
        _check_data(f"{target}: evaluation_data", job.evaluation_data)
    samples = length_of(job.train_data)
    if samples is not None and job.microbatch_size > samples:
        raise BadInput(f"{target}: a microbatch of {job.microbatch_size} samples is larger than train_data, which has {samples}",
                       hint=f"use a microbatch_size up to {samples}")
    if job.shuffle and not is_map_style(job.train_data):
        raise BadInput(f"{target}: shuffle=True, and train_data is an iterable, whose order is its own",
                       hint="leave shuffle out, and shuffle in the data set: set_epoch(epoch) is called where it has that")
    return job


def _check_data(name: str, data: Any) -> None:
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise BadInput(f"{name} is a {kind}, which makes batches of its own", hint="give the data set that it reads")
    if hasattr(data, "__next__"):
        raise BadInput(f"{name} is a {kind}, an iterator, which can be gone through only once",
                       hint="give an object whose __iter__ begins anew each time, such as a torch IterableDataset")
    if not is_map_style(data) and not hasattr(data, "__iter__"):
        raise BadInput(f"{name} is a {kind} without len() and indexing, and is no iterable", hint="use a torch Dataset or IterableDataset")
    if length_of(data) == 0:
        raise BadInput(f"{name} is empty: 0 samples", hint="check what the data set reads")
