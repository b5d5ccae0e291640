"""JSON over HTTP for rewards that live on a server: bounded retries, deadlines, and images as PNG.

Imports only the standard library and numpy; `requests` and Pillow when they are used.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from flowgrpo_ray.rewards.base import Option, RewardError
from flowgrpo_ray.rewards.image_files import ImageError, rgb_of

RETRIED = frozenset({429, 502, 503, 504})
LONGEST_WAIT_S = 30.0
LARGEST_S = 1e6  # that an option may ask to wait: 11 days, and far below what locks and sockets take
CHUNK = 1024  # bytes of an answer that are read at once
SHOWN = 300  # characters of a server's answer that an error quotes

_Answer = tuple[int, Mapping[str, str], bytes]  # status, headers, body


# Options of every reward that talks to a server.
CONNECTION: dict[str, Option] = {
    "timeout_s": Option(60.0, "Seconds that a try may take, from looking up the server's name to the last byte of its "
                        "answer; an answer that is late is an error at once", kind=float, minimum=0.01, maximum=LARGEST_S,
                        infrastructure=True),
    "retries": Option(3, "Times that a request is sent again after a refused or lost connection or HTTP 429, 502, 503, "
                      "504; any other failure is final", kind=int, minimum=0, infrastructure=True),
    "backoff_s": Option(0.5, "Seconds before the first retry; each further one waits twice as long, 30 s at most",
                        kind=float, minimum=0, maximum=LARGEST_S, infrastructure=True),
}


def pause(backoff_s: float, attempt: int) -> float:
    """Seconds before the retry that follows an attempt, counted from 0."""
    return min(backoff_s * 2.0 ** min(attempt, 64), LONGEST_WAIT_S)


def longest_wait(settings: Mapping[str, Any]) -> float:
    """Seconds that a request may take under the options in `CONNECTION`: tries that are refused at once, with the waits
    between them, and a last one without an answer in time, which is final. A `Retry-After` of the server comes on top."""
    retries, backoff = settings["retries"], settings["backoff_s"]
    growing = min(retries, 64)
    return (settings["timeout_s"] + sum(pause(backoff, attempt) for attempt in range(growing))
            + (retries - growing) * pause(backoff, growing))


class HttpError(RewardError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        text: what the server said, shortened.
    """

    def __init__(self, message: str, status: int, text: str) -> None:
        super().__init__(message)
        self.status, self.text = status, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status, self.text)  # it travels between actors


def url_problem(option: str, value: Any, example: str) -> str | None:
    """What is wrong with a server's address given as `option`, or None."""
    if value is None:
        return f"option {option} is needed: the address of the server, for example {option}: {example}"
    try:
        parts = urlsplit(value)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # a name that no look-up takes, such as a..b
        why = ""
    except ValueError as error:  # brackets without an IPv6 address, a port that is none; UnicodeError is one too
        right, why = False, f" ({error})"
    # urlsplit drops line ends and tabs silently, and keeps spaces.
    if not right or any(character.isspace() or not character.isprintable() for character in value):
        return f"option {option} is {value!r}, not of the form http://HOST:PORT{why}; an example is {example}"
    return None


def strict_json(text: str | bytes) -> Any:
    """Parse JSON without what Python's parser lets pass: NaN, Infinity, and an object that has a name twice.

    Raises:
        ValueError: not JSON, one of these, or nested deeper than Python's parser goes.
    """
    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is no JSON number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"an object has {next(name for name in names if names.count(name) > 1)!r} twice")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_png(image: np.ndarray) -> bytes:
    """A uint8 [H, W, 3] RGB image as PNG, without loss."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def to_base64(data: bytes) -> str:
    """Base64 text of bytes."""
    return base64.b64encode(data).decode("ascii")


def from_png(text: str, *, max_pixels: int) -> np.ndarray:
    """uint8 [H, W, 3] RGB of a base64 PNG.

    Raises:
        ValueError: not base64, not a PNG, not of 8-bit RGB, transparent in places, damaged, or larger than `max_pixels`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"is no base64: {error}") from None
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.width * image.height > max_pixels:
                raise ImageError(f"has {image.width} x {image.height} pixels, more than the {max_pixels} allowed")
            if image.mode != "RGB":
                raise ImageError(f"is a PNG of mode {image.mode}, not 8-bit RGB")
            return rgb_of(image)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ValueError("is no PNG") from None
    except Image.DecompressionBombError as error:  # Pillow's own bound, where ours is larger
        raise ValueError(f"is too large: {error}") from None
    except Exception as error:  # damaged bytes lead Pillow's decoders to errors of every type
        raise ValueError(f"is a damaged PNG: {error}") from None


class HttpClient:
    """Requests to one server. Threads may share it.

    Args:
        base_url: prefix of every path.
        who: name of the reward, for errors.
        timeout_s, retries, backoff_s: see `CONNECTION`.
        key: sent as a bearer token, whatever ~/.netrc and the URL hold for the server; they count where there is none.
    """

    def __init__(
        self, base_url: str, *, who: str, timeout_s: float, retries: int, backoff_s: float,
        key: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._who, self._key = who, key
        self._timeout, self._retries, self._backoff = timeout_s, retries, backoff_s
        self._idle: SimpleQueue[Any] = SimpleQueue()  # sessions, each with its open connection

    def get(self, path: str) -> Any:
        """The JSON that a GET of `path` answers; raises as `post`."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """The JSON that a POST of `body` (as JSON) to `path` answers.

        Connection errors and the statuses in `RETRIED` are tried again `retries` times. A request that got no answer in
        time is not: the server may still be working on it, and a second one would wait behind the first.

        Raises:
            HttpError: the server answered with an error.
            RewardError: no connection, no answer in time, or an answer that is no JSON. All name the URL.
        """
        return self._request("POST", path, json.dumps(body, allow_nan=False).encode())

    def _request(self, method: str, path: str, body: bytes | None) -> Any:
        url = self.base_url + path
        for attempt in itertools.count():
            wait, problem = pause(self._backoff, attempt), None
            try:
                status, headers, content = self._send(method, url, body)
            except _Retriable as error:
                problem = RewardError(f"reward {self._who}: {url}: {error}{_through(url)}{_tried(attempt)}")
            else:
                if 200 <= status < 300:
                    return self._parsed(url, content)
                text = _message_of(content)
                problem = HttpError(f"reward {self._who}: {url} answered with HTTP {status}: {text}{_through(url)}"
                                    f"{_tried(attempt)}", status, text)
                if status not in RETRIED:
                    raise problem
                asked = headers.get("Retry-After", "")
                wait = max(wait, float(asked)) if re.fullmatch(r"\d{1,6}", asked) else wait
            if attempt == self._retries:
                raise problem
            time.sleep(min(wait, LONGEST_WAIT_S))

    def _send(self, method: str, url: str, body: bytes | None) -> _Answer:
        """One try, on a thread of its own: `requests` bounds each read, but not the look-up of a name, nor an answer that
        comes byte by byte. A try that is late is left to itself; its thread ends with the next kilobyte, or when none comes.
        """
        import requests

        try:
            session = self._idle.get_nowait()
        except Empty:
            session = requests.Session()
        answer: Future[_Answer] = Future()
        threading.Thread(target=self._try, args=(answer, session, method, url, body), daemon=True).start()
        try:
            return answer.result(self._timeout)
        except TimeoutError:
            raise self._late(url) from None

    def _try(self, answer: Future[_Answer], session: Any, method: str, url: str, body: bytes | None) -> None:
        try:
            found = self._exchange(session, method, url, body)
        except BaseException as error:
            session.close()
            answer.set_exception(error)
        else:
            self._idle.put(session)
            answer.set_result(found)

    def _exchange(self, session: Any, method: str, url: str, body: bytes | None) -> _Answer:
        import requests
        from urllib3.exceptions import ReadTimeoutError

        end = time.monotonic() + self._timeout
        headers = {"Content-Type": "application/json"} if body is not None else {}
        # A connection that is not accepted is found before the whole try is late: it may be tried again.
        timeouts = (0.9 * self._timeout, self._timeout)
        try:
            # A redirected POST would arrive as a GET.
            with session.request(method, url, data=body, headers=headers, timeout=timeouts, allow_redirects=False,
                                 stream=True, auth=self._authorize if self._key else None) as response:
                parts = []
                for part in response.iter_content(CHUNK):
                    if time.monotonic() > end:
                        raise self._late(url)
                    parts.append(part)
                return response.status_code, response.headers, b"".join(parts)
        except requests.exceptions.RequestException as error:
            late = isinstance(error, requests.exceptions.ReadTimeout) or any(
                isinstance(cause, ReadTimeoutError) for cause in error.args)
            if late:
                raise self._late(url) from None
            if isinstance(error, (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError)):
                raise _Retriable(f"no connection, or it was lost: {_reason(error)}") from None
            raise RewardError(f"reward {self._who}: {url}: {type(error).__name__}: {error}{_through(url)}") from None

    def _authorize(self, request: Any) -> Any:
        """Set the key as late as `requests` would put other credentials in its place."""
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _late(self, url: str) -> RewardError:
        return RewardError(f"reward {self._who}: no answer from {url} within {self._timeout:g} s{_through(url)}")

    def _parsed(self, url: str, content: bytes) -> Any:
        try:
            return strict_json(content)
        except ValueError as error:
            shown = content[:SHOWN].decode("utf-8", "replace")
            raise RewardError(f"reward {self._who}: the answer of {url} is no JSON ({error}): {shown!r}"
                              f"{_through(url)}") from None


class _Retriable(Exception):
    """A failure that another try may mend."""


def _through(url: str) -> str:
    """What to add to a failure where a proxy of the environment lies between: it may be the proxy's, and not the server's."""
    from requests.utils import get_environ_proxies, select_proxy

    proxy = select_proxy(url, get_environ_proxies(url))
    if not proxy:
        return ""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    where = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname  # without the password that it may hold
    return (f" (through the proxy {where}, which the environment names and which may be what refuses; NO_PROXY="
            f"{urlsplit(url).hostname} asks the server itself)")


def _tried(attempt: int) -> str:
    return f" (tried {attempt + 1} times)" if attempt else ""


def _reason(error: Exception) -> str:
    """The innermost reason of requests' nested errors."""
    text = str(error)
    found = re.search(r"(\[Errno \d+\] [^'\")]+|Remote end closed connection[^'\")]*|Tunnel connection failed[^'\")]*|"
                      r"Name or service not known)", text)
    return found.group(1).strip() if found else text[:SHOWN]


def _message_of(content: bytes) -> str:
    """The message in an error's body: ours, OpenAI's and vLLM's forms, or the text as it is."""
    text = content.decode("utf-8", "replace").strip()
    try:
        body = strict_json(text)
    except ValueError:
        return text[:SHOWN]
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message = str(error.get("message") or error.get("detail") or error)
        field = error.get("field")
        return (f"{field}: {message}" if field else message)[:SHOWN]
    return str(error)[:SHOWN]
