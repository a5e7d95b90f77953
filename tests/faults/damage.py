"""What happens to the newest checkpoint of a run folder between two commands."""

import os
import shutil
from pathlib import Path


def newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def truncate(out: Path) -> None:
    path = newest(out) / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def flip(out: Path) -> None:
    path = newest(out) / "trainer" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def remove(out: Path) -> None:
    (newest(out) / "trainer" / "optimizer.safetensors").unlink()


def swap(out: Path) -> None:
    """Two files that both are JSON, under each other's name."""
    one, other = newest(out) / "config.json", newest(out) / "generation_config.json"
    shutil.move(one, newest(out) / "aside")
    shutil.move(other, one)
    shutil.move(newest(out) / "aside", other)


class Hostile:
    """Unpickled, it writes a file: EXECUTED in the working folder of who did it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def executed(out: Path) -> Path:
    return out / "EXECUTED"


def plant_pickles(out: Path) -> None:
    """Where others look for them: beside the weights, and as DCP's and Accelerate's files."""
    import pickle

    evil = pickle.dumps(Hostile(executed(out)))
    for name in ("pytorch_model.bin", "trainer/optimizer.pt", "trainer/.metadata"):
        (newest(out) / name).write_bytes(evil)
