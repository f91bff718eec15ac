"""Repositories on the Hugging Face Hub, through ``huggingface_hub``: an optional package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from advnorm._core.errors import ConfigError, first_line


def upload(folder: Path, repo: str, files: Sequence[str], *, private: bool, message: str) -> str:
    """Upload these files to ``USER/NAME``, which is created if missing, and return its address."""
    hint = "log in with `hf auth login`, and check the name of the repository"
    with _hub("upload_failed", f"cannot push to {repo}", "repo", hint) as hub:
        api = hub.HfApi(library_name="advnorm")
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=repo, allow_patterns=list(files), commit_message=message)
        return f"{api.endpoint}/{repo}"


def download(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    """Fetch these files of a repository, or find them in the cache; return their folder."""
    hint = "name a folder, or USER/NAME on the Hugging Face Hub; private repositories need `hf auth login`"
    message = f"{repo} is neither a folder nor a repository that can be fetched"
    with _hub("download_failed", message, "source", hint) as hub:
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=list(files)))


@contextmanager
def _hub(code: str, message: str, field: str, hint: str) -> Iterator[Any]:
    """Scope: yield ``huggingface_hub``, and raise its errors as :class:`ConfigError`."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        text, install = "huggingface_hub is not installed", "pip install 'advnorm[hub]'"
        raise ConfigError("missing_package", text, field="hub", hint=install) from None
    try:
        yield huggingface_hub
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(code, f"{message}: {first_line(error)}", field=field, hint=hint) from error
