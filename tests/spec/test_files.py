"""Documents: what is written is read back, and every fault names its place."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.spec.errors import BadInput, InvalidFile
from planner.spec.files import digest, document_text, parse_document, read_document, require, write_document, write_text


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    load_us: float

    def __post_init__(self) -> None:
        require(self.load_us >= 0, f"load_us {self.load_us} is below 0")


@dataclasses.dataclass(frozen=True)
class Thing:
    FORMAT: ClassVar[str] = "test-thing"
    VERSION: ClassVar[int] = 2

    count: int
    mode: Literal["a", "b"]
    limit_bytes: int | None
    parts: tuple[Part, ...]
    settings: dict[str, str | int | float | bool]


things = st.builds(
    Thing,
    count=st.integers(-(2**63) + 1, 2**63 - 1),
    mode=st.sampled_from(["a", "b"]),
    limit_bytes=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    parts=st.lists(st.builds(Part, name=st.text(), load_us=st.floats(0, 1e12))).map(tuple),
    settings=st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.floats(-1e6, 1e6)),
)


def valid() -> dict[str, object]:
    return {
        "format": "test-thing", "version": 2, "count": 1, "mode": "a", "limit_bytes": None,
        "parts": [{"name": "p", "load_us": 1.5}], "settings": {},
    }


@dataclasses.dataclass(frozen=True)
class Grown:
    """``count`` came with version 3."""

    FORMAT: ClassVar[str] = "test-grown"
    VERSION: ClassVar[int] = 3

    name: str
    count: int = 7


def test_an_older_file_lacks_only_what_has_a_default() -> None:
    assert parse_document(Grown, '{"format": "test-grown", "version": 2, "name": "a"}', source="x") == Grown("a", 7)
    with pytest.raises(InvalidFile, match="missing key count"):
        parse_document(Grown, '{"format": "test-grown", "version": 3, "name": "a"}', source="x")
    with pytest.raises(InvalidFile, match=r"x has version 1, this pipedream reads 3 \(missing key name\)"):
        parse_document(Grown, '{"format": "test-grown", "version": 1}', source="x")


@given(things)
def test_reading_what_was_written_gives_the_same_value(thing: Thing) -> None:
    text = document_text(thing)
    again = parse_document(Thing, text, source="x")
    assert again == thing
    assert document_text(again) == text


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"count": "1"}, "count is '1', not a whole number"),
        ({"count": True}, "count is True"),
        ({"count": 1.0}, "count is 1.0"),
        ({"mode": "c"}, "mode is 'c'"),
        ({"parts": [{"name": "p", "load_us": 1}, {"name": "q", "load_us": -1}]}, "parts[1]: load_us -1.0 is below 0"),
        ({"parts": [{"name": "p"}]}, "missing key parts[0].load_us"),
        ({"parts": [{"name": "p", "load_us": 1, "extra": 0}]}, "unknown key parts[0].extra"),
        ({"parts": {}}, "parts is {}, not a list"),
        ({"settings": {"k": [1]}}, "settings.k is [1]"),
        ({"surprise": 1}, "unknown key surprise"),
        ({"limit_bytes": 1.5}, "limit_bytes is 1.5"),
        ({"version": 3}, "version 3, this pipedream reads up to 2"),
        ({"version": 0}, "version 0"),
        ({"version": True}, "version True"),
        ({"format": "other"}, "format 'other', not 'test-thing'"),
    ],
)
def test_a_fault_names_its_place(change: dict[str, object], place: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        parse_document(Thing, json.dumps(valid() | change), source="thing.json")
    assert place in caught.value.message
    assert "thing.json" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"a": 1, "a": 2}', '{"count": NaN}', "[" * 100_000, '{"count": 1e999}',
     "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")],
)
def test_what_is_not_a_document_is_refused(text: str) -> None:
    with pytest.raises(InvalidFile):
        parse_document(Thing, text, source="thing.json")


def test_infinity_hidden_in_a_number_is_refused() -> None:
    text = json.dumps(valid()).replace("1.5", "1e999")
    with pytest.raises(InvalidFile, match="load_us"):
        parse_document(Thing, text, source="thing.json")


def test_a_whole_number_too_large_for_a_float_is_refused() -> None:
    text = json.dumps(valid()).replace("1.5", "1" + "0" * 400)
    with pytest.raises(InvalidFile, match="load_us is too large"):
        parse_document(Thing, text, source="thing.json")


def test_unreadable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "binary.json", Path("a\0b")):
        with pytest.raises(InvalidFile):
            read_document(Thing, path)


def test_writing_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    thing = Thing(1, "a", None, (), {})
    path = tmp_path / "deep" / "thing.json"
    write_document(thing, path)
    write_document(dataclasses.replace(thing, count=2), path)
    assert read_document(Thing, path).count == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["thing.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BadInput, match="cannot write"):
        write_document(Thing(1, "a", None, (), {}), tmp_path / "file" / "thing.json")
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_digest_follows_the_value() -> None:
    thing = Thing(1, "a", None, (), {})
    assert digest(thing) == digest(dataclasses.replace(thing))
    assert digest(thing) != digest(dataclasses.replace(thing, count=2))


def test_a_number_that_no_arithmetic_survives_is_refused_with_its_place() -> None:
    data = valid() | {"count": 10**400}
    with pytest.raises(InvalidFile, match=r"count is 1000.*beyond"):
        parse_document(Thing, json.dumps(data), source="x")
    assert parse_document(Thing, json.dumps(valid() | {"settings": {"big": 10**40}}), source="x").settings == {"big": 10**40}


def test_a_file_name_that_is_not_utf_8_is_written_and_read_back(tmp_path: Path) -> None:
    thing = Thing(1, "a", None, (Part(os.fsdecode(b"\xff.py"), 1.0),), {})
    write_document(thing, tmp_path / "thing.json")
    assert read_document(Thing, tmp_path / "thing.json") == thing
    assert (tmp_path / "thing.json").read_text(encoding="utf-8") == document_text(thing)
    assert len(digest(thing)) == 64


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "whole")
        assert os.read(reading, 100) == b"whole"
    finally:
        os.close(reading)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_and_leads_to_the_new_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
