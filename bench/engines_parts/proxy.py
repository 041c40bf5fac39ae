"""A proxy before engines: chats go to each in turn, with `--encoder` after vLLM's encoder instance has encoded them.

The encoder gets each image in a request of its own, as from the proxy among vLLM's examples. Runs in an engine's
environment, which has aiohttp.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web

MAX_BODY_BYTES = 64 << 20
ROUTE, MODELS = "/v1/chat/completions", "/v1/models"
TIMEOUT = aiohttp.ClientTimeout(total=600)


class EngineProxy:
    """Forwards chats; `session` is set while it runs."""

    def __init__(self, engines: Sequence[str], encoder: str | None) -> None:
        self._engines = engines
        self._turns = itertools.cycle(engines)
        self._encoder = encoder
        self.session: aiohttp.ClientSession

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat as the engine answers it, streamed."""
        body = await request.read()
        if self._encoder:
            chat = json.loads(body)
            await asyncio.gather(*(self._encode(chat, image) for image in images(chat)))
        async with self.session.post(next(self._turns) + request.path, data=body, headers=JSON) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def models(self, request: web.Request) -> web.Response:
        """Answer with the models of the first engine, which SGLang's load generator waits for."""
        async with self.session.get(self._engines[0] + request.path) as answer:
            return web.Response(status=answer.status, body=await answer.read(), headers=JSON)

    async def _encode(self, chat: dict[str, Any], image: dict[str, Any]) -> None:
        """Let the encoder store the rows of an image. Raises `aiohttp.ClientError` if it fails."""
        body = {"model": chat["model"], "messages": [{"role": "user", "content": [image]}], "max_tokens": 1}
        async with self.session.post(f"{self._encoder}{ROUTE}", json=body) as answer:
            answer.raise_for_status()
            await answer.read()


JSON = {"Content-Type": "application/json"}


def images(chat: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a chat that are images."""
    parts = (message["content"] for message in chat["messages"] if isinstance(message["content"], list))
    return [part for part in itertools.chain(*parts) if part["type"] == "image_url"]


def main() -> None:
    """Run the proxy until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", required=True, help="their URLs")
    parser.add_argument("--encoder", help="its URL")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    proxy = EngineProxy(args.engines, args.encoder)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    async def connected(_: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as proxy.session:
            yield

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(connected)
    app.add_routes([web.get("/health", healthy), web.get(MODELS, proxy.models), web.post(ROUTE, proxy.chat)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
