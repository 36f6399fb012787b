"""The LeaderWorkerSet of one group on two nodes: valid by its schema, and consistent with settings and other manifests.

The schema is that of LeaderWorkerSet's documented fields (api/leaderworkerset/v1 of kubernetes-sigs/lws), written here
in our own words; pods and claims in it are checked against Kubernetes' schemas. It was not applied to a cluster.
"""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from runner_svc.link.health import RUNNER
from runner_svc.settings.runner_settings import RunnerSettings
from tests.deploy.test_kubernetes import ROOT, VERSION, chosen, container, of_kind

FOLDER = ROOT / "deploy" / "leaderworkerset"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
OBJECTS = [
    item for name in KUSTOMIZATION["resources"] for item in yaml.safe_load_all((FOLDER / name).read_text("utf-8"))
]
(SET,) = (item for item in OBJECTS if item["kind"] == "LeaderWorkerSet")
TEMPLATE = SET["spec"]["leaderWorkerTemplate"]
KINDS = ("leaderTemplate", "workerTemplate")
SIZE = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "roster-group-0.roster-group.roster"}


def fields(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object that has these fields and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


COUNT = {"type": "integer", "minimum": 0}
PART = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+%$"}]}
PODS = {"type": "object", "required": ["spec"]}
SCHEMA = fields(
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata={"type": "object", "required": ["name"]},
    spec={
        **fields(
            replicas=COUNT,
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            networkConfig=fields(subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
            rolloutStrategy=fields(
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=fields(partition=COUNT, maxUnavailable=PART, maxSurge=PART),
            ),
            leaderWorkerTemplate={
                **fields(
                    size={"type": "integer", "minimum": 1},
                    restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},  # Default is deprecated
                    leaderTemplate=PODS,
                    workerTemplate=PODS,
                    subGroupPolicy=fields(
                        subGroupPolicyType={"enum": ["LeaderWorker", "LeaderExcluded"]}, subGroupSize=COUNT
                    ),
                    volumeClaimTemplates={"type": "array", "items": {"type": "object"}},
                    persistentVolumeClaimRetentionPolicy=fields(
                        whenDeleted={"enum": ["Retain", "Delete"]}, whenScaled={"enum": ["Retain", "Delete"]}
                    ),
                ),
                "required": ["workerTemplate"],
            },
        ),
        "required": ["leaderWorkerTemplate"],
    },
)


def own(kind: str) -> dict[str, Any]:
    """Returns the only container of a kind of pods."""
    (found,) = TEMPLATE[kind]["spec"]["containers"]
    return dict(found)


def values(kind: str, index: int) -> dict[str, str]:
    """Returns the variables of the pod of an index that have values, as Kubernetes fills them in."""
    known = {**SIZE, "LWS_WORKER_INDEX": str(index)}
    found = {}
    for variable in own(kind)["env"]:
        text = variable.get("value")
        if text is not None:
            for name, value in known.items():
                text = text.replace(f"$({name})", value)
            found[variable["name"]] = text
    return found


def test_the_set_is_valid() -> None:
    jsonschema.validate(SET, SCHEMA)
    assert {path.name for path in FOLDER.glob("*.yaml")} == {*KUSTOMIZATION["resources"], "kustomization.yaml"}
    for kind in KINDS:
        pod = {"apiVersion": "v1", "kind": "Pod", **TEMPLATE[kind]}
        pod["metadata"] = {"name": "checked", **pod["metadata"]}
        assert kubernetes_validate.validate(pod, VERSION, strict=True) == VERSION
    for claim in TEMPLATE["volumeClaimTemplates"]:
        item = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}
        assert kubernetes_validate.validate(item, VERSION, strict=True) == VERSION
    for policy in (item for item in OBJECTS if item["kind"] == "NetworkPolicy"):
        assert kubernetes_validate.validate(policy, VERSION, strict=True) == VERSION


def test_the_schema_detects_mistakes() -> None:
    for path, value in ((("restartPolicy",), "Never"), (("sizes",), 2), (("size",), 0)):
        wrong = copy.deepcopy(SET)
        wrong["spec"]["leaderWorkerTemplate"][path[0]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


def test_variables_are_settings_of_nodes_of_one_group() -> None:
    settings = []
    for kind, index in (("leaderTemplate", 0), ("workerTemplate", 1)):
        given = {name[7:].lower(): value for name, value in values(kind, index).items() if name.startswith("ROSTER_")}
        named = {
            variable["name"][7:].lower() for variable in own(kind)["env"] if variable["name"].startswith("ROSTER_")
        }
        assert named <= set(RunnerSettings.model_fields)
        settings.append(RunnerSettings.model_validate(given))
    node_0, node_1 = settings
    assert (node_0.nnodes, node_0.node_rank, node_1.node_rank) == (TEMPLATE["size"], 0, 1)
    assert node_0.rdzv_endpoint == node_1.rdzv_endpoint == "roster-group-0.roster-group.roster:29500"
    differing = {name for name in RunnerSettings.model_fields if getattr(node_0, name) != getattr(node_1, name)}
    assert differing == {"node_rank", "health_listen"}
    gpus = {own(kind)["resources"]["limits"]["nvidia.com/gpu"] for kind in KINDS}
    assert gpus == {str(node_0.tensor_parallel // node_0.nnodes)}
    single = {variable["name"]: variable.get("value") for variable in container("roster-runner")["env"]}
    assert node_0.link == single["ROSTER_LINK"] and str(node_0.runner_key) == single["ROSTER_RUNNER_KEY"]


def test_the_pods_differ_in_what_the_leader_alone_has() -> None:
    leader, worker = (copy.deepcopy(TEMPLATE[kind]) for kind in KINDS)
    of_leader, of_worker = leader["spec"]["containers"][0], worker["spec"]["containers"][0]
    probe = of_leader.pop("readinessProbe")
    assert probe["grpc"] == {"port": 50066, "service": RUNNER}
    assert [port["containerPort"] for port in of_leader.pop("ports")] == [29500, 50066]
    more = [variable["name"] for variable in of_leader["env"] if variable not in of_worker["env"]]
    assert more == ["ROSTER_HEALTH_LISTEN", "ROSTER_RUNNER_ID"]
    of_leader["env"] = [variable for variable in of_leader["env"] if variable["name"] not in more]
    assert leader == worker
    assert SET["spec"]["startupPolicy"] == "LeaderCreated", "the leader is ready only when the others have loaded"


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_no_more_rights_than_single_runners(kind: str) -> None:
    assert own(kind)["securityContext"] == container("roster-runner")["securityContext"]
    assert own(kind)["image"] == container("roster-runner")["image"]
    pod = TEMPLATE[kind]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in TEMPLATE["volumeClaimTemplates"]}
    assert {mount["name"] for mount in own(kind)["volumeMounts"]} == volumes | claims


def test_only_groups_reach_groups_and_they_reach_the_scheduler() -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in OBJECTS if item["kind"] == "NetworkPolicy"}
    labels = TEMPLATE["leaderTemplate"]["metadata"]["labels"]
    assert (
        labels
        == TEMPLATE["workerTemplate"]["metadata"]["labels"]
        == policies["roster-group"]["podSelector"]["matchLabels"]
    )
    peers = [{"podSelector": {"matchLabels": labels}}]
    assert policies["roster-group"]["ingress"] == [{"from": peers}]
    assert policies["roster-group"]["egress"][0] == {"to": peers}
    link = policies["roster-link-of-groups"]
    assert chosen(link["podSelector"]["matchLabels"]) == ["roster-scheduler"]
    assert link["ingress"] == [{"ports": [{"port": "link"}], "from": peers}]
    assert not any(chosen(labels)), "no workload or Service of the other manifests takes these pods for its own"
    for service in of_kind("Service"):
        assert not service["spec"]["selector"].items() <= labels.items()
