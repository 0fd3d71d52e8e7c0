"""What can go wrong, by meaning. ``pdcli`` maps each class to an exit code and prints it.

Every error says what happened with both numbers (``message``) and what to do next (``hint``);
``code`` is the stable name that ``--json`` prints.
"""

from __future__ import annotations

__all__ = [
    "BadInput",
    "Infeasible",
    "Interrupted",
    "InvalidFile",
    "InvalidValue",
    "Mismatch",
    "PipedreamError",
    "PolicyRefuses",
    "TooSlow",
    "WorkerFailure",
    "shown",
    "told",
]


class PipedreamError(Exception):
    """Anything that is reported to the user as ``error:`` and ``hint:``, without a traceback."""

    code = "unexpected"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code:
            self.code = code

    def __reduce__(self) -> tuple[object, ...]:  # keyword arguments survive pickling
        return (_rebuild, (type(self), self.message, self.hint, self.code))


def _rebuild(cls: type[PipedreamError], message: str, hint: str, code: str) -> PipedreamError:
    return cls(message, hint=hint, code=code)


def told(error: BaseException) -> str:
    """``str(error)``, also of an exception of somebody else's that cannot say it."""
    try:
        return str(error)
    except Exception:
        return ""


def shown(value: object, most: int = 60) -> str:
    """``value`` as a message shows it: what the user wrote, but not all of it where it is long.

    >>> shown("16 potatoes"), shown("9" * 5000)
    ("'16 potatoes'", "'99999999999999999999999999999999999999999999999999999999...")
    """
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "a number of very many digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


class BadInput(PipedreamError):
    """The user's input cannot be used: an option, a job, a model that cannot be captured."""

    code = "bad_input"


class PolicyRefuses(BadInput):
    """A weight policy cannot run on such a pipeline."""

    code = "batch"


class InvalidValue(BadInput):
    """A value type was given something it cannot hold."""

    code = "invalid_value"


class InvalidFile(BadInput):
    """A file is unreadable, of another format, or has a wrong value at a named place."""

    code = "invalid_file"


class Infeasible(PipedreamError):
    """No plan satisfies the limits. ``code`` names the limit that binds."""

    code = "infeasible"


class TooSlow(Infeasible):
    """The fastest plan does not reach the throughput that was asked for; ``samples_per_s`` is what it reaches."""

    code = "too_slow"
    samples_per_s = 0.0


class Mismatch(PipedreamError):
    """A plan does not fit the machine, the job or the checkpoint it is used with."""

    code = "mismatch"


class WorkerFailure(PipedreamError):
    """A worker raised, was killed, or hung."""

    code = "worker_failed"


class Interrupted(PipedreamError):
    """The user stopped the run."""

    code = "interrupted"
