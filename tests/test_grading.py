"""Rewards in killable processes: only the culprit of a hang or crash loses its score."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import faulty_rewards as rewards
import pytest

import fsdprl
from fsdprl.errors import UserError
from fsdprl.functions import FunctionRef, function_ref
from fsdprl.grading import Grader, RewardError
from fsdprl.options import RewardOptions
from fsdprl.sample import Sample

SRC = str(Path(__file__).parents[1] / "src")


def batch(size: int, **faults: int) -> list[Sample]:
    """Samples whose response is their ordinal; faults: what to do -> ordinal."""
    at = {index: do.replace("_", ".") for do, index in faults.items()}
    return [
        Sample(f"prompt {i}", str(i), meta={"do": at.get(i, "")}, row=100 + i) for i in range(size)
    ]


@contextlib.contextmanager
def grader(workers: int = 1, timeout_s: float = 30.0, share: float = 0.5) -> Iterator[Grader]:
    """A grader that must leave no process behind."""
    before = descendants(os.getpid())
    options = RewardOptions(workers=workers, timeout_s=timeout_s, max_failed_share=share)
    with Grader(options) as made:
        yield made
    assert descendants(os.getpid()) <= before


def descendants(pid: int) -> set[int]:
    """All living processes below `pid`, zombies left out."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    found, front = set(), {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front}
        found |= front
    return found


def named(command: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if (
                    line == command
                    and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                ):
                    found.append(entry.name)
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_come_back_in_order(workers: int):
    ticks = []
    with grader(workers) as made:
        graded = made.grade(function_ref(rewards.act), batch(200, none=4), lambda: ticks.append(1))
        assert made.grade(function_ref(rewards.act), []).scores == []
    assert graded.scores == [None if i == 4 else float(i) for i in range(200)]
    assert graded.failures == [] and ticks


def test_keywords_travel_with_the_name():
    with grader() as made:
        graded = made.grade(function_ref(partial(rewards.scaled, scale=2.5)), batch(3))
    assert graded.scores == [0.0, 2.5, 5.0]


def test_processes_are_reused_and_isolated_from_the_rank():
    with grader(2) as made:
        made.warm_up(function_ref(rewards.process_id))
        first = made.grade(function_ref(rewards.process_id), batch(100)).scores
        again = made.grade(function_ref(rewards.process_id), batch(100)).scores
        clean = made.grade(function_ref(rewards.environment), batch(1)).scores
        warmed = made.grade(function_ref(rewards.warmed), batch(3)).scores
    assert 1 <= len(set(first) | set(again)) <= 2 and os.getpid() not in first
    assert clean == [1.0] and warmed == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("sleep", "no answer within 0.5 s"),
        ("spin", "no answer within 0.5 s"),
        ("segfault", "SIGSEGV"),
        ("exit", "exit code 7"),
        ("oom", "SIGKILL (out of memory?)"),
        ("child", "no answer within 0.5 s"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_culprit_fails(fault: str, cause: str, workers: int):
    samples = batch(40) + batch(1, **{fault: 0}) + batch(20)
    with grader(workers, timeout_s=0.5) as made:
        graded = made.grade(function_ref(rewards.act), samples)
        assert made.grade(function_ref(rewards.act), batch(5)).scores == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert named("sleep 600") == []
    expected = [*map(float, range(40)), None, *map(float, range(20))]
    assert graded.scores == expected
    assert [(f.index, f.row) for f in graded.failures] == [(40, 100)]
    assert cause in graded.failures[0].cause


def test_too_many_failures_stop_the_batch_early():
    with grader(timeout_s=0.3, share=0.05) as made:
        ref = function_ref(rewards.act)
        one = made.grade(ref, batch(8, sleep=3))  # one of a small batch is always allowed
        assert len(one.failures) == 1
        samples = batch(1, sleep=0) * 10 + batch(50)  # ten hang, three of sixty are allowed
        with pytest.raises(RewardError, match=r"(?s)on 4 of 60 .* 0\.05 .*--reward\.timeout-s"):
            made.grade(ref, samples)
        assert made.grade(ref, batch(2)).scores == [0.0, 1.0]
    with grader(timeout_s=0.3, share=0.0) as made, pytest.raises(RewardError, match="1 of 8"):
        made.grade(ref, batch(8, exit=3))


def test_one_rank_may_lose_what_the_whole_batch_may():
    ref = function_ref(rewards.act)
    hanging = batch(1, sleep=0) * 3 + batch(3)
    with grader(timeout_s=0.3, share=0.05) as made:
        assert len(made.grade(ref, hanging, allowed=3).failures) == 3
        with pytest.raises(RewardError, match="on 3 of 6"):
            made.grade(ref, hanging, allowed=2)


def test_failures_allowed():
    assert [RewardOptions(max_failed_share=0.05).failures_allowed(n) for n in (8, 60)] == [1, 3]
    assert RewardOptions(max_failed_share=0.05).failures_allowed(60, unit=8) == 8
    assert RewardOptions(max_failed_share=0.0).failures_allowed(60, unit=8) == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"(?s)faulty_rewards:act raised on sample 1 \(row 101\): prompt 'prompt 1', "
         r"response '1'.*faulty_rewards.py.*KeyError: 'no such thing'"),
        ("sys_exit", r"(?s)raised on sample 1 .*SystemExit: 3"),
        ("nan", r"returned nan \(float\) for sample 1 \(row 101\)"),
        ("inf", r"returned inf \(float\) for sample 1"),
        ("str", r"returned '1.0' \(str\) for sample 1"),
        ("list", r"returned \[1.0\] \(list\) for sample 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("debug", [False, True])
def test_what_is_no_reward_is_an_error(fault: str, message: str, debug: bool):
    made = Grader(RewardOptions(), debug=debug)
    with made, pytest.raises(RewardError, match=message):
        made.grade(function_ref(rewards.act), batch(3, **{fault: 1}))


def test_debug_runs_in_this_process():
    with Grader(RewardOptions(), debug=True) as made:
        made.warm_up(function_ref(rewards.process_id))
        assert made.grade(function_ref(rewards.process_id), batch(2)).scores == [os.getpid()] * 2
        assert made.grade(function_ref(rewards.waits), batch(2)).scores == [0.0, 1.0]


def test_trl_functions_run_unchanged():
    plain = [Sample(f"p{i}", str(i), answer="a", meta={"bonus": 0.5 * i}) for i in range(150)]
    chat = [
        Sample("p", text, meta={"solution": "4"}, messages=[{"role": "user", "content": "2+2"}])
        for text in ("4", "5")
    ]
    with grader() as made:
        assert made.grade(function_ref(rewards.trl_style), plain).scores == [
            1.5 * i for i in range(150)
        ]
        assert made.grade(function_ref(rewards.trl_chat), chat).scores == [1.0, 0.0]
        with pytest.raises(RewardError, match=r"trl_short returned 63 rewards for a list"):
            made.grade(function_ref(rewards.trl_short), plain)
        with pytest.raises(RewardError, match="trl_number returned a float for a list"):
            made.grade(function_ref(rewards.trl_number), plain)


def test_a_batch_that_hangs_is_repeated_one_by_one():
    samples = [Sample("p", "hang" if i == 5 else str(i), meta={"bonus": 0.0}) for i in range(12)]
    with grader(timeout_s=0.5) as made:
        graded = made.grade(function_ref(rewards.trl_style), samples)
        asynchronous = made.grade(function_ref(rewards.trl_async), batch(12))
    assert graded.scores == [None if i == 5 else float(i) for i in range(12)]
    assert [failure.index for failure in graded.failures] == [5]
    assert asynchronous.scores == [None if i == 7 else float(i) for i in range(12)]


def test_async_functions_run_together():
    with grader(timeout_s=1.5) as made:
        made.warm_up(function_ref(rewards.waits))
        start = time.monotonic()
        graded = made.grade(function_ref(rewards.waits), batch(60, sleep=9))
        took = time.monotonic() - start
        blocked = made.grade(function_ref(rewards.blocks), batch(6, sleep=2))
        with pytest.raises(RewardError, match="TimeoutError: the judge did not answer"):
            made.grade(function_ref(rewards.own_timeout), batch(2))
    assert graded.scores == [None if i == 9 else float(i) for i in range(60)]
    assert [failure.index for failure in graded.failures] == [9]
    assert took < 60 * 0.3  # the sum of their waits
    assert blocked.scores == [0.0, 1.0, None, 3.0, 4.0, 5.0]


def test_a_function_that_cannot_be_found_is_the_users_mistake():
    with grader() as made:
        with pytest.raises(UserError, match="faulty_rewards:nothing is not a function"):
            made.grade(FunctionRef("faulty_rewards", "nothing"), batch(1))
        with pytest.raises(UserError, match="cannot import no_such_module"):
            made.warm_up(FunctionRef("no_such_module", "f"))
        assert made.grade(function_ref(rewards.act), batch(1)).scores == [0.0]
    with pytest.raises(UserError, match=r"--reward\.workers 0"):
        Grader(RewardOptions(workers=0))


def test_a_dead_server_is_replaced():
    with grader() as made:
        assert made.grade(function_ref(rewards.act), batch(1)).scores == [0.0]
        server = made._server._process
        server.send_signal(signal.SIGKILL)
        server.wait()
        assert made.grade(function_ref(rewards.act), batch(2)).scores == [0.0, 1.0]


RECIPE = """
    import os, signal, sys
    from fsdprl.functions import function_ref
    from fsdprl.grading import Grader
    from fsdprl.options import RewardOptions
    from fsdprl.sample import Sample

    import beside

    def reward(sample):
        if sample.response == "hang":
            import time
            time.sleep(600)
        return beside.VALUE + len(sample.response)

    if __name__ == "__main__":
        made = Grader(RewardOptions())
        # A process that was forked for another module's function knows nothing of this file.
        assert made.grade(function_ref(beside.other), [Sample("", "abc")]).scores == [3.0]
        print(made.grade(function_ref(reward), [Sample("", "abc")]).scores, flush=True)
        print(made._server._process.pid, made._children[0].pid, flush=True)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "in work":
            made.grade(function_ref(reward), [Sample("", "hang")])
"""


@pytest.mark.parametrize("end", ["exits", "killed", "in work"])
def test_a_recipes_own_function_and_its_end(tmp_path: Path, end: str):
    """A reward in `__main__`, a module beside it; however the rank ends, nothing stays."""
    (tmp_path / "recipe.py").write_text(textwrap.dedent(RECIPE))
    (tmp_path / "beside.py").write_text(
        "VALUE = 10\ndef other(sample): return len(sample.response)"
    )
    rank = subprocess.Popen(
        [sys.executable, str(tmp_path / "recipe.py"), end],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": SRC},
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "[13.0]\n"
    pids = [int(word) for word in rank.stdout.readline().split()]
    if end == "in work":
        time.sleep(0.3)
        rank.kill()
    rank.wait(timeout=30)
    rank.stdout.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids):
        assert time.monotonic() < deadline, "reward processes outlive their rank"
        time.sleep(0.05)


def test_a_recipe_that_launches_when_imported_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FSDPRL_REWARD_PROCESS", "1")
    with pytest.raises(UserError, match=r'under if __name__ == "__main__"'):
        fsdprl.launch(lambda cfg: None, RewardOptions)
