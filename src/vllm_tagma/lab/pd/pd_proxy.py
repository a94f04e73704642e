"""One address for a prefill server and a decode server of vLLM. A demonstration, not a router.

    python -m vllm_tagma.lab.pd.pd_proxy --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

A request goes to the prefill server for one token, which is thrown away, and then to the decode
server with the ``kv_transfer_params`` of that answer, so that the decode server pulls the prompt's
blocks instead of computing them. Without an answer from the prefill server it computes the prompt
itself. One server of each kind, no queueing, no retries, no authentication of its own (headers are
passed on). In production use a router that knows prefill and decode pools: vLLM's
production stack, llm-d or Dynamo.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web

_logger = logging.getLogger("pd_proxy")

PATHS: Final = ("/v1/completions", "/v1/chat/completions")

_REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's NIXL connectors want to read in the request to the prefill server."""

_HOP_HEADERS: Final = {
    "connection",
    "content-encoding",
    "content-length",
    "host",
    "keep-alive",
    "transfer-encoding",
    "upgrade",
}


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: the same prompt, one token, no stream."""
    wanted = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": _REMOTE_DECODE}
    for key in ("stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs"):
        wanted.pop(key, None)
    if "max_completion_tokens" in wanted:
        wanted["max_completion_tokens"] = 1
    for key in ("n", "best_of"):
        if key in wanted:
            wanted[key] = 1
    return wanted


class Proxy:
    """Handlers over one client session. ``prefill`` and ``decode`` are base URLs."""

    def __init__(self, *, prefill: str, decode: str) -> None:
        self.prefill = prefill.rstrip("/")
        self.decode = decode.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The application, with the two paths of completions, ``/v1/models`` and ``/health``."""
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self._sessions)
        for path in PATHS:
            app.router.add_post(path, self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def _sessions(self, app: web.Application) -> Any:
        del app
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        # A connection for each request: vLLM closes idle ones after 5 seconds, and a request sent
        # at that moment would be lost without an answer. As many at once as clients come with.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            yield
        self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client session. It is there while the application runs."""
        assert self._session is not None
        return self._session

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode; an error of the decode server is passed on as it is.

        A client that goes away cancels this handler, which closes the connection in use, and vLLM
        aborts the request there.
        """
        body = await request.json()
        headers = request.headers.copy()
        for name in _HOP_HEADERS:
            headers.popall(name, None)
        headers.setdefault("X-Request-Id", str(uuid.uuid4()))
        params = await self._prefill(request.path, body, headers)
        if params is not None:
            body = {**body, "kv_transfer_params": params}
        try:
            answer = await self.session.post(self.decode + request.path, json=body, headers=headers)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"decode server {self.decode}: {error}"}, status=502)
        async with answer:
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in _HOP_HEADERS:
                    response.headers[name] = value
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _prefill(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Where the decode server finds the prompt's blocks; ``None`` if it has to compute them."""
        try:
            async with self.session.post(
                self.prefill + path, json=prefill_body(body), headers=headers
            ) as answer:
                if answer.status == 200:
                    params: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
                    return params
                reason = f"status {answer.status}: {(await answer.text())[:300]}"
        except (aiohttp.ClientError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        _logger.warning("prefill server %s gave no blocks, %s", self.prefill, reason)
        return None

    async def models(self, request: web.Request) -> web.Response:
        """The models of the decode server."""
        async with self.session.get(self.decode + request.path) as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def health(self, request: web.Request) -> web.Response:
        """200 if both servers are well, else 503 with the names of those that are not."""
        del request
        ill = [url for url in (self.prefill, self.decode) if not await self._is_well(url)]
        return web.Response(status=503 if ill else 200, text="\n".join(ill))

    async def _is_well(self, url: str) -> bool:
        try:
            async with asyncio.timeout(5), self.session.get(f"{url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="pd_proxy", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="base URL of the prefill server")
    parser.add_argument("--decode", required=True, help="base URL of the decode server")
    options = parser.parse_args()
    logging.basicConfig(format="proxy: %(message)s", level=logging.WARNING)
    web.run_app(
        Proxy(prefill=options.prefill, decode=options.decode).app(),
        host=options.host,
        port=options.port,
        print=None,
        handler_cancellation=True,
        access_log=None,
    )


if __name__ == "__main__":
    main()
