"""Ctrl-C during the import of a large library is neither lost nor fatal."""

from __future__ import annotations

import signal

import click
import pytest

from pdcli.errors import describe
from pdcli.interrupts import Terminated, interrupts_deferred, terminations_raised


@pytest.fixture(autouse=True)
def _default_handler() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    with interrupts_deferred():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_of_the_block_comes_first() -> None:
    with pytest.raises(ModuleNotFoundError), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        raise ModuleNotFoundError("torch")


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_termination_is_an_interruption_and_waits_too() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with terminations_raised():
            with pytest.raises(Terminated, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
            done = False
            with pytest.raises(Terminated), interrupts_deferred():
                signal.raise_signal(signal.SIGTERM)
                done = True
        assert done and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(click.Abort) as caught:  # how click passes it on
        raise click.Abort from Terminated("stopped by SIGTERM")
    failure = describe(caught.value)
    assert (failure.exit_code, failure.message) == (130, "stopped by SIGTERM")
