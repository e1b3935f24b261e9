"""A folder to a repository of the Hugging Face hub, through its own client. Knows nothing of runs."""

import json
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.words import first_line, plural, say, size

MARK = "potluck.json"
"""File beside the model: says that a repository is a run's, and may be written over by the next push."""


def client() -> Any:
    """The library, or how to get it; with a token, or how to get that."""
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError("potluck push needs the hub's client: pip install './potluck[hub]'.") from None
    if huggingface_hub.get_token() is None:
        raise ConfigError("There is no token for the hub here. Log in with: hf auth login; or set HF_TOKEN.")
    library: Any = huggingface_hub
    library.utils.disable_progress_bars()
    return library


def mark(folder: Path, **about: str) -> None:
    (folder / MARK).write_text(json.dumps({"made_by": "potluck", **about}, indent=2) + "\n", encoding="utf-8")


def upload(folder: Path, repo: str, *, public: bool, force: bool) -> str:
    """Returns where it is. What an earlier push left there and this one does not have is removed."""
    library = client()
    api = library.HfApi()
    try:
        is_ours = False
        if api.repo_exists(repo):
            is_ours = _is_ours(api, repo, force=force)
            is_private = bool(api.model_info(repo).private)
            if is_private == public:
                say(f"{repo} stays {'private' if is_private else 'public'}: that is changed on its page of the hub.")
        else:
            api.create_repo(repo, private=not public)
        # One commit, so that nobody loads half of it.
        gone = ["*.safetensors", "*.json"] if is_ours else None
        api.upload_folder(repo_id=repo, folder_path=folder, delete_patterns=gone, commit_message="Pushed by potluck")
    except library.errors.HFValidationError as error:
        raise ConfigError(f"{repo!r} is no name for a repository: {first_line(error)}. Such as: you/name.") from None
    except (library.errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"The hub did not take {repo}: {_why(error)}.") from None
    files = [path for path in folder.rglob("*") if path.is_file()]
    total = size(sum(path.stat().st_size for path in files))
    url = f"{api.endpoint}/{repo}"
    print(f"Pushed {plural(len(files), 'file')} ({total}) to {url}", flush=True)
    return url


def _is_ours(api: Any, repo: str, *, force: bool) -> bool:
    """Tell whether an earlier push has left it; refuse a repository that is somebody else's work."""
    files = set(api.list_repo_files(repo)) - {".gitattributes"}
    if files and MARK not in files and not force:
        shown = ", ".join(sorted(files)[:3]) + (", ..." if len(files) > 3 else "")
        raise ConfigError(
            f"{repo} holds something else than a push of potluck ({shown}). Name another repository; or, to write into"
            " this one, add --force."
        )
    return MARK in files


def _why(error: BaseException) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "the token is not valid; log in again with: hf auth login"
    if status == 403:
        return "this token may not write there; it needs write access, or another name in front of the slash"
    return first_line(error)
