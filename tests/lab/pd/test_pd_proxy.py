"""The proxy between two small HTTP servers that answer as vLLM does."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from vllm_tagma.lab.pd.pd_proxy import Proxy, prefill_body

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]]}


class Side:
    """A server that notes what it is asked, and how each request ended."""

    def __init__(self, answer=None, *, status=200, chunks=(), seconds=0.0):
        self.answer, self.status, self.chunks, self.seconds = answer, status, chunks, seconds
        self.bodies, self.headers, self.ends = [], [], []

    def app(self):
        app = web.Application()
        app.router.add_post("/v1/{name:.*}", self.complete)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.health)
        return app

    async def health(self, request):
        return web.json_response({"data": []})

    async def complete(self, request):
        self.bodies.append(await request.json())
        self.headers.append(request.headers.copy())
        try:
            if not self.chunks:
                return web.json_response(self.answer, status=self.status)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for chunk in self.chunks:
                await response.write(chunk)
                await asyncio.sleep(self.seconds)
            self.ends.append("whole")
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.ends.append("aborted")
            raise


@contextlib.asynccontextmanager
async def running(prefill, decode):
    """The proxy's URL; ``prefill`` may be None, for a server that is not there."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(app):
            server = TestServer(app)
            await server.start_server()
            stack.push_async_callback(server.close)
            return str(server.make_url("")).rstrip("/")

        if prefill is None:
            prefill_url = f"http://127.0.0.1:{unused_port()}"
        else:
            prefill_url = await serve(prefill.app())
        proxy = Proxy(prefill=prefill_url, decode=await serve(decode.app()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield session, await serve(proxy.app())


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_prefill_gets_one_token_and_decode_gets_its_blocks():
    async def go():
        prefill, decode = Side({"kv_transfer_params": PARAMS}), Side({"choices": [1]})
        async with running(prefill, decode) as (session, url):
            body = {"prompt": "p", "max_tokens": 9, "n": 2, "stream": False}
            headers = {"Authorization": "Bearer x", "X-Request-Id": "mine"}
            async with session.post(url + "/v1/completions", json=body, headers=headers) as answer:
                assert await answer.json() == {"choices": [1]}
            assert prefill.bodies == [prefill_body(body)]
            assert decode.bodies == [{**body, "kv_transfer_params": PARAMS}]
            for side in (prefill, decode):
                assert side.headers[0]["Authorization"] == "Bearer x"
                assert side.headers[0].getall("X-Request-Id") == ["mine"]
            async with session.get(url + "/v1/models") as answer:
                assert await answer.json() == {"data": []}
            async with session.get(url + "/health") as answer:
                assert answer.status == 200

    run(go())


def test_no_request_is_sent_on_a_connection_that_a_server_may_have_closed():
    """vLLM closes idle connections; a request sent on one at that moment had no answer."""
    connections = []

    class Noting(Side):
        async def complete(self, request):
            connections.append(request.protocol)
            return await super().complete(request)

    async def go():
        prefill, decode = Noting({"kv_transfer_params": PARAMS}), Noting({"choices": [1]})
        async with running(prefill, decode) as (session, url):
            for _ in range(3):
                async with session.post(url + "/v1/completions", json={"prompt": "p"}) as answer:
                    assert answer.status == 200

    run(go())
    assert len(connections) == len(set(connections)) == 6


def test_what_prefill_is_asked():
    asked = prefill_body(
        {
            "messages": [],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 50,
            "min_tokens": 5,
            "n": 3,
        }
    )
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    del asked["kv_transfer_params"]
    assert asked == {
        "messages": [],
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
    }


@pytest.mark.parametrize(
    "prefill", [None, Side({"error": "busy"}, status=503)], ids=["gone", "503"]
)
def test_without_prefill_the_decoder_computes(prefill, caplog):
    async def go():
        decode = Side({"choices": [1]})
        async with running(prefill, decode) as (session, url):
            async with session.post(url + "/v1/completions", json={"prompt": "p"}) as answer:
                assert answer.status == 200
            assert decode.bodies == [{"prompt": "p"}]
            async with session.get(url + "/health") as answer:
                assert answer.status == (503 if prefill is None else 200)

    run(go())
    assert "gave no blocks" in caplog.text


def test_an_error_of_the_decoder_is_passed_on():
    async def go():
        decode = Side({"error": "too long"}, status=400)
        async with running(Side({}), decode) as (session, url):
            answer = await session.post(url + "/v1/completions", json={"prompt": "p"})
            assert answer.status == 400
            assert await answer.json() == {"error": "too long"}

    run(go())


def test_a_stream_is_passed_on_and_ends_with_its_client():
    async def go():
        decode = Side(chunks=[b"data: 1\n\n"] * 40, seconds=0.05)
        async with running(Side({"kv_transfer_params": PARAMS}), decode) as (session, url):
            body = {"prompt": "p", "stream": True}
            answer = await session.post(url + "/v1/completions", json=body)
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            answer.close()
            for _ in range(100):
                if decode.ends:
                    break
                await asyncio.sleep(0.05)
            assert decode.ends == ["aborted"]

    run(go())
