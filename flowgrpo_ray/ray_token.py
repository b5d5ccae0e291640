"""Ray's own file of the authentication token."""

from __future__ import annotations

from pathlib import Path


def token_in_file(path: str | Path | None = None) -> str | None:
    """The token in a file, by default Ray's own (`~/.ray/auth_token`); None if it cannot be read or is empty."""
    try:
        return Path(path or Path.home() / ".ray" / "auth_token").read_text().strip() or None
    except (OSError, RuntimeError, UnicodeDecodeError):  # no such file, no home
        return None
