"""The Kubernetes manifests: valid by Kubernetes' schemas, and consistent with each other and with the settings."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from runner_svc.link.health import RUNNER
from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.front.rpc import health
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.prometheus import needs_promtool, promtool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
ADAPTER = yaml.safe_load((FOLDER / "prometheus-adapter-rules.yaml").read_text("utf-8"))
VERSION = "1.37"
"""The newest version with schemas; all features in use are stable since 1.27."""


def read(name: str) -> list[dict[str, Any]]:
    """Returns the objects of a file."""
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


OBJECTS = [item for name in KUSTOMIZATION["resources"] for item in read(name)]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    """Returns the objects of these kinds."""
    return [item for item in OBJECTS if item["kind"] in kinds]


WORKLOADS = {item["metadata"]["name"]: item["spec"] for item in of_kind("Deployment", "StatefulSet")}


def pod(name: str) -> dict[str, Any]:
    """Returns the pod of a workload."""
    spec: dict[str, Any] = WORKLOADS[name]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    """Returns the only container of a workload."""
    (found,) = pod(name)["containers"]
    return dict(found)


def environment(name: str) -> dict[str, str]:
    """Returns the variables of a workload that have literal values."""
    return {variable["name"]: variable["value"] for variable in container(name)["env"] if "value" in variable}


def chosen(labels: dict[str, str]) -> list[str]:
    """Returns the workloads whose pods have these labels."""
    named = {name: spec["template"]["metadata"]["labels"] for name, spec in WORKLOADS.items()}
    return [name for name, own in named.items() if labels.items() <= own.items()]


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_each_object_is_valid(item: dict[str, Any]) -> None:
    assert kubernetes_validate.validate(item, VERSION, strict=True) == VERSION


def test_the_schema_detects_a_mistake() -> None:
    wrong = copy.deepcopy(of_kind("Deployment")[0])
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_the_kustomization_lists_every_file() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "prometheus-adapter-rules.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files
    used = {container(name)["image"].partition(":")[0] for name in WORKLOADS}
    assert used == {image["name"] for image in KUSTOMIZATION["images"]}
    assert not any("newTag" in image for image in KUSTOMIZATION["images"]), "the manifests have the tags"
    (namespace,) = of_kind("Namespace")
    assert KUSTOMIZATION["namespace"] == namespace["metadata"]["name"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is missing")
def test_kustomize_keeps_the_tags() -> None:
    command = ["kubectl", "kustomize", FOLDER]
    made = yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    workloads = [item for item in made if item["kind"] in ("Deployment", "StatefulSet")]
    assert {item["metadata"]["namespace"] for item in workloads} == {KUSTOMIZATION["namespace"]}
    images = {item["spec"]["template"]["spec"]["containers"][0]["image"] for item in workloads}
    assert images == {container(name)["image"] for name in WORKLOADS}


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    assert pod(name)["securityContext"]["runAsNonRoot"] and pod(name)["securityContext"]["runAsUser"] == 10001
    assert pod(name)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(name)["automountServiceAccountToken"] is False
    assert pod(name)["enableServiceLinks"] is False  # its variables are named like settings: ROSTER_PORT
    own = container(name)
    assert own["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert own["resources"]["requests"]["memory"] and own["resources"]["limits"]["memory"]
    assert {mount["name"] for mount in own["volumeMounts"]} == volumes(name)


def volumes(name: str) -> set[str]:
    """Returns the volumes of a workload's pods."""
    claims = WORKLOADS[name].get("volumeClaimTemplates", [])
    return {volume["name"] for volume in pod(name)["volumes"]} | {claim["metadata"]["name"] for claim in claims}


def test_selectors_find_their_pods_and_ports() -> None:
    for name, spec in WORKLOADS.items():
        assert chosen(spec["selector"]["matchLabels"]) == [name]
    for service in of_kind("Service"):
        (workload,) = chosen(service["spec"]["selector"])
        ports = {port["name"] for port in container(workload).get("ports", [])}
        assert {port["targetPort"] for port in service["spec"].get("ports", [])} <= ports
    for budget in of_kind("PodDisruptionBudget"):
        assert chosen(budget["spec"]["selector"]["matchLabels"]) == [budget["metadata"]["name"]]


def test_ports_are_those_of_the_listeners() -> None:
    settings = environment("roster-scheduler")
    listened = {int(value.rpartition(":")[2]) for value in settings.values() if "0.0.0.0:" in value}
    assert listened == {port["containerPort"] for port in container("roster-scheduler")["ports"]}
    services = {service["metadata"]["name"]: service["spec"].get("ports", []) for service in of_kind("Service")}
    link = environment("roster-runner")["ROSTER_LINK"]
    assert link == f"tcp://roster-link:{services['roster-link'][0]['port']}"
    called = f"--worker-urls=grpc://roster-for-gateway:{services['roster-for-gateway'][0]['port']}"
    assert called in container("roster-gateway")["args"]


def test_variables_are_settings() -> None:
    known = {"roster-scheduler": SchedulerSettings, "roster-runner": RunnerSettings}
    for name, settings in known.items():
        named = {variable["name"] for variable in container(name)["env"] if variable["name"].startswith("ROSTER_")}
        assert named <= {f"ROSTER_{field.upper()}" for field in settings.model_fields}
        settings(**{key[7:].lower(): value for key, value in environment(name).items() if key.startswith("ROSTER_")})


def test_probes_name_services() -> None:
    own = container("roster-scheduler")
    probes = {kind: own[f"{kind}Probe"]["grpc"].get("service", "") for kind in ("startup", "liveness", "readiness")}
    own = container("roster-runner")
    assert own["readinessProbe"]["grpc"] == {"port": own["ports"][0]["containerPort"], "service": RUNNER}
    assert environment("roster-runner")["ROSTER_HEALTH_LISTEN"].endswith(f":{own['ports'][0]['containerPort']}")
    assert probes == {"startup": health.LIVENESS, "liveness": health.ENGINE, "readiness": health.READINESS}
    links = [
        service for service in of_kind("Service") if service["metadata"]["name"] in ("roster-link", "roster-admin")
    ]
    assert all(service["spec"]["publishNotReadyAddresses"] for service in links), (
        "runners connect before the scheduler is ready"
    )


def test_pods_get_the_time_to_drain() -> None:
    scheduler, gateway = pod("roster-scheduler"), pod("roster-gateway")
    wait_s = int(container("roster-scheduler")["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(environment("roster-scheduler")["ROSTER_DRAIN_S"])
    assert scheduler["terminationGracePeriodSeconds"] >= wait_s + drain_s + 10
    arguments = dict(argument.split("=", 1) for argument in container("roster-gateway")["args"] if "=" in argument)
    assert gateway["terminationGracePeriodSeconds"] >= int(arguments["--shutdown-grace-period-secs"]) + 10


def references(name: str) -> Iterator[tuple[str, str]]:
    """Yields each (secret, file or key) that a workload reads."""
    mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
    for volume in pod(name)["volumes"]:
        if "secret" in volume:
            for value in environment(name).values():
                if value.startswith(f"{mounts[volume['name']]}/"):
                    yield volume["secret"]["secretName"], value.rpartition("/")[2]
    for variable in container(name).get("env", []):
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            yield reference["name"], reference["key"]


def test_secrets_are_created_as_documented() -> None:
    page = (ROOT / "docs" / "operators.md").read_text("utf-8").replace("\\\n", " ")
    made = {
        (secret, file)
        for secret, files in re.findall(r"create secret generic (\S+)((?: +--from-file=\S+)+)", page)
        for file in re.findall(r"--from-file=\S*?([\w.]+)(?= |$)", files)
    }
    assert made == {reference for name in WORKLOADS for reference in references(name)}
    assert of_kind("Secret") == []


def allowed(name: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the allowed peers of a workload's ports, by the port's name."""
    policies = [item["spec"] for item in of_kind("NetworkPolicy")]
    rules = [
        rule
        for policy in policies
        if policy["podSelector"] and chosen(policy["podSelector"]["matchLabels"]) == [name]
        for rule in policy.get("ingress", [])
    ]
    return {port["port"]: rule["from"] for rule in rules for port in rule["ports"]}


def test_admin_link_and_gateway_ports_are_internal() -> None:
    everything = [item for item in of_kind("NetworkPolicy") if item["spec"]["podSelector"] == {}]
    assert [item["spec"] for item in everything] == [{"podSelector": {}, "policyTypes": ["Ingress"]}]
    scheduler = allowed("roster-scheduler")
    assert set(scheduler) == {port["name"] for port in container("roster-scheduler")["ports"]}
    for port in ("link", "admin", "gateway"):
        (peer,) = scheduler[port]
        assert set(peer) == {"podSelector"}, "no other namespace"
    assert chosen(scheduler["link"][0]["podSelector"]["matchLabels"]) == ["roster-runner"]
    assert chosen(scheduler["gateway"][0]["podSelector"]["matchLabels"]) == ["roster-gateway"]
    assert [set(peer) for peer in scheduler["grpc"]] == [{"namespaceSelector"}]
    assert environment("roster-scheduler")["ROSTER_TOKENS"]
    assert allowed("roster-runner") == {}


def test_runners_are_scaled_by_metrics_that_the_adapter_knows() -> None:
    (scaler,) = (item["spec"] for item in of_kind("HorizontalPodAutoscaler"))
    assert scaler["scaleTargetRef"]["name"] in WORKLOADS and "replicas" not in WORKLOADS["roster-runner"]
    wanted = {metric["external"]["metric"]["name"] for metric in scaler["metrics"]}
    assert wanted == {rule["name"]["as"] for rule in ADAPTER["externalRules"]}
    known = set(re.findall(r"^\| `([a-z_:]+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8"), re.M))
    assert {rule["seriesQuery"].partition("{")[0] for rule in ADAPTER["externalRules"]} <= known


@needs_promtool
def test_prometheus_can_read_the_adapters_queries(tmp_path: Path) -> None:
    queries = [rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="a"') for rule in ADAPTER["externalRules"]]
    rules = [{"record": f"rule:{index}", "expr": query} for index, query in enumerate(queries)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "adapter", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", path)


def test_each_port_is_documented() -> None:
    page = (ROOT / "docs" / "operators.md").read_text("utf-8").split("## Ports")[1].split("\n## ")[0]
    documented = {int(port) for port in re.findall(r"^\| (\d+) \|", page, re.M)}
    inside = {port["containerPort"] for name in WORKLOADS for port in container(name).get("ports", [])}
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"].values()
    published = {int(port.rpartition(":")[2]) for service in compose for port in service.get("ports", [])}
    if_asked = {50067, 29500}  # moves: `runner.moves` of the chart, the profile `roles`; groups: deploy/leaderworkerset
    assert documented == inside | published | if_asked
