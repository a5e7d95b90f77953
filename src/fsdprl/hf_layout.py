"""A model's parameters as the tensors of a Hugging Face checkpoint.

transformers 5 keeps a mixture's experts fused (`experts.gate_up_proj` [E, 2I, H]) where checkpoints
and engines have one tensor per expert and projection. Each of those is a contiguous flat range of the
fused parameter, so an `Item` (name, shape, parameter, start) says everything. The names come from
transformers' own conversion table.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from fsdprl.shards import LocalShard, model_shards, numel_of, tied_names

# How a converter lays tensors into one parameter, as transformers names its operations: all experts
# stacked, and projections side by side within an expert.
STACKED = [("MergeModulelist", 0)]
STACKED_SIDE_BY_SIDE = [("MergeModulelist", 0), ("Concatenate", 1)]


@dataclass(frozen=True)
class Item:
    """A checkpoint tensor: elements [start, start + numel) of the flattened parameter `param`."""

    name: str
    shape: tuple[int, ...]
    param: str
    start: int

    @property
    def numel(self) -> int:
        return numel_of(self.shape)


class HfLayout:
    """The checkpoint tensors of each parameter of a transformers model."""

    def __init__(self, hf: nn.Module, shards: dict[str, LocalShard]) -> None:
        self.hf = hf
        self.shards = shards
        self.tied = tied_names(hf)
        self.base = f"{getattr(hf, 'base_model_prefix', '')}."
        transforms = get_model_conversion_mapping(hf, add_legacy=False)  # type: ignore[arg-type]
        # submodels' rules come last when loading, so first when going back
        backward = list(reversed(transforms))
        self.converters = [
            (t.target_patterns, t.reverse_transform())
            for t in backward
            if isinstance(t, WeightConverter) and _operations(t) in (STACKED, STACKED_SIDE_BY_SIDE)
        ]
        # a PrefixChange cannot be undone without knowing whether it was done
        self.renamings = [
            t.reverse_transform()
            for t in backward
            if isinstance(t, WeightRenaming) and not isinstance(t, PrefixChange)
        ]

    def canonical(self, param: str) -> list[Item]:
        """The tensors that published checkpoints (and engines) of this architecture have."""
        shape = self.shards[param].shape
        for fused, backward in self.converters:
            if len(shape) >= 2 and any(param.endswith(pattern) for pattern in fused):
                return self._expert_items(backward, param, shape)
        return [Item(self._renamed(param), shape, param, 0)]

    def items(self) -> list[Item]:
        """The canonical tensors of all parameters, in the model's order."""
        return [item for param in self.shards for item in self.canonical(param)]

    def candidates(self, param: str) -> list[list[Item]]:
        """What a checkpoint may hold instead of this parameter, the likeliest first.

        Its own name (a tied parameter has several, one list each), the published tensors, and both
        as a checkpoint of the bare base model names them.
        """
        shape = self.shards[param].shape
        names = self.tied.get(param, [param])
        exact = [[Item(name, shape, param, 0)] for name in names]
        found = [*exact, self.canonical(param)]
        bare = [[self._without_base(item) for item in items] for items in found]
        return found + [items for items in bare if items not in found]

    def present(self, param: str, names: Collection[str]) -> list[list[Item]]:
        """The candidates all of whose tensors are in `names`; more than one only for tied weights."""
        complete = []
        for items in self.candidates(param):
            if all(item.name in names for item in items) and items not in complete:
                complete.append(items)
        return complete

    def is_head(self, param: str) -> bool:
        """Whether the parameter lies outside of the base model: a score or value head."""
        return not param.startswith(self.base)

    def _without_base(self, item: Item) -> Item:
        return Item(item.name.removeprefix(self.base), item.shape, item.param, item.start)

    def _renamed(self, name: str) -> str:
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def _expert_items(
        self, backward: WeightTransform, param: str, shape: tuple[int, ...]
    ) -> list[Item]:
        templates = backward.target_patterns
        first, _ = backward.rename_source_key(param)
        names = [self._renamed(first.replace(templates[0], template)) for template in templates]
        inner = (shape[1] // len(names), *shape[2:])
        size = numel_of(inner)
        return [
            Item(name.replace("*", str(expert)), inner, param, (expert * len(names) + i) * size)
            for expert in range(shape[0])
            for i, name in enumerate(names)
        ]


def _operations(converter: WeightConverter) -> list[tuple[str, int | None]]:
    return [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]


def class_name(hf: nn.Module) -> str:
    """The model's transformers class; fully_shard puts a subclass of its own in front of it."""
    return next(kind.__name__ for kind in type(hf).__mro__ if not issubclass(kind, FSDPModule))


def layout_of(model: Any) -> HfLayout:
    """The layout of `model.hf`, or of a transformers model by itself, with this rank's shards.

    A layout gives itself: who walks over a model's shards several times makes it once.
    """
    if isinstance(model, HfLayout):
        return model
    return HfLayout(getattr(model, "hf", model), model_shards(model))


def hf_items(model: Any) -> list[Item]:
    """Every tensor of `model.hf` as engines and published checkpoints name it, in the model's order.

    A tied weight appears once, under the embedding's name.
    """
    return layout_of(model).items()
