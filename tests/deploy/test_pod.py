"""Starts the pod of the chart with TLS by hand, with its arguments, environment, Secrets and probes, and calls it."""

import asyncio
import re
import shlex
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from deploy import charts
from encoder_contract.errors import UnavailableError
from prefill_client import Credentials, EncoderClient
from testing.certificates import HOSTS, Authority
from testing.photos import photo
from tests.calls import encoded
from tests.deploy.test_running import START_S
from tests.pages import ROOT
from tests.redis_tls import redis_by_tls
from tests.waiting import PATIENCE_S, soon

NAME = "encoder.encoder.svc"
REDIS = "redis.redis.svc:6379"
TOKEN = "of a scraper"

VALUES = {name: {"enabled": True} for name in ("tls", "redisTls", "monitoring")}


def secrets_of_the_page(folder: Path, *names: str) -> dict[str, dict[str, str]]:
    """Return the Secrets that the page's commands create from files in `folder`: those with `names`, or all."""
    found: dict[str, dict[str, str]] = {}
    for line in (ROOT / "docs/access.md").read_text().splitlines():
        if line.startswith("kubectl -n encoder create secret generic "):
            name, *options = shlex.split(line)[6:]
            if name in names or not names:
                found[name] = dict(_entry(option, folder) for option in options)
    return found


def _entry(option: str, folder: Path) -> tuple[str, str]:
    kind, key, value = re.fullmatch(r"--from-(file|literal)=([^=]*)(?:=(.*))?", option).groups()  # type: ignore[union-attr]
    return key, value if kind == "literal" else (folder / Path(value or key).name).read_text()


class Pod:
    """A pod of the Deployment `encoder` on this host: the process of its container, and folders for its Secrets."""

    def __init__(
        self,
        manifests: list[dict[str, Any]],
        secrets: Mapping[str, Mapping[str, str]],
        folder: Path,
        here: Mapping[str, str],
    ) -> None:
        """`here` maps parts of settings to what replaces them on this host."""
        self._configs = {
            each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"
        }
        self._secrets = secrets
        self._monitors = [each["spec"] for each in manifests if each["kind"] == "PodMonitor"]
        (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
        self._spec = deployment["spec"]["template"]["spec"]
        (self.container,) = self._spec["containers"]
        self._folder = folder
        self._here = {"/etc/encoder": str(folder / "etc"), **here}
        self._log = folder / "log"
        for name in self.mounts():
            self.mount(name, secrets[name])

    def mounts(self) -> dict[str, Path]:
        """Return the folder of each Secret on this host."""
        names = {
            each["name"]: each["secret"]["secretName"] for each in self._spec["volumes"] if "secret" in each
        }
        paths = {
            each["name"]: each["mountPath"]
            for each in self.container["volumeMounts"]
            if each["name"] in names
        }
        return {names[volume]: Path(self.here(path)) for volume, path in paths.items()}

    def mount(self, name: str, data: Mapping[str, str]) -> None:
        """Mount a Secret as Kubernetes does: a renamed link to a folder changes all its files at once."""
        folder = self.mounts()[name]
        folder.mkdir(parents=True, exist_ok=True)
        version = folder / f"..{len(list(folder.iterdir()))}"
        version.mkdir()
        (volume,) = (
            each["secret"]
            for each in self._spec["volumes"]
            if each.get("secret", {}).get("secretName") == name
        )
        items = volume.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            (version / item["path"]).write_text(data[item["key"]])
            if not (link := folder / item["path"]).is_symlink():
                link.symlink_to(Path("..data") / item["path"])
        (folder / "..new").symlink_to(version.name)
        (folder / "..new").rename(folder / "..data")

    def here(self, value: str) -> str:
        """Return a value of the manifests as it is on this host."""
        for there, ours in self._here.items():
            value = value.replace(there, ours)
        return value

    def environment(self) -> dict[str, str]:
        """Return the container's environment, by the rules of Kubernetes."""
        found: dict[str, str] = {}
        for source in self.container["envFrom"]:
            found |= self._configs[source["configMapRef"]["name"]]
        fields = {"status.podIP": "127.0.0.1"}
        for each in self.container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                value = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                value = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], each["value"])
            found[each["name"]] = value
        found["ENCSVC_STORE_HOST_GIB"] = "0.25"  # small, for this host's memory
        return {name: self.here(value) for name, value in found.items()}

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the container's process."""
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        bare = {"PATH": path, "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            return subprocess.Popen(
                ["encoder-service", *self.container["args"]],
                env={**bare, **self.environment()},
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )

    def output(self) -> str:
        """Return all that the process has printed."""
        return self._log.read_text()

    def listens(self) -> bool:
        """Whether it has printed the addresses of both ports."""
        return len(self._printed_ports()) == 2

    def _printed_ports(self) -> dict[str, str]:
        return dict(re.findall(r'"(listening|metrics)": "(?:https://)?0\.0\.0\.0:(\d+)\b', self.output()))

    def ports(self) -> dict[str, str]:
        """Return the address of each of the container's ports on this host, once it listens."""
        found = self._printed_ports()
        return {
            name: f"localhost:{found[key]}" for name, key in (("grpc", "listening"), ("metrics", "metrics"))
        }

    def probe(self, name: str) -> int:
        """Probe the container like the kubelet, which does not check certificates."""
        http = self.container[name]["httpGet"]
        url = f"{http.get('scheme', 'HTTP').lower()}://{self.ports()[http['port']]}{http['path']}"
        context = ssl._create_unverified_context()
        with urllib.request.urlopen(url, timeout=PATIENCE_S, context=context) as answer:
            return int(answer.status)

    def scraped(self) -> str:
        """Scrape the container as the PodMonitor says."""
        ((endpoint,),) = (each["podMetricsEndpoints"] for each in self._monitors)
        assert endpoint["scheme"] == "https"
        ca, token = (
            self._secrets[each["name"]][each["key"]]
            for each in (endpoint["tlsConfig"]["ca"]["secret"], endpoint["authorization"]["credentials"])
        )
        host, _, port = self.ports()[endpoint["port"]].rpartition(":")
        context = ssl.create_default_context(cadata=ca)
        connection = HTTPConnection(host, int(port), PATIENCE_S)
        with (
            socket.create_connection((host, int(port)), PATIENCE_S) as plain,
            context.wrap_socket(
                plain, server_hostname=endpoint["tlsConfig"]["serverName"]
            ) as connection.sock,
        ):
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return answer.read().decode()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The authority that signs Redis's certificate."""
    authority = Authority()
    authority.write(tmp_path / "redis-ca.pem")
    return authority


@asynccontextmanager
async def running(pod: Pod) -> AsyncIterator[None]:
    """Run the pod until the block ends; then drain it."""
    process = pod.start()
    try:
        await soon(lambda: process.poll() is not None or pod.listens(), START_S)
        assert process.poll() is None, pod.output()
        yield
    finally:
        process.terminate()
        code = await asyncio.to_thread(process.wait, PATIENCE_S)
    assert code == 0, pod.output()


@pytest.fixture
async def pod(checkpoint: Path, authority: Authority, tmp_path: Path) -> AsyncIterator[Pod]:
    """A running pod that uses TLS on all connections."""
    subprocess.run([sys.executable, "-m", "testing.certificates", tmp_path], check=True, cwd=ROOT)
    (tmp_path / "fleet.key").write_text("of a fleet that exists only in this test\n")
    (tmp_path / "tenants.toml").write_text(
        '[chat]\ncertificates = ["client"]\nrights = ["submit", "fetch"]\n'
        f'[scraper]\ntokens = ["{sha256(TOKEN.encode()).hexdigest()}"]\nrights = ["metrics"]\n'
    )
    (tmp_path / "token").write_text(TOKEN)
    async with redis_by_tls(authority.issue(tmp_path, "redis", ["127.0.0.1"])) as redis_port:
        here = {"/model": str(checkpoint), REDIS: f"127.0.0.1:{redis_port}", "0.0.0.0:50051": "0.0.0.0:0"}
        here["0.0.0.0:9464"] = here["0.0.0.0:50052"] = "0.0.0.0:0"
        manifests = [*charts.render("encoder-service", VALUES).values()]
        pod = Pod(manifests, secrets_of_the_page(tmp_path), tmp_path, here)
        async with running(pod):
            yield pod


NEW = ("encoded", "host")
"""The sources of a new image's rows: the store, if they were encoded before the Fetch."""


async def fetched(pod: Pod, credentials: Credentials, seed: int) -> str:
    """Encode an image in the pod; return the source of its rows."""
    async with await EncoderClient.connect(
        pod.ports()["grpc"], credentials=credentials, timeout_s=PATIENCE_S, wait=False
    ) as client:
        return (await encoded(client, photo(64, 64, seed), transports=["inline"])).source


async def refused(pod: Pod, credentials: Credentials) -> None:
    """Check that a client with these credentials is refused."""
    with pytest.raises(UnavailableError):
        await EncoderClient.connect(
            pod.ports()["grpc"], credentials=credentials, timeout_s=START_S, wait=False
        )


async def test_a_tls_pod_serves_probes_and_tenants_and_rereads_its_secret(pod: Pod, tmp_path: Path) -> None:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert await asyncio.to_thread(pod.probe, name) == 200
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "client.pem", "client-key.pem"))
    tenant = Credentials(ca, cert, key, NAME)
    assert await fetched(pod, tenant, 1) in NEW
    await refused(pod, Credentials())
    await refused(pod, Credentials(ca, server_name=NAME))

    async def joined() -> bool:
        return 'encsvc_index_state{state="joined"} 1.0\n' in await asyncio.to_thread(pod.scraped)

    await soon(joined)

    folder = tmp_path / "new"
    folder.mkdir()
    new_authority = Authority("new")
    new_authority.write(folder / "ca.pem")
    new_authority.issue(folder, "server", HOSTS)
    issued = new_authority.issue(folder, "client")
    pod.mount("encoder-tls", secrets_of_the_page(folder, "encoder-tls")["encoder-tls"])
    assert await fetched(pod, Credentials(str(folder / "ca.pem"), *issued, NAME), 2) in NEW
    await refused(pod, tenant)
