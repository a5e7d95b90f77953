"""What a person sees, on a terminal and in a log file."""

import io
import math

import pytest

from fsdprl.console import Console, clock, headline, plain_line, short

METRICS = {
    "critic/score/mean": 0.4125,
    "response_length/mean": 9.75,
    "actor/pg_loss": -0.000123,
    "actor/grad_norm": 1.5,
    "actor/ppo_kl": 0.0012,
    "e2e_tps": 31234.0,
    "eval/reward": 0.5,
    "timing/all": 1.2,
    "timing/rollout": 0.4,
    "timing/update": 0.6,
    "timing/rows.free": 0.5,
    "timing/controller_overhead": 0.015,
}


def test_headline_takes_the_first_name_found():
    assert headline({"reward/mean": 1.0, "critic/score/mean": 2.0, "other": 3.0}) == {"reward": 2.0}
    assert headline(METRICS)["eval/reward"] == 0.5


def test_one_line_a_step():
    line = plain_line(11, 60, METRICS, 62.0)
    assert line == (
        "step 11/60 | reward 0.4125 | length 9.75 | loss -1.23e-04 | kl 0.0012 | grad norm 1.5 | "
        "tok/s 31.23k | eval/reward 0.5 | 1.2 s (update 0.6, rollout 0.4, controller 1.5%) | left 1:02"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.0, "1"), (123456.0, "123.5k"), (1e-7, "1.00e-07"), (math.nan, "nan")],
)
def test_numbers_in_short(value: float, text: str):
    assert short(value) == text


def test_time_left():
    assert (clock(5.4), clock(125), clock(3723)) == ("0:05", "2:05", "1:02:03")


def test_plain_output_has_every_nth_step_and_the_last(capsys: pytest.CaptureFixture[str]):
    stream = io.StringIO()
    console = Console(log_every=3, stream=stream)
    console.start("run", 0, 5)
    for step in range(5):
        console.step(step, METRICS)
    console.stop()
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 0/5", "step 3/5", "step 4/5"]
    assert "\x1b" not in stream.getvalue()
    assert capsys.readouterr().out == ""


def test_a_warning_is_said_once():
    stream = io.StringIO()
    console = Console(stream=stream)
    for _ in range(3):
        console.warn("the [disk] is full")
    assert stream.getvalue() == "warning: the [disk] is full\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_display_shows_the_step_and_makes_room_for_a_debugger(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream)
    console.start("runs/x", 0, 4)
    console.show([{"prompt": "1+1=", "response": "2", "reward": 1.0}])
    console.step(0, METRICS)
    console.pause()
    shown = stream.getvalue()
    for text in ("runs/x", "1/4", "reward", "0.4125", "rollout", "33%", "1+1=", "left"):
        assert text in shown
    console.step(1, METRICS)
    assert stream.getvalue() == shown, "drew while a debugger had the terminal"
    console.pause(False)
    console.stop()
    assert "2/4" in stream.getvalue()
