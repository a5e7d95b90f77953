"""A checkpoint that differs by one bit from what was written is named, and the one before it is used."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdprl.manifest import seal, verify
from fsdprl.run_checkpoints import Checkpoints
from tests.faults import trial

Spoil = Callable[[Path, Path, random.Random], bool]
"""Damages the first file, maybe with the help of the second; whether it now differs."""


def truncate(path: Path, other: Path, draw: random.Random) -> bool:
    size = path.stat().st_size
    os.truncate(path, draw.randrange(size) if size else 0)
    return size > 0


def flip(path: Path, other: Path, draw: random.Random) -> bool:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return True


def delete(path: Path, other: Path, draw: random.Random) -> bool:
    path.unlink()
    return True


def swap(path: Path, other: Path, draw: random.Random) -> bool:
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)
    return mine != its


def append(path: Path, other: Path, draw: random.Random) -> bool:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 64)))
    return True


DAMAGE: tuple[Spoil, ...] = (truncate, flip, delete, swap, append)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def corrupt(whole: Path, copy: Path, count: int, seed: int) -> None:
    """Damage a copy `count` times, a random file in a random way, see it found, and mend it."""
    draw = random.Random(seed)
    shutil.copytree(whole, copy)
    for number in range(count):
        path, other = draw.sample(files_of(copy), 2)
        how = draw.choice(DAMAGE)
        names = [str(file.relative_to(copy)) for file in (path, other)]
        differs = how(path, other, draw)
        fault = verify(copy)
        assert bool(fault) == differs, (number, how.__name__, names)
        assert not differs or any(name in fault for name in names), (fault, names)
        for name in names:
            shutil.copyfile(whole / name, copy / name)
    assert verify(copy) == ""


def written(folder: Path, step: int) -> Path:
    """A checkpoint of a dozen small files, with some content that JSON and safetensors have."""
    checkpoints, draw = Checkpoints(folder), random.Random(step)
    part = checkpoints.begin(step)
    (part / "trainer").mkdir()
    for name in ("config.json", "generation_config.json", "run.json", "tokenizer.json"):
        (part / name).write_text(f'{{"name": "{name}", "n": {draw.random()}}}\n')
    for name in (
        "model.safetensors",
        "trainer/optimizer.safetensors",
        "trainer/masters.safetensors",
    ):
        (part / name).write_bytes(draw.randbytes(draw.randrange(100, 2000)))
    seal(part, step)
    return checkpoints.commit(part, step)


def test_a_thousand_corruptions_are_all_found(tmp_path: Path):
    whole = written(tmp_path / "checkpoints", 1)
    assert verify(whole) == ""
    corrupt(whole, tmp_path / "copy", 1000, seed=0)


@pytest.mark.parametrize("how", DAMAGE)
def test_the_checkpoint_before_it_is_used(how: Spoil, tmp_path: Path):
    folder = tmp_path / "checkpoints"
    first, second = written(folder, 1), written(folder, 2)
    path, other, *_ = files_of(second)
    assert how(path, other, random.Random(0))
    warned: list[str] = []
    assert Checkpoints(folder).newest_whole(warned.append) == (1, first)
    assert len(warned) == 1 and f"{second} is damaged: " in warned[0]


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "trainer/optimizer.pt", "trainer/.metadata", "modeling.py"]
)
def test_files_that_can_hold_code_are_not_of_a_checkpoint(name: str, tmp_path: Path):
    whole = written(tmp_path / "checkpoints", 1)
    (whole / "notes.txt").write_text("a person's")
    assert verify(whole) == ""
    (whole / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert verify(whole) == f"{name} is not of this checkpoint, and of a kind that can hold code"


@pytest.mark.faults
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_ten_thousand_corruptions_of_a_real_checkpoint(tmp_path: Path):
    whole = trial.undisturbed(1) / "checkpoints" / f"step-{trial.STEPS:06d}"
    corrupt(whole, tmp_path / "copy", 10_000, seed=1)
