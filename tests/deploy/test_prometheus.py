"""Checks every expression of the dashboard, rules and alerts against the metrics of a live replica."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy import charts
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.metrics import Scrape, scrape
from prefill_client import TRANSPORTS, Credentials, EncoderClient
from prefill_client.sglang_gateway.metrics import GatewayMetrics
from prefill_client.vllm.counts import METRICS as METRICS_OF_ENGINES
from prefill_client.vllm.counts import answers, renders
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from testing.redis_servers import redis_server
from tests.calls import encoded
from tests.deployed_engine import DEPLOY
from tests.processes import run
from tests.servers import server_of
from tests.waiting import PATIENCE_S

DASHBOARD = DEPLOY / "grafana/dashboards/encoder-service.json"
RULES = [DEPLOY / "prometheus/rules.yml", DEPLOY / "prometheus/alerts.yml"]

TARGET_LABELS = {"job", "instance"}  # added by Prometheus to every target
OF_PROMETHEUS = {"up": TARGET_LABELS, "ALERTS": {"alertname", "alertstate", "severity"}}
VARIABLES = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*"}

Series = Mapping[str, list[Mapping[str, str]]]


def rules(kind: str) -> list[dict[str, str]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def dashboard_expressions() -> Iterator[tuple[str, str, str]]:
    """Yield panel, expression and legend of every query of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, stands_for in VARIABLES.items():
                expression = expression.replace(name, stands_for)
            yield panel["title"], expression, target["legendFormat"]


EXPRESSIONS = {
    **{f"{title}: {legend}": expr for title, expr, legend in dashboard_expressions()},
    **{rule["record"]: rule["expr"] for rule in rules("record")},
    **{rule["alert"]: rule["expr"] for rule in rules("alert")},
}


@dataclass
class Reads:
    """The selectors of an expression, and the labels that it names."""

    selectors: list[promql.VectorSelector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)

    def visit(self, node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector):
            self.selectors.append(node)
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            self.labels.update(node.modifier.labels)
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching:
            self.labels.update(node.modifier.matching.labels)
        return True


def reads(expression: str) -> Reads:
    found = Reads()
    promql.walk(promql.parse(expression), pre_visit=found.visit)
    assert found.selectors, expression
    return found


@pytest.fixture
async def exported(config: Config, model: Model, tmp_path: Path) -> AsyncIterator[Series]:
    """All series of a replica with Redis and TLS that has served images, and of the gateway."""
    authority = Authority()
    ca, issued = authority.write(tmp_path / "ca.pem"), authority.issue(tmp_path, "server", HOSTS)
    with redis_server() as redis:
        listening = replace(config, index=redis.url, device_peak_tflops=1.0)
        secured = replace(listening, tls_cert=issued.cert, tls_key=issued.key)
        async with server_of(secured, model) as server:
            yield await _serve_some(server, ca)


async def _serve_some(server: Server, ca: str) -> Series:
    image = photo(160, 120, 1)
    async with await EncoderClient.connect(server.endpoint, credentials=Credentials(ca)) as client:
        for transport in TRANSPORTS:
            await encoded(client, image, transports=[transport])
        now: Scrape = await asyncio.to_thread(scrape, server.watch.url, PATIENCE_S, ca=ca)
    series = {_exported(name): [labels for labels, _ in samples] for name, samples in now.samples.items()}
    for family in text_string_to_metric_families(generate_latest(_gateway_metrics().registry).decode()):
        for sample in family.samples:
            series.setdefault(sample.name, []).append(sample.labels)
    series |= {name: [dict.fromkeys(labels, "")] for name, labels in OF_PROMETHEUS.items()}
    series |= {name: [{label: ""} if label else {}] for name, label, _ in METRICS_OF_ENGINES.values()}
    answers().labels("410", "not_found")
    renders().labels("named")
    for counter in (answers(), renders()):
        for sample in next(iter(counter.collect())).samples:
            series.setdefault(sample.name, []).append(sample.labels)
    for rule in rules("record"):
        series[rule["record"]] = [dict.fromkeys(_labels_of_recorded(rule["expr"]), "")]
    return series


def _gateway_metrics() -> GatewayMetrics:
    metrics = GatewayMetrics()
    metrics.images.labels("host").inc()
    metrics.certificate_expiration.labels("client")
    return metrics


def _exported(name: str) -> str:
    return name if name.startswith("process_") else f"encsvc_{name}"


def _labels_of_recorded(expression: str) -> set[str]:
    return {label for label in reads(expression).labels if label != "le"} | TARGET_LABELS


def _matches(labels: Mapping[str, str], selector: promql.VectorSelector) -> bool:
    """Return whether a series has the labels of a selector, without those that Prometheus adds."""
    for matcher in selector.matchers.matchers:
        if matcher.name in TARGET_LABELS | {"alertstate"}:
            continue
        value = labels.get(matcher.name)
        if value is None:
            return False
        exact = re.fullmatch(matcher.value if "Re" in str(matcher.op) else re.escape(matcher.value), value)
        if (exact is None) != ("Not" in str(matcher.op)):
            return False
    return True


async def test_every_expression_reads_series_that_a_live_replica_exports(exported: Series) -> None:
    wrong = []
    for where, expression in EXPRESSIONS.items():
        found = reads(expression)
        read = [labels for selector in found.selectors for labels in exported.get(selector.name, [])]
        for selector in found.selectors:
            if not any(_matches(labels, selector) for labels in exported.get(selector.name, [])):
                wrong.append(f"{where}: nothing exported matches {selector}")
        known = {label for labels in read for label in labels} | TARGET_LABELS
        wrong += [f"{where}: no label {label}" for label in found.labels - known]
    assert wrong == []


async def test_every_legend_names_labels_that_its_expression_keeps(exported: Series) -> None:
    wrong = []
    for panel, expression, legend in dashboard_expressions():
        found = reads(expression)
        kept = found.labels or TARGET_LABELS
        wrong += [f"{panel}: {{{{{name}}}}}" for name in re.findall(r"{{(\w+)}}", legend) if name not in kept]
    assert wrong == []


async def test_every_exported_metric_is_shown_or_listed_as_left_out(exported: Series) -> None:
    """A metric that no panel, rule or alert reads may be useless, so it must be listed."""
    read = {selector.name for expression in EXPRESSIONS.values() for selector in reads(expression).selectors}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in read}
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if name.startswith("encsvc_")}
    for_top_and_queries = {
        *("model_info", "draining", "foreign_rows_total", "index_never_joined", "queue_requests"),
        *("queue_claims", "queue_clients", "sources_size_bytes", "sources_images", "videos"),
        *("videos_size_bytes", "store_largest_free_bytes", "store_moves_total", "store_refusals_total"),
        *("store_waits_total", "store_writes_total"),
    }
    assert ours - stems == {f"encsvc_{name}" for name in for_top_and_queries}


def test_unknown_labels_and_label_values_are_detected() -> None:
    expression = 'sum by (nothing) (rate(encsvc_calls_total{call="fetch"}[5m]))'
    found = reads(expression)
    assert (found.labels, [s.name for s in found.selectors]) == ({"nothing"}, ["encsvc_calls_total"])
    assert _matches({"call": "fetch"}, found.selectors[0])
    assert not _matches({"call": "submit"}, found.selectors[0])
    assert not _matches({}, found.selectors[0])


def test_the_dashboard_is_built_from_its_panels_file() -> None:
    built = run("python", DEPLOY / "grafana/build.py", "--check")
    assert built.returncode == 0, built.stderr


def test_the_prometheus_operator_gets_the_same_rules_and_scrapes_the_pods() -> None:
    built = run("python", DEPLOY / "prometheus/operator.py", "--check")
    assert built.returncode == 0, built.stderr
    rendered = charts.render("encoder-service", {"monitoring": {"enabled": True}})
    rule = rendered["PrometheusRule", "encoder"]
    operator_rules = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert operator_rules == [*rules("record"), *rules("alert")]
    monitor = rendered["PodMonitor", "encoder"]["spec"]
    pod = rendered["Deployment", "encoder"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert monitor["jobLabel"] in pod["metadata"]["labels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
    assert endpoint["port"] in ports


def test_panels_do_not_overlap_and_fill_their_rows() -> None:
    occupied: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & occupied, panel["title"]
        assert place["x"] + place["w"] <= 24
        occupied |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_stat_panel_has_a_colour_for_each_range() -> None:
    stats = [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] == "stat"]
    assert len(stats) == 7
    for each in stats:
        steps = each["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None
        values = [step["value"] for step in steps[1:]]
        assert values == sorted(values)
        assert len({step["color"] for step in steps}) in (1, 3), each["title"]


def test_every_alert_has_a_case_a_severity_and_a_runbook() -> None:
    cases = yaml.safe_load((DEPLOY / "prometheus/rules.test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in cases
        for case in test.get("alert_rule_test", [])
        if case.get("exp_alerts")
    }
    for rule in rules("alert"):
        assert rule["alert"] in fired, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert not re.search(r"\bjob *=", rule["expr"]), "a job may have any name"
    assert fired == {rule["alert"] for rule in rules("alert")}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml", "vllm.yml"), ("test", "rules", "rules.test.yml")],
    ids=" ".join,
)
def test_promtool_accepts_configurations_and_rules(arguments: tuple[str, ...]) -> None:
    check = subprocess.run(
        ["promtool", *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr
