"""A TCP proxy that can be cut, like a port-forward that ends and is started again."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from clusters import free_port


class CutProxy:
    """Context manager; forwards `port` to `target` of this machine."""

    def __init__(self, target: int) -> None:
        self._target, self.port = target, free_port()
        self._loop = asyncio.new_event_loop()
        self._streams: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> CutProxy:
        self._thread.start()
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def open(self) -> None:
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", self.port))

    def cut(self) -> None:
        """End all connections, and take no others."""
        self._run(self._close())

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _close(self) -> None:
        self._server.close()
        for stream in list(self._streams):
            stream.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._target)
        self._streams |= {writer, there[1]}
        await asyncio.gather(self._pass_on(reader, there[1]), self._pass_on(there[0], writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        self._streams.discard(writer)
        writer.close()
