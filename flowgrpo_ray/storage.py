"""Files of a run through pyarrow.fs: a local path, file://, s3:// or gs://, all under the same few functions.

Object stores can neither rename folders nor append, so everything here is a whole file, written at
once. Local files are written to a temporary name, synced and renamed, so that no reader meets half of
one; what the file system cannot do of that is said once and left out. Options of a store ride in the
URI's query (`s3://bucket/run?endpoint_override=host:9000&scheme=http`); credentials belong in the
environment.

Every call to an object store has a deadline (`run.storage_timeout_s`): its library tries a store that
does not answer for minutes, without a word and deaf to signals.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from flowgrpo_ray import waiting
from flowgrpo_ray.errors import ConfigError, nearest

log = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMES = ("file", "s3", "gs", "gcs")
_CHUNK = 8 << 20  # bytes read at a time
_LOSSES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)  # data are lost
_said: set[str] = set()
_BYTES_PER_S = 1e6  # an object store that takes fewer is late


def join(uri: str, *parts: str) -> str:
    """`uri` with path parts appended, in front of the query string that a URI may carry."""
    if "://" not in uri:
        return os.path.join(uri, *parts)
    base, mark, query = uri.partition("?")
    return "/".join([base.rstrip("/"), *(quote(part, safe="/") for part in parts)]) + mark + query


def parent(uri: str, levels: int = 1) -> str:
    """The folder `levels` above `uri`."""
    base, mark, query = uri.partition("?") if "://" in uri else (os.path.abspath(uri), "", "")
    for _ in range(levels):
        base = base.rstrip("/").rpartition("/")[0]
    return base + mark + query


def base_name(uri: str) -> str:
    """Last part of the path."""
    path = unquote(urlsplit(uri).path) if "://" in uri else os.path.abspath(uri)
    return path.rstrip("/").rpartition("/")[2]


def display(uri: str) -> str:
    """The URI for a message: without credentials and without the query."""
    return redact(uri).partition("?")[0] if "://" in uri else uri


def redact(text: str) -> str:
    """`text` with the user:password@ part of every URI in it left out."""
    return re.sub(r"(\w+://)[^/@\s?]+@", r"\1***@", text)


def local_path(uri: str) -> Path | None:
    """The path of a local URI; None for an object store."""
    if "://" not in uri:
        return Path(os.path.abspath(os.path.expanduser(uri)))
    split = urlsplit(uri)
    return Path(unquote(split.path)) if split.scheme == "file" else None


@lru_cache(maxsize=16)
def _remote(root: str) -> tuple[fs.FileSystem, str]:
    try:
        return fs.FileSystem.from_uri(root)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(f"{redact(root)} is not a place that files can be kept in: {error}") from None


def resolve(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI and the path in it.

    Raises:
        ConfigError: the scheme or an option in the query is unknown.
    """
    local = local_path(uri)
    if local is not None:
        return fs.LocalFileSystem(), str(local)
    split = urlsplit(uri)
    if split.scheme not in SCHEMES:
        raise ConfigError(f"{display(uri)}: no store is named {split.scheme!r}{nearest(split.scheme, SCHEMES)}")
    if not split.netloc:
        raise ConfigError(f"{display(uri)} names no bucket, for example {split.scheme}://bucket/runs")
    filesystem, root = _remote(f"{split.scheme}://{split.netloc}" + (f"?{split.query}" if split.query else ""))
    return filesystem, root.rstrip("/") + unquote(split.path).rstrip("/")


def _ask(
    uri: str, call: Callable[[fs.FileSystem, str], T], *, progress: waiting.Progress | None = None,
    size: int = 0,
) -> T:
    """`call(file system, path)`; of an object store with a deadline, which grows with the bytes to be
    written (`size`)."""
    if local_path(uri) is not None:
        return call(*resolve(uri))
    split = urlsplit(uri)
    endpoint = dict(parse_qsl(split.query)).get("endpoint_override")
    what = f"{split.scheme}://{split.netloc}" + (f" at {endpoint}" if endpoint else "")
    return waiting.bounded(
        lambda: call(*resolve(uri)), redact(what), waiting.limits.storage + size / _BYTES_PER_S,
        setting="run.storage_timeout_s", progress=progress)


def size(uri: str) -> int | None:
    """Bytes of a file; None where there is no such file."""
    info = _ask(uri, lambda filesystem, path: filesystem.get_file_info(path))
    return info.size if info.type == fs.FileType.File else None


def modified(uri: str) -> float | None:
    """When a file was last written, in seconds since the epoch; None where there is no such file."""
    info = _ask(uri, lambda filesystem, path: filesystem.get_file_info(path))
    return info.mtime_ns / 1e9 if info.type == fs.FileType.File and info.mtime_ns else None


def check_folder(uri: str) -> None:
    """Raise ConfigError where a local folder cannot be made because it, or a folder above it, is a file."""
    local = local_path(uri)
    for path in [local, *local.parents] if local is not None else []:
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"{uri} cannot be a folder: {path} is a file")
            return


def list_dir(uri: str) -> list[str]:
    """Names in a folder, sorted; empty where there is no such folder."""
    def call(filesystem: fs.FileSystem, path: str) -> list[fs.FileInfo]:
        return filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))

    found = _ask(uri, call)
    return sorted(info.base_name for info in found)


def read_bytes(uri: str) -> bytes:
    """A whole file. Raises FileNotFoundError."""
    chunks: list[bytes] = []
    _read(uri, chunks.append)
    return b"".join(chunks)


def sha256(uri: str) -> str:
    """Hex digest of a file, read in pieces. Raises FileNotFoundError."""
    digest = hashlib.sha256()
    _read(uri, digest.update)
    return digest.hexdigest()


def _read(uri: str, take: Callable[[bytes], object]) -> None:
    progress = waiting.Progress()

    def call(filesystem: fs.FileSystem, path: str) -> None:
        with filesystem.open_input_stream(path) as stream:
            while chunk := stream.read(_CHUNK):
                take(chunk)
                progress.made()

    _ask(uri, call, progress=progress)


def write_bytes(uri: str, data: bytes) -> str:
    """Write a whole file, replacing what was there, and return `uri`. Folders are made as needed."""
    local = local_path(uri)
    if local is None:
        def write(filesystem: fs.FileSystem, path: str) -> None:
            with filesystem.open_output_stream(path) as stream:
                stream.write(data)

        _ask(uri, write, size=len(data))
        return uri
    local.parent.mkdir(parents=True, exist_ok=True)
    _write_local(local, data)
    return uri


def _write_local(path: Path, data: bytes) -> None:
    """Write a file beside its place, synced, and move it there; what the file system does not offer of
    that (network shares, mounted object stores) is left out, and said once."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            _write_synced(file, data, path)
        with _best_effort("give a file the permissions of others", path, logging.INFO):
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files
        try:
            os.replace(temporary, path)
        except OSError as error:
            if error.errno in _LOSSES or path.is_dir():
                raise
            with open(path, "wb") as file:
                _write_synced(file, data, path)
            _say_once("move a file into its place (a crash may leave a part of one, which its digest "
                      "shows)", path, error, logging.WARNING)
    finally:
        with suppress(OSError):  # it was moved
            temporary.unlink()
    with _best_effort("sync a folder", path, logging.INFO):
        # The move itself survives a power cut only with its folder synced.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write_synced(file: BinaryIO, data: bytes, path: Path) -> None:
    file.write(data)
    file.flush()
    with _best_effort("sync a file", path, logging.WARNING):
        os.fsync(file.fileno())


@contextmanager
def _best_effort(what: str, path: Path, level: int) -> Iterator[None]:
    """A step without which the file is still right: its failure is said, unless data were lost."""
    try:
        yield
    except OSError as error:
        if error.errno in _LOSSES:
            raise
        _say_once(what, path, error, level)


def _say_once(what: str, path: Path, error: OSError, level: int) -> None:
    if what not in _said:
        _said.add(what)
        log.log(level, "the file system of %s cannot %s: %s; the run continues without", path.parent, what,
                error.strerror or error)


@lru_cache(maxsize=1)
def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def delete_file(uri: str) -> None:
    """Remove a file if it is there."""
    if size(uri) is not None:
        _ask(uri, lambda filesystem, path: filesystem.delete_file(path))


def delete_dir(uri: str) -> None:
    """Remove a folder and everything in it. Raises FileNotFoundError."""
    _ask(uri, lambda filesystem, path: filesystem.delete_dir(path))


class PartFiles:
    """Rows in step order as immutable files `part-<first step>-<last step><suffix>` of one folder."""

    def __init__(self, folder: str, suffix: str):
        self.folder, self.suffix = folder, suffix
        self._pattern = re.compile(r"part-(\d+)-(\d+)" + re.escape(suffix))

    def list(self) -> list[tuple[int, int, str]]:
        """(first step, last step, URI) of every part, in step order."""
        matches = [self._pattern.fullmatch(name) for name in list_dir(self.folder)]
        return sorted((int(m[1]), int(m[2]), join(self.folder, m[0])) for m in matches if m)

    def last_step(self) -> int:
        """Last step on file; -1 where there is none."""
        return max((last for _, last, _ in self.list()), default=-1)

    def write(self, first: int, last: int, data: bytes) -> str:
        """Write one part and return its URI."""
        return write_bytes(join(self.folder, f"part-{first:08d}-{last:08d}{self.suffix}"), data)

    def truncate(self, after_step: int, cut: Callable[[bytes, str], tuple[int, bytes]]) -> None:
        """Take away what lies beyond `after_step`.

        `cut(data, uri)` gives (last step kept, bytes kept) of a part that lies across it. The shorter part is written
        before the longer one goes, so that a crash in between loses nothing and the next call ends the work.
        """
        for first, last, uri in self.list():
            if last <= after_step:
                continue
            if first <= after_step:
                kept_last, data = cut(read_bytes(uri), uri)
                self.write(first, kept_last, data)
            delete_file(uri)
