"""The commands: options, rendering and exit codes. No logic of planning or training is here."""

__version__ = "0.1.0"
