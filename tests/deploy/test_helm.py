"""The Helm chart renders the same manifests as kustomize does from the overlays."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import check
from encoder_contract.version import __version__
from encoder_service.config import Config

DEPLOY = check.DEPLOY
CHART = DEPLOY / "helm/encoder-service"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

with_helm = pytest.mark.skipif(
    shutil.which("helm") is None and find_spec("helm_python") is None,
    reason="Helm is not installed: helm itself, or pip install helm-python-sdk",
)
with_kustomize = pytest.mark.skipif(
    check.kustomize() is None, reason="neither kubectl nor kustomize is installed"
)

Manifests = dict[tuple[str, str], dict[str, Any]]


def rendered(values: Mapping[str, Any]) -> Manifests:
    """Return the manifests that Helm renders, by kind and name."""
    if helm := shutil.which("helm"):
        command = [helm, "template", "encoder", CHART, "--namespace", "encoder", "--values", "-"]
        done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
        texts = [done.stdout]
    else:
        import helm_python

        files = helm_python.Chart.load(CHART).render(dict(values), name="encoder", namespace="encoder")
        texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return by_name(each for text in texts for each in yaml.safe_load_all(text) if each)


def by_name(manifests: Any) -> Manifests:
    """Return manifests without what the two tools name differently: a ConfigMap's hash, the settings' checksum."""
    text = "\n---\n".join(json.dumps(each) for each in manifests)
    text = re.sub(r'"encoder-[a-z0-9]{10}"', '"encoder"', text)
    found = list(yaml.safe_load_all(text))
    for each in found:
        if each["kind"] == "Deployment":
            each["spec"]["template"]["metadata"]["annotations"].pop("checksum/settings", None)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def built(overlay: str, *components: str, folder: Path) -> Manifests:
    """Return the manifests that kustomize renders from an overlay, without the namespace, which the chart lacks."""
    kustomize = check.kustomize()
    assert kustomize is not None
    target = check.overlay_with(components, folder / "it", overlay)
    done = subprocess.run([*kustomize, target], capture_output=True, text=True, check=True)
    return by_name(each for each in yaml.safe_load_all(done.stdout) if each["kind"] != "Namespace")


TLS = {"tls": {"enabled": True}}


@with_helm
@with_kustomize
@pytest.mark.parametrize(
    ("overlay", "components", "values"),
    [
        ("cpu", (), {}),
        ("cpu", ("monitoring",), {"monitoring": {"enabled": True}}),
        ("cpu-tls", (), TLS),
        ("cpu-tls", ("monitoring-tls",), {"monitoring": {"enabled": True}, **TLS}),
        ("gpu", (), {"profile": "gpu", "autoscale": {"enabled": True}}),
        (
            "gpu-tls",
            (),
            {"profile": "gpu", "autoscale": {"enabled": True}, "redisTls": {"enabled": True}, **TLS},
        ),
    ],
)
def test_the_chart_renders_what_kustomize_renders(
    overlay: str, components: tuple[str, ...], values: dict[str, Any], tmp_path: Path
) -> None:
    ours, expected = rendered(values), built(overlay, *components, folder=tmp_path)
    assert ours.keys() == expected.keys()
    for name, manifest in expected.items():
        assert ours[name] == manifest, name


@with_helm
def test_chart_values_reach_the_replicas() -> None:
    values = {
        "replicas": 5,
        "modelClaim": "another",
        "index": "redis://elsewhere:6379",
        "settings": {"ENCSVC_MAX_CALLS": 7},
        "image": {
            "repository": "registry.example/encoder",
            "tag": "1.2.3",
            "pullSecrets": [{"name": "pull"}],
        },
    }
    found = rendered(values)
    settings = found["ConfigMap", "encoder"]["data"]
    config = Config.read({}, settings)
    assert (config.index, config.max_calls) == ("redis://elsewhere:6379", 7)
    deployment = found["Deployment", "encoder"]["spec"]
    pod = deployment["template"]["spec"]
    assert deployment["replicas"] == 5
    assert pod["containers"][0]["image"] == "registry.example/encoder:1.2.3"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "another"


@with_helm
def test_helm_lint_passes_and_an_unknown_profile_is_refused() -> None:
    if helm := shutil.which("helm"):
        done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        refused: type[Exception] = subprocess.CalledProcessError
    else:
        import helm_python

        report = helm_python.lint(CHART, strict=True)
        assert report["errors"] == []
        assert [each for each in report["messages"] if each["severity"] > 1] == []
        refused = helm_python.HelmRenderError
    with pytest.raises(refused):
        rendered({"profile": "tpu"})


def test_the_charts_images_and_settings_are_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for name, profile in VALUES["profiles"].items():
        assert profile["tag"].startswith(f"{__version__}-"), name
        Config.read({}, {"ENCSVC_MODEL": "/model", **profile["settings"]})
