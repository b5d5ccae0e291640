"""A server that takes connections and never answers."""

from __future__ import annotations

import socket
import threading


class SilentServer:
    """Listens on every address of this machine at `port`; `connected` is set by the first connection."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("0.0.0.0", 0))
        self.port = self._listening.getsockname()[1]
        self.connected = threading.Event()
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self._connections.append(self._listening.accept()[0])
            except OSError:  # closed
                return
            self.connected.set()

    def close(self) -> None:
        self._listening.close()
        for connection in self._connections:
            connection.close()
