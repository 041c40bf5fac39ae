"""Registering at SGLang's encoder bootstrap server, for an SGLang that is started without `--encoder-urls`."""

import asyncio
import json
import logging
from collections.abc import Sequence
from http.client import HTTPException
from urllib.request import Request, urlopen

log = logging.getLogger(__name__)

# SGLang forgets its encoders when it restarts, and encoders that were away for long.
AGAIN_S = 10.0
_CALL_S = 5.0
# SGLang reads the list of encoders when a request comes, and sends its parts later: so long after they left the list.
LAST_PARTS_S = 3.0


class Registration:
    """Keeps `urls`, each an encoder to SGLang, registered at every bootstrap server, until `end`."""

    def __init__(self, servers: Sequence[str], urls: Sequence[str]) -> None:
        self._servers = servers
        self._urls = urls
        self._registered: set[str] = set()
        self._ended = False
        self._turn = asyncio.Lock()  # one call at a time at a server: the last one counts there

    async def keep(self) -> None:
        """Register again and again. A server that does not answer is tried again; the log says so once."""
        while not self._ended:
            async with self._turn:
                await asyncio.gather(*(asyncio.to_thread(self._register, server) for server in self._servers))
            await asyncio.sleep(AGAIN_S)

    async def end(self) -> None:
        """Unregister, and return when SGLang sends no more parts."""
        self._ended = True
        async with self._turn:
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
    with urlopen(request, timeout=_CALL_S):  # noqa: S310
        pass
