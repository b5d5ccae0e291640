"""The job server of a Ray cluster, the part of its dashboard at port 8265: address, token, versions, jobs.

Every failure is explained: who cannot be reached, which token is asked for and where it is.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowgrpo_ray import waiting
from flowgrpo_ray.errors import ConfigError, ResourceError, first_line
from flowgrpo_ray.ray_token import token_in_file

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

T = TypeVar("T")

REQUEST_S = 30.0  # deadline of a request that moves no package
_FORWARD = "kubectl port-forward svc/CLUSTER-head-svc 8265:8265"
_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # what Ray's client takes before what it is given


class Unreachable(ResourceError):
    """The job server does not answer; it may do so later."""


class TokenError(ResourceError):
    """The job server wants a token, or another one."""


@dataclass(frozen=True)
class JobServer:
    """Where jobs are submitted, and what is sent along.

    Attributes:
        url: such as http://HOST:8265, without a slash at its end.
        token: what requests carry; never shown.
        token_file: the file that it was read from, if `--token-file` named one.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def client(self) -> JobSubmissionClient:
        """Ray's client of this server, for `ask`; what the environment says of addresses does not count."""
        for name in _ADDRESSES:
            os.environ.pop(name, None)
        from ray.job_submission import JobSubmissionClient

        for module in ("dashboard_sdk", "job.sdk"):  # they set a level of their own: INFO
            logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        return JobSubmissionClient(self.url, headers=self.headers)

    def ask(self, call: Callable[[JobSubmissionClient], T], what: str,
            timeout_s: float = REQUEST_S) -> T:
        """`call(client)`, with a deadline.

        Raises:
            Unreachable: nothing answers at the address.
            TokenError: a token is missing, or is not the cluster's.
            DeadlineError: no answer in time.
            ResourceError: the server's own error.
        """
        import requests
        from ray.exceptions import AuthenticationError

        try:
            return waiting.bounded(lambda: call(self.client()), f"{what} at {self.url}", timeout_s,
                                   setting="--address")
        except AuthenticationError as error:
            raise self.token_error(403 if "Authentication failed" in str(error) else 401) from None
        except (ConnectionError, requests.RequestException) as error:
            raise self.unreachable(first_line(error)) from None
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise ResourceError(f"{what} at {self.url}: {_last_line(error)}") from None

    def unreachable(self, why: str) -> Unreachable:
        return Unreachable(
            f"no job server answers at {self.url} (--address): {why}. Is the cluster up, is this "
            "its dashboard's port (8265 unless set otherwise), and is a port-forward "
            f"(`{_FORWARD}`) still running?")

    def token_error(self, status: int) -> TokenError:
        """The error for an answer 401 or 403."""
        what = ("wants an authentication token, and none was sent" if status == 401 else
                "does not take the authentication token that was sent" if self.token else
                "does not let this command in, and no authentication token was sent")
        return TokenError(
            f"the cluster at {self.url} {what} (HTTP {status}). KubeRay keeps it in the Secret "
            "with the RayCluster's name: `kubectl get secret CLUSTER -o "
            "jsonpath='{.data.auth_token}' | base64 -d > token`; on a node of the cluster `ray "
            "get-auth-token` prints it. Give it by --token-file token, by RAY_AUTH_TOKEN or in "
            "~/.ray/auth_token")

    def command(self, action: str, job_id: str) -> str:
        """A `ray job` command on a job of this server, to be typed into a shell."""
        name = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={shlex.quote(self.token_file)} " if (
            self.token_file) else ""
        return f"{name}ray job {action} --address {shlex.quote(self.url)} {job_id}"


def find(address: str | None, token_file: str | None = None) -> JobServer:
    """The server at `address`, or the one that the environment names; nothing is sent yet.

    Raises:
        ConfigError: no address, or none of http(s); a token file that cannot be read.
    """
    given = address or next(filter(None, map(os.environ.get, _ADDRESSES)), None)
    if given is None:
        raise ConfigError("give --address http://HOST:8265, the address of the cluster's dashboard")
    if "://" not in given or not given.startswith(("http://", "https://")):
        host = given.partition("://")[2] or given
        host = host.partition("/")[0].rpartition(":")[0] or host
        raise ConfigError(
            f"--address is {given!r}; jobs are submitted over HTTP to the cluster's dashboard: "
            f"give --address http://{host}:8265")
    return JobServer(given.rstrip("/"), _token(token_file),
                     str(Path(token_file).absolute()) if token_file else None)


def _token(token_file: str | None) -> str | None:
    """The token of `--token-file`, else the one that Ray itself would send."""
    if token_file is not None:
        try:
            token = Path(token_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {token_file} cannot be read: "
                              f"{getattr(error, 'strerror', None) or 'it is not text'}") from None
        if not token or len(token.split()) != 1:
            raise ConfigError(f"--token-file {token_file} must hold the token and nothing else")
        return token
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    return token_in_file(os.environ.get("RAY_AUTH_TOKEN_PATH"))


def check_versions(server: JobServer) -> None:
    """Raise ConfigError if the cluster runs another Ray, or another Python (first two parts), than
    this command: what was checked here is to run there.

    The server names its Ray to everybody; its Python only from Ray 2.52 on.
    """
    ours = _versions_here()
    theirs = {"ray": _get(server, "/api/version").get("ray_version")}
    metadata = _get(server, "/api/v0/cluster_metadata", optional=True)
    theirs["python"] = (metadata.get("data") or {}).get("pythonVersion")
    python = [(text or "").split(".")[:2] for text in (ours["python"], theirs["python"])]
    if theirs["ray"] == ours["ray"] and (theirs["python"] is None or python[0] == python[1]):
        return
    there = f"Ray {theirs['ray']}" + (f" on Python {theirs['python']}" if theirs["python"] else "")
    here = f"Ray {ours['ray']} on Python {ours['python']}"
    raise ConfigError(
        f"the cluster at {server.url} runs {there}, and this command {here}. Submit from an "
        f"environment with the cluster's versions (pip install 'ray[default]=={theirs['ray']}'"
        + (f", in Python {'.'.join(python[1])}" if theirs["python"] and python[0] != python[1]
           else "")
        + "), or give the cluster an image with these (rayVersion and image of its manifest)")


def _versions_here() -> dict[str, str]:
    import ray

    return {"ray": ray.__version__, "python": platform.python_version()}


def _get(server: JobServer, path: str, optional: bool = False) -> dict[str, Any]:
    """The JSON object at a path of the server; with `optional`, {} if it has none."""
    import requests

    def get() -> requests.Response:
        return requests.get(server.url + path, headers=server.headers, timeout=REQUEST_S)

    try:
        answer = waiting.bounded(get, f"the job server at {server.url}", REQUEST_S,
                                 setting="--address")
    except requests.RequestException as error:
        raise server.unreachable(_reason(error)) from None
    if answer.status_code in (401, 403):
        raise server.token_error(answer.status_code)
    try:
        answer.raise_for_status()
        found = answer.json()
        if isinstance(found, dict):
            return found
        raise ValueError
    except (requests.RequestException, ValueError):
        if optional:
            return {}
        raise server.unreachable(
            f"its answer to {path} (HTTP {answer.status_code}) is not a Ray dashboard's") from None


def running(server: JobServer, run_dir: str) -> JobDetails | None:
    """The living job that writes into a run directory, if any, as the metadata say that it was submitted with."""
    jobs = server.ask(lambda client: client.list_jobs(), "the list of jobs")
    return next((job for job in jobs if job.submission_id is not None and not job.status.is_terminal()
                 and (job.metadata or {}).get("run_dir") == run_dir), None)


def _reason(error: Exception) -> str:
    """What the operating system said, without the classes and object addresses around it."""
    text = first_line(error)
    for mark in ("Connection refused", "Name or service not known", "timed out",
                 "Temporary failure in name resolution", "No route to host", "certificate"):
        if mark.lower() in text.lower():
            return mark.lower()
    return text


def _last_line(error: Exception) -> str:
    """The last line of an error: the server sends its tracebacks whole."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
