"""KubeRay's custom resources, as far as our manifests use them.

Written by hand from the reference of ray.io/v1 (KubeRay 1.6): the published definitions hold a
whole copy of Kubernetes' pod schema, against which ``kubernetes-validate`` checks the pods instead.
A field that is not here is refused: where a manifest needs it, look it up and add it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


POD_TEMPLATE: Schema = _object(("spec",), metadata={"type": "object"}, spec={"type": "object"})

HEAD: Schema = _object(
    ("rayStartParams", "template"),
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    headService={"type": "object"},
    enableIngress=FLAG,
    resources=TEXTS,
    labels=TEXTS,
)

WORKERS: Schema = _object(
    ("groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts={"type": "integer", "minimum": 1},
    idleTimeoutSeconds=COUNT,
    suspend=FLAG,
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
    scaleStrategy={"type": "object"},
    resources=TEXTS,
    labels=TEXTS,
)

AUTOSCALER: Schema = _object(
    (),
    resources={"type": "object"},
    image=TEXT,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    idleTimeoutSeconds=COUNT,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
    env={"type": "array"},
    envFrom={"type": "array"},
    volumeMounts={"type": "array"},
    securityContext={"type": "object"},
)

CLUSTER_SPEC: Schema = _object(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=_object(
        (), mode={"enum": ["token", "disabled"]}, secretName=TEXT, enableK8sTokenAuth=FLAG
    ),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=AUTOSCALER,
    headServiceAnnotations=TEXTS,
    gcsFaultToleranceOptions={"type": "object"},
    managedBy=TEXT,
    suspend=FLAG,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)

SERVICE_SPEC: Schema = _object(
    ("rayClusterConfig",),
    rayClusterConfig=CLUSTER_SPEC,
    serveConfigV2=TEXT,
    upgradeStrategy=_object(
        (), type={"enum": ["None", "NewCluster", "NewClusterWithIncrementalUpgrade"]}
    ),
    excludeHeadPodFromServeSvc=FLAG,
    rayClusterDeletionDelaySeconds=COUNT,
    serveService={"type": "object"},
    suspend=FLAG,
)

SCHEMAS: dict[str, Schema] = {
    kind: _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=_object(("name",), name=TEXT, labels=TEXTS, annotations=TEXTS),
        spec=spec,
    )
    for kind, spec in (("RayCluster", CLUSTER_SPEC), ("RayService", SERVICE_SPEC))
}
