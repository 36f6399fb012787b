"""What a failed request to a hub means, in a sentence that says what to do.

huggingface_hub has a class for each of HTTP's errors; those of the network come from its HTTP library, which is
another one in each of its major versions, so they are known by their modules.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from runner_svc.hub.names import HubName

_HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "requests", "urllib3"}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_HUB = "https://huggingface.co"
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def hub_address(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the address of the hub that is asked: HF_ENDPOINT, by default huggingface.co."""
    return environment.get("HF_ENDPOINT", _HUB).rstrip("/")


def is_unreachable(error: Exception) -> bool:
    """Returns whether the hub was not reached, is ill, or must not be asked."""
    if type(error).__name__ == "OfflineModeIsEnabled" or isinstance(error, ConnectionError | TimeoutError):
        return True
    status = _status(error)
    if status is not None:
        return status >= 500 or status == 429
    return any(base.__module__.partition(".")[0] in _HTTP_LIBRARIES for base in type(error).__mro__)


def why_unreachable(error: Exception | None) -> str:
    """Returns the reason as the end of a sentence. None: it must not be asked."""
    if error is None or type(error).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    status = _status(error)
    if status == 429:
        return f"{hub_address()} refuses further requests for now"
    if status is not None:
        return f"{hub_address()} answers with HTTP status {status}"
    return f"{hub_address()} can't be reached ({one_line(error)})"


def refusal(name: HubName, error: Exception) -> str | None:
    """Returns what a hub's refusal means; None when the error is none."""
    kinds = {base.__name__ for base in type(error).__mro__}
    status = _status(error)
    address = hub_address()
    if "GatedRepoError" in kinds:
        return f"{name.repo} is gated: accept its terms at {address}/{name.repo}, then {_LOG_IN}."
    if "DisabledRepoError" in kinds:
        return f"{address} has disabled {name.repo}: choose another model."
    if "RevisionNotFoundError" in kinds:
        return f"{name.repo} has no revision {name.revision!r}: give a branch, a tag or a commit of it."
    if status == 401 and "RepositoryNotFoundError" not in kinds:
        return f"{address} refuses the token of this machine: {_LOG_IN} to one that is valid."
    if "RepositoryNotFoundError" in kinds or status in (401, 404):
        return f"{address} has no model {name.repo!r}, or it is private: check the spelling; if private, {_LOG_IN}."
    if status == 403:
        return f"{address} forbids access to {name.repo}: ask its owners for access, then {_LOG_IN} with that account."
    if status is not None and status < 500 and status != 429:
        return f"{address} refuses {name.repo} with HTTP status {status}: {one_line(error)}"
    return None


def storage_problem(error: Exception, cache: Path) -> str | None:
    """Returns what is wrong with the cache folder; None when the error is of another kind."""
    if not isinstance(error, OSError) or error.errno is None or _status(error) is not None:
        return None
    if error.errno in _FULL:
        return f"The disk of {cache} is full: make room, or set HF_HUB_CACHE to a folder on another disk."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
        return (
            f"{cache} can't be written ({error.strerror}): set HF_HUB_CACHE or HF_HOME to a folder that this user may "
            "write."
        )
    return None


def one_line(error: Exception) -> str:
    """Returns an error's message on one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
