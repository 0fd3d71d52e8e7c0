"""A model that cannot be captured, in plain words: the user's own line, the reason, what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from launcher.blame import one_line, user_line
from planner.spec.errors import BadInput, PipedreamError, told

__all__ = ["LostGradient", "explain"]


class LostGradient(Exception):
    """The model changes gradients in a way that a graph of its forward does not show."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@contextlib.contextmanager
def explain(what: str, step: torch.nn.Module | None = None, tensors: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Turn an exception of the block into :class:`BadInput`; ``step`` is run plainly to tell whose fault it is."""
    try:
        yield
    except PipedreamError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, when the user's code calls sys.exit()
        raise _explained(what, error, step, tensors) from error


def _explained(what: str, error: BaseException, step: torch.nn.Module | None, tensors: Sequence[torch.Tensor]) -> BadInput:
    if step is not None:
        own = _own_failure(step, tensors)
        if isinstance(own, PipedreamError):
            return BadInput(own.message, hint=own.hint, code=own.code)
        if own is not None:
            return BadInput(f"{what} fails on its own data with {one_line(own)}{_at(own)}",
                            hint="correct the model or the data", code="model_raised")
        reason, hint = _reason(error)
        return BadInput(f"{what} cannot be captured as one graph: {reason}{_at(error)}", hint=hint, code="cannot_capture")
    return BadInput(f"{what} raised {one_line(error)}{_at(error)}", hint="correct it there", code="job_raised")


def _at(error: BaseException) -> str:
    line = user_line(error)
    return f", at {line}" if line else ""


def _own_failure(step: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> BaseException | None:
    """The exception of a plain call, with buffers put back as they were."""
    saved = [(buffer, buffer.detach().clone()) for buffer in step.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            step(*(tensor.clone() for tensor in tensors))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
    return None


def _reason(error: BaseException) -> tuple[str, str]:
    if isinstance(error, LostGradient):
        return told(error), error.hint
    name, text = type(error).__name__, told(error)
    if "DataDependent" in name or "data-dependent" in text or "unbacked" in text.lower():
        return ("what happens next depends on the values of a tensor",
                "choose without a branch (torch.where, masking, torch.clamp), or decide on shapes or settings instead of values")
    if "numpy" in text.lower():
        return "it leaves torch for numpy", "use the torch operation instead"
    return one_line(error), "use ordinary torch operations there; see what torch.export supports"
