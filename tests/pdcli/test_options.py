"""How options are read, and the command line that files store."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcli import options
from pdcli.plan_cmd import command as plan_command
from pdcli.profile_cmd import command as profile_command
from pdcli.train_cmd import command as train_command
from planner.spec.errors import BadInput
from planner.spec.units import parse_bandwidth, parse_bytes


def stored(command: click.Command, arguments: list[str]) -> str:
    context = command.make_context(command.name, list(arguments))
    return options.command_line(context)


def test_defaults_and_what_does_not_change_the_file_are_not_stored() -> None:
    arguments = ["p.json", "--json", "-v", "--debug", "-o", "elsewhere.json", "--check"]
    assert stored(plan_command, arguments) == "pipedream plan p.json"


def test_what_was_given_is_stored_in_the_order_of_declaration() -> None:
    first = stored(plan_command, ["--policy", "2bw", "my profile.json", "--cluster=2x4", "--intra_bandwidth", "12 GB/s"])
    second = stored(plan_command, ["--intra-bandwidth=12 GB/s", "--cluster", "2x4", "my profile.json", "--policy=2bw"])
    assert first == second == "pipedream plan 'my profile.json' --cluster 2x4 --intra-bandwidth '12 GB/s' --policy 2bw"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(st.dictionaries(st.sampled_from(["layers", "width", "name"]), TEXT))
def test_the_stored_command_line_reads_back_the_same(given_settings: dict[str, str]) -> None:
    arguments = ["job.py", *(word for name, value in given_settings.items() for word in ("--set", f"{name}={value}"))]
    line = stored(profile_command, arguments)
    again = shlex.split(line)
    assert again[:2] == ["pipedream", "profile"]
    assert stored(profile_command, again[2:]) == line
    assert profile_command.make_context("profile", again[2:]).params["settings"] == tuple(f"{k}={v}" for k, v in given_settings.items())


@pytest.mark.parametrize(
    ("text", "value"),
    [("6", 6), ("-3", -3), ("1e-3", 1e-3), ("true", True), ("False", False), ("small", "small"), ("", ""), ("'6'", "6"),
     ('"x y"', "x y"), ("a=b", "a=b")],
)
def test_settings_have_the_type_they_look_like(text: str, value: Any) -> None:
    read = options.parse_settings([f"name={text}"])["name"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("pair", ["layers", "=6", "two words=1", "1x=2", ""])
def test_a_setting_without_name_or_value_is_refused(pair: str) -> None:
    with pytest.raises(BadInput, match="NAME=VALUE"):
        options.parse_settings([pair])


def test_quantities_name_their_option_in_errors() -> None:
    assert options.parse_quantity("--memory", "16GB", parse_bytes) == 16_000_000_000
    assert options.parse_quantity("--intra-bandwidth", None, parse_bandwidth) is None
    with pytest.raises(BadInput, match="--memory: '16XB'") as caught:
        options.parse_quantity("--memory", "16XB", parse_bytes)
    assert "GiB" in caught.value.hint


@pytest.mark.parametrize("command", [profile_command, plan_command, train_command], ids=lambda command: command.name)
def test_every_command_has_the_common_options_and_hyphens(command: click.Command) -> None:
    names = [name for parameter in command.params for name in parameter.opts if isinstance(parameter, click.Option)]
    assert {"--json", "--verbose", "-v", "--debug"} <= set(names)
    assert not [name for name in names if "_" in name]
    assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))
