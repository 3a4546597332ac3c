"""The files of infra/k8s: built offline, valid for the API, and what they start is ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped] # ships no types
import pytest
import yaml
from typer.testing import CliRunner

from skerry.errors import StateLost
from skerry.settings import loading
from skerry.settings.local import Settings
from tests.support.processes import call, skerry

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
K8S = ROOT / "infra" / "k8s"
EXAMPLES = tuple(sorted(path.name for path in (K8S / "examples").iterdir()))
ALONE = ("bucket", "gpu", "kueue", "slice")
"""Components that no example has, or that change what others add."""
OF_OTHERS = {"JobSet", "PodMonitor", "PrometheusRule"}
"""Kinds whose schemas their operators bring."""
API = "1.37"
Object = dict[str, Any]


def built(folder: Path) -> list[Object]:
    done = call(BIN / "kubectl", "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """All examples, and one more overlay with every component."""
    found = [one for name in EXAMPLES for one in built(K8S / "examples" / name)]
    folder = tmp_path_factory.mktemp("overlay")
    k8s = os.path.relpath(K8S, folder.resolve())
    store = {"name": "skerry", "behavior": "merge", "literals": ["SKERRY_STORE__URL=s3://b/p"]}
    more = {
        "resources": [f"{k8s}/base"],
        "components": [f"{k8s}/components/{name}" for name in ("learners", *ALONE)],
        "configMapGenerator": [store],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(more))
    return [*found, *built(folder)]


def pods(everything: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Yield name, pod and object for every pod that is described."""
    for one in everything:
        template = one.get("spec", {}).get("template")
        for job in one.get("spec", {}).get("replicatedJobs", ()):
            template = job["template"]["spec"]["template"]
        if template is not None:
            yield f"{one['kind']} {one['metadata']['name']}", template["spec"], one


def volumes(pod: Object) -> set[str]:
    return {volume["name"] for volume in pod["volumes"]}


def settings(everything: list[Object], name: str) -> dict[str, str]:
    (data,) = [
        one["data"]
        for one in everything
        if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name
    ][:1]
    return dict(data)


def environment(everything: list[Object], container: Object) -> dict[str, str]:
    """Return a container's variables, expanded as the kubelet does: by those before them."""
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        if "configMapRef" in source:
            found |= settings(everything, source["configMapRef"]["name"])
    for variable in container["env"]:
        value = variable.get("value", "pod-0")
        found[variable["name"]] = expanded(value, found)
    return found


def expanded(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], text)


def test_every_object_is_valid_for_the_api(everything: list[Object]) -> None:
    kinds = {one["kind"] for one in everything}
    assert kinds >= {"StatefulSet", "Deployment", "Job", "NetworkPolicy", *OF_OTHERS}
    for one in everything:
        if one["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(one, API, strict=True)
        for job in one["spec"].get("replicatedJobs", ()) if "spec" in one else ():
            inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            kubernetes_validate.validate(
                {**inner, "spec": job["template"]["spec"]}, API, strict=True
            )


def test_each_container_starts_an_image_of_ours_with_options_and_settings_that_exist(
    everything: list[Object], tmp_path: Path
) -> None:
    for name, pod, _ in pods(everything):
        (container,) = pod["containers"]
        environ = environment(everything, container)
        recipe = service_of(container["image"])
        known = {**environ, "JOB_COMPLETION_INDEX": "1"}
        words = [expanded(word, known) for word in container["args"]]
        module = import_module(f"skerry_{recipe}.__main__")
        done = CliRunner().invoke(module.app, [*words, "--help"])
        assert done.exit_code == 0, (name, done.output)
        sets = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
        loaded(everything, pod, environ, sets, tmp_path)


def service_of(image: str) -> str:
    """Return the service whose Dockerfile builds an image: its folder."""
    name = image.partition(":")[0].rpartition("/")[2].removesuffix("-cuda").replace("-", "_")
    text = (ROOT / "services" / name / "Dockerfile").read_text()
    entry = re.search(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    assert entry is not None
    assert json.loads(entry[1]) == ["python", "-m", f"skerry_{name}"]
    return name


def loaded(
    everything: list[Object], pod: Object, environ: dict[str, str], sets: list[str], folder: Path
) -> Settings:
    """Load a pod's settings, its config file included; ConfigError for one that does not exist."""
    path = None
    for volume in pod["volumes"]:
        if "configMap" in volume:
            path = folder / "run.toml"
            path.write_text(settings(everything, volume["configMap"]["name"])["run.toml"])
    return loading.load(path, sets, {k: v for k, v in environ.items() if k != "SKERRY_RUN"})


def test_no_pod_may_do_more_than_it_must(everything: list[Object]) -> None:
    for name, pod, _ in pods(everything):
        (container,) = pod["containers"]
        assert not pod["automountServiceAccountToken"], name
        assert not pod["enableServiceLinks"], name
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"], name
        assert rights["capabilities"] == {"drop": ["ALL"]}, name
        assert not rights["allowPrivilegeEscalation"], name
        assert container["resources"]["requests"], name
        assert container["resources"]["limits"]["memory"], name


def test_what_a_service_writes_is_on_a_volume_and_it_may_end_in_order(
    everything: list[Object], tmp_path: Path
) -> None:
    for name, pod, _ in pods(everything):
        (container,) = pod["containers"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        } | {c["metadata"]["name"] for c in claims(everything, name)}, name
        text = (ROOT / "services" / service_of(container["image"]) / "Dockerfile").read_text()
        made = set(re.findall(r"install -d .* (/\S+)", text))
        if "create-run" not in name:
            assert made <= mounted, name
        local = loaded(everything, pod, environment(everything, container), [], tmp_path).local
        assert pod["terminationGracePeriodSeconds"] > local.shutdown_s + 10, name
        secrets = {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
        assert secrets <= made_secrets(), name


def test_each_pod_finds_the_key_that_the_how_to_makes_for_it(
    everything: list[Object], tmp_path: Path
) -> None:
    lines = (ROOT / "docs/how-to/kubernetes.md").read_text().splitlines()
    for line in lines:
        if line.startswith("skerry keys "):
            made = skerry(tmp_path, *line.split()[1:])
            assert made.returncode == 0, made.stderr
    held: dict[str, set[str]] = {}
    for name, files in re.findall(r"create secret generic (\S+) (.+)", "\n".join(lines)):
        held[name] = set(re.findall(r"--from-file (keys/\S+)", files))
        assert all((tmp_path / file).is_file() for file in held[name]), name
    for name, pod, _ in pods(built(K8S / "examples" / "hub")):
        (container,) = pod["containers"]
        (keys,) = [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "keys"]
        for number in ("0", "1"):
            given = {"POD_NAME": f"{name.split()[1]}-{number}", "JOB_COMPLETION_INDEX": number}
            known = {**environment(everything, container), **given}
            texts = [e.get("value", "") for e in container["env"]] + container["args"]
            (path,) = [t for t in texts if "/run/secrets/skerry/" in t]
            key = expanded(path, known).rpartition("/")[2]
            assert f"keys/{key}" in held[keys], name


def claims(everything: list[Object], name: str) -> list[Object]:
    found = [one for one in everything if f"{one['kind']} {one['metadata']['name']}" == name]
    return [c for one in found for c in one["spec"].get("volumeClaimTemplates", ())]


def made_secrets() -> set[str]:
    """Return the Secrets that the how-to makes."""
    text = (ROOT / "docs/how-to/kubernetes.md").read_text()
    return set(re.findall(r"create secret \w+ (\S+)", text))


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_pod_knows_who_vouches_for_a_broker_with_tls(example: str) -> None:
    objects = built(K8S / "examples" / example)
    for name, pod, _ in pods(objects):
        (container,) = pod["containers"]
        environ = environment(objects, container)
        assert environ["SKERRY_NATS__URL"].startswith("tls://"), name
        folder, _, file = environ["SKERRY_NATS__CA_FILE"].rpartition("/")
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert file == "ca.crt", name
        assert volumes[mounts[folder]]["secret"]["secretName"] == "nats-ca", name


def test_a_learner_is_given_up_only_for_what_no_start_mends(everything: list[Object]) -> None:
    (job, *_) = [o for _, _, o in pods(everything) if o["metadata"]["name"] == "learners"]
    ignored, failed = job["spec"]["podFailurePolicy"]["rules"]
    assert ignored["action"] == "Ignore"
    assert failed["onExitCodes"]["values"] == [StateLost.exit_code], "a key may become known later"


def test_a_learner_that_is_moved_away_is_not_done(everything: list[Object]) -> None:
    """A Job takes a pod that ends with 0 for done, and starts it nowhere else."""
    learners = [(name, pod) for name, pod, _ in pods(everything) if "learners" in volumes(pod)]
    assert learners
    for name, pod in learners:
        environ = {row["name"]: row.get("value") for row in pod["containers"][0]["env"]}
        assert environ["SKERRY_LEARNER__STOPPED_CODE"] not in {"0", "4"}, name


def test_a_service_whose_run_is_over_stays(everything: list[Object]) -> None:
    """What ends would be started again and again."""
    staying = {
        name
        for name, pod, one in pods(everything)
        if one["kind"] in {"Deployment", "StatefulSet"}
        for row in pod["containers"][0]["env"]
        if (row["name"], row.get("value")) == ("SKERRY_STAYS", "true")
    }
    assert staying == {"StatefulSet checkpointer", "StatefulSet syncer", "Deployment evaluator"}


def test_alerts_are_those_of_prometheus_alone(everything: list[Object]) -> None:
    (rules, *_) = [one for one in everything if one["kind"] == "PrometheusRule"]
    shipped = yaml.safe_load((ROOT / "infra/prometheus/rules.yml").read_text())
    assert rules["spec"] == shipped


def test_only_the_monitor_reaches_the_brokers_monitoring_port(everything: list[Object]) -> None:
    policies = [one for one in everything if one["kind"] == "NetworkPolicy"]
    for policy in policies:
        for rule in policy["spec"].get("ingress", ()):
            if 8222 in {port["port"] for port in rule.get("ports", ())}:
                (peer,) = rule["from"]
                named = peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
                assert named == "health-monitor"


def test_the_brokers_values_say_what_its_own_config_says() -> None:
    values = yaml.safe_load((K8S / "nats/hub.yaml").read_text())["config"]
    text = (ROOT / "infra/nats/nats.conf").read_text()
    known = dict(re.findall(r"^\s*(\w+): \"?([\w.]+)\"?$", text, re.MULTILINE))
    merged = {**values["merge"], **values["jetstream"]["merge"]}
    for name in ("max_payload", "ping_interval", "ping_max", "write_deadline", "sync_interval"):
        assert str(merged[name]).strip("<> ") == known[name], name


def test_a_probe_looks_at_the_process_and_not_at_the_broker(
    everything: list[Object], tmp_path: Path
) -> None:
    """A syncer whose broker is away passes; the same one does not once its loop stands still."""
    (container,) = next(pod for name, pod, _ in pods(everything) if "syncer" in name)["containers"]
    alive = tmp_path / "alive"
    named = environment(everything, container)["SKERRY_ALIVE_FILE"]
    probe = [w.replace(named, str(alive)) for w in container["livenessProbe"]["exec"]["command"]]
    given = ("--nats", "nats://127.0.0.1:1", "--set", f'alive_file="{alive}"')
    assert call(*probe).returncode != 0
    command = [sys.executable, "-m", "skerry_syncer", *given]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while call(*probe).returncode != 0:
            assert process.poll() is None
        process.kill()
    past_s = time.time() - 90  # as when it has hung for so long
    os.utime(alive, (past_s, past_s))
    assert call(*probe).returncode != 0
