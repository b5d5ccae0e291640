"""A real HTTP server on a thread, that answers as a test says."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """`answer(method, path, body)` gives (status, payload) or (status, payload, headers); a payload is JSON, bytes as they
    are, or one of HANG (no answer until the test is over), CLOSE (the connection is closed without one), and DRIP and
    DRIP_HEAD (a right answer whose body, or head, comes byte by byte until `enough` is set, by the test or after 20 s).

    `requests` lists (method, path, parsed body, headers) as they came.
    """

    HANG, CLOSE, DRIP, DRIP_HEAD = object(), object(), object(), object()

    def __init__(self, answer):
        self.requests, self.ended, self.enough = [], threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self):
                size = int(self.headers.get("Content-Length", 0))
                raw = self.rfile.read(size)
                body = json.loads(raw) if raw else None
                outer.requests.append((self.command, self.path, body, dict(self.headers)))
                status, payload, *rest = answer(self.command, self.path, body)
                if payload is Server.HANG:
                    outer.ended.wait(30)
                if payload in (Server.HANG, Server.CLOSE):
                    self.close_connection = True
                    return
                if payload in (Server.DRIP, Server.DRIP_HEAD):
                    return self.drip(status, payload is Server.DRIP_HEAD)
                data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                for key, value in (rest[0] if rest else {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def drip(self, status, in_head):
                self.close_connection = True
                head, end = f"HTTP/1.0 {status} fine\r\n", b"\r\n\r\n7" if in_head else b"7"
                with contextlib.suppress(OSError):  # the client has had enough
                    self.wfile.write((head + ("X-Padding: " if in_head else "\r\n")).encode())
                    for count in range(400):
                        if count > 4 and outer.enough.is_set() or outer.ended.wait(0.05):
                            break
                        self.wfile.write(b" ")
                    outer.enough.set()
                    self.wfile.write(end)

            do_GET = do_POST = handle_any

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        """From now on nothing listens on the port."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def count(self, path):
        return sum(request[1] == path for request in self.requests)


@contextlib.contextmanager
def serving(answer):
    server = Server(answer)
    try:
        yield server
    finally:
        if not server.ended.is_set():
            server.stop()


def in_turn(*answers):
    """An answer function that gives these one after another, and the last one from then on."""
    left = list(answers)
    return lambda *_: left.pop(0) if len(left) > 1 else left[0]
