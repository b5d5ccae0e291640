"""Follow the log of a submitted job to its end, over as many connections as it takes.

Ray's server sends a log from its beginning on every connection; what has been written already is left out. While the log is
young it is asked for every fraction of a second: the server's own stream is up to three seconds behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from flowgrpo_ray.cluster.job_server import JobServer
from flowgrpo_ray.errors import ResourceError, described

YOUNG_S, YOUNG_BYTES, YOUNG_EVERY_S = 30.0, 2**16, 0.25  # how long a log is asked for whole
SILENT_S = 30.0  # without a line the server is asked whether it is there
RENEW_S = 300.0  # and so much later the stream is opened anew: a dead connection may look like a silent one
GIVE_UP_S = 900.0  # without an answer
REQUEST_S = 15.0
TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Ended:
    """How a job has ended: Ray's status and message, and the exit code of its command if that has ended by itself."""

    status: str
    message: str
    exit_code: int | None

    @property
    def code(self) -> int:
        """The exit code that stands for the run's: that of its command, 143 if it was stopped, 1 if it never ran."""
        if self.status == "SUCCEEDED":
            return 0
        if self.exit_code:
            return self.exit_code if self.exit_code > 0 else 128 - self.exit_code
        return 143 if self.status == "STOPPED" else 1


class _Lost(Exception):
    """The connection is lost; the message says how."""


def follow(server: JobServer, job_id: str, write: Callable[[str], None],
           say: Callable[[str], None]) -> Ended:
    """Write a job's log as it grows, each character once, until the job has ended.

    Args:
        write: takes pieces of the log.
        say: takes lines about the connection.

    Raises:
        Unreachable: the server did not answer for GIVE_UP_S.
        ResourceError: the server does not know the job (any more), or rejects the token.
    """
    return asyncio.run(_Follower(server, job_id, write, say).run())


class _Follower:
    def __init__(self, server: JobServer, job_id: str, write: Callable[[str], None],
                 say: Callable[[str], None]) -> None:
        self._server, self._job, self._write, self._say = server, job_id, write, say
        self._written = 0  # characters
        self._heard = time.monotonic()  # when the server last answered

    async def run(self) -> Ended:
        lost_since: float | None = None
        said_at = 0.0
        async with aiohttp.ClientSession(headers=self._server.headers) as session:
            self._session = session
            while True:
                try:
                    return await self._connected(lost_since is not None)
                except _Lost as error:
                    why, now = str(error), time.monotonic()
                if lost_since is None or self._heard > lost_since:
                    lost_since, said_at = now, now
                    self._say(f"connection to {self._server.url} lost ({why}). If only the connection is lost, the "
                              f"run goes on; this command connects again for up to {GIVE_UP_S / 60:.0f} minutes. If a "
                              "port-forward has ended, start it again")
                elif now - said_at >= 30:
                    said_at = now
                    self._say(f"no connection to {self._server.url} for {now - lost_since:.0f} s ({why})")
                if now - max(lost_since, self._heard) >= GIVE_UP_S:
                    raise self._server.unreachable(f"{why}, for {GIVE_UP_S / 60:.0f} minutes")
                await asyncio.sleep(min(5.0, 0.5 + (now - lost_since) / 10))

    async def _connected(self, again: bool) -> Ended:
        """Write the log until the job has ended; raises _Lost."""
        started = time.monotonic()
        while True:
            info = await self._info()
            if again:
                self._say(f"connected to {self._server.url} again")
                again = False
            if info["status"] in TERMINAL:
                await self._whole_log()
                return Ended(info["status"], info.get("message") or "", info.get("driver_exit_code"))
            if time.monotonic() - started < YOUNG_S and self._written < YOUNG_BYTES:
                await self._whole_log()
                await asyncio.sleep(YOUNG_EVERY_S)
            else:
                await self._stream()

    async def _info(self) -> dict[str, Any]:
        return await self._get(f"/api/jobs/{self._job}")

    async def _whole_log(self) -> None:
        self._take((await self._get(f"/api/jobs/{self._job}/logs")).get("logs") or "", 0)

    def _take(self, text: str, start: int) -> None:
        """Write what is new of a piece of the log that starts at character `start`."""
        new = text[max(0, self._written - start):]
        if new:
            self._write(new)
            self._written += len(new)

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._session.get(self._server.url + path,
                                         timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as answer:
                self._judge(answer.status)
                found = await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise _Lost(_reason(error)) from error
        self._heard = time.monotonic()
        return found

    def _judge(self, status: int) -> None:
        if status in (401, 403):
            raise self._server.token_error(status)
        if status == 404:
            raise ResourceError(f"the cluster at {self._server.url} does not know the job {self._job}: "
                                "was its head started again? The same command resumes the run from its newest checkpoint")
        if status != 200:
            raise _Lost(f"HTTP {status}")

    async def _stream(self) -> None:
        """Write the log as the server sends it; returns when the stream ends or has been silent for RENEW_S."""
        position, heard = 0, time.monotonic()
        try:
            async with self._session.ws_connect(f"{self._server.url}/api/jobs/{self._job}/logs/tail",
                                                max_msg_size=0) as stream:
                message = asyncio.ensure_future(stream.receive())
                try:
                    while True:
                        done, _ = await asyncio.wait([message], timeout=SILENT_S)
                        if not done:
                            if (await self._info())["status"] in TERMINAL or time.monotonic() - heard > RENEW_S:
                                return
                            continue
                        received = message.result()
                        if received.type is not aiohttp.WSMsgType.TEXT:
                            break
                        heard = self._heard = time.monotonic()
                        self._take(received.data, position)
                        position += len(received.data)
                        message = asyncio.ensure_future(stream.receive())
                finally:
                    message.cancel()
        except aiohttp.WSServerHandshakeError as error:
            self._judge(error.status)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _Lost(_reason(error)) from error
        if stream.close_code != aiohttp.WSCloseCode.OK:
            raise _Lost("the stream of the log ended")
        await asyncio.sleep(YOUNG_EVERY_S)  # the job has ended, and its status is about to say so


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, aiohttp.ClientConnectorError):
        return (error.os_error.strerror or str(error.os_error)).lower()
    return described(error)
