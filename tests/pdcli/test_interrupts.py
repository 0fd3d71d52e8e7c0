"""Ctrl-C during the import of a large library is neither lost nor fatal."""

from __future__ import annotations

import signal

import pytest

from pdcli.interrupts import interrupts_deferred


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
