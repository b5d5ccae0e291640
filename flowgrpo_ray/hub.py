"""The Hugging Face Hub: its errors, as what a user can do about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowgrpo_ray.errors import ConfigError, DeadlineError, HubError, first_line


@contextmanager
def explained(where: str, repo: str, revision: str | None, lacking: str) -> Iterator[None]:
    """Around a request for something of `repo`.

    Args:
        where: the setting and its value, for the message.
        lacking: what is said of a repository that has no such file.

    Raises:
        ConfigError: in place of the hub's errors: there is no such model, revision or file.
        HubError: the licence is not accepted (with its page), or there is no connection.
        DeadlineError: as it comes; what was downloaded until then is kept.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except (ConfigError, DeadlineError):
        raise
    except GatedRepoError as error:
        raise HubError(f"{where}: the hub gives this model only to those who accepted its licence, at "
                       f"{constants.ENDPOINT}/{repo}; then log in with `hf auth login` or set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"{where}: there is no such folder, and the hub has no model of that name at "
                          f"{constants.ENDPOINT}/{repo} (or it is private and HF_TOKEN is not set)") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{where}: the hub model has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        raise unreachable(where, f"could not be reached ({first_line(error)})") from error
    except EntryNotFoundError as error:
        raise ConfigError(f"{where}: {lacking}") from error
    except HfHubHTTPError as error:  # a server error
        raise unreachable(where, f"answered {first_line(error)}") from error
    except Exception as error:  # whatever its HTTP library raises: no connection, a proxy
        raise unreachable(where, f"could not be reached ({first_line(error)})") from error


def unreachable(where: str, what: str) -> HubError:
    """The error for something that neither this machine nor the hub has given; `what` the hub did."""
    return HubError(f"{where} is unreachable: there is no such folder, the hub's cache does not hold it, and the hub {what}")
