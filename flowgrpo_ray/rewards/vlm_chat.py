"""Asking a vision-language model on an OpenAI-compatible endpoint (vLLM, SGLang) about images, and reading its reply.

What a reply does not say is never made up: no verdict in it, or one outside what was asked for, is an error.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

import numpy as np

from flowgrpo_ray.errors import counted, nearest
from flowgrpo_ray.rewards.base import Option, Reward, RewardError
from flowgrpo_ray.rewards.http_client import (
    CONNECTION,
    HttpClient,
    HttpError,
    longest_wait,
    strict_json,
    to_base64,
    to_png,
    url_problem,
)

EXAMPLE_URL = "http://127.0.0.1:8000/v1"
SHOWN = 200  # characters of a reply that an error quotes
PARSERS = ("json:", "regex:")
CUT = ("length", "content_filter", "abort", "error")  # finish_reason of replies that are not whole

T = TypeVar("T")

CHAT_OPTIONS: dict[str, Option] = {
    "base_url": Option(None, f"The endpoint's address with its version, for example {EXAMPLE_URL}",
                       infrastructure=True),
    "model": Option(None, "Name of the model on the endpoint; default is the only one that it serves"),
    "api_key_env": Option(None, "NAME of the environment variable that holds the API key, in the reward actors' environment",
                          infrastructure=True),
    "structured": Option("auto", "With a json: parser. auto: ask for a JSON schema, and go on without one where the server "
                         "says that it has none; json_schema: insist on it; never: do not ask",
                         choices=("auto", "json_schema", "never")),
    "max_tokens": Option(512, "Longest reply, in tokens", kind=int, minimum=1),
    "temperature": Option(0.0, "Sampling temperature of the judge", kind=float, minimum=0),
    "image_size": Option(512, "Larger images are scaled down to this length of their longer side, in pixels; 0: as they are",
                         kind=int, minimum=0),
    "concurrency": Option(8, "Requests under way at once", kind=int, minimum=1, infrastructure=True),
    **CONNECTION,
}


def template_problem(template: str, fields: Sequence[str], needed: Sequence[str] = ()) -> str | None:
    """What is wrong with a prompt template, or None. Braces around anything but a word are text."""
    used = re.findall(r"\{(\w+)\}", template)
    for field in used:
        if field not in fields:
            return f"option template has the field {{{field}}}{nearest(field, fields)}"
    for field in needed:
        if field not in used:
            return f"option template lacks {{{field}}}, where the text prompt goes"
    return None if template.strip() else "option template is empty"


def parser_problem(parser: str, others: Sequence[str] = ()) -> str | None:
    """What is wrong with a parser, or None: `json:FIELD`, `regex:PATTERN` with one group, or one of `others`."""
    if parser in others:
        return None
    kind = next((prefix for prefix in PARSERS if parser.startswith(prefix)), None)
    rest = parser.removeprefix(kind or "")
    if kind is None or not rest:
        forms = ["json:FIELD", "regex:PATTERN", *others]
        return f"option parser is {parser!r}; it is one of {', '.join(forms)}"
    if kind == "regex:":
        try:
            groups = re.compile(rest).groups
        except re.error as error:
            return f"option parser: {rest!r} is no regular expression: {error}"
        if groups != 1:
            return f"option parser: {rest!r} has {counted(groups, 'group')}; exactly one (in parentheses) holds the verdict"
    return None


def extract(reply: str, parser: str) -> Any:
    """The verdict in a reply, as the parser finds it: a text, or for `json:` the field's value.

    `json:` takes the whole reply, or what a single ```-fence in it holds; `number` the whole reply. `regex:` takes the last
    match, as a verdict comes after the reasoning. Where another match says something else, the last one must begin a line:
    marks such as ** and - may stand before it there, words may not. A number must be matched whole.

    Raises:
        ValueError: it is not there, or it is not clear which one it is.
    """
    if parser.startswith("json:"):
        field = parser.removeprefix("json:")
        fenced = re.findall(r"```(?:json)?\s*\n(.*?)```", reply, re.DOTALL)
        value = strict_json(fenced[0] if len(fenced) == 1 else reply)
        if not isinstance(value, dict) or field not in value:
            raise ValueError(f"no field {field!r}")
        return value[field]
    if parser.startswith("regex:"):
        matches = list(re.finditer(parser.removeprefix("regex:"), reply))
        if not matches:
            raise ValueError("the pattern does not match")
        found = [_whole(reply, match) for match in matches]
        if found[-1] != (matches[-1][1] or ""):
            raise ValueError(f"the pattern matches only a part of {found[-1]!r}")
        other = next((text for text in found if text != found[-1]), None)
        if other is not None and not _begins_line(reply, matches[-1]):
            raise ValueError(f"it says {other!r} and {found[-1]!r}, and the last is not at the start of a line")
        return found[-1]
    return reply.strip()


def _whole(reply: str, match: re.Match[str]) -> str:
    """What a pattern's group matched; where that is a part of a number such as 4.5 or 4,5, with the rest of it."""
    found = match[1] or ""
    number = re.search(r"(?:\d[.,]?)*\Z", reply[: match.start(1)]) if found[:1].isdigit() else None
    rest = re.match(r"(?:[.,]?\d)*", reply[match.end(1) :]) if found[-1:].isdigit() else None
    before, after = number[0] if number else "", rest[0] if rest else ""
    return before + found + after


def _begins_line(reply: str, match: re.Match[str]) -> bool:
    """Whether a match stands at the start of a line, but for marks and numbering."""
    start = match.end() - len(match[0].lstrip())
    return not any(character.isalpha() for character in reply[:start].rpartition("\n")[2])


def to_number(value: Any) -> float:
    """A number, or a text that is one; raises ValueError for anything else, and for NaN and infinity."""
    # Python reads "4_5" as 45.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or (isinstance(value, str) and "_" in value):
        raise ValueError(f"{value!r} is no number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is no number") from None
    except OverflowError:
        raise ValueError("a number of hundreds of digits") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


class ChatReward(Reward):
    """What the rewards that ask a vision-language model share.

    The constructor asks the endpoint for its models: RewardError where it does not answer, or lacks the model, or the
    environment variable of the key is not set.
    """

    needs: ClassVar[tuple[str, ...]] = ("prompt", "server")
    packages: ClassVar[tuple[str, ...]] = ("requests", "pillow")
    licence: ClassVar[str] = "that of the served model"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        s = self.settings
        self._http = HttpClient(s["base_url"], who=self.name, key=self._key(), **{key: s[key] for key in CONNECTION})
        self._model = self._find_model()
        self._schema = self.schema() if s["structured"] != "never" and s["parser"].startswith("json:") else None
        self._lock = threading.Lock()

    @classmethod
    def conflicts(cls, settings: Mapping[str, Any]) -> list[str]:
        """See `Reward.conflicts`."""
        problems = [url_problem("base_url", settings["base_url"], EXAMPLE_URL)]
        variable = settings["api_key_env"]
        if variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            # The value may be the key itself: it is not repeated.
            problems.append("option api_key_env is not the name of an environment variable; the key itself belongs into that "
                            "variable, never into a configuration")
        if settings["structured"] == "json_schema" and not settings["parser"].startswith("json:"):
            problems.append(f"option structured: json_schema goes with a json: parser, not with {settings['parser']!r}")
        return [problem for problem in problems if problem]

    @classmethod
    def longest_wait(cls, settings: Mapping[str, Any]) -> float:
        """See `Reward.longest_wait`."""
        return longest_wait(settings)

    @classmethod
    def requests_in_turn(cls, settings: Mapping[str, Any], images: int) -> int:
        """See `Reward.requests_in_turn`."""
        return math.ceil(cls.requests_of(settings, images) / settings["concurrency"])

    @classmethod
    def requests_of(cls, settings: Mapping[str, Any], images: int) -> int:
        """Requests that a call for so many images sends in all."""
        return images

    def schema(self) -> dict[str, Any]:
        """JSON schema of a reply."""
        raise NotImplementedError

    def _key(self) -> str | None:
        variable = self.settings["api_key_env"]
        if variable is None:
            return None
        key = os.environ.get(variable, "").strip()  # of a key from a file a line end may be left
        if not key or not (key.isascii() and key.isprintable()):
            what = "holds characters that no key has" if key else "is not set where the reward runs"
            raise RewardError(f"reward {self.name}: the environment variable {variable} (option api_key_env) {what}")
        return key

    def _find_model(self) -> str:
        answer = self._http.get("/models")
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("id"), str) for e in entries):
            raise RewardError(f"reward {self.name}: {self._http.base_url}/models is not that of an OpenAI-compatible endpoint: "
                              f"{str(answer)[:SHOWN]}")
        names, wanted = [entry["id"] for entry in entries], self.settings["model"]
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted in names:
            return wanted
        if wanted is None:
            raise RewardError(f"reward {self.name}: {self._http.base_url} serves {len(names)} models; option model names one "
                              f"of {', '.join(names) or 'them'}")
        raise RewardError(f"reward {self.name}: {self._http.base_url} serves no model {wanted!r}{nearest(wanted, names)}")

    def ask(self, images: Sequence[str], text: str) -> str:
        """The model's reply to images (data URLs) and a text; RewardError where there is none, or it is empty or cut off."""
        content = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        body = {"model": self._model, "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
                "max_tokens": self.settings["max_tokens"], "temperature": self.settings["temperature"]}
        answer = self._post(body)
        try:
            choice = answer["choices"][0]
            reply = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise RewardError(f"reward {self.name}: the answer of {self._http.base_url} holds no reply: "
                              f"{str(answer)[:SHOWN]}") from None
        reason = choice.get("finish_reason")
        if reason in CUT:  # the rest might have changed the verdict: "4" can be the start of "4.5"
            advice = f"; option max_tokens is {self.settings['max_tokens']}, give it more" if reason == "length" else ""
            raise RewardError(f"reward {self.name}: the model's reply is cut off (finish_reason {reason!r}){advice}. It ends: "
                              f"{_end_of(str(reply or ''))!r}")
        if not isinstance(reply, str) or not reply.strip():
            raise RewardError(f"reward {self.name}: the model's reply is empty (finish_reason {reason!r})")
        return reply

    def _post(self, body: dict[str, Any]) -> Any:
        schema = self._schema
        if schema is None:
            return self._http.post("/chat/completions", body)
        wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
        try:
            return self._http.post("/chat/completions", body | {"response_format": wanted})
        except HttpError as error:
            about = re.search(r"response_format|json_schema|structured|guided|grammar", error.text, re.IGNORECASE)
            if error.status != 400 or not about or self.settings["structured"] == "json_schema":
                raise
            with self._lock:
                if self._schema is not None:
                    self.notes += (f"{self._http.base_url} has no structured output ({error.text}); without it, replies "
                                   "are parsed as strictly",)
                    self._schema = None
        return self._http.post("/chat/completions", body)

    def verdict(self, reply: str, read: Callable[[Any], T]) -> T:
        """What `read` makes of the parser's finding; RewardError, with the reply, where either raises ValueError."""
        try:
            return read(extract(reply, self.settings["parser"]))
        except ValueError as error:
            raise RewardError(f"reward {self.name}: no verdict in the model's reply ({error}): {_end_of(reply)!r}") from None

    def data_url(self, image: np.ndarray) -> str:
        """An image, uint8 [H, W, 3], as a PNG data URL, scaled down to `image_size`."""
        from PIL import Image

        longest, size = max(image.shape[:2]), self.settings["image_size"]
        if size and longest > size:
            height, width = (max(1, round(side * size / longest)) for side in image.shape[:2])
            image = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
        return f"data:image/png;base64,{to_base64(to_png(image))}"

    def in_parallel(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of calls, `concurrency` at a time, in order. The first failure, in order, is raised; what has not
        begun then is left."""
        with ThreadPoolExecutor(min(self.settings["concurrency"], max(len(calls), 1))) as threads:
            futures = [threads.submit(call) for call in calls]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()


def _end_of(reply: str) -> str:
    return reply if len(reply) <= SHOWN else f"...{reply[-SHOWN:]}"


def object_schema(field: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of an object with one field."""
    return json.loads(json.dumps({
        "type": "object", "properties": {field: value}, "required": [field], "additionalProperties": False}))
