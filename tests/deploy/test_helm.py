"""The Helm charts: valid settings, bounds that fit, manifests that Kubernetes accepts, values that have an effect."""

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import yaml

from bench.sizing import memory_gib
from deploy import charts, check
from encoder_contract.version import __version__
from encoder_service.config import Config
from tests.deploy.test_deploy import PROCESSES_GIB, gib

CHART = charts.CHARTS / "encoder-service"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
EXAMPLES = [
    pytest.param(chart, values, id=f"{chart}-{name}")
    for chart in charts.names()
    for name, values in charts.examples(chart)
]
ENCODERS = [each for each in EXAMPLES if each.values[0] == "encoder-service"]


def test_kubernetes_accepts_every_example() -> None:
    results = check.check_charts()
    assert len(results) > len(EXAMPLES) * len(check.KUBERNETES)
    assert all(results)


def test_a_manifest_that_kubernetes_refuses_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = charts.render("encoder-service")["Deployment", "encoder"]
    manifest["spec"]["replica"] = 1  # misspelt
    monkeypatch.setattr(charts, "render", lambda chart, values=None: {("Deployment", "encoder"): manifest})
    assert not any(check.check_charts())


@pytest.mark.parametrize("chart", charts.names())
def test_helm_lint_passes(chart: str) -> None:
    values = next(values for _, values in charts.examples(chart))
    assert charts.lint(chart, values) == []


@pytest.mark.parametrize("chart", charts.names())
def test_the_examples_set_every_value(chart: str) -> None:
    known = set(_names(yaml.safe_load((charts.CHARTS / chart / "values.yaml").read_text())))
    used = {name for _, values in charts.examples(chart) for name in _names(values)}
    assert {name for name in known - used if not name.startswith("profiles.")} == set()


def _names(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values that are no mappings, or mappings of the user's own names."""
    for name, value in values.items():
        own = prefix + name
        if (
            isinstance(value, dict)
            and value
            and own not in ("networkPolicy.clients", "settings", "resources")
        ):
            yield from _names(value, f"{own}.")
        else:
            yield own


@pytest.mark.parametrize(("chart", "values"), EXAMPLES)
def test_every_value_that_an_example_sets_is_rendered(chart: str, values: dict[str, Any]) -> None:
    rendered = yaml.safe_dump_all([*charts.render(chart, values).values()], width=100_000)
    missing = [value for value in _leaves(values) if isinstance(value, str) and value not in rendered]
    # Those that choose a manifest or a profile.
    assert set(missing) <= {"gpu", "cpu", "keda", "metrics"}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


@pytest.mark.parametrize(
    ("values", "says"),
    [({"profile": "tpu"}, "there is no \\W+tpu"), ({"autoscale": {"by": "cron"}}, "there is no \\W+cron")],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(charts.ChartError, match=says):
        charts.render("encoder-service", values)


@pytest.mark.parametrize(("chart", "values"), ENCODERS)
def test_the_pods_environment_is_a_valid_configuration_whose_store_fits(
    chart: str, values: dict[str, Any]
) -> None:
    rendered = charts.render(chart, values)
    config = Config.read({}, rendered["ConfigMap", "encoder"]["data"])
    pod = rendered["Deployment", "encoder"]["spec"]["template"]["spec"]
    (shm,) = (each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm")
    assert shm["medium"] == "Memory"
    assert config.store_host_gib < gib(shm["sizeLimit"])
    limit = gib(pod["containers"][0]["resources"]["limits"]["memory"])
    assert gib(shm["sizeLimit"]) < limit
    assert memory_gib(config, on_gpu=config.devices == "cuda") + PROCESSES_GIB[config.devices] < limit


@pytest.mark.parametrize(("chart", "values"), ENCODERS)
def test_the_pod_outlives_the_drain_leaves_a_dead_node_and_is_locked_down(
    chart: str, values: dict[str, Any]
) -> None:
    rendered = charts.render(chart, values)
    deployment = rendered["Deployment", "encoder"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    drain_s = next(field.default for field in fields(Config) if field.name == "drain_s")
    pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > drain_s + pre_stop_s
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    dead = {each["key"]: each.get("tolerationSeconds") for each in pod["tolerations"]}
    assert dead["node.kubernetes.io/unreachable"] == dead["node.kubernetes.io/not-ready"] != 300
    assert pod["topologySpreadConstraints"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    gpu = {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility,video"}
    assert (gpu in container["env"]) == (values.get("profile") == "gpu")


@pytest.mark.parametrize(("chart", "values"), ENCODERS)
def test_each_selector_selects_the_pods_of_one_deployment(chart: str, values: dict[str, Any]) -> None:
    rendered = charts.render(chart, values)
    labels = {
        name: each["spec"]["template"]["metadata"]["labels"]
        for (kind, name), each in rendered.items()
        if kind == "Deployment"
    }
    selectors = {
        (kind, name): each["spec"].get("podSelector", each["spec"].get("selector"))
        for (kind, name), each in rendered.items()
        if kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment")
    }
    for (kind, name), selector in selectors.items():
        wanted = selector.get("matchLabels", selector)
        assert wanted, "an empty selector selects every pod, or none"
        selected = [each for each, has in labels.items() if wanted.items() <= has.items()]
        assert selected == [name.removesuffix("-replicas")], (kind, name)


@pytest.mark.parametrize(("chart", "values"), ENCODERS)
def test_no_service_name_makes_kubernetes_inject_our_settings(chart: str, values: dict[str, Any]) -> None:
    rendered = charts.render(chart, values)
    assert rendered["Deployment", "encoder"]["spec"]["template"]["spec"]["enableServiceLinks"] is False
    injected = {name.upper().replace("-", "_") for kind, name in rendered if kind == "Service"}
    ours = {Config.environment_name(field.name) for field in fields(Config)}
    assert injected
    assert not {name for name in ours for service in injected if name.startswith(f"{service}_")}


def test_a_redis_of_its_own_is_the_index_and_only_replicas_reach_it() -> None:
    rendered = charts.render("encoder-service", {"redis": {"enabled": True}})
    index = Config.read({}, rendered["ConfigMap", "encoder"]["data"]).index
    host, port = re.fullmatch(r"redis://([\w-]+):(\d+)/0", index).groups()  # type: ignore[union-attr]
    assert rendered["Service", host]["spec"]["ports"][0]["port"] == int(port)
    replicas = rendered["Deployment", "encoder"]["spec"]["template"]["metadata"]["labels"]
    policy = rendered["NetworkPolicy", host]["spec"]
    assert policy["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": replicas}}], "ports": [{"port": "redis"}]}
    ]
    assert "Egress" in policy["policyTypes"]
    assert not policy.get("egress")
    allowed = rendered["NetworkPolicy", "encoder"]["spec"]["egress"]
    labels = rendered["Deployment", host]["spec"]["template"]["metadata"]["labels"]
    assert {"to": [{"podSelector": {"matchLabels": labels}}], "ports": [{"port": 6379}]} in allowed


def test_an_autoscaler_alone_sets_the_number_of_replicas() -> None:
    for by, kind in (("metrics", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        rendered = charts.render("encoder-service", {"autoscale": {"enabled": True, "by": by}})
        assert "replicas" not in rendered["Deployment", "encoder"]["spec"]
        assert [each for each, _ in rendered if each in ("HorizontalPodAutoscaler", "ScaledObject")] == [kind]


def test_autoscalers_follow_the_seconds_of_the_demanded_backlog() -> None:
    values = {"enabled": True, "seconds": "0.5", "prometheus": "http://prometheus:9090"}
    scaler = charts.render("encoder-service", {"autoscale": {**values, "by": "metrics"}})[
        "HorizontalPodAutoscaler", "encoder"
    ]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"] == {
        "metric": {"name": "encsvc_backlog_seconds", "selector": {"matchLabels": {"class": "demanded"}}},
        "target": {"type": "AverageValue", "averageValue": "0.5"},
    }
    scaler = charts.render("encoder-service", {"autoscale": {**values, "by": "keda"}})[
        "ScaledObject", "encoder"
    ]
    (trigger,) = scaler["spec"]["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "0.5")
    query = trigger["metadata"]["query"]
    assert query.startswith("sum(encsvc_backlog_seconds{namespace=")
    assert query.endswith(", class='demanded'})")


def test_a_changed_setting_rolls_the_pods() -> None:
    def annotations(values: dict[str, Any]) -> Any:
        return charts.render("encoder-service", values)["Deployment", "encoder"]["spec"]["template"][
            "metadata"
        ]["annotations"]

    assert annotations({}) == annotations({})
    assert annotations({}) != annotations({"settings": {"ENCSVC_LOG_LEVEL": "debug"}})


def test_the_charts_images_and_settings_are_of_this_release() -> None:
    for name in charts.names():
        chart = yaml.safe_load((charts.CHARTS / name / "Chart.yaml").read_text())
        assert chart["version"] == chart["appVersion"] == __version__
    for name, profile in VALUES["profiles"].items():
        assert profile["tag"].startswith(f"{__version__}-"), name
        Config.read({}, {"ENCSVC_MODEL": "/model", **profile["settings"]})
