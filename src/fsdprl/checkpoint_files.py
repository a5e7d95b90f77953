"""Where a model's files are, and whether they can be used at all. Files and JSON only: mistakes answer at once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdprl.errors import UserError

NO_CODE = {"trust_remote_code": False}
"""For every call of transformers that could run a checkpoint's own Python. The only place that says so."""
FROM_HUB = "check the name, the network, and for a gated model that HF_TOKEN is set"
"""What to do where the hub gives nothing."""
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class CheckpointFiles:
    """A Hugging Face checkpoint on this machine."""

    folder: Path
    config: dict[str, Any]
    """config.json as it stands."""


def find_checkpoint(path: str, *, flag: str = "--model") -> CheckpointFiles:
    """A local folder, or a hub name fetched into (or found in) the hub's cache.

    Raises UserError for a path that is not there, lacks config.json, has no safetensors (.bin files are pickles and
    never loaded), or needs code from the checkpoint.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.is_file() or path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise UserError(
                f"{flag} {path}: no such folder; give a Hugging Face checkpoint folder or a hub name"
            )
        folder = _from_hub(path, flag)
    for latest in ("checkpoints/latest", "latest"):  # of a run, or of its checkpoints
        if (folder / latest / "config.json").is_file() and not any(folder.glob("*.safetensors")):
            raise UserError(
                f"{flag} {path}: a folder of checkpoints and none itself; give {path.rstrip('/')}/{latest}"
            )
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(
            f"{flag} {path}: {config_file} is missing, so this is no Hugging Face checkpoint"
        )
    try:
        config = json.loads(config_file.read_text())
    except ValueError as error:
        raise UserError(f"{config_file}: broken JSON: {error}") from None
    if "auto_map" in config:
        raise UserError(
            f"{flag} {path}: config.json asks for code of its own (auto_map), which fsdprl never runs; "
            f"use a model that transformers knows, or save it with transformers' own classes"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(file.name for file in (*folder.glob("*.bin"), *folder.glob("*.pt")))
        found = f"only {pickles[0]}, a pickle that could run code" if pickles else "no weights"
        raise UserError(
            f"{flag} {path}: there is {found}; convert it once with "
            f"AutoModelForCausalLM.from_pretrained(...).save_pretrained(...), which writes safetensors"
        )
    return CheckpointFiles(folder, config)


def _from_hub(name: str, flag: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{flag} {name}: no such folder here, and the hub could not give it ({type(error).__name__}); {FROM_HUB}"
        ) from None
