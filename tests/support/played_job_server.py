"""A job server that plays a part: the paths of Ray's dashboard that submitting needs, and losses of the connection."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Job:
    """A job as the server reports it. `pieces` is its log, as the stream sends it; None closes the connection without a
    word, once."""

    status: str = "RUNNING"
    message: str = ""
    exit_code: int | None = None
    pieces: list[str | None] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return "".join(piece for piece in self.pieces if piece)


class PlayedServer:
    """Context manager; `url` is its address. `refusing` answers that often with 503, `streams` counts streams of logs."""

    def __init__(self, ray: str, python: str | None, token: str | None = None) -> None:
        self.ray, self.python, self.token = ray, python, token
        self.jobs: dict[str, Job] = {}
        self.refusing = self.streams = 0
        self.asked: list[str] = []

    def __enter__(self) -> PlayedServer:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def start() -> None:
            app = web.Application(middlewares=[self._judge])
            app.add_routes([
                web.get("/api/version", self._version), web.get("/api/v0/cluster_metadata", self._metadata),
                web.get("/api/jobs/", self._list), web.get("/api/jobs/{id}", self._info),
                web.get("/api/jobs/{id}/logs", self._logs), web.get("/api/jobs/{id}/logs/tail", self._tail)])
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            ready.set()

        def serve() -> None:
            self._loop.run_until_complete(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    @web.middleware
    async def _judge(self, request: web.Request, handler) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.refusing:
            self.refusing -= 1
            return web.Response(status=503)
        sent = request.headers.get("Authorization")
        if self.token and sent != f"Bearer {self.token}":
            return web.Response(status=403 if sent else 401, text="Unauthorized")
        return await handler(request)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": self.ray, "ray_commit": "", "session_name": ""})

    async def _metadata(self, request: web.Request) -> web.Response:
        if self.python is None:
            return web.Response(status=404)
        return web.json_response({"result": True, "msg": "", "data": {"rayVersion": self.ray, "pythonVersion": self.python}})

    def _details(self, name: str) -> dict:
        job = self.jobs[name]
        return {"type": "SUBMISSION", "submission_id": name, "status": job.status, "message": job.message, "entrypoint": "x",
                "driver_exit_code": job.exit_code, "metadata": job.metadata}

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response([self._details(name) for name in self.jobs])

    async def _info(self, request: web.Request) -> web.Response:
        if (name := request.match_info["id"]) not in self.jobs:
            return web.Response(status=404)
        return web.json_response(self._details(name))

    async def _logs(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": self.jobs[request.match_info["id"]].log})

    async def _tail(self, request: web.Request) -> web.StreamResponse:
        job, stream = self.jobs[request.match_info["id"]], web.WebSocketResponse()
        await stream.prepare(request)
        self.streams += 1
        for index, piece in enumerate(job.pieces):
            if piece is None:
                del job.pieces[index]
                request.transport.abort()
                return stream
            await stream.send_str(piece)
        job.status = "SUCCEEDED" if job.status == "RUNNING" else job.status
        return stream


