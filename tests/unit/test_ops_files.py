"""What cannot run here is at least parsed, checked by its own tools if they are installed, and compared with the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from producer.keys import GROUP, TIERS, Keys
from worker.engine.scheduler import SchedulerStats
from worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
YAML_FILES = sorted([ROOT / "compose.yaml", *OPS.rglob("*.yaml"), *OPS.rglob("*.yml")])
JSON_FILES = sorted(OPS.rglob("grafana/**/*.json"))
SHELL_FILES = sorted([*OPS.rglob("*.sh"), ROOT / ".ci" / "run"])
METRIC = re.compile(r"\bheadrace:[a-z0-9_]+")
DRAIN = re.compile(r"--drain-seconds[= ](\d+)")
HANDOVER_S = 15  # to hand back what the drain did not finish


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / name).read_text()))


def one(name: str) -> dict[str, Any]:
    (document,) = documents(name)
    return document


def found(name: str) -> str | None:
    """A program beside this Python, or on the path."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def tool(name: str, *command: str) -> None:
    """Run a checker over our files, if it is installed."""
    path = found(name)
    if path is None:
        pytest.skip(f"no {name} on this machine")
    result = subprocess.run([path, *command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def exported_names() -> set[str]:
    metrics = WorkerMetrics("w", sources=["s"])
    metrics.serving("m", "cpu", "float32")
    metrics.scheduler(SchedulerStats(), {"realtime": 0, "batch": 0})
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


def exported_labels() -> dict[str, set[str]]:
    metrics = WorkerMetrics("w", sources=["s"])
    metrics.serving("m", "cpu", "float32")
    return {s.name: set(s.labels) for family in metrics.registry.collect() for s in family.samples}


def dashboard() -> dict[str, Any]:
    return json.loads((OPS / "grafana/dashboards/headrace.json").read_text())


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression in `ops`, with the name of its place."""
    for group in one("ops/prometheus/alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in dashboard()["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_parses(path: Path) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_json_parses(path: Path) -> None:
    assert json.loads(path.read_text())


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_queried_metric_is_exported(where: str, expression: str) -> None:
    names = set(METRIC.findall(expression))
    assert names <= exported_names()
    assert names or "up{" in expression


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_selected_label_exists(where: str, expression: str) -> None:
    labels = exported_labels()
    for name, selector in re.findall(r"(headrace:[a-z0-9_]+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)[!=~]+\"", selector)) <= labels[name], name


def test_every_exported_family_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ()))
    metrics = WorkerMetrics("w")
    families = {family.name for family in metrics.registry.collect()}
    assert {name for name in families if not re.search(rf"{name}(_total|_bucket|_sum|_count)?\b", shown)} == set()


def test_dashboard_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_alert_says_what_to_do() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in (OPS / "runbook.md").read_text().splitlines()
        if line.startswith("#")
    }
    for group in one("ops/prometheus/alerts.yml")["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"]["summary"]
            page, _, section = rule["annotations"]["runbook"].partition("#")
            assert page == "ops/runbook.md"
            assert section in headings


def test_promtool_accepts_rules_configuration_and_rule_tests() -> None:
    tool("promtool", "check", "rules", "ops/prometheus/alerts.yml")
    tool("promtool", "check", "config", "ops/prometheus/prometheus.yml")
    tool("promtool", "test", "rules", "ops/prometheus/alerts.test.yml")


def test_compose_keeps_what_was_accepted_and_waits_for_the_drain() -> None:
    services = one("compose.yaml")["services"]
    assert {"redis", "worker", "worker-gpu", "prometheus", "grafana"} <= services.keys()
    for name in ("worker", "worker-gpu"):
        (drain,) = DRAIN.findall(" ".join(services[name]["command"]))
        assert int(services[name]["stop_grace_period"].rstrip("s")) >= int(drain) + HANDOVER_S
        assert services[name]["depends_on"]["redis"]["condition"] == "service_healthy"
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    assert "redis-data:/data" in services["redis"]["volumes"]
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for mount in service.get("volumes", ()):
            source = mount["source"] if isinstance(mount, dict) else mount.split(":")[0]
            assert not source.startswith("./ops") or (ROOT / source).exists(), mount


def test_compose_mounts_no_folder_to_write_that_docker_would_make_as_root() -> None:
    config = one("compose.yaml")
    made = [
        mount
        for service in config["services"].values()
        for mount in service.get("volumes", ())
        if isinstance(mount, str) and not mount.endswith(":ro") and mount.split(":")[0] not in config["volumes"]
    ]
    assert made == []
    (bulk,) = config["services"]["bulk-worker"]["volumes"]
    assert bulk["bind"] == {"create_host_path": False}
    (user,) = re.findall(r"\$\{HEADRACE_BULK_USER:-(.*)\}", config["services"]["bulk-worker"]["user"])
    assert f"USER {user}\n" in (OPS / "Dockerfile").read_text()


def test_compose_is_accepted_by_docker_compose() -> None:
    command = ["--profile", "*", "config", "--quiet"]
    if found("docker-compose") is not None:
        tool("docker-compose", *command)
    elif shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose on this machine")
    else:
        tool("docker", "compose", *command)


def test_redis_conf_loses_nothing_and_evicts_nothing() -> None:
    directives = dict(line.split(None, 1) for line in (OPS / "redis.conf").read_text().splitlines() if line and not line.startswith("#"))
    assert directives["maxmemory-policy"] == "noeviction"
    assert directives["appendonly"] == "yes"
    assert directives["appendfsync"] == "everysec"
    assert int(directives["maxclients"]) >= 10_000


def test_dockerfile_has_both_devices_and_runs_as_nobody_special() -> None:
    text = (OPS / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert stages[-1] == "worker"
    assert "client" in stages
    assert re.findall(r"^ *(cpu|cuda)\)", text, re.MULTILINE) == ["cpu", "cuda"]
    assert set(re.findall(r"^USER (.*)$", text, re.MULTILINE)) == {"10001:10001"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all(f"!{name}" in ignored for name in source.split())


def image_environment() -> dict[str, str]:
    """What the worker's image sets, and its user's home."""
    worker = (OPS / "Dockerfile").read_text().rpartition("FROM base AS worker\n")[2]
    (home,) = re.findall(r"^WORKDIR (.*)$", worker, re.MULTILINE)
    return {"HOME": home} | dict(item.split("=") for line in re.findall(r"^ENV (.*)$", worker, re.MULTILINE) for item in line.split())


def test_everything_that_is_made_at_run_time_lies_where_a_pod_may_write() -> None:
    pytest.importorskip("triton")
    program = """
from huggingface_hub import constants
from triton import knobs
from worker.engine.model_loader import cache_folder
from worker.engine.native.build import _cache_directory
for path in (constants.HF_HOME, knobs.cache.dir, cache_folder(), _cache_directory()):
    print(path)
"""
    environment = image_environment()
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    (container,) = one("ops/k8s/worker.yaml")["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    writable = [Path(mount["mountPath"]) for mount in container["volumeMounts"] if not mount.get("readOnly")]
    for path in (*done.stdout.splitlines(), environment["CUDA_CACHE_PATH"]):
        assert any(Path(path).is_relative_to(folder) for folder in writable), path
    assert Path("/tmp") in writable  # noqa: S108 - a path in the pod


def test_package_carries_every_file_that_the_code_reads() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    carried = [*settings["package-data"]["*"], "*.py"]
    files = [path for folder in ("producer", "worker") for path in (ROOT / folder).rglob("*") if path.is_file()]
    ours = [path for path in files if "__pycache__" not in path.parts]
    assert [path for path in ours if not any(path.match(pattern) for pattern in carried)] == []


def test_hadolint_accepts_the_dockerfile() -> None:
    tool("hadolint", "ops/Dockerfile")


def test_systemd_waits_for_the_drain_and_does_not_wait_for_a_notification_that_never_comes() -> None:
    unit = (OPS / "systemd/headrace-worker@.service").read_text()
    (drain,) = DRAIN.findall(unit)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) >= int(drain) + HANDOVER_S
    assert "Type=exec" in unit.splitlines()
    assert "KillSignal=SIGTERM" in unit.splitlines()


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (OPS / "systemd/headrace-worker@.service").read_text()
    installed = tmp_path / "headrace-worker@.service"
    installed.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", unit))  # headrace is not installed at its final path
    tool("systemd-analyze", "verify", str(installed))


def test_shell_scripts_parse() -> None:
    for path in SHELL_FILES:
        subprocess.run(["bash", "-n", path], check=True)


def test_shellcheck_accepts_the_shell_scripts() -> None:
    tool("shellcheck", *map(str, SHELL_FILES))


def test_kubernetes_probes_the_three_states_and_waits_for_the_drain() -> None:
    deployment = one("ops/k8s/worker.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (drain,) = DRAIN.findall(" ".join(container["args"]))
    assert pod["terminationGracePeriodSeconds"] >= int(drain) + HANDOVER_S
    paths = {probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/startupz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert f"--metrics-port={container['ports'][0]['containerPort']}" in container["args"]
    assert "replicas" not in deployment["spec"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_kubernetes_resources_select_the_worker() -> None:
    labels = one("ops/k8s/worker.yaml")["spec"]["template"]["metadata"]["labels"]
    assert one("ops/k8s/poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert one("ops/k8s/networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    assert one("ops/k8s/podmonitor.yaml")["spec"]["selector"]["matchLabels"] == labels
    resources = {path.name for path in (OPS / "k8s").iterdir()} - {"kustomization.yaml"}
    assert set(one("ops/k8s/kustomization.yaml")["resources"]) == resources


def test_kubernetes_alerts_are_those_of_prometheus(tmp_path: Path) -> None:
    rule, alerts = "ops/k8s/prometheusrule.yaml", "ops/prometheus/alerts.yml"
    assert one(rule)["spec"] == one(alerts)
    for name in (rule, alerts, "Makefile"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["make", "-s", "-C", tmp_path, "alerts"], check=True)
    assert (tmp_path / rule).read_text() == (ROOT / rule).read_text()


def test_what_the_manifests_name_is_made_or_asked_for() -> None:
    asked_for = (OPS / "k8s/kustomization.yaml").read_text()
    text = "".join(path.read_text() for path in (OPS / "k8s").glob("*.yaml") if path.name != "kustomization.yaml")
    named = set(re.findall(r"claimName: ([\w-]+)", text)) | set(re.findall(r"secretKeyRef: {name: ([\w-]+)", text))
    assert named == {"headrace-models", "headrace-redis"}
    assert all(name in asked_for for name in named)


def test_kustomize_accepts_the_manifests() -> None:
    tool("kubectl", "kustomize", "ops/k8s")


def test_keda_follows_the_lag_of_each_tier() -> None:
    authentication, scaled = documents("ops/k8s/scaledobject.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == one("ops/k8s/worker.yaml")["metadata"]["name"]
    assert [trigger["type"] for trigger in scaled["spec"]["triggers"]] == ["redis-streams"] * 2
    metadata = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    assert [item["stream"] for item in metadata] == [Keys("default").stream(tier) for tier in TIERS]
    for item in metadata:
        assert item["consumerGroup"] == GROUP
        assert int(item["lagCount"]) >= 1
        assert all(isinstance(value, str) for value in item.values())  # KEDA's metadata is a map of strings
    assert {trigger["authenticationRef"]["name"] for trigger in scaled["spec"]["triggers"]} == {authentication["metadata"]["name"]}


def test_lua_scripts_call_nothing_that_their_user_may_not() -> None:
    rights = {
        line.split()[1]: {name.upper() for name in re.findall(r" \+(\w+)", line)}
        for line in (OPS / "users.acl").read_text().splitlines()
        if line.startswith("user ")
    }
    owners = {"producer": ("producer", "operator"), "worker/stream": ("worker",)}
    operator_only = {"replay.lua"}
    for folder, users in owners.items():
        scripts = sorted((ROOT / folder / "lua").glob("*.lua"))
        assert scripts
        for script in scripts:
            called = set(re.findall(r"redis\.p?call\(\s*'(\w+)'", script.read_text()))
            for user in users:
                if user == "producer" and script.name in operator_only:
                    continue
                assert called <= rights[user], f"{script.name} as {user}"
