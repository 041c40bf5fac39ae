"""A Redis behind TLS whose only user has the rights that docs/access.md gives."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from testing.certificates import Issued
from testing.redis_servers import redis_server
from testing.tcp_proxy import TcpProxy
from tests.pages import ROOT


def rules() -> list[str]:
    """Return the rights that the page gives the user, for keys and channels that begin with `encoder:`."""
    page = (ROOT / "docs/access.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("ACL SETUSER encoder "))
    return line.split()[3:]


@asynccontextmanager
async def redis_by_tls(issued: Issued) -> AsyncIterator[int]:
    """Yield the port of a Redis that admits only the page's user. A proxy ends TLS, which this build may lack."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*issued)
    with redis_server() as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "encoder", *rules())
            client.execute_command("ACL", "SETUSER", "default", "off")
        proxy = await TcpProxy(server.port, context).start()
        yield proxy.port
        await proxy.stop()


def redis_url(port: int, ca: Path) -> str:
    """Return the URL for that user."""
    return f"rediss://encoder:PASSWORD@127.0.0.1:{port}/0?ssl_ca_certs={ca}"
