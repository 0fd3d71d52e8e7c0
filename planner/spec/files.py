"""Strict JSON documents: a frozen dataclass in, the same dataclass out, and a named place for every fault.

A document is ``{"format": ..., "version": ..., ...fields}`` in the order of the dataclass's fields, so
the same value always gives the same bytes. Unknown and missing keys are errors; a newer version says
"upgrade"; a write goes to a temporary file in the same folder and is renamed over the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import stat
import tempfile
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from planner.spec.errors import BadInput, InvalidFile, InvalidValue, shown

T = TypeVar("T")
_MOST_DIGITS = 4000  # of a whole number: Python reads few more


class Document(Protocol):
    """A dataclass that is stored as a file of its own."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]


D = TypeVar("D", bound=Document)


def read_document(cls: type[D], path: str | os.PathLike[str]) -> D:
    """Read ``path`` as a ``cls``.

    Raises:
        InvalidFile: unreadable, not JSON, another format, a newer version, or a wrong value; the
            message names the file and the place in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidFile(f"cannot read {path}: {reason}", hint=f"give the path of a {cls.FORMAT} file") from error
    return parse_document(cls, text, source=str(path))


_MADE_WITH = {"pipedream-profile": "this is a profile: pipedream plan {}", "pipedream-plan": "this is a plan: pipedream train {}"}


def parse_document(cls: type[D], text: str, *, source: str) -> D:
    """Like :func:`read_document`, for text already read from ``source``."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=_whole_number)
    except (ValueError, RecursionError, InvalidValue) as error:
        job = source.endswith(".py")
        raise InvalidFile(f"{source} is not JSON{' but a job' if job else ''}: {error}",
                          hint=f"pipedream profile {source}" if job else "write the file again with the command that makes it") from error
    if not isinstance(data, dict) or data.get("format") != cls.FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InvalidFile(f"{source} has format {found!r}, not {cls.FORMAT!r}",
                          hint=_MADE_WITH.get(str(found), f"give a {cls.FORMAT} file here").format(source))
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidFile(f"{source}: version {version!r} is not a whole number from 1", hint="write the file again")
    if version > cls.VERSION:
        raise InvalidFile(
            f"{source} has version {version}, this pipedream reads up to {cls.VERSION}",
            hint="upgrade pipedream: pip install --upgrade pipedream",
        )
    body = {key: value for key, value in data.items() if key not in ("format", "version")}
    older = version < cls.VERSION
    try:
        document: D = decode(cls, (_defaults(cls) if older else {}) | body, "")
    except BadInput as error:
        if older:
            raise InvalidFile(f"{source} has version {version}, this pipedream reads {cls.VERSION} ({error.message})",
                              hint="write the file again with the command that makes it") from error
        raise InvalidFile(f"{source}: {error.message}", hint=error.hint or "write the file again with the command that makes it") from error
    return document


def _defaults(cls: type) -> dict[str, Any]:
    """What the keys that came with later versions mean where they are missing."""
    return {field.name: encode(field.default) for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}


def write_document(document: Document, path: str | os.PathLike[str]) -> None:
    """Write ``document`` to ``path`` atomically, with bytes that depend on its value only."""
    write_text(path, document_text(document))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never a part.

    A link stays, and the file it leads to is replaced. A device or a pipe (``/dev/null``) is written to as it is.

    Raises:
        BadInput: the folder cannot be written.
    """
    target = Path(path)
    temporary = None
    try:
        if _takes_writes_only(target):
            target.write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise BadInput(f"cannot write {path}: {error.strerror}", hint="choose another path with -o", code="unwritable") from error


def _takes_writes_only(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def document_text(document: Document) -> str:
    """The text of a document's file."""
    body = {"format": document.FORMAT, "version": document.VERSION} | encode(document)
    text = json.dumps(body, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()  # a file name that is not UTF-8 is in it as the escape of JSON


def digest(document: Document) -> str:
    """SHA-256 of the document's text, in hexadecimal: two files with one digest hold the same value."""
    return hashlib.sha256(document_text(document).encode()).hexdigest()


def encode(value: Any) -> Any:
    """Dataclasses, tuples and dicts as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(cls: Any, data: Any, where: str) -> Any:
    """``data`` as a ``cls``: a dataclass, scalar, ``Literal``, ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``.

    Raises:
        InvalidValue: with the place, such as ``layers[3].forward_us``.
    """
    if dataclasses.is_dataclass(cls) and isinstance(cls, type):
        return _decode_dataclass(cls, data, where)
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, data, where)
    if origin is typing.Literal:
        if not any(data == option and type(data) is type(option) for option in arguments):
            raise InvalidValue(f"{where} is {shown(data)}, not one of {', '.join(map(repr, arguments))}")
        return data
    if origin is tuple:
        _expect(isinstance(data, list), data, where, "a list")
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), data, where, "an object")
        return {key: decode(arguments[1], item, f"{where}.{key}" if where else key) for key, item in data.items()}
    data = _decode_scalar(cls, data, where)
    if cls is int and abs(data) >= 2**63:  # arithmetic with it would leave the range of a float
        raise InvalidValue(f"{where} is {shown(data)}, which is beyond {2**63}")
    return data


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), data, where or "the document", "an object")
    hints = _type_hints(cls)
    prefix = f"{where}." if where else ""
    names = [field.name for field in dataclasses.fields(cls)]
    for key in data:
        if key not in names:
            raise InvalidValue(f"unknown key {prefix}{key}", hint=f"keys known there: {', '.join(names)}")
    values = {}
    for field in dataclasses.fields(cls):
        if field.name in data:
            values[field.name] = decode(hints[field.name], data[field.name], f"{prefix}{field.name}")
        else:
            raise InvalidValue(f"missing key {prefix}{field.name}")
    try:
        return cls(**values)
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error.message}" if where else error.message, hint=error.hint) from error


def _decode_union(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) == 1:
        return decode(rest[0], data, where)
    for option in rest:  # scalars only: the first whose own type matches exactly
        if type(data) is option:
            return _decode_scalar(option, data, where)
    raise InvalidValue(f"{where} is {shown(data)}, not {' or '.join(option.__name__ for option in rest)}")


def _decode_scalar(cls: type, data: Any, where: str) -> Any:
    if cls is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            data = float(data)
        except OverflowError:
            raise InvalidValue(f"{where} is too large") from None
    _expect(type(data) is cls, data, where, {float: "a number", int: "a whole number", str: "text", bool: "true or false"}[cls])
    if isinstance(data, float) and not math.isfinite(data):
        raise InvalidValue(f"{where} is {data}, not a finite number")
    return data


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _expect(condition: bool, data: Any, where: str, expected: str) -> None:
    if not condition:
        raise InvalidValue(f"{where} is {shown(data)}, not {expected}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise InvalidValue(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice")
    return result


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise InvalidValue(f"a whole number of {len(text)} digits is more than a document can hold")
    return int(text)


def _no_constant(name: str) -> Any:
    raise InvalidValue(f"{name} is not a number a document can hold")


def require(condition: bool, message: str, hint: str = "") -> None:
    """Raise :class:`InvalidValue` unless ``condition``; for ``__post_init__``."""
    if not condition:
        raise InvalidValue(message, hint=hint)
