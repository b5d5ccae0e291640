import base64
import contextlib
import io
import pickle
import socket
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from answering import Server, in_turn, serving
from PIL import Image
from raw_png import RGB, png

from flowgrpo_ray.rewards import RewardError, http_client
from flowgrpo_ray.rewards.http_client import HttpClient, HttpError, from_png, strict_json, to_base64, to_png, url_problem

RED = np.zeros((9, 7, 3), np.uint8)
RED[..., 0] = 255
CHECKERBOARD = np.where(np.indices((8, 12)).sum(0)[..., None] % 2, np.uint8([0, 128, 255]), np.uint8([255, 3, 0]))
NOISE = np.random.default_rng(0).integers(0, 256, (33, 20, 3), np.uint8)


def client(url, **settings):
    return HttpClient(url, who="remote", **{"timeout_s": 5.0, "retries": 2, "backoff_s": 0.0} | settings)


@pytest.fixture
def waits(monkeypatch):
    """Seconds that the client would have waited."""
    found = []
    monkeypatch.setattr(http_client.time, "sleep", found.append)
    return found


# Images ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("image", [RED, CHECKERBOARD, NOISE])
def test_png_keeps_every_pixel_and_the_order_of_colours(image):
    back = from_png(to_base64(to_png(image)), max_pixels=10_000)
    assert back.dtype == np.uint8 and np.array_equal(back, image)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(to_png(image)))), image)


def test_red_is_red_for_another_reader():
    assert Image.open(io.BytesIO(to_png(RED))).getpixel((3, 3)) == (255, 0, 0)


def encoded(image, form, **more):
    buffer = io.BytesIO()
    image.save(buffer, form, **more)
    return to_base64(buffer.getvalue())


@pytest.mark.parametrize(("text", "message"), [
    ("*** no base64", "is no base64"),
    (to_base64(b"hello"), "is no PNG"),
    (to_base64(to_png(RED)[:40]), "PNG"),
    (to_base64(to_png(NOISE)[:-500]), "damaged PNG"),
    (to_base64(to_png(NOISE)[:200] + b"xxxx" + to_png(NOISE)[204:]), "damaged PNG"),
    (encoded(Image.fromarray(RED), "JPEG"), "is no PNG"),
    (encoded(Image.fromarray(RED).convert("RGBA"), "PNG"), "mode RGBA, not 8-bit RGB"),
    (encoded(Image.fromarray(RED).convert("L"), "PNG"), "mode L"),
    (encoded(Image.fromarray(RED), "PNG", transparency=(255, 0, 0)), "is transparent in places"),
    (to_base64(png(RGB, 16, [b"\1\2" * 3], width=1)), "has more than 8 bits a channel"),
    (to_base64(png(RGB, 8, [b"abc"], (b"pHYs", b""), width=1)), "damaged PNG"),
    (to_base64(png(RGB, 8, [b"abc"], width=1, after=[(b"iCCP", b"a\0")])), "damaged PNG"),
    (to_base64(to_png(np.zeros((101, 100, 3), np.uint8))), "has 100 x 101 pixels, more than the 10000 allowed"),
])
def test_what_is_no_rgb_png_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        from_png(text, max_pixels=10_000)


def test_a_png_that_says_it_is_huge_is_refused():
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    huge = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + to_png(RED)[33:]
    with pytest.raises(ValueError, match="is too large"):
        from_png(to_base64(huge), max_pixels=10_000)


@pytest.mark.parametrize("text", ['{"a": NaN}', "[Infinity]", "[-Infinity]", '{"a": [{"b": 1, "b": 2}]}', "", "{",
                                  "[" * 100_000 + "]" * 100_000])
def test_strict_json_refuses(text):
    with pytest.raises(ValueError):
        strict_json(text)


# Requests -------------------------------------------------------------------------------------------------------------

def test_post_sends_json_and_returns_json():
    with serving(lambda method, path, body: (200, {"method": method, "twice": body["x"] * 2})) as server:
        assert client(server.url + "/", key="k").post("/v1/score", {"x": 21}) == {"method": "POST", "twice": 42}
    (_, path, _, headers), = server.requests
    assert path == "/v1/score" and headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer k"


def test_the_key_counts_before_the_credentials_of_netrc_and_of_the_url(tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(in_turn((200, 1))) as server:
        for url in (server.url, server.url.replace("//", "//other:word@")):
            client(url, key="k").post("/x", {})
        client(server.url).get("/x")
        sent = [headers["Authorization"] for *_, headers in server.requests]
    basic = base64.b64encode(b"someone:secret").decode()
    assert sent == ["Bearer k", "Bearer k", f"Basic {basic}"], "without a key, what netrc says"


def test_a_proxy_of_the_environment_is_used(monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(in_turn((200, 1))) as server:
        monkeypatch.setenv("http_proxy", server.url)
        assert client("http://judge.invalid/v1", key="k").get("/models") == 1
        (_, path, _, headers), = server.requests
    assert path == "http://judge.invalid/v1/models" and headers["Authorization"] == "Bearer k"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_refusing_proxy_is_named(scheme, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(in_turn((403, {"error": "not allowed"}))) as server:
        where = server.url.removeprefix("http://")
        monkeypatch.setenv(f"{scheme}_proxy", f"http://me:secret@{where}")
        with pytest.raises(RewardError) as error:
            client(f"{scheme}://judge.invalid/v1", key="k").get("/models")
        assert "403" in str(error.value) or "501" in str(error.value)  # to CONNECT, the test's server says 501
        assert f"(through the proxy {where}, which the environment names" in str(error.value)
        assert "NO_PROXY=judge.invalid asks the server itself" in str(error.value) and "secret" not in str(error.value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(RewardError) as error:
            client(server.url).get("/x")
        assert "proxy" not in str(error.value)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again(status):
    with serving(in_turn((status, {}), (status, {}), (200, [1]))) as server:
        assert client(server.url).get("/health") == [1]
    assert server.count("/health") == 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_stays_busy_is_an_error_after_bounded_tries(status):
    with serving(in_turn((status, {"error": {"message": "no room"}}))) as server:
        with pytest.raises(HttpError, match=rf"/x answered with HTTP {status}: no room \(tried 3 times\)") as error:
            client(server.url).get("/x")
    assert server.count("/x") == 3 and error.value.status == status


@pytest.mark.parametrize(("status", "body", "said"), [
    (500, {"error": {"message": "ValueError: broken"}}, "ValueError: broken"),
    (400, {"error": {"field": "prompts[1]", "message": "is a number"}}, r"prompts\[1\]: is a number"),
    (404, b"<h1>nothing here</h1>", "nothing here"),
    (422, {"detail": "bad"}, "bad"),
    (401, {"error": "no key"}, "no key"),
    (302, b"", "HTTP 302"),
])
def test_other_statuses_are_errors_at_once_with_what_the_server_said(status, body, said):
    with serving(in_turn((status, body, {"Location": "/elsewhere"}), (200, {}))) as server:
        with pytest.raises(HttpError, match=said) as error:
            client(server.url).post("/x", {})
    assert len(server.requests) == 1
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.status, again.text) == (str(error.value), status, error.value.text)


def test_no_answer_in_time_is_an_error_and_is_not_asked_again():
    with serving(in_turn((200, Server.HANG))) as server:
        with pytest.raises(RewardError, match=rf"no answer from {server.url}/x within 0.2 s"):
            client(server.url, timeout_s=0.2).post("/x", {})
        assert len(server.requests) == 1


@pytest.mark.parametrize("payload", [Server.DRIP, Server.DRIP_HEAD])
def test_an_answer_that_drips_has_to_be_whole_in_time_too(payload):
    with serving(in_turn((200, payload), (200, 8))) as server:
        asked = client(server.url, timeout_s=0.4)
        with pytest.raises(RewardError, match=rf"no answer from {server.url}/x within 0.4 s"):
            asked.post("/x", {})
        assert not server.enough.is_set(), "the answer was waited for"
        assert asked.post("/x", {}) == 8, "what is left of the late answer is not read as the next one"
        assert len(server.requests) == 2
    with serving(in_turn((200, payload))) as server:
        server.enough.set()
        assert client(server.url, timeout_s=30.0).post("/x", {}) == 7


def test_a_connection_that_nobody_accepts_is_tried_again():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # fill the queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        with pytest.raises(RewardError, match=r"no connection.*timed out.*\(tried 2 times\)"):
            client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3, retries=1).get("/x")


def test_connections_are_used_again():
    ports = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            ports.append(self.client_address[1])
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"1")

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        asked = client(f"http://127.0.0.1:{server.server_address[1]}")
        assert [asked.get("/x") for _ in range(3)] == [1, 1, 1]
        server.shutdown()
    assert len(ports) == 3 and len(set(ports)) == 1


@pytest.mark.parametrize(("settings", "seconds"), [
    ({}, 63.5), ({"retries": 0}, 60), ({"retries": 8}, 60 + 0.5 + 1 + 2 + 4 + 8 + 16 + 30 + 30),
    ({"timeout_s": 5, "retries": 10**9, "backoff_s": 0}, 5), ({"timeout_s": 5, "retries": 3000, "backoff_s": 30}, 5 + 90_000),
])
def test_the_longest_wait_for_one_request(settings, seconds):
    defaults = {key: option.default for key, option in http_client.CONNECTION.items()}
    assert http_client.longest_wait(defaults | settings) == seconds


def test_a_lost_connection_is_tried_again():
    with serving(in_turn((200, Server.CLOSE), (200, 7))) as server:
        assert client(server.url).post("/x", {}) == 7
    assert len(server.requests) == 2
    with serving(in_turn((200, Server.CLOSE))) as server:
        with pytest.raises(RewardError, match=r"connection.*\(tried 3 times\)"):
            client(server.url).post("/x", {})
    assert len(server.requests) == 3


def test_a_server_that_is_not_there_is_named():
    with serving(in_turn((200, 1))) as server:
        asked = client(server.url, retries=1)
        assert asked.get("/health") == 1
        server.stop()
        with pytest.raises(RewardError, match=rf"{server.url}/health: .*Connection refused.*\(tried 2 times\)"):
            asked.get("/health")


@pytest.mark.parametrize("body", [b"fine", b'{"score": NaN}', b"", b"\xff\xfe"])
def test_an_answer_that_is_no_json_is_an_error(body):
    with serving(in_turn((200, body))) as server, pytest.raises(RewardError, match="/x is no JSON"):
        client(server.url).get("/x")


def test_waits_double_up_to_a_bound(waits):
    with serving(in_turn((503, {}))) as server, pytest.raises(HttpError):
        client(server.url, retries=8, backoff_s=0.5).get("/x")
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_the_server_may_ask_for_a_longer_wait(waits):
    answers = [(503, {}, {"Retry-After": text}) for text in ("7", "9999", "Mon, 30 Nov 2026 01:00:00 GMT")]
    with serving(in_turn(*answers, (200, 1))) as server:
        assert client(server.url, retries=3, backoff_s=1.0).get("/x") == 1
    assert waits == [7, 30, 4]


def test_nan_is_not_sent():
    with serving(in_turn((200, 1))) as server:
        with pytest.raises(ValueError):
            client(server.url).post("/x", {"score": float("nan")})
        assert server.requests == []


@pytest.mark.parametrize("value", ["127.0.0.1:8000", "ftp://host", "http://", "", "localhost", "http://[::1", "http://[x]:80",
                                   "http://host:99999", "http://host:abc", "http://host:0", "http://a host", "http://a\nhost",
                                   "http://:80", "http://a..b", " http://host"])
def test_a_wrong_address_is_named(value):
    problem = url_problem("url", value, "http://127.0.0.1:1")
    assert f"option url is {value!r}" in problem and problem.endswith("an example is http://127.0.0.1:1")


@pytest.mark.parametrize("value", ["http://[::1]:80", "http://host:80/v1", "https://user:word@host", "http://bücher.example",
                                   "http://a_b.c."])
def test_a_right_address_is_taken(value):
    assert url_problem("url", value, "x") is None


@pytest.mark.parametrize("key", ["timeout_s", "backoff_s"])
def test_a_wait_that_nothing_can_wait_is_refused(key):
    assert http_client.CONNECTION[key].problem(1e6) is None
    assert "use at most 1000000" in http_client.CONNECTION[key].problem(1e10)


def test_the_address_is_needed():
    assert "option url is needed" in url_problem("url", None, "http://127.0.0.1:1")
    assert url_problem("url", "https://host/v1", "x") is None


def test_base64_is_the_standard_one():
    assert to_base64(b"\xfb\xff") == base64.b64encode(b"\xfb\xff").decode() == "+/8="
