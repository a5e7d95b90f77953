"""Jobs of real processes: each ends in one piece, with one message that names the culprit."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from jobs import HERE, End, Job

pytestmark = pytest.mark.ranks
FAULTY = str(HERE / "faulty.py")


def faulty(case: str, out: Path, *flags: str, ranks: int = 2, **options) -> Job:
    return Job([FAULTY, f"--case={case}", f"--out={out}", *flags], ranks=ranks, **options)


def struck(case: str, out: Path) -> End:
    """The end of a job of two ranks that something befalls. torchrun would take 30 s to kill them."""
    job = faulty(case, out)
    job.until(out / "began")
    return job.end(25.0)


def cause(out: Path) -> dict:
    return json.loads((out / "cause").read_text())


def check_one_message(end: End, text: str) -> None:
    """The message is there, once, and nobody else spoke for fsdprl."""
    assert end.err.count(text) == 1, end.err
    assert end.err.count("fsdprl: ") == 1, end.err


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_normal_run_ends_quietly_with_zero(tmp_path, ranks):
    end = faulty("normal", tmp_path, ranks=ranks).end()
    assert end.code == 0, end.err
    assert end.out.splitlines() == [f"devices cpu, ranks {list(range(ranks or 1))}", "main is done"]
    assert end.err == "" and cause(tmp_path)["kind"] == "finished"


def test_a_verb_that_raises(tmp_path):
    end = struck("raise_in_verb", tmp_path)
    assert end.code == 1 and "main is done" not in end.out
    check_one_message(end, "raised in update (at faulty.py:")
    assert end.err.index("ValueError: the verb is broken") < end.err.index("fsdprl: rank 1 on ")
    assert end.err.count("ValueError: the verb is broken") == 1
    told = cause(tmp_path)
    assert (told["kind"], told["rank"], told["phase"], told["step"]) == ("raised", 1, "update", 12)
    assert told["host"] and told["message"].startswith("rank 1 on")


def test_a_rank_killed_in_a_verb_is_a_death_and_not_a_preemption(tmp_path):
    end = struck("kill_in_verb", tmp_path)
    assert end.code == 1
    check_one_message(end, "died in rollout: its process is gone")
    assert cause(tmp_path)["kind"] == "died" and cause(tmp_path)["rank"] == 1


def test_a_rank_killed_while_main_is_busy_with_its_own(tmp_path):
    end = struck("kill_while_main_is_busy", tmp_path)
    assert end.code == 1
    check_one_message(end, "died while idle: its process is gone")
    assert cause(tmp_path)["kind"] == "died"


def test_a_rank_that_dies_before_it_connects_is_named(tmp_path):
    end = faulty("early", tmp_path).end()
    assert end.code == 1
    check_one_message(end, "rank 1 had not connected when torchrun ended the job")


def test_a_stopped_rank_is_frozen(tmp_path):
    end = struck("stop", tmp_path)
    assert end.code == 1
    check_one_message(end, "is frozen in rollout: its process is stopped (state T)")
    assert cause(tmp_path)["rank"] == 1


def test_a_stopped_controller_is_ended_by_its_ranks(tmp_path):
    end = struck("controller_stopped", tmp_path)
    assert end.code == 1
    check_one_message(end, "rank 0, the controller, is frozen: its process is stopped (state T)")


def test_a_stall_names_the_rank_that_others_wait_for(tmp_path):
    end = struck("stall", tmp_path)
    assert end.code == 1
    check_one_message(end, "stalled in update: no progress")
    assert "time.sleep(120)" in end.err and "fsdprl: rank 1 on" in end.err
    assert "does not move either" in end.err and "distributed" in end.err
    assert cause(tmp_path)["kind"] == "stalled" and cause(tmp_path)["rank"] == 1


def test_a_killed_controller_leaves_nothing(tmp_path):
    end = struck("controller_killed", tmp_path)
    assert end.code == 1
    check_one_message(end, "fsdprl: rank 0, the controller, is gone")


def test_a_killed_agent_leaves_nothing(tmp_path):
    job = faulty("wait", tmp_path)
    job.until(tmp_path / "waiting")
    assert len(job.processes()) == 3
    job.process.kill()
    assert job.end().code == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_agent_interrupts_main(tmp_path, number):
    job = faulty("save_when_interrupted", tmp_path)
    job.until(tmp_path / "waiting")
    job.process.send_signal(number)
    end = job.end()
    assert f"saving on {number.value}: {{'a': 1}}" in end.out
    check_one_message(end, f"interrupted by {number.name} (at faulty.py:")
    assert cause(tmp_path)["kind"] == "interrupted" and end.code != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_main_waits_for_a_rank(tmp_path, number):
    job = faulty("wait", tmp_path, ranks=0)
    job.until(tmp_path / "waiting")
    job.process.send_signal(number)
    end = job.end()
    assert end.code == 128 + number
    check_one_message(end, f"interrupted by {number.name} (at faulty.py:")


def test_a_reader_that_is_gone_takes_nothing_with_it(tmp_path):
    """As `tee` in a pipe, which dies of the same Ctrl-C, and before us: the end is written down all the same."""
    job = faulty("print_for_nobody", tmp_path, ranks=0)
    job.until(tmp_path / "waiting")
    for stream in (job.process.stdout, job.process.stderr):
        assert stream
        stream.close()
    (tmp_path / "gone").touch()
    job.until(tmp_path / "printed")
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(60) == 130
    assert cause(tmp_path)["kind"] == "interrupted" and not job.processes()


def test_a_second_signal_exits_at_once(tmp_path):
    job = faulty("ignore_interrupts", tmp_path, ranks=0)
    job.until(tmp_path / "waiting")
    job.process.send_signal(signal.SIGINT)
    job.until(tmp_path / "stubborn")
    time.sleep(1.5)  # sooner would count as the same signal, passed on by torchrun
    job.process.send_signal(signal.SIGINT)
    assert job.end().code == 130


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("user_error", "fsdprl: --data x.jsonl:3: no field 'question'\n"),
        ("user_in_verb", "fsdprl: --model nowhere: no such folder\n"),
    ],
)
def test_a_users_mistake_is_a_message_and_code_two(tmp_path, case, says):
    alone = faulty(case, tmp_path, ranks=0).end()
    assert (alone.code, alone.err) == (2, says)
    assert cause(tmp_path)["kind"] == "user"


def test_a_users_mistake_is_printed_once_for_all_ranks(tmp_path):
    end = faulty("user_error", tmp_path).end()
    check_one_message(end, "fsdprl: --data x.jsonl:3: no field 'question'\n")
    assert "exitcode  : 2" in end.err and end.code == 1
    flag = faulty("normal", tmp_path, "--cas=3").end()
    assert flag.err.count("no such option") == 1 and "exitcode  : 2" in flag.err


def test_a_bug_in_main_shows_its_traceback_from_the_recipe_on(tmp_path):
    end = faulty("bug", tmp_path, ranks=0).end()
    assert end.code == 1 and end.err.endswith("KeyError: 'missing'\n")
    assert end.err.count("Traceback") == 1 and "launch.py" not in end.err.split("in main")[1]
    assert cause(tmp_path)["kind"] == "error"


def test_sys_exit_keeps_its_code(tmp_path):
    end = faulty("leave", tmp_path, ranks=0).end()
    assert (end.code, end.err) == (3, "") and cause(tmp_path)["kind"] == "exit"


def test_ranks_with_another_recipe_are_refused_by_name(tmp_path):
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        shutil.copy(FAULTY, folder / "recipe.py")
    with (tmp_path / "1" / "recipe.py").open("a") as file:
        file.write("# one comment more\n")
    script = f'exec "$0" {tmp_path}/$RANK/recipe.py --out {tmp_path}'
    end = Job(["--no-python", "bash", "-c", script, os.sys.executable], ranks=2).end()
    check_one_message(end, "has another version of recipe.py than rank 0 on")
    assert "fsdprl: rank 1 on" in end.err and "exitcode  : 2" in end.err


def test_a_restart_by_torchrun_uses_fresh_keys(tmp_path):
    job = Job(["--max-restarts=1", FAULTY, "--case=die_once", f"--out={tmp_path}"], ranks=2)
    end = job.end(120.0)
    assert end.code == 0 and end.out.count("main is done") == 1
    check_one_message(end, "died in hurt")


def test_a_breakpoint_stops_the_clock(tmp_path):
    typed = "import time; time.sleep(5)\nprint(6 * 7)\ncontinue\n"
    end = faulty("breakpoint_in_main", tmp_path, ranks=0, stdin=typed).end()
    assert "42" in end.out and "back in main" in end.out  # 5 s at the prompt, deadline 1 s
    assert "faulty.py" in end.out and 'print("back in main")' in end.out
    assert end.out.index("paused") < end.out.index("42") < end.out.index("resumed")
    check_one_message(end, "stalled in hurt")  # and afterwards the clock runs again


def test_a_dry_run_runs_main_once_and_starts_nothing(tmp_path):
    end = faulty("dry", tmp_path, "--dry-run").end()
    assert end.code == 0, end.err
    assert end.out.splitlines()[0] == "[('plan', ['two steps', 'of 64 samples'])]"
    assert end.out.count("plan") == 1


def test_an_end_that_cannot_be_written_down_is_a_failure(tmp_path):
    end = faulty("bad_hook", tmp_path, ranks=0).end()
    assert end.code == 1 and "KeyError: 'no room'" in end.err and "main is done" in end.out
