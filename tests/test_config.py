"""The command line: values, TOML beneath it, and what every kind of mistake is answered with."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from fsdprl.config import Flags, parse, resolve, to_dict
from fsdprl.config_file import line_of
from fsdprl.errors import UserError
from fsdprl.options import EngineOptions, RunOptions, ShardingOptions


@dataclass(frozen=True)
class Range:
    """A group that checks itself."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} exceeds high {self.high}")


@dataclass(frozen=True)
class Config:
    model: str
    """Checkpoint."""
    steps: int = 0
    """Training steps."""
    lr: float = 1e-6
    """Learning rate."""
    shuffle: bool = True
    """Whether to shuffle."""
    system: str | None = None
    """System prompt."""
    max_new_tokens: int = 16
    """Tokens of an answer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation."""
    weights: tuple[float, ...] = ()
    """One a reward."""
    extra: dict[str, int] = field(default_factory=dict)
    """Anything."""
    clip: Range = field(default_factory=Range)
    run: RunOptions = field(default_factory=RunOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    sharding: ShardingOptions = field(
        default_factory=lambda: ShardingOptions(tokens_per_microbatch=4096)
    )


def given(*words: str) -> Config:
    return resolve(Config, ["--model", "m", *words])[0]


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        given(*words)
    return str(caught.value)


def toml(folder: Path, text: str) -> str:
    path = folder / "a.toml"
    path.write_text(text)
    return str(path)


def test_values_of_all_kinds():
    words = (
        "--model m --steps 3 --lr -1e-3 --no-shuffle --weights 1 0.5 --run.save_every=7 "
        "--run.track wandb tensorboard --sharding.compile --extra a 1 b 2 --debug"
    )
    cfg, flags = resolve(Config, words.split())
    assert (cfg.model, cfg.steps, cfg.lr, cfg.shuffle) == ("m", 3, -1e-3, False)
    assert cfg.weights == (1.0, 0.5)
    assert cfg.run.save_every == 7
    assert cfg.run.track == ("wandb", "tensorboard")
    assert cfg.sharding == ShardingOptions(tokens_per_microbatch=4096, compile=True)
    assert cfg.extra == {"a": 1, "b": 2}
    assert flags == Flags(debug=True)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--shuffle"], True),
        (["--no-shuffle"], False),
        (["--shuffle", "False"], False),
        (["--shuffle=no"], False),
        (["--shuffle", "1"], True),
        (["--no-shuffle", "false"], True),
    ],
)
def test_spellings_of_a_boolean(words: list[str], value: bool):
    assert given(*words).shuffle is value


@pytest.mark.parametrize(
    "word", ["--sharding.no-compile", "--no-sharding.compile", "--sharding.compile=off"]
)
def test_spellings_of_a_nested_boolean(word: str):
    assert given("--sharding.compile").sharding.compile is True
    assert given("--sharding.compile", word).sharding.compile is False


def test_hyphens_and_underscores_and_the_last_one_wins():
    assert given("--max_new_tokens", "3", "--max-new-tokens", "4").max_new_tokens == 4
    assert given("--run.track", "wandb", "--run.track", "trackio").run.track == ("trackio",)


def test_values_that_look_like_flags():
    assert given("--system=--be-brief").system == "--be-brief"
    assert given("--system", "-x").system == "-x"
    assert given("--system", "None").system is None
    assert given("--run.profile", "").run.profile == ""


def test_toml_lies_under_the_command_line(tmp_path: Path):
    file = toml(
        tmp_path,
        'steps = 5\nlr = 1\nshuffle = false\nrun.save-every = 9\nrun.track = ["wandb"]\n'
        "[extra]\na = 1\n[sharding]\ncompile = true\ntokens_per_microbatch = 2\n",
    )
    cfg = given("--steps", "6", "--config", file, "--sharding.no-compile")
    assert (cfg.steps, cfg.lr, cfg.shuffle) == (6, 1.0, False)
    assert (cfg.run.save_every, cfg.run.track, cfg.extra) == (9, ("wandb",), {"a": 1})
    assert cfg.sharding == ShardingOptions(tokens_per_microbatch=2, compile=False)


def test_later_toml_files_win(tmp_path: Path):
    first = toml(tmp_path, "steps = 1\nmax_new_tokens = 3\n")
    (tmp_path / "b.toml").write_text("steps = 2\n")
    cfg = given("--config", first, str(tmp_path / "b.toml"))
    assert (cfg.steps, cfg.max_new_tokens) == (2, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lerning-rate 1", "--lerning-rate: no such option; did you mean --lr?"),
        ("--learning_rate 1", "did you mean --lr?"),
        ("--stpes 1", "--stpes: no such option; did you mean --steps?"),
        ("--save-every 1", "--save-every: no such option; did you mean --run.save-every?"),
        ("--run.steps 1", "--run.steps: no such option; did you mean --steps?"),
        ("--max_tokens 1", "did you mean --max-new-tokens or --sharding.tokens-per-microbatch?"),
        ("--max-completion-length 1", "did you mean --max-new-tokens?"),
        ("--run.out_dir x", "did you mean --run.out?"),
        ("--engine.kidn vllm", "did you mean --engine.kind?"),
        ("--no-steps", "--no-steps: no such option"),
        ("--zzz 1", "--zzz: no such option\n"),
        ("--run x", "--run: is a group of options: --run.out, "),
        ("--steps abc", "--steps: 'abc' is not a whole number"),
        ("--steps 1.5", "--steps: '1.5' is not a whole number"),
        ("--steps", "--steps: takes one value, got none"),
        ("--steps 1 2", "--steps: takes one value, got 2: 1 2"),
        ("--lr x", "--lr: 'x' is not a number"),
        ("--weights 1 x 2", "--weights: 'x' is not a number"),
        ("--shuffle maybe", "--shuffle: 'maybe' is not True or False"),
        ("--dtype bf16", "--dtype: 'bf16' is not one of float32, bfloat16; did you mean bfloat16?"),
        ("--engine.kind vlm", "not one of auto, transformers, vllm; did you mean vllm?"),
        ("--run.track wandb tensorbord", "'tensorbord' is not one of wandb, trackio, tensorboard"),
        ("--clip.low 2", "low 2.0 exceeds high 1.0"),
        ("--config nowhere.toml", "--config nowhere.toml: cannot be read: No such file"),
    ],
)
def test_mistakes_on_the_command_line(words: str, said: str):
    assert said in refusal(*words.split())


def test_a_word_without_a_flag():
    with pytest.raises(UserError, match="'steps': expected a flag first"):
        resolve(Config, ["steps", "3"])


def test_what_is_required_and_missing():
    with pytest.raises(UserError, match="--model is required"):
        resolve(Config, [])


def test_all_mistakes_at_once(tmp_path: Path):
    file = toml(tmp_path, "lerning_rate = 1\n")
    said = refusal("--config", file, "--stepz", "1", "--lr", "x")
    assert [line.split(": ")[0].strip() for line in said.splitlines()[:3]] == [
        f"{file}:1", "--stepz", "--lr",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("# a\n\nlerning_rate = 1\n", 3, "lerning_rate: no such option; did you mean lr?"),
        ("steps = 1\n[run]\nsave_evry = 2\n", 3, "run.save_evry: no such option; did you mean run.save_every?"),
        ("lr = 1\nsteps = 'abc'\n", 2, "steps: 'abc' is not a whole number"),
        ("[run]\nkeep = 1\ntrack = [\n 'wandb',\n 'x',\n]\n", 3, "run.track: 'x' is not one of"),
        ("[engine]\nkind = 'vlm'\n", 2, "did you mean vllm?"),
        ("\n[bogus]\na = 1\nb = 2\n", 2, "bogus: no such option"),
        ("[run]\n", 0, ""),
        ("run = 5\n", 1, "run: is a group of options: run.out, "),
        ("run.save-every = 'x'\n", 1, "run.save_every: 'x' is not a whole number"),
        ("debug = true\n", 1, "debug: belongs on the command line, as --debug"),
        ("lr = 1\nsteps = = 2\n", 2, "not valid TOML"),
        ("lr = 1\nlr = 2\n", 2, "not valid TOML"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_name_its_line(tmp_path: Path, text: str, line: int, said: str):
    file = toml(tmp_path, text)
    if not said:
        given("--config", file)
        return
    answer = refusal("--config", file)
    assert f"{file}:{line}: " in answer
    assert said in answer


def test_a_value_that_the_command_line_overrides_is_still_checked(tmp_path: Path):
    file = toml(tmp_path, "steps = 'abc'\n")
    assert f"{file}:1: steps: 'abc'" in refusal("--config", file, "--steps", "5")


def test_a_file_that_is_not_text(tmp_path: Path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refusal("--config", str(tmp_path / "a.toml"))


def test_line_of_a_multi_line_value_is_where_it_begins():
    text = 'a = 1\n\nb = [\n  1,\n]\ns = """\nx = 1\n"""\n[t.u]\nc-d = 2\n'
    assert line_of(text, ["b"]) == 3
    assert line_of(text, ["s"]) == 6
    assert line_of(text, ["t", "u", "c_d"]) == 10


def test_no_field_holds_a_secret():
    @dataclass
    class Leaky:
        wandb_api_key: str = ""
        prompt_key: str = ""

    with pytest.raises(UserError, match=r"Leaky.wandb_api_key.*environment"):
        resolve(Leaky, [])


def test_a_field_may_not_hide_a_flag():
    @dataclass
    class Taken:
        debug: int = 0

    with pytest.raises(UserError, match=r"Taken.debug.*rename"):
        resolve(Taken, [])


def test_as_json():
    tree = to_dict(given("--run.track", "wandb"))
    assert tree["run"]["track"] == ["wandb"]
    assert tree["model"] == "m"


def test_quiet_ranks_exit_alike_and_say_nothing(capsys: pytest.CaptureFixture[str]):
    for words, code in ((["--nope", "1"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as caught:
            parse(Config, words, quiet=True)
        assert caught.value.code == code
    assert capsys.readouterr() == ("", "")


def test_a_mistake_is_told_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse(Config, ["--model", "m", "--nope", "1"])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("--nope: no such option") == 1


def test_help_has_every_field_with_text_and_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse(Config, ["--steps", "3", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--steps INT Training steps. (default: 0)" in text
    assert "--sharding.tokens-per-microbatch INT" in text
    assert "(default: 4096)" in text
    assert "--run.track" in text
    assert "--dry-run" in text
    assert "--config" in text


RECIPE = '''
"""The recipe's own words."""
from dataclasses import dataclass, field
import fsdprl as rl
from fsdprl.config import parse

@dataclass
class Config:
    steps: int = 1
    """Steps."""
    run: rl.RunOptions = field(default_factory=rl.RunOptions)

if __name__ == "__main__":
    import sys
    try:
        print(parse(Config))
    finally:
        assert not {"torch", "transformers", "numpy"} & set(sys.modules), "too much was imported"
'''


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "The recipe's own words."),
        (["--run.sav-every", "1"], 2, "did you mean --run.save-every?"),
        (["--steps", "2"], 0, "Config(steps=2"),
    ],
)
def test_a_recipe_answers_without_importing_torch(
    tmp_path: Path, words: list[str], code: int, said: str
):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, str(recipe), *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
