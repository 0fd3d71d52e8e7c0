"""Every option that commands share, declared once, and how its text is read.

Values stay the text the user typed until the command runs, so that the command line stored in a file
is the one that was given.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from planner.spec.errors import BadInput

__all__ = ["COUNT", "RATE", "SECONDS", "SETTINGS", "command_line", "common", "oversubscribe", "parse_quantity", "parse_settings", "seed",
           "settings", "threads", "timeout"]

Function = TypeVar("Function", bound=Callable[..., Any])
Setting = str | int | float | bool

SETTINGS: dict[str, Any] = {
    "token_normalize_func": lambda word: word.replace("_", "-"),  # --batch_microbatches is --batch-microbatches
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}



class _Positive(click.FloatRange):
    """Above zero, and finite: a duration that a clock can hold (no ``nan``, no ``inf``)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not number < math.inf:
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


COUNT = click.IntRange(1, 1_000_000_000)
SECONDS = _Positive(0, 1e9, min_open=True)
RATE = _Positive(0, 1e18, min_open=True)

settings = click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="Argument of the job's factory; may be repeated.")
seed = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True,
                    help="Seed of weights, data order and dropout.")
threads = click.option("--threads", type=click.IntRange(1, 4096), help="Threads a worker computes with on a CPU.")
oversubscribe = click.option("--oversubscribe", is_flag=True, help="Allow more workers than this machine has devices.")
timeout = click.option("--timeout", type=SECONDS, default=300.0, show_default=True, metavar="SECONDS",
                       help="A worker silent for so long has failed.")

NOT_STORED = {"as_json", "verbose", "debug", "output", "check", "sweep", "plot", "explain"}  # they do not change what a file holds


def common(function: Function) -> Function:
    """``--json``, ``--verbose`` and ``--debug``; the command gets an :class:`~pdcli.output.Output` first."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, also on failure.")
    @click.option("-v", "--verbose", is_flag=True, help="Say more on stderr.")
    @click.option("--debug", is_flag=True, help="Print the traceback of an error.")
    @functools.wraps(function)
    def run(*, as_json: bool, verbose: bool, debug: bool, **parameters: Any) -> Any:
        from pdcli.output import Output, claimed_stdout

        with claimed_stdout() as stdout:
            return function(Output(stdout, as_json=as_json, verbose=verbose or debug), **parameters)

    return run  # type: ignore[return-value]


def command_line(context: click.Context) -> str:
    """The command line that gives the same file again: what was given, in the order the options are declared."""
    words = ["pipedream", *(context.command.name or "").split()]
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in NOT_STORED or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(parameter.opts[-1])
        else:
            for item in value if parameter.multiple else (value,):
                words += [parameter.opts[-1], str(item)]
    return shlex.join(words)


def parse_settings(pairs: Iterable[str]) -> dict[str, Setting]:
    """``NAME=VALUE`` texts as factory arguments: a whole number, a number, true or false, else text.

    Quotes keep a number as text.

    >>> parse_settings(["layers=6", "rate=1e-3", "tied=true", "name=small", "tag='12'"])
    {'layers': 6, 'rate': 0.001, 'tied': True, 'name': 'small', 'tag': '12'}

    Raises:
        BadInput: no ``=``, or a name that is no Python name.
    """
    result: dict[str, Setting] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--set {pair!r} is not NAME=VALUE", hint="write for example --set layers=6")
        result[name] = _value(text)
    return result


def _value(text: str) -> Setting:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


Number = TypeVar("Number", int, float)


def parse_quantity(option: str, text: str | None, parse: Callable[[str], Number]) -> Number | None:
    """The value of ``option``, read by a function of :mod:`planner.spec.units`; None when it was not given."""
    if text is None:
        return None
    try:
        return parse(text)
    except BadInput as error:
        raise BadInput(f"{option}: {error.message}", hint=error.hint, code=error.code) from error
