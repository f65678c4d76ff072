"""What is in deploy/: parsed, held against its schema as far as that needs no engine, and metric names against ours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from ipcsync import config
from ipcsync_broker import metrics

from .overview_sample import sample

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*/*.service"))


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def exported() -> set[str]:
    return {s.name for family in metrics.families(sample()) for s in family.samples}


def names_in(expression: str) -> set[str]:
    """Metric names of a PromQL expression."""
    return set(
        re.findall(r"\b(?:ipcsync_\w+|up)\b(?!\s*=)", re.sub(r'"[^"]*"|by \([^)]*\)|on \([^)]*\)', "", expression))
    )


# -- metrics


def test_every_metric_of_the_dashboard_is_exported() -> None:
    dashboard = json.loads((DEPLOY / "grafana/ipcsync.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    used = {name for e in expressions for name in names_in(e)}
    assert len(used) > 10
    assert used <= exported() | {"up"}
    queries = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert {re.match(r"label_values\((\w+), \w+\)", q)[1] for q in queries} <= exported()  # type: ignore[index]


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "grafana/ipcsync.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_every_metric_of_the_alerts_is_exported() -> None:
    rules = [rule for group in load("prometheus/alerts.yaml")["groups"] for rule in group["rules"]]
    assert len(rules) > 5
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert names_in(rule["expr"]) <= exported() | {"up"}
        assert rule["expr"].count("(") == rule["expr"].count(")")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", str(DEPLOY / "prometheus/alerts.yaml")], check=True)


# -- systemd


class Unit(ConfigParser):
    """A unit file; of a key that comes more than once (Environment) the last counts here."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None, delimiters=("=",))
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read(path)


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.parent.name)
def test_units_are_of_type_notify_and_keep_what_sharing_needs(path: Path) -> None:
    service = Unit(path)["Service"]
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) > 10  # the broker leaves within ten seconds
    for key in ("PrivateTmp", "PrivateDevices", "PrivateUsers", "RemoveIPC", "MemoryDenyWriteExecute"):
        assert service.get(key, "no") == "no"
    assert service["ExecStart"].split()[1:] == ["broker"]


def test_the_system_unit_sets_only_what_is_a_setting() -> None:
    variables = {setting.variable for setting in config.settings().values()}
    text = (DEPLOY / "systemd/system/ipcsync-broker.service").read_text()
    assert set(re.findall(r"^Environment=(\w+)=", text, re.MULTILINE)) <= variables


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.parent.name)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_system_calls_we_need_pass_the_filter() -> None:
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", "@system-service", "@default", "@process", "@file-system"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for call in ("membarrier", "futex", "pidfd_open", "pidfd_send_signal", "fallocate", "linkat"):
        assert re.search(rf"^\s+{call}$", listed, re.MULTILINE), call


# -- containers


def test_the_image_is_not_roots_and_has_a_health_check() -> None:
    text = (DEPLOY / "container/Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages[-1] == "cpu"  # what is built without --target
    assert "cuda" in stages
    for stage in ("cuda", "cpu"):
        body = re.split(rf"^FROM \S+ AS {stage}$", text, flags=re.MULTILINE)[1].split("\nFROM")[0]
        assert re.search(r"^USER 10001:10001$", body, re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .* CMD \["ipcsync", "status"', text, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["ipcsync"\]$', text, re.MULTILINE)  # a list: SIGTERM reaches the broker itself


def test_the_image_is_built_from_what_the_wheel_needs() -> None:
    kept = {line[1:] for line in (DEPLOY / "container/Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    assert kept == {"pyproject.toml", "README.md", "LICENSE", "ipcsync", "broker", "workers"}
    assert all((DEPLOY.parent / name).exists() for name in kept)


def test_compose_shares_the_runtime_directory_and_pids() -> None:
    compose = load("container/compose.yaml")
    assert compose["volumes"]["runtime"]["driver_opts"]["type"] == "tmpfs"
    for name, service in compose["services"].items():
        assert any(v.startswith("runtime:") for v in service["volumes"]), name
        if name != "broker":
            assert service["pid"] == service["ipc"] == "service:broker"
            assert service["depends_on"]["broker"]["condition"] == "service_healthy"
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["broker"]["ports"])


def pods() -> list[tuple[str, Any]]:
    return [
        ("sidecar", load("kubernetes/sidecar.yaml")["spec"]),
        ("daemonset", load("kubernetes/daemonset.yaml")["spec"]["template"]["spec"]),
    ]


@pytest.mark.parametrize(("name", "spec"), pods(), ids=lambda p: p if isinstance(p, str) else "")
def test_pods_probe_the_loop_share_memory_and_are_not_roots(name: str, spec: Any) -> None:
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    (broker,) = [c for c in containers if c["name"] == "broker"]
    port = broker["args"][-1].rpartition(":")[2]
    assert {p["name"]: p["containerPort"] for p in broker["ports"]} == {"http": int(port)}
    for probe in ("startupProbe", "livenessProbe"):
        assert broker[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert broker["livenessProbe"]["timeoutSeconds"] > 2  # the page itself answers after two at the latest
    assert spec["terminationGracePeriodSeconds"] > 10
    runs_as = broker["securityContext"].get("runAsUser", spec.get("securityContext", {}).get("runAsUser"))
    assert runs_as == 10001
    (volume,) = spec["volumes"]
    if name == "sidecar":
        assert volume["emptyDir"]["medium"] == "Memory"
        assert spec["shareProcessNamespace"] is True
        assert broker["restartPolicy"] == "Always"
    else:
        assert volume["hostPath"]["path"].startswith("/dev/shm/")
        assert spec["hostPID"] is True
    for container in containers:
        assert [m["name"] for m in container["volumeMounts"]] == [volume["name"]]
        variables = {e["name"] for e in container.get("env", [])}
        assert variables <= {s.variable for s in config.settings().values()}


def test_the_daemonset_selects_its_own_pods() -> None:
    spec = load("kubernetes/daemonset.yaml")["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
