"""What stands behind the rewards over HTTP: servers that score the share of red, and do on a marked image what it says."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
from answering import Server
from faulty_kinds import SERVER, fault_of
from PIL import Image


def from_png(text: str) -> np.ndarray:
    """uint8 [H, W, 3] of a base64 PNG or a data URL of one."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text.rpartition(",")[2]))).convert("RGB"))


def red(image: np.ndarray) -> float:
    return float(image[..., 0].mean() / 255)


class Marked:
    """`seen` are the images that came."""

    def __init__(self):
        self.seen: list[np.ndarray] = []

    def take(self, texts):
        """(images of a request, the fault that one of them asks of a server)."""
        images = [from_png(text) for text in texts]
        self.seen += images
        return images, next((fault for fault in map(fault_of, images) if fault in SERVER), None)

    def transport(self, fault):
        """The answer of a server that is out of order."""
        return {"http_500": (500, {"error": {"message": "broken"}}), "http_hang": (200, Server.HANG),
                "http_close": (200, Server.CLOSE)}.get(fault)


class Rewards(Marked):
    """The protocol of `remote`."""

    FAULTS = tuple(fault for fault in SERVER if fault != "http_outside")

    def __init__(self, name="red", scope="sample", low=0.0, high=1.0):
        super().__init__()
        self.health = {"name": name, "scope": scope, "range": [low, high], "max_batch": None}
        self.low, self.high = low, high

    def __call__(self, method, path, body):
        if path == "/health":
            return 200, self.health
        images, fault = self.take(body["images"])
        scores = [self.low + (self.high - self.low) * red(image) for image in images]
        if answer := self.transport(fault):
            return answer
        if fault == "http_unparsable":
            return 200, b"<html>gateway</html>"
        if fault == "http_nan":
            return 200, f'{{"scores": {{"{self.health["name"]}": [NaN]}}}}'.encode()
        if fault == "http_outside":
            scores = [self.low - 10.0] * len(scores)
        scores = {"http_short": scores[:-1], "http_empty": []}.get(fault, scores)
        return 200, {"scores": {self.health["name"]: scores}}


class Chat(Marked):
    """An OpenAI-compatible endpoint; `form` is what a right reply looks like, with a grade from 1 to 5 in it, or None for
    the better of two images."""

    FAULTS = tuple(fault for fault in SERVER if fault != "http_short")

    def __init__(self, form):
        super().__init__()
        self.form = form

    def __call__(self, method, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "judge"}]}
        images, fault = self.take(
            part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url")
        if answer := self.transport(fault):
            return answer
        if self.form is None:
            first, second = map(red, images)
            better = {"http_nan": float("nan"), "http_outside": "third"}.get(fault, "first" if first > second else "second")
            reply = json.dumps({"better": better})
        else:
            (image,) = images
            grade = {"http_nan": "NaN", "http_outside": "11"}.get(fault, f"{1 + 4 * red(image):.4f}")
            reply = self.form % grade
        reply = {"http_empty": "", "http_unparsable": "I like it"}.get(fault, reply)
        return 200, {"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]}
