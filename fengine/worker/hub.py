"""From the name of a model to a directory on disk: a model in the package, a directory, or a hub repository."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fengine.config.schema import BOX as BOX
from fengine.config.schema import PACKAGED
from fengine.errors import ConfigError, ModelLoadError, UnsupportedFormatError
from fengine.worker.safetensors_file import NEVER_OPENED

HUB_ID = re.compile(r"[\w][\w.-]*/[\w.-]+", re.ASCII)
TEXT_FILES = ["*.json", "*.jinja", "merges.txt"]
# Of folders only those of sentence-transformers' modules ("1_Pooling/config.json"), and weights of "2_Dense" alone.
IGNORED = ["[!0-9]*/*", "*[!e]/*.safetensors", "consolidated*"]


def resolve_model(
    path: str, revision: str | None = None, *, weights: bool = True, cache_dir: str | None = None
) -> Path:
    """The directory of `path`: "box", "box-vl", a directory, or a hub id such as "org/name", which is downloaded once.

    Only safetensors, JSON and tokenizer text files are fetched, into huggingface_hub's cache (or the one at
    `cache_dir`), which also shows progress, resumes, and honours HF_HUB_OFFLINE, HF_HOME and HF_TOKEN. `weights=False`
    leaves the weights out.
    Errors: ModelLoadError, UnsupportedFormatError, ConfigError (a revision of something that has none)."""
    try:
        directory = PACKAGED.get(path) or Path(path).expanduser()
        directory.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of nobody
        raise ModelLoadError(f"model directory {path!r:.200} cannot be read: {str(error):.200}") from error
    if path and directory.is_dir():
        if revision is not None:
            raise ConfigError(f"revision {revision!r} applies to hub ids, but {path!r} is a directory; leave it out.")
        return directory
    if path and (directory.exists() or directory.is_symlink()):
        if directory.suffix in NEVER_OPENED:
            raise UnsupportedFormatError(f"{path}: {directory.suffix} files are never opened; use safetensors.")
        raise ModelLoadError(f"{path} is not a directory; pass the directory that holds config.json and the weights.")
    if not HUB_ID.fullmatch(path):
        there = re.match(r"https?://huggingface\.co/([^/]+/[^/?#]+)", path)
        hint = f"its hub id is {there[1]!r}" if there else "a hub id looks like 'org/name'"
        where = "is a URL" if "://" in path else f"does not exist ({directory.absolute()})"
        raise ModelLoadError(f"model directory {path!r:.200} {where}; {hint}.")
    return _download(path, revision, TEXT_FILES + ["*.safetensors"] * weights, cache_dir)


def resolve_local(repo: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """The directory of a hub id that was downloaded before; None if it was not. Asks nobody."""
    if not HUB_ID.fullmatch(repo):
        return None
    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=TEXT_FILES, cache_dir=cache_dir, local_files_only=True
        )
        return Path(found)
    except Exception:  # whatever the hub client makes of a cache without it
        return None


def _download(repo: str, revision: str | None, patterns: list[str], cache_dir: str | None) -> Path:
    name = f"model {repo!r}" + (f" at revision {revision!r}" if revision else "")
    here = "There is no directory of that name either."
    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED, cache_dir=cache_dir
        )
    except GatedRepoError:
        problem = "is gated: accept its terms on the hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = f"was not found on the hub (private ones need HF_TOKEN). {here}"
    except RevisionNotFoundError:
        problem = "was not found: there is no such revision"
    except LocalEntryNotFoundError as error:
        problem = (
            "is not (completely) in the local cache and the hub cannot be reached. Unset HF_HUB_OFFLINE, check the "
            f"connection, or pass a directory. {here} ({_first_line(error)})"
        )
    except Exception as error:  # the hub client's own errors, its HTTP library's, the disk's
        problem = f"could not be downloaded: {type(error).__name__}: {_first_line(error)}"
    else:
        return Path(found)
    raise ModelLoadError(f"{name} {problem}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
