"""What a command names that is not there, broken or negative, said before torch is imported: a second, not ten."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdprl.checkpoint_files import find_checkpoint
from fsdprl.data.json_rows import check_head
from fsdprl.data.places import JSON_LINES, absent, subset_of
from fsdprl.errors import UserError

CHECKPOINTS = ("model", "teacher", "critic", "reference_model", "reward_model")
DATASETS = ("data", "eval_data")
"""Fields of a recipe's config that name one or several of these, as those of all recipes here do."""
NOT_NEGATIVE = ("lr", "critic_lr", "temperature", "weight_decay")
"""Fields that train away from the loss, or draw what is unlikely, if their sign is wrong."""


def check_inputs(config: Mapping[str, Any]) -> None:
    """UserError for the first checkpoint or dataset that is not there or can never be used, broken lines at the
    beginning of a dataset among them, and for numbers with a wrong sign. What may be a name of the hub is left to the
    one who loads it."""
    for name in NOT_NEGATIVE:
        if isinstance(value := config.get(name), int | float) and value < 0:
            raise UserError(f"{_flag(name)} {value:g}: must not be negative")
    for name in CHECKPOINTS:
        for path in _paths(config.get(name)):
            no_hub_name = path.startswith((".", "/", "~")) or path.count("/") > 1
            if no_hub_name or Path(path).expanduser().exists():
                find_checkpoint(path, flag=_flag(name))
    for name in DATASETS:
        for path in _paths(config.get(name)):
            if said := absent(path, _flag(name)):
                raise UserError(said)
            file, rows = subset_of(path)
            if (place := Path(file).expanduser()).is_file() and place.suffix.lower() in JSON_LINES:
                check_head(place, rows)


def _paths(value: Any) -> Iterable[str]:
    many = value if isinstance(value, (tuple, list)) else (value,)
    return [path for path in many if isinstance(path, str) and path]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
