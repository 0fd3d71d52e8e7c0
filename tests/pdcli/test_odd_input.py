"""Odd input of every kind: a right plan, or an error that names what is wrong; never a traceback, exit code 1 or a hang."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.spec.files import document_text, read_document
from planner.spec.plan import Plan
from tests.pdcli.conftest import Run
from tests.pdcli.samples import profile

Edit = Callable[[dict[str, Any]], object]

SERVERS = ("--cluster", "2x2", "--intra-bandwidth", "12GB/s", "--inter-bandwidth", "10Gbit/s")
LONG = "9" * 5000
MOST_CHARACTERS = 800  # of a message that can be read
BASE: dict[str, Any] = json.loads(document_text(profile()))


def planned(run: Run, *arguments: str) -> Plan:
    """The plan that the command line makes, which must be one of finite numbers that uses every layer once."""
    result = run("plan", "profile.json", *arguments)
    assert result.exit_code == 0, result.stderr
    plan = read_document(Plan, "plan.json")
    layers = [layer["name"] for layer in json.loads(Path("profile.json").read_text(encoding="utf-8"))["layers"]]
    assert [name for stage in plan.stages for name in stage.layers] == layers
    slowest = max([stage.microbatch_us for stage in plan.predicted.stages] + [link.microbatch_us for link in plan.predicted.links])
    assert math.isfinite(slowest) and plan.predicted.microbatch_us == pytest.approx(slowest)
    assert plan.solver.bound_us <= plan.predicted.microbatch_us * (1 + 1e-9)
    return plan


def refused(run: Run, *arguments: str, exit_code: int = 2) -> str:
    message, hint = run("plan", "profile.json", *arguments).failed(exit_code)
    assert len(message) <= MOST_CHARACTERS and len(hint) <= MOST_CHARACTERS and "bug" not in hint
    assert "sys.set_int" not in message
    return message


def write_profile(edit: Edit = lambda data: None) -> None:
    data = copy.deepcopy(BASE)
    edit(data)
    Path("profile.json").write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture(autouse=True)
def _profile(run: Run) -> None:
    write_profile()


def every(ending: str, value: float, *lists: str) -> Edit:
    """Set all keys that end so, of layers and tensors."""
    def edit(data: dict[str, Any]) -> None:
        for entry in [entry for name in lists or ("layers", "tensors") for entry in data[name]]:
            entry.update({key: value for key in entry if key.endswith(ending)})
    return edit


def chain_of(count: int) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        layer, tensor = data["layers"][0], data["tensors"][0]
        data["layers"] = [{**layer, "name": f"l{i}"} for i in range(count)]
        data["tensors"] = [{**tensor, "name": f"t{i}", "source": i, "consumers": [i + 1]} for i in range(count - 1)]
    return edit


def named(*names: str) -> Edit:
    return lambda data: [layer.update(name=name) for layer, name in zip(data["layers"], names, strict=False)]


def tensor(source: int, consumer: int) -> Edit:
    return lambda data: data["tensors"].append({**data["tensors"][0], "name": "odd", "source": source, "consumers": [consumer]})


@pytest.mark.parametrize(("edit", "says"), [
    (lambda data: data.update(layers=[], tensors=[]), "layers is empty"),
    (tensor(3, 1), "consumer 1 is not after source 3"),
    (tensor(3, 3), "consumer 3 is not after source 3"),
    (tensor(3, 6), "layer 6, there are 6"),
    (named("same", "same"), "'same' appears twice"),
    (named(""), "name is empty"),
    (lambda data: data.update(tied=[{"name": "w", "parameter_bytes": 4, "layers": [0, 9]}]), "not among 6 layers"),
], ids=["empty graph", "backwards tensor", "self loop", "no such layer", "duplicate names", "empty name", "tied to nothing"])
def test_graphs_that_are_none(run: Run, edit: Edit, says: str) -> None:
    write_profile(edit)
    assert says in refused(run, *SERVERS)


@pytest.mark.parametrize("name", ["forward_us", "update_us", "parameter_bytes", "saved_bytes", "forward_bytes", "gradient_bytes"])
@pytest.mark.parametrize("value", ["1e308", "1e400", "-1e308", "-1", "NaN", "Infinity", "-Infinity", LONG, "1" + "0" * 400, "true",
                                   "null", '"5"', "[]"], ids=lambda text: text[:10])
def test_numbers_in_a_profile_that_are_none(run: Run, name: str, value: str) -> None:
    text = json.dumps(BASE)
    start = text.index(f'"{name}": ') + len(f'"{name}": ')
    end = text.index("}" if name == "gradient_bytes" else ",", start)
    Path("profile.json").write_text(text[:start] + value + text[end:])
    assert "profile.json" in refused(run, *SERVERS)


@pytest.mark.parametrize("edit", [
    every("_us", 0.0), every("_bytes", 0), lambda data: (every("_us", 0.0)(data), every("_bytes", 0)(data)), every("_us", 1e-300),
    every("forward_us", 9.9e17, "layers"), every("parameter_bytes", 10**17, "layers"), every("saved_bytes", 10**17, "layers"),
    every("forward_bytes", 10**18 - 1, "tensors"), chain_of(1), lambda data: data.update(tensors=[]),
    lambda data: data.update(tied=[{"name": "w", "parameter_bytes": 4, "layers": [0, 5]}]),
    named("слой", "层", "🙂", "e\u0301", "\u202ertl", "a b"), named("[red]x[/]", "--json", "a=b"), named("x" * 10_000),
    named("\u001b[31mred\n", "tab\t"),
], ids=["zero times", "zero bytes", "zero times and bytes", "tiny times", "large times", "large weights", "large activations",
        "large tensors", "one layer", "no tensors", "ends tied", "unicode names", "names like options", "a name of 10 kB",
        "control characters"])
def test_odd_models_are_planned(run: Run, edit: Edit) -> None:
    write_profile(edit)
    plan = planned(run, *SERVERS)
    if all(entry[key] == 0 for entry in json.loads(Path("profile.json").read_text())["layers"] for key in entry if key.endswith("_us")):
        assert plan.predicted.microbatch_us == 0


def test_a_need_that_no_file_can_hold(run: Run) -> None:
    write_profile(every("parameter_bytes", 10**18 - 1, "layers"))
    assert "bytes on a device" in refused(run, *SERVERS, "--stages", "1")


@pytest.mark.parametrize("cluster", ["1", "1x1", "1x1x1"])
def test_one_device(run: Run, cluster: str) -> None:
    assert planned(run, "--cluster", cluster, *(("--inter-bandwidth", "1GB/s") if "x1x" in cluster else ())).worker_count == 1


@pytest.mark.parametrize("cluster", ["100000", "1000000", "1000000x1", "1000x100"])
@pytest.mark.parametrize("cost_model", ["measured", "pipedream-2019"])
def test_more_devices_than_a_plan_is_made_for(run: Run, cluster: str, cost_model: str) -> None:
    links = ("--intra-bandwidth", "1GB/s", *(("--inter-bandwidth", "1GB/s") if "x" in cluster else ()))
    assert "at most 16384" in refused(run, "--cluster", cluster, *links, "--cost-model", cost_model)


def test_a_few_of_very_many_devices(run: Run) -> None:
    assert planned(run, "--cluster", "100000", "--intra-bandwidth", "1GB/s", "--devices", "3").worker_count <= 3
    assert "4096" in refused(run, "--cluster", "100000x1", "--inter-bandwidth", "1GB/s", "--devices", "3")


@pytest.mark.parametrize("cluster", ["0", "0x4", "4x0", "1000001", "1001x1000", LONG, f"{LONG}x2", "2x2x2x2x2", "-1", "x", "2x",
                                     "٤", "nan"], ids=lambda text: text[:12])
def test_clusters_that_are_none(run: Run, cluster: str) -> None:
    assert "cluster" in refused(run, f"--cluster={cluster}", "--intra-bandwidth", "1GB/s", "--inter-bandwidth", "1GB/s")


@pytest.mark.parametrize("option", ["--memory", "--intra-bandwidth", "--inter-bandwidth"])
@pytest.mark.parametrize("value", ["1e300GB/s", "1e300GB", "1e400GB", "-1GB", "nan", "inf", "0", "0GB/s", "0GB", f"{LONG}GB/s", f"{LONG}GB",
                                   "", "GB", "1 2 GB"], ids=lambda text: text[:12])
def test_quantities_that_are_none(run: Run, option: str, value: str) -> None:
    assert option in refused(run, *SERVERS, f"{option}={value}")


@pytest.mark.parametrize(("text", "same"), [("12gb/s", "12GB/s"), ("12 Gb/s", "12GB/s"), ("10gbit/s", "10Gbit/s"), ("10GBPS", "10Gbit/s"),
                                            ("1gib/s", "1GiB/s")])
def test_units_may_be_written_in_any_case(run: Run, text: str, same: str) -> None:
    plans = [planned(run, "--cluster", "4", "--intra-bandwidth", rate).predicted for rate in (text, same)]
    assert plans[0] == plans[1]


def test_a_rate_without_its_second_is_corrected_and_units_are_spelled_as_they_are_written(run: Run) -> None:
    assert run("plan", "profile.json", "--cluster", "4", "--intra-bandwidth", "12GB").failed(2)[1] == "did you mean '12GB/s'?"
    assert "GB, TB" in run("plan", "profile.json", "--memory", "16 potatoes").failed(2)[1]


@pytest.mark.parametrize("option", ["--stages", "--devices", "--max-replicas", "--batch-microbatches"])
@pytest.mark.parametrize("value", ["0", "-1", "1e9", LONG, "nan", "x", "1.5", ""], ids=lambda text: text[:8])
def test_counts_that_are_none(run: Run, option: str, value: str) -> None:
    assert option in refused(run, *SERVERS, f"{option}={value}")


@pytest.mark.parametrize("option", ["--devices", "--max-replicas"])
def test_a_limit_beyond_what_there_is_limits_nothing(run: Run, option: str) -> None:
    assert planned(run, *SERVERS, f"{option}=999999999").predicted == planned(run, *SERVERS).predicted


def test_a_batch_of_a_billion_microbatches(run: Run) -> None:
    assert planned(run, *SERVERS, "--batch-microbatches", "999999999").batch_microbatches == 999_999_999


TOML = '''
[[device_types]]
name = "d"
{kind}

[[nodes]]
name = "device"
device = "d"
{node}
'''


def write_cluster(kind: str = "", node: str = 'count = 4\nbandwidth = "1 GB/s"') -> None:
    Path("odd.toml").write_text(TOML.format(kind=kind, node=node), encoding="utf-8")


@pytest.mark.parametrize(("key", "value"), [
    (key, value) for key in ("count", "speed", "memory", "bandwidth", "latency")
    for value in ("1e308", "1" + "0" * 400, LONG, f"-{LONG}", "nan", "inf", "-1", "0", "true", '"4"', "10000000", "2020-01-01", "[]")
    if (key, value) not in (("speed", "10000000"), ("memory", '"4"'))  # a fast device, and one of four bytes
], ids=lambda text: text[:10])
def test_numbers_in_a_cluster_that_are_none(run: Run, key: str, value: str) -> None:
    rest = {"count": 'bandwidth = "1 GB/s"', "bandwidth": "count = 4"}.get(key, 'count = 4\nbandwidth = "1 GB/s"')
    in_kind = key in ("speed", "memory")
    write_cluster(f"{key} = {value}" if in_kind else "", rest if in_kind else f"{rest}\n{key} = {value}")
    message = refused(run, "--cluster", "odd.toml")
    assert "odd.toml" in message and (key in message or "digits" in message)


@pytest.mark.parametrize("text", ['"1e300 GB/s"', '"1e400 GB/s"', '"0 GB/s"', '"-1 GB/s"', '"1e-300 GB/s"', '""', '"nan GB/s"',
                                  f'"{LONG} GB/s"'],
                         ids=lambda text: text[:12])
def test_links_that_are_none(run: Run, text: str) -> None:
    write_cluster(node=f"count = 4\nbandwidth = {text}")
    if text == '"1e-300 GB/s"':  # no link at all, nearly: then one device is best
        assert planned(run, "--cluster", "odd.toml").worker_count == 1
    else:
        assert "odd.toml" in refused(run, "--cluster", "odd.toml")


@pytest.mark.parametrize("text", [
    "", "\0", "a=" + "[" * 5000, "nodes = []\ndevice_types = []", '[[device_types]]\nname = "d"', '\ufeff[[nodes]]\nname = "x"',
    TOML.format(kind="", node='bandwidth = "1 GB/s"').replace('device = "d"', 'device = "e"'),
    TOML.format(kind="", node='bandwidth = "1 GB/s"') + '[[device_types]]\nname = "d"',
    TOML.format(kind="", node='bandwidth = "1 GB/s"') + '[[nodes]]\nname = "device"\ndevice = "d"\nbandwidth = "1 GB/s"',
    TOML.format(kind="", node='bandwidth = "1 GB/s"') + '[[nodes]]\nname = "lonely"\nbandwidth = "1 GB/s"',
    TOML.format(kind="", node='bandwidth = "1 GB/s"') + '[[nodes]]\nname = "far"\ndevice = "d"\nbandwidth = "0 GB/s"',
    "\n".join(f'[[nodes{".children" * depth}]]\nname = "n"\nbandwidth = "1 GB/s"' for depth in range(300)),
], ids=["empty", "NUL", "deep list", "no nodes", "no devices", "byte order mark", "unknown type", "type twice", "node twice",
        "server without devices", "disconnected", "300 levels"])
def test_cluster_files_that_are_none(run: Run, text: str) -> None:
    Path("odd.toml").write_text(text, encoding="utf-8")
    assert "odd.toml" in refused(run, "--cluster", "odd.toml")


@pytest.mark.parametrize("name", ["устройство", "dev1", "d0", "a b", "[red]", "x" * 3000, "de\u001bv"], ids=lambda text: text[:8])
def test_odd_names_of_devices(run: Run, name: str) -> None:
    write_cluster()
    path = Path("odd.toml")
    path.write_text(path.read_text().replace('"device"', json.dumps(name)), encoding="utf-8")
    plan = planned(run, "--cluster", "odd.toml")
    assert plan.stages[0].devices[0] == f"{name}0"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\ufeff{}", "null", '{"format": "pipedream-profile", "version": ' + LONG + "}",
                                  '{"format": "pipedream-profile", "version": NaN}', '{"a": 1, "a": 2}', "\ud800"],
                         ids=["empty", "cut", "deep", "byte order mark", "null", "long version", "NaN version", "key twice", "surrogate"])
def test_profiles_that_are_none(run: Run, text: str) -> None:
    Path("profile.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    assert "profile.json" in refused(run, *SERVERS)
