"""The compose file as operators run it: up, a chat, three replicas, faults, a roll, the dashboard, down."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.images import build, engine
from testing.images.stack import Stack, wait_until
from testing.photos import photo

pytestmark = pytest.mark.images

REPLICAS = 3

# Rows of the dashboard, and panels, that a stack without GPUs, engines and failures leaves empty.
EMPTY_ROWS = {"vLLM engines", "SGLang gateways"}
EMPTY_PANELS = {"Failed images, by reason", "Model FLOP utilisation"}
RATE_S = 30


@pytest.fixture(scope="module")
def stack(
    images: dict[str, str], readable_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The running services. The time until the first answer of a chat is printed."""
    stack = Stack(readable_checkpoint, tmp_path_factory.mktemp("stack"), REPLICAS)
    began = time.monotonic()
    try:
        stack.up()
        stack.chat(photo(320, 240, 1))
        print(f"first answer of a chat {time.monotonic() - began:.0f} s after `up`")
        yield stack
    finally:
        stack.down()
    left = engine.run("volume", "ls", "--quiet").split()
    assert left == [], "`down --volumes` leaves no volume"


def encoders(stack: Stack) -> list[str]:
    return stack.containers("encoder-cpu")


def test_a_container_has_no_rights_and_its_decoders_are_confined(stack: Stack) -> None:
    (container,) = encoders(stack)[:1]
    with pytest.raises(subprocess.CalledProcessError):
        stack.exec(container, "touch", "/opt/app/x")
    status = dict(
        line.split(":\t", 1)
        for line in stack.exec(container, "cat", "/proc/1/status").splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert "confined by seccomp" in stack.log("encoder-cpu")


def test_replicas_are_added_and_find_each_other(stack: Stack) -> None:
    stack.up("encoder-cpu", replicas=REPLICAS)
    assert len(encoders(stack)) == REPLICAS
    wait_until(lambda: stack.value("sum(up)") == REPLICAS, "Prometheus scrapes all")
    wait_until(lambda: stack.value("min(encsvc_index_peers)") == REPLICAS - 1, "replicas see each other")
    assert stack.value('sum(encsvc_index_state{state="joined"})') == REPLICAS
    print(stack.compose("ps", "--format", "table {{.Name}}\t{{.Status}}\t{{.Ports}}"))
    for target in stack.prometheus("targets")["activeTargets"]:
        print(target["labels"]["job"], target["scrapeUrl"], target["health"])
        assert target["health"] == "up", target["lastError"]


def test_every_query_of_the_dashboard_is_answered(stack: Stack) -> None:
    began = time.time()
    for number in range(4):
        stack.chat(photo(320, 240, number), photo(200, 100, 10 + number))
    wait_until(lambda: time.time() > began + RATE_S, "there are samples for a rate")
    instance = stack.prometheus("query", query="encsvc_build_info")["result"][0]["metric"]["instance"]
    row, empty = "", []
    for panel in json.loads((build.DEPLOY / "grafana/dashboards/encoder-service.json").read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", f"{RATE_S}s").replace("$job", "encoder")
            query = query.replace('="$instance"', f'="{instance}"').replace("$instance", ".*")
            series = stack.prometheus("query_range", query=query, start=began, end=time.time(), step=5)[
                "result"
            ]
            has_value = any(value != "NaN" for each in series for _, value in each["values"])
            if not has_value and row not in EMPTY_ROWS:
                empty.append(panel["title"])
    print("empty panels:", sorted(set(empty)))
    assert set(empty) <= EMPTY_PANELS


def test_no_alert_fires_on_a_sound_stack(stack: Stack) -> None:
    assert stack.alerts() == set()
    rules = [rule for group in stack.prometheus("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []


def test_a_roll_of_all_replicas_fails_no_call(stack: Stack) -> None:
    stack.up("encoder-cpu", replicas=REPLICAS)
    before = set(encoders(stack))
    with stack.calls() as calls:
        stack.roll("encoder-cpu")
    after = set(encoders(stack))
    assert len(after) == REPLICAS
    assert not before & after
    print(f"roll of {REPLICAS} replicas: {calls['calls']} calls, {len(calls['errors'])} failed")
    assert calls["calls"] > 0
    assert calls["errors"] == []


def test_a_replica_that_is_killed_is_started_again_and_fails_no_call(stack: Stack) -> None:
    victim = encoders(stack)[0]
    started = engine.run("inspect", "--format", "{{.State.StartedAt}}", victim)
    with stack.calls() as calls:
        # From outside: a signal of `docker kill` counts as a wish to stop it.
        pid = engine.run("inspect", "--format", "{{.State.Pid}}", victim).strip()
        subprocess.run(["kill", "-9", pid], check=True)
        wait_until(
            lambda: engine.run("inspect", "--format", "{{.State.StartedAt}}", victim) != started,
            "it is restarted",
        )
        wait_until(
            lambda: (
                engine.run("inspect", "--format", "{{.State.Health.Status}}", victim).strip() == "healthy"
            ),
            "it is healthy",
        )
    assert calls["errors"] == []


@pytest.fixture(scope="module")
def lost_at(stack: Stack) -> float:
    """Remove a replica for good; when that was. Its alert takes two minutes, in which another test runs."""
    engine.run("rm", "--force", encoders(stack)[0])
    return time.monotonic()


@pytest.mark.usefixtures("lost_at")
def test_a_stopped_redis_raises_an_alert_that_ends_with_it(stack: Stack) -> None:
    stack.compose("stop", "redis")
    seconds = wait_until(lambda: "EncoderIndexDown" in stack.alerts(), "EncoderIndexDown fires")
    print(f"EncoderIndexDown fires after {seconds:.0f} s")
    (manager,) = stack.containers("alertmanager")
    api = "http://127.0.0.1:9093/api/v2/alerts?receiver=page"
    wait_until(
        lambda: "EncoderIndexDown" in stack.exec(manager, "wget", "-q", "-O", "-", api), "a page goes out"
    )
    stack.chat(photo(320, 240, 77))
    stack.compose("start", "redis")
    wait_until(lambda: "EncoderIndexDown" not in stack.alerts(), "EncoderIndexDown ends")


def test_a_replica_that_is_gone_for_good_raises_an_alert(stack: Stack, lost_at: float) -> None:
    wait_until(lambda: "EncoderReplicaLost" in stack.alerts(), "EncoderReplicaLost fires")
    print(f"EncoderReplicaLost fires after {time.monotonic() - lost_at:.0f} s")
    stack.up("encoder-cpu", replicas=REPLICAS)
    wait_until(lambda: "EncoderReplicaLost" not in stack.alerts(), "EncoderReplicaLost ends")


def test_every_replica_stops_with_code_0(stack: Stack) -> None:
    containers = encoders(stack)
    stack.compose("stop", "encoder-cpu", "prefill")
    codes = {engine.run("inspect", "--format", "{{.State.ExitCode}}", each).strip() for each in containers}
    assert codes == {"0"}
    wait_until(lambda: "EncoderNone" in stack.alerts(), "EncoderNone fires")
    stack.compose("down")
    left = set(engine.run("volume", "ls", "--quiet").split())
    assert left == {"encoder-service_prometheus", "encoder-service_grafana"}, "only what holds history"
