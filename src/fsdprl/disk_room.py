"""Whether the disk of a run folder has room for its checkpoints, as far as file sizes tell. No torch: it costs nothing.

While a checkpoint is written the one before it is still there, so a run that saves more than once needs room for two.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdprl.errors import UserError
from fsdprl.options import RunOptions
from fsdprl.records import read_json
from fsdprl.run_checkpoints import Checkpoints


def check_room(options: RunOptions, config: Mapping[str, Any]) -> None:
    """UserError if the disk of --run.out is too small for two checkpoints: for one with --run.save-every 0, and for
    those beside what is there already.

    config: the recipe's. Its `model` is saved, and a `critic` where there is one.
    """
    path, need = Path(options.out), checkpoint_bytes(config)
    most = 2 if options.save_every else 1
    there = len(Checkpoints(path / "checkpoints").all())
    count = most - min(there, most - 1)
    disk = next((p for p in (path, *path.absolute().parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(disk).free
    if count * need <= free:
        return
    of_all = "two checkpoints may take" if count == 2 else "a checkpoint may take"
    remedy = "; with --run.save-every 0 there is but one, at the end" if count == 2 else ""
    raise UserError(
        f"--run.out {path}: {of_all} {count * need / 1e9:.3g} GB and the disk has {free / 1e9:.3g} GB free{remedy}"
    )


def checkpoint_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint: the weights, float32 masters where the weights are not float32, and two Adam moments.
    That is 3 times float32 weights and 7 times 16-bit ones. A model that is not on this machine counts as nothing."""
    names = [config.get("model")]
    critic = config.get("critic")
    if isinstance(critic, str):
        names.append(critic or names[0])
    return sum(_saved_bytes(name) for name in names if isinstance(name, str))


def _saved_bytes(name: str) -> int:
    folder = _folder_of(name)
    if folder is None:
        return 0
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    weights = sum(path.stat().st_size for path in files)
    known = read_json(folder / "config.json")
    config = known if isinstance(known, dict) else {}
    wide = "float32" in (config.get("dtype"), config.get("torch_dtype"))
    return weights * (3 if wide else 7)


def _folder_of(name: str) -> Path | None:
    """A local folder, or what the hub's cache has under this name; huggingface_hub takes a second to import."""
    folder = Path(name).expanduser()
    if folder.is_dir() or name.count("/") != 1:
        return folder
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    cached = cache / f"models--{name.replace('/', '--')}"
    try:
        return cached / "snapshots" / (cached / "refs" / "main").read_text().strip()
    except OSError:
        return None
