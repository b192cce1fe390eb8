"""What cannot run here is held against the schemas of its own makers: Compose, Kubernetes, systemd, shell.

And a few rules of this project: versions are those of requirements/, nothing listens beyond the loopback interface, no
secret is in the repository.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
KUBERNETES = INFRA / "kubernetes"
MANIFESTS = [
    (path.stem, document)
    for path in sorted(KUBERNETES.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
]
RAY = yaml.safe_load((KUBERNETES / "ray" / "cluster.yaml").read_text())
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE))
KUBERNETES_VERSION = "1.33"


def _env_names() -> set[str]:
    return set(re.findall(r"^(\w+)=", (INFRA / "env.example").read_text(), re.MULTILINE))


def test_compose_file_meets_the_compose_specification() -> None:
    schema = json.loads(
        resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    )
    jsonschema.validate(COMPOSE, schema)
    with pytest.raises(jsonschema.ValidationError):  # the schema does refuse things
        jsonschema.validate({"services": {"worker": {"imagee": "x"}}}, schema)


def test_compose_publishes_on_the_loopback_interface_only() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:4200:4200", "127.0.0.1:5000:5000"]
    assert COMPOSE["networks"]["databases"] == {"internal": True}
    assert COMPOSE["services"]["postgres"]["networks"] == ["databases"]


def test_compose_names_things_that_exist() -> None:
    text = (INFRA / "compose.yaml").read_text()
    chosen = {"MAGRPO_MEMORY", "MAGRPO_POOL", "TORCH_INDEX"}
    assert set(re.findall(r"\$\{(\w+)", text)) - chosen <= _env_names()
    for service in COMPOSE["services"].values():
        assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (INFRA / source).exists()
        if "build" in service:
            assert (INFRA / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize(("file", "manifest"), MANIFESTS, ids=[f"{f}-{m['kind']}" for f, m in MANIFESTS])
def test_manifests_meet_kubernetes_schemas(file: str, manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_the_schemas_refuse_a_misspelt_field() -> None:
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"portz": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def _groups() -> list[dict[str, Any]]:
    return [RAY["spec"]["headGroupSpec"], *RAY["spec"]["workerGroupSpecs"]]


def _pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for _, manifest in MANIFESTS:
        if "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]
    yield "run", fill_job()["spec"]["template"]["spec"]
    for group in _groups():
        yield group.get("groupName", "head"), group["template"]["spec"]


RAY_CLUSTER = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "spec": {
            "type": "object",
            "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
            "additionalProperties": False,
            "properties": {
                "rayVersion": {"type": "string"},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "autoscalerOptions": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "version": {"enum": ["v1", "v2"]},
                        "idleTimeoutSeconds": {"type": "integer"},
                        "securityContext": {"type": "object"},
                    },
                },
                "headGroupSpec": {"$ref": "#/$defs/group"},
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "allOf": [{"$ref": "#/$defs/group"}],
                        "required": ["groupName", "replicas", "minReplicas", "maxReplicas"],
                    },
                },
            },
        },
    },
    "$defs": {
        "group": {
            "type": "object",
            "required": ["rayStartParams", "template"],
            "additionalProperties": False,
            "properties": {
                "groupName": {"type": "string"},
                "replicas": {"type": "integer"},
                "minReplicas": {"type": "integer"},
                "maxReplicas": {"type": "integer"},
                "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
                "template": {"type": "object"},
            },
        },
    },
}
"""Fields of KubeRay's own definition (ray.io_rayclusters.yaml) that the manifest may use."""


def test_the_ray_cluster_meets_its_schema_and_its_pods_those_of_kubernetes() -> None:
    jsonschema.validate(RAY, RAY_CLUSTER)
    for group in _groups():
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": group["template"]["metadata"],
            "spec": group["template"]["spec"],
        }
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
        assert group["template"]["metadata"]["labels"] == {"app": "ray"}
    [policy] = yaml.safe_load_all((KUBERNETES / "ray" / "network.yaml").read_text())
    kubernetes_validate.validate(policy, KUBERNETES_VERSION, strict=True)
    kustomization = yaml.safe_load((KUBERNETES / "ray" / "kustomization.yaml").read_text())
    files = {*kustomization["resources"], *kustomization["configurations"], "kustomization.yaml"}
    assert {path.name for path in (KUBERNETES / "ray").iterdir()} == files


def test_the_ray_cluster_runs_the_pinned_version_grows_from_nothing_and_its_head_does_no_work() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / "ray.txt").read_text(), re.MULTILINE))
    assert RAY["spec"]["rayVersion"] == pins["ray"]
    assert RAY["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert {group["replicas"] for group in RAY["spec"]["workerGroupSpecs"]} == {0}


def fill_job(**values: Any) -> dict[str, Any]:
    """The Job that a worker makes of the pool's template, as Prefect fills it in: variables, else their defaults."""
    pool = json.loads((KUBERNETES / "work-pool.json").read_text())
    variables = {name: spec.get("default") for name, spec in pool["variables"]["properties"].items()}
    variables |= {"name": "nightly", "labels": {}, "env": {}, "command": "prefect flow-run execute"} | values

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, str) and (whole := re.fullmatch(r"{{ (\w+) }}", value)):
            return variables[whole[1]]
        return re.sub(r"{{ (\w+) }}", lambda m: str(variables[m[1]]), value) if isinstance(value, str) else value

    fill(pool["job_configuration"])  # every placeholder is a variable
    job: dict[str, Any] = fill(pool["job_configuration"]["job_manifest"])
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["args"] = container["args"].split()  # the worker does this too
    return job


def test_job_template_makes_a_job_with_a_gpu() -> None:
    job = fill_job(gpus=2)
    pod = job["spec"]["template"]["spec"]
    # The worker insists on these two, where Kubernetes has no such field and drops it.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    assert pod["containers"][0]["resources"]["limits"].pop("nvidia.com/gpu") == 2  # the schema wants a string
    kubernetes_validate.validate(job, KUBERNETES_VERSION, strict=True)


def test_pods_meet_the_restricted_standard_and_name_things_that_exist() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, as the namespace enforces."""
    objects = {(manifest["kind"], manifest["metadata"]["name"]) for _, manifest in MANIFESTS}
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    objects |= {("ConfigMap", generator["name"]) for generator in kustomization["configMapGenerator"]}
    ray = {group.get("groupName", "head") for group in _groups()}
    for name, pod in _pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for volume in pod.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in objects
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in objects
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert "readOnlyRootFilesystem" in container["securityContext"] or name in ray, name
            for variable in container["env"]:
                if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert secret["name"] == "magrpo"
                    assert secret["key"] in _env_names()


def test_deployments_keep_runs_on_the_volume_of_runs() -> None:
    deployments = yaml.safe_load((INFRA / "prefect.yaml").read_text())["deployments"]
    [root] = {deployment["parameters"]["root"] for deployment in deployments}
    mounts = {volume for name in ("worker", "worker-gpu") for volume in COMPOSE["services"][name]["volumes"]}
    assert mounts == {f"runs:{root}"}
    mounted = [mount for _, pod in _pods() for container in pod["containers"] for mount in container["volumeMounts"]]
    assert {mount["mountPath"] for mount in mounted if mount["name"] == "runs"} == {root}
    for path in (INFRA / "images").glob("worker*.Dockerfile"):
        assert f"install -d -o magrpo -g magrpo {root}" in path.read_text()


def test_kustomization_lists_every_manifest(tmp_path: Path) -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == sorted({f"{file}.yaml" for file, _ in MANIFESTS})
    for generator in kustomization["configMapGenerator"]:
        assert all((KUBERNETES / file).is_file() for file in generator["files"])


def test_kubectl_builds_the_kustomization(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(KUBERNETES, tmp_path / "k")
    subprocess.run([INFRA / "make-env.sh", tmp_path / "k" / "magrpo.env"], check=True)
    built = subprocess.run(["kubectl", "kustomize", tmp_path / "k"], check=True, capture_output=True, text=True).stdout
    documents = list(yaml.safe_load_all(built))
    assert len(documents) == len(MANIFESTS) + 3  # two config maps, one secret
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "magrpo"


def _images() -> Iterator[str]:
    yield from (service["image"] for service in COMPOSE["services"].values())
    yield from (container["image"] for _, pod in _pods() for container in pod["containers"])
    for dockerfile in (INFRA / "images").glob("*.Dockerfile"):
        yield from re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)


def test_images_are_named_by_exact_version_those_of_the_pins() -> None:
    images = set(_images())
    assert [image for image in images if not re.fullmatch(r"[\w./-]+:\d+\.\d+(\.\d+)?(-[\w.-]+)?", image)] == []
    assert {image.split(":")[1].split("-")[0] for image in images if "prefecthq" in image} == {PINS["prefect"]}
    assert len({image for image in images if image.startswith("postgres:")}) == 1
    assert len({image for image in images if image.startswith("python:")}) == 1


@pytest.mark.parametrize("path", sorted((INFRA / "images").glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_dockerfiles_copy_what_exists_and_end_as_an_ordinary_user(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    sources = [source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]]
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignore, f"{source} is not sent to the builder"
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "1000"


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in (INFRA / "systemd").glob("magrpo-*"):
        name = unit.name.replace("@.", "@nightly.")
        (tmp_path / name).write_text(re.sub(r"/opt/magrpo/\S+", "/bin/true", unit.read_text()))
    result = subprocess.run(
        ["systemd-analyze", "verify", *sorted(path.name for path in tmp_path.iterdir())],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")


def test_units_bind_to_the_loopback_interface() -> None:
    for name in ("prefect", "mlflow"):
        assert " --host 127.0.0.1 " in (INFRA / "systemd" / f"magrpo-{name}.service").read_text()


@pytest.mark.parametrize(
    "path", sorted([*INFRA.glob("**/*.sh"), *INFRA.glob("**/*.sbatch")]), ids=lambda path: path.name
)
def test_shell_scripts_parse_and_shellcheck_has_no_warning(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck is not None, "shellcheck is pinned in requirements/dev.txt: run make setup"
    if path.name != "stores.sh":  # followed from the scripts that source it
        subprocess.run([shellcheck, "-S", "warning", "-x", "-P", "SCRIPTDIR", path], check=True)


def test_make_env_writes_secrets_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first, second = tmp_path / "first.env", tmp_path / "second.env"
    for file in (first, second):
        subprocess.run([INFRA / "make-env.sh", file], check=True)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    values = dict(line.split("=", 1) for line in first.read_text().splitlines() if line and not line.startswith("#"))
    assert set(values) == _env_names()
    assert values["PREFECT_API_AUTH_STRING"] == values["PREFECT_SERVER_API_AUTH_STRING"]
    assert values["MLFLOW_TRACKING_PASSWORD"] == values["MLFLOW_AUTH_ADMIN_PASSWORD"]
    secrets = set(re.findall(r"[0-9a-f]{32}", first.read_text()))
    assert len(secrets) == len(set(re.findall(r"=\S*(@[a-z-]+@)", (INFRA / "env.example").read_text())))
    assert secrets.isdisjoint(re.findall(r"[0-9a-f]{32}", second.read_text()))
    again = subprocess.run([INFRA / "make-env.sh", first], capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists" in again.stderr


def test_env_files_are_ignored_by_git() -> None:
    names = ["infra/.env", "infra/kubernetes/magrpo.env"]
    listed = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout.splitlines() == names
