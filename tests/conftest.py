"""What every test starts from: one thread a process, no network, and a small number of fixtures."""

import os

# Before any test module imports torch: tests share few cores, and ranks are spawned beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

FIRST = ("learn", "ranks", "vllm")
"""Marks of tests that start processes. Their files come first: the last ones to run on each core are then short."""


def pytest_collection_modifyitems(items: list) -> None:
    long = {item.path for item in items if any(map(item.get_closest_marker, FIRST))}
    items.sort(key=lambda item: item.path not in long)
