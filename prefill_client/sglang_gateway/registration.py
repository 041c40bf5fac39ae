"""Registers the gateway at SGLang's encoder bootstrap server, for an SGLang without `--encoder-urls`."""

import asyncio
import json
import logging
from collections.abc import Sequence
from http.client import HTTPException
from urllib.request import Request

from encoder_contract.direct import open_url

log = logging.getLogger(__name__)

# SGLang forgets all encoders when it restarts, and an encoder that was away for long. Register this often.
REGISTER_EVERY_S = 10.0
_CALL_S = 5.0
# SGLang reads the list of encoders when a request arrives, and may send its parts this long after they left the list.
LAST_PARTS_S = 3.0


class Registration:
    """Keeps the URLs of the gateway, which SGLang treats as encoders, registered at every bootstrap server."""

    def __init__(self, servers: Sequence[str], urls: Sequence[str]) -> None:
        self._servers = servers
        self._urls = urls
        self._registered: set[str] = set()
        self._ended = False
        self._lock = asyncio.Lock()  # calls to a server must not overlap, because the last one counts there

    async def keep(self) -> None:
        """Register periodically until `end`. A server that does not answer is logged once and tried again."""
        while not self._ended:
            async with self._lock:
                await asyncio.gather(*(asyncio.to_thread(self._register, server) for server in self._servers))
            await asyncio.sleep(REGISTER_EVERY_S)

    async def end(self) -> None:
        """Unregister, and return once SGLang no longer sends parts: the caller serves parts until then.

        Waits for a registration that is running, and up to `_CALL_S` for a server that does not answer: SGLang may go
        on sending parts then. Cancel `keep` afterwards, which returns only at its next turn. Call it once.
        """
        self._ended = True
        async with self._lock:
            servers = tuple(self._registered)
            await asyncio.gather(*(asyncio.to_thread(self._unregister, server) for server in servers))
        if servers:
            await asyncio.sleep(LAST_PARTS_S)

    def _register(self, server: str) -> None:
        try:
            for url in self._urls:
                _call(f"{server}/register_encoder_url", "POST", url)
        except (OSError, ValueError, HTTPException) as error:
            known = server in self._registered
            self._registered.discard(server)
            log.log(logging.WARNING if known else logging.INFO, "not registered at %s: %s", server, error)
            return
        if server not in self._registered:
            self._registered.add(server)
            log.info("registered at %s as %s", server, ", ".join(self._urls))

    def _unregister(self, server: str) -> None:
        try:
            for url in self._urls:
                _call(f"{server}/unregister_encoder_url", "DELETE", url)
        except (OSError, ValueError, HTTPException) as error:
            log.info("not unregistered at %s: %s", server, error)


def _call(address: str, method: str, url: str) -> None:
    body = json.dumps({"url": url}).encode()
    request = Request(address, body, {"Content-Type": "application/json"}, method=method)  # noqa: S310 - the operator's
    with open_url(request, _CALL_S):
        pass
