"""The manifests in `kubernetes/`: sound in form and in what they name of each other and the engine.

No cluster checks them here. The keys are those of Kubernetes' API and of KubeRay's RayCluster (v1),
as far as these files use them, so that a misspelt or misplaced one fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fumehood.config import load_config

pytestmark = pytest.mark.row("B10")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/run-on-kubernetes.md").read_text(encoding="utf-8")


def closed(required: str, optional: str = "", **of: Any) -> dict[str, Any]:
    """A schema of an object without other keys; `of` has the schemas of some of them."""
    names = [*required.split(), *optional.split(), *of]
    return {
        "type": "object", "required": required.split(), "additionalProperties": False,
        "properties": {name: of.get(name, {}) for name in names},
    }  # fmt: skip


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
REFERENCE = closed("secretKeyRef", secretKeyRef=closed("name key"))
PROBE = closed(
    "exec periodSeconds timeoutSeconds failureThreshold",
    exec=closed("command", command=many({"type": "string"})),
)
CONTAINER = closed(
    "name image", "command args",
    env=many({"oneOf": [closed("name value", value={"type": "string"}),
                        closed("name valueFrom", valueFrom=REFERENCE)]}),
    ports=many(closed("name containerPort")), readinessProbe=PROBE, livenessProbe=PROBE,
    resources=closed("requests limits", requests=TEXTS, limits=TEXTS),
    securityContext=closed("", "privileged runAsUser"), volumeMounts=many(closed("name mountPath")),
)  # fmt: skip
AWAY = many(closed("topologyKey labelSelector", labelSelector=closed("matchLabels")))
POD = closed(
    "containers automountServiceAccountToken enableServiceLinks", "terminationGracePeriodSeconds shareProcessNamespace",
    containers=many(CONTAINER), initContainers=many(CONTAINER), nodeSelector=TEXTS,
    tolerations=many(closed("key operator")),
    affinity=closed("podAntiAffinity", podAntiAffinity=closed(
        "requiredDuringSchedulingIgnoredDuringExecution",
        requiredDuringSchedulingIgnoredDuringExecution=AWAY)),
    securityContext=closed(
        "", "runAsNonRoot runAsUser runAsGroup fsGroup fsGroupChangePolicy supplementalGroups"),
    volumes=many(closed(
        "name", secret=closed("secretName", "defaultMode"), hostPath=closed("path type"),
        emptyDir=closed("", "medium sizeLimit"))),
)  # fmt: skip
TEMPLATE = closed("spec", spec=POD, metadata=closed("labels", labels=TEXTS))
PEERS = many(closed("podSelector", podSelector=closed("matchLabels", matchLabels=TEXTS)))
GROUP = {"rayStartParams": TEXTS, "template": TEMPLATE}
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("ray.io/v1", "RayCluster"): closed(
        "rayVersion headGroupSpec workerGroupSpecs",
        headGroupSpec=closed("rayStartParams template", **GROUP),
        workerGroupSpecs=many(closed(
            "groupName replicas minReplicas maxReplicas rayStartParams template", **GROUP)),
    ),
    ("networking.k8s.io/v1", "NetworkPolicy"): closed(
        "podSelector policyTypes ingress",
        ingress=many(closed("", **{"from": PEERS, "ports": many(closed("port"))})),
    ),
    ("v1", "Service"): closed("selector ports", ports=many(closed("name port targetPort"))),
    ("apps/v1", "StatefulSet"): closed(
        "serviceName replicas podManagementPolicy updateStrategy selector template "
        "volumeClaimTemplates", template=TEMPLATE),
}  # fmt: skip

DOCUMENTS = [
    document
    for file in sorted((ROOT / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]


def one(kind: str) -> Any:
    return next(document["spec"] for document in DOCUMENTS if document["kind"] == kind)


def pods() -> Iterator[Any]:
    """Each pod's specification."""
    cluster = one("RayCluster")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"], one("StatefulSet")):
        yield group["template"]["spec"]


def variables(container: Any) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_manifest_has_the_keys_that_its_kind_has(document: Any) -> None:
    whole = closed(
        "apiVersion kind metadata spec",
        metadata=closed("name"), spec=SPECS[document["apiVersion"], document["kind"]],
    )  # fmt: skip
    jsonschema.validate(document, whole)


def test_every_volume_is_declared_and_every_secret_is_made_on_the_page() -> None:
    claims = {claim["metadata"]["name"] for claim in one("StatefulSet")["volumeClaimTemplates"]}
    for pod in pods():
        declared = {volume["name"] for volume in pod.get("volumes", ())} | claims
        secrets = {v["secret"]["secretName"] for v in pod.get("volumes", ()) if "secret" in v}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= declared
            for each in container.get("env", ()):
                if "valueFrom" in each:
                    reference = each["valueFrom"]["secretKeyRef"]
                    secrets.add(reference["name"])
                    assert f"--from-literal={reference['key']}=" in PAGE
        assert all(f"{name} " in PAGE for name in secrets), secrets


def test_all_of_ray_asks_for_the_token_and_only_workers_are_nodes() -> None:
    for pod in pods():
        assert variables(pod["containers"][0])["RAY_AUTH_MODE"] == "token"
        assert variables(pod["containers"][0])["RAY_USAGE_STATS_ENABLED"] == "0"
        assert "RAY_AUTH_TOKEN" in variables(pod["containers"][0])
    cluster = one("RayCluster")
    assert "resources" not in cluster["headGroupSpec"]["rayStartParams"]
    for group in cluster["workerGroupSpecs"]:
        # KubeRay puts it into a shell's command line as it is.
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"fumehood": 4}
    image = (ROOT / "kubernetes/Dockerfile").read_text(encoding="utf-8")
    assert f"FROM rayproject/ray:{cluster['rayVersion']}-" in image


def test_engine_accepts_its_variables_and_callers_reach_a_ready_engine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, _ = one("StatefulSet")["template"]["spec"]["containers"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name, value in variables(engine).items():
        if name.startswith("FUMEHOOD_"):
            monkeypatch.setenv(name, value or "postgresql://fumehood@db/fumehood")
    config = load_config()
    assert config.cluster.address == "auto"
    assert config.tls is not None
    mounts = {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert {"/state", str(config.tls.key.parent)} <= mounts
    command = engine["readinessProbe"]["exec"]["command"]
    assert (command[3], command[4].endswith("/v1/ready")) == (str(config.socket_path), True)
    labels = one("StatefulSet")["template"]["metadata"]["labels"]
    assert one("Service")["selector"] == one("StatefulSet")["selector"]["matchLabels"] == labels
    (port,) = engine["ports"]
    assert config.tcp == f"0.0.0.0:{port['containerPort']}"
    assert one("Service")["ports"][0]["targetPort"] == port["name"]


def test_ray_beside_the_engine_runs_as_another_user_without_its_secrets() -> None:
    pod = one("StatefulSet")["template"]["spec"]
    engine, ray = pod["containers"]
    assert ray["securityContext"]["runAsUser"] != pod["securityContext"]["runAsUser"]
    assert pod["shareProcessNamespace"]
    assert {mount["name"] for mount in ray["volumeMounts"]} == {"ray", "shm"}
    assert set(variables(ray)) == {
        "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED",
    }  # fmt: skip
    assert variables(ray)["RAY_TMPDIR"] == variables(engine)["RAY_TMPDIR"]
