"""Run by test_trl_worker.py, where TRL is installed: the server of TRL's own loop goes away and comes back.

It prints the seconds from its return to the answer that the loop was waiting for, and what was logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
from accelerate import PartialState
from aiohttp import web

from deltawire.engines.trl_worker import VersionedLoop

AWAY_S = 20.0
PROMPT = [1, 2, 3]
messages: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("deltawire").addHandler(handler)


async def complete(_: web.Request) -> web.Response:
    return web.json_response({"choices": [{"token_ids": [4], "logprobs": {"token_logprobs": [-1.0]}}]})


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "policy"}]})


async def serve(port: int) -> web.AppRunner:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


def make(url: str) -> Any:
    return VersionedLoop(
        model_name="policy",
        dataset=[],
        reward_funcs=[print],
        processing_class=SimpleNamespace(response_template="any"),
        eos_token_ids=[0],
        rollout_buffer=None,
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=None,
        exception_info_queue=None,
        metrics_queue=None,
        vllm_server_url=url,
    )


async def main() -> None:
    server = await serve(0)
    port = server.addresses[0][1]
    loop = make(f"http://127.0.0.1:{port}")
    async with aiohttp.ClientSession() as loop.session:
        assert (await loop._generate_one_turn(PROMPT))[0] == [4]
        await server.cleanup()
        # several at once, as games are
        waiting = [asyncio.create_task(loop._generate_one_turn(PROMPT)) for _ in range(16)]
        await asyncio.sleep(AWAY_S)
        server = await serve(port)
        back = time.monotonic()
        await asyncio.gather(*waiting)
        print(json.dumps({"seconds": time.monotonic() - back, "messages": messages}))
    await server.cleanup()


# of TRL's log
PartialState()
asyncio.run(main())
