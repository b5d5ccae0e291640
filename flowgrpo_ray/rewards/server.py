"""The reward server: one reward behind HTTP, for `remote` rewards of other machines and environments.

JSON with base64 PNG in, JSON out (protocol: remote.py). There is no authentication: keep it inside a private network.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from queue import SimpleQueue
from typing import Any

import numpy as np
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flowgrpo_ray import __version__
from flowgrpo_ray.errors import counted, nearest
from flowgrpo_ray.rewards.base import Reward, RewardError, no_exit, read_only, self_tested, validated
from flowgrpo_ray.rewards.http_client import from_png, strict_json, to_base64, to_png
from flowgrpo_ray.rewards.registry import get
from flowgrpo_ray.rewards.remote import MAX_PIXELS

log = logging.getLogger(__name__)

PROTOCOL = 1
FIELDS = ("images", "prompts", "metadata", "group_ids")
GRACE_S = 10.0  # a scoring call under way at a signal may take this long


class BadRequest(Exception):
    """A request that is no request of the protocol; `field` says where."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Scorer:
    """Runs the reward's calls one at a time, in order of arrival, on one thread of its own.

    The thread is a daemon: a call that hangs does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future, Callable[[], Any]]] = SimpleQueue()
        self._lock, self._open = threading.Lock(), 0
        self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._open > 0

    @property
    def queued(self) -> int:
        """Calls that wait: all but the one under way."""
        return max(0, self._open - 1)

    def submit(self, call: Callable[[], Any], most: int) -> Future | None:
        """Queue a call, or None where `most` wait already. Cancelling the future takes it out of the queue."""
        with self._lock:
            if self._open > most:
                return None
            self._open += 1
        future: Future = Future()
        future.add_done_callback(self._ended)
        self._queue.put((future, call))
        return future

    def _ended(self, _: Future) -> None:
        with self._lock:
            self._open -= 1

    def _work(self) -> None:
        while True:
            future, call = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has gone
            try:
                result = call()
            except BaseException as error:
                # asyncio cannot carry StopIteration, and a SystemExit of the reward must not end the server.
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if plain else RewardError(f"the reward raised {error!r}"))
            else:
                future.set_result(result)


class RewardServer:
    """The HTTP application around one reward.

    Args:
        reward: what scores.
        max_batch: images that one request may hold.
        max_queue: requests that may wait; more are answered with 503, which clients take as "try again".
        max_body_mb: size of a request's body in MB.
    """

    def __init__(self, reward: Reward, *, max_batch: int = 256, max_queue: int = 64, max_body_mb: int = 256) -> None:
        self._reward, self._max_batch, self._max_queue = reward, max_batch, max_queue
        self._scorer = Scorer()
        self._metrics = CollectorRegistry()
        label: dict[str, Any] = {"registry": self._metrics, "namespace": "flowgrpo", "subsystem": "reward_server"}
        self._requests = Counter("requests", "Scoring requests, by HTTP status of the answer", ["status"], **label)
        self._images = Counter("images", "Images scored", **label)
        self._failures = Counter("failures", "Requests that the reward failed on", **label)
        self._seconds = Histogram("seconds", "Seconds of a scoring call, without waiting", **label,
                                  buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100))
        Gauge("queued", "Requests that wait", **label).set_function(lambda: self._scorer.queued)
        self._reasons: dict[tuple[Any, ...], int] = {}
        self._count = {"requests": 0, "images": 0, "failures": 0}
        self.app = web.Application(client_max_size=max_body_mb * 1_000_000, middlewares=[_errors_as_json])
        self.app.add_routes([
            web.post("/v1/score", self._score), web.get("/v1/self_test", self._self_test),
            web.get("/health", self._health), web.get("/metrics", self._prometheus),
        ])

    @property
    def name(self) -> str:
        return self._reward.name

    @property
    def busy(self) -> bool:
        return self._scorer.busy

    async def _score(self, request: web.Request) -> web.Response:
        status = 500
        try:
            response = await self._answer(request)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = 499  # the client went away
            raise
        finally:
            self._count["requests"] += 1
            self._requests.labels(str(status)).inc()

    async def _answer(self, request: web.Request) -> web.Response:
        data = await request.read()
        try:
            # Decoding runs beside the scoring of earlier requests.
            batch = await asyncio.to_thread(self._batch, data)
        except BadRequest as error:
            return _error(400, str(error), field=error.field)
        except Exception as error:
            return self._failed(error)
        answer = await self._on_scorer(lambda: self._run(*batch))
        if isinstance(answer, web.Response):
            return answer
        scores, seconds = answer
        self._count["images"] += len(batch[0])
        self._images.inc(len(batch[0]))
        self._seconds.observe(seconds)
        return web.json_response({"scores": {key: values.tolist() for key, values in scores.items()}}, dumps=_dumps)

    async def _on_scorer(self, call: Callable[[], Any]) -> Any:
        """What a call gives on the thread that scores, after those that wait; the answer that says why where it has failed, or
        where too many wait. All code of the reward that may take long, or touch its model, runs there."""
        future = self._scorer.submit(call, self._max_queue)
        if future is None:
            waiting = f"{counted(self._max_queue, 'request')} {'waits' if self._max_queue == 1 else 'wait'}"
            return _error(503, f"the queue is full: {waiting}", headers={"Retry-After": "1"})
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> web.Response:
        """The answer to a request that the reward failed on. Failures of one kind and place in its code are logged when they
        first come, and at the 10th, 100th, ... time: a broken reward fails on every request."""
        self._count["failures"] += 1
        self._failures.inc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = type(error), place.filename, place.lineno
        times = self._reasons[reason] = self._reasons.get(reason, 0) + 1
        text = f"{type(error).__name__}: {error}"
        if times == 1:
            log.warning("scoring failed: %s", text, exc_info=not isinstance(error, RewardError))
        elif str(times).rstrip("0") == "1":
            log.warning("scoring failed %d times for one reason, now: %s", times, text)
        return _error(500, text)

    def _run(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]], group_ids: list[int] | None,
    ) -> tuple[dict[str, np.ndarray], float]:
        start = time.perf_counter()
        result = self._reward.score(read_only(images), prompts, metadata, group_ids=group_ids)
        # NaN or infinity never leave as numbers: they are refused here.
        return validated(result, len(prompts), self._reward.name, range=self._reward.range), time.perf_counter() - start

    def _batch(self, data: bytes) -> tuple[np.ndarray, list[str], list[dict[str, Any]], list[int] | None]:
        """The batch in a request's body; raises BadRequest that names the field."""
        try:
            body = strict_json(data)
        except ValueError as error:
            raise BadRequest("body", f"is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest("body", f"is {_kind(body)}, not an object with {', '.join(FIELDS)}")
        for key in body:
            if key not in FIELDS:
                raise BadRequest(key, f"is no field of a request{nearest(key, FIELDS)}")
        texts = _list_of(body, "images", str, "base64 PNG texts")
        if not texts:
            raise BadRequest("images", "is empty")
        if len(texts) > self._max_batch:
            raise BadRequest("images", f"holds {counted(len(texts), 'image')}, more than the {self._max_batch} of --max-batch")
        n = len(texts)
        prompts = _list_of(body, "prompts", str, "texts", n)
        metadata = _list_of(body, "metadata", dict, "objects", n) if body.get("metadata") is not None else [{} for _ in texts]
        ids = _list_of(body, "group_ids", int, "whole numbers", n) if body.get("group_ids") is not None else None
        if ids is None and self._reward.scope == "group":
            raise BadRequest("group_ids", f"is missing: {self._reward.name} scores whole groups")
        images, left = [], MAX_PIXELS  # a small PNG can hold a huge image
        for i, text in enumerate(texts):
            try:
                images.append(from_png(text, max_pixels=left))
            except ValueError as error:
                raise BadRequest(f"images[{i}]", str(error)) from None
            left -= images[-1].shape[0] * images[-1].shape[1]
        for i, image in enumerate(images):
            if image.shape != images[0].shape:
                raise BadRequest(f"images[{i}]", f"is of {_size(image)} pixels, and images[0] of {_size(images[0])}")
        for i, (prompt, extra) in enumerate(zip(prompts, metadata, strict=True)):
            with no_exit(self._reward.name):
                problem = self._reward.check_prompt(prompt, extra, **self._reward.settings)
            if problem:
                raise BadRequest(f"prompts[{i}]", problem)
        return np.stack(images), prompts, metadata, ids

    async def _self_test(self, request: web.Request) -> web.Response:
        return await self._on_scorer(self._known_images)

    def _known_images(self) -> web.Response:
        with no_exit(self._reward.name):
            case = self._reward.self_test_case()
        body = None if case is None else {
            "images": [to_base64(to_png(image)) for image in case.images], "prompts": list(case.prompts),
            "metadata": list(case.metadata) or [{} for _ in case.prompts], "ordered": case.ordered}
        return web.json_response(body, dumps=_dumps)

    async def _health(self, request: web.Request) -> web.Response:
        r = self._reward
        return web.json_response({
            "name": r.name, "protocol": PROTOCOL, "range": [bound if math.isfinite(bound) else None for bound in r.range],
            "scope": r.scope, "needs": list(r.needs), "batch_invariant": r.batch_invariant, "max_batch": self._max_batch,
            "options": json.loads(json.dumps(r.settings, default=str)), "versions": _versions(r.packages),
            "busy": self._scorer.busy, "queued": self._scorer.queued, "notes": list(r.notes), **self._count,
        }, dumps=_dumps)

    async def _prometheus(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})


def serve(
    name: str, options: Mapping[str, Any], *, host: str, port: int, max_batch: int, max_body_mb: int = 256,
    self_test: bool = True, say: Callable[[str], None] = print,
) -> int:
    """Load a reward, score its known images, and serve it until SIGTERM or SIGINT.

    Args:
        say: told the address once requests are answered.

    Returns:
        The signal that ended it. A scoring call under way gets some seconds to finish, and its answer is sent.

    Raises:
        ConfigError, RewardError: as `registry.get` and `Reward.self_test`. OSError: the port is taken.
    """
    reward = get(name, **options)
    if self_test:
        self_tested(reward)
    server = RewardServer(reward, max_batch=max_batch, max_body_mb=max_body_mb)
    number = asyncio.run(_until_signal(server, host, port, say))
    if server.busy:
        say(f"{reward.name} still scores after {GRACE_S:g} s; ending without its answer")
        sys.stdout.flush()
        os._exit(128 + number)  # native code cannot be interrupted otherwise
    return number


async def _until_signal(server: RewardServer, host: str, port: int, say: Callable[[str], None]) -> int:
    # A queued request whose client has gone is taken out of the queue.
    runner = web.AppRunner(server.app, handler_cancellation=True, shutdown_timeout=GRACE_S, access_log=None)
    await runner.setup()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        port = runner.addresses[0][1]  # the one that the system chose for 0
        say(f"serving {server.name} at http://{f'[{host}]' if ':' in host else host}:{port}")
        return await ended
    finally:
        await runner.cleanup()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, error.text or error.reason)


def _error(status: int, message: str, field: str | None = None, headers: Mapping[str, str] | None = None) -> web.Response:
    detail = {"message": message} | ({"field": field} if field else {})
    return web.json_response({"error": detail}, status=status, headers=headers, dumps=_dumps)


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _list_of(body: Mapping[str, Any], field: str, kind: type, what: str, n: int | None = None) -> list[Any]:
    values = body.get(field)
    if values is None:
        raise BadRequest(field, "is missing")
    if not isinstance(values, list):
        raise BadRequest(field, f"is {_kind(values)}, not a list of {what}")
    for i, value in enumerate(values):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadRequest(f"{field}[{i}]", f"is {_kind(value)}; {field} holds {what}")
    if n is not None and len(values) != n:
        raise BadRequest(field, f"holds {len(values)} for {counted(n, 'image')}")
    return values


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _size(image: np.ndarray) -> str:
    return f"{image.shape[1]} x {image.shape[0]}"


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of what scores; null for a package that is not installed as a distribution."""
    found: dict[str, str | None] = {"flowgrpo_ray": __version__, "python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
