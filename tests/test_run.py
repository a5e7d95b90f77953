"""A run from beginning to end: what it writes, says and refuses."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from run_job import CONFIG, Job, Killed, checkpoints, isolated, kill_at, killed_at, steps_of
from transformers import AutoTokenizer

from fsdprl.errors import UserError
from fsdprl.records import read_json, read_lines
from fsdprl.run import before_and_after
from fsdprl.run_folder import profile_window


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated(monkeypatch):
        yield


# ---- a run from beginning to end


def test_what_a_run_leaves_behind(tmp_path: Path):
    out = tmp_path / "run"
    job = Job(out).train(5)
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == [
        "checkpoints", "completions", "config.json", "grpo.py", "metrics.jsonl", "plots", "status.json",
    ]  # fmt: skip
    rows = read_lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[2]["critic/score/mean"] == 3.5  # the mean of 3 and 4
    assert rows[1]["timing/all"] >= rows[1]["timing/save"] > 0
    assert "timing/save" not in rows[2]
    assert checkpoints(out) == ["latest", "step-000002", "step-000004", "step-000005"]
    last = out / "checkpoints" / "latest"
    assert last.resolve().name == "step-000005"
    assert (last / "model.safetensors").read_text() == "5.0"
    assert read_json(last / "run.json") == {
        "step": 5, "models": ["policy"], "states": {"count": {"n": 50}},
    }  # fmt: skip
    assert set(read_json(last / "manifest.json")["files"]) == {
        "model.safetensors", "trainer/adam.safetensors", "run.json",
    }  # fmt: skip
    status = read_json(out / "status.json")
    assert (status["state"], status["step"], status["resumable"]) == ("finished", 5, False)
    facts = read_json(out / "config.json")
    assert facts["config"] == CONFIG
    assert facts["versions"]["torch"]
    said = job.said.getvalue()
    assert "4 prompts x 2 = 8 samples, 2 minibatches of 4 samples" in said
    for name in ("run  ", "plot ", "metrics ", f"checkpoint  {out}/checkpoints/step-000005"):
        assert f"\n{name}" in said


def test_numbers_logged_after_the_loop_have_a_line_of_their_own(tmp_path: Path):
    job = Job(tmp_path / "run").train(3, end=False)
    job.run.log({"eval/reward": 0.5})
    job.end()
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1] == {"step": 3, "eval/reward": 0.5}


def test_stop_finishes_saves_and_ends(tmp_path: Path):
    job = Job(tmp_path / "run", save_every=0)
    job.train(6, during=lambda step: job.run.stop() if step == 1 else None)
    assert steps_of(tmp_path / "run" / "metrics.jsonl") == [0, 1]
    assert "step-000002" in checkpoints(tmp_path / "run")
    assert read_json(tmp_path / "run" / "status.json")["state"] == "finished"


def test_a_stopped_run_stays_stopped(tmp_path: Path):
    """Killed while the last weights are evaluated, say: the step that stop() was called in was the last one."""
    out = tmp_path / "run"
    killed = Job(out)
    killed.train(6, during=lambda step: killed.run.stop() if step == 2 else None, end=False)
    killed.abandon()
    job = Job(out).train()
    assert (job.run.restored, job.model.value) == (3, 3.0)
    assert read_json(out / "status.json")["state"] == "finished"
    # It can be given more steps, and others may begin from its end.
    assert Job(out, config=CONFIG | {"steps": 8}).train(8).model.value == 8.0
    last = str(out / "checkpoints" / "step-000003")
    assert Job(tmp_path / "other", resume=last).train().model.value == 6.0


@pytest.mark.parametrize("named", ["file", "text"])
def test_a_checkpoint_has_the_chat_template_it_was_trained_with(tmp_path: Path, named: str):
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (tmp_path / "other.jinja").write_text(template)
    given = str(tmp_path / "other.jinja") if named == "file" else template
    job = Job(tmp_path / "run", config=CONFIG | {"chat_template": given})
    job.open().model.tokenizer = tiny.tokenizer()
    job.train(2)
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert "chat_template.jinja" in read_json(saved / "manifest.json")["files"]
    assert AutoTokenizer.from_pretrained(saved).chat_template == template
    assert template != tiny.CHATML


def test_decided_at_run_time_is_written_down(tmp_path: Path):
    job = Job(tmp_path / "run").open()
    job.controller.facts["engine"] = "vllm"
    job.train(1)
    assert read_json(tmp_path / "run" / "config.json")["engine"] == "vllm"


def test_another_engine_does_not_continue_a_run(tmp_path: Path):
    job = Job(tmp_path / "run", save_every=1).open()
    job.controller.facts["engine"] = "vllm"
    with pytest.raises(ZeroDivisionError):
        job.train(3, during=lambda step: 1 / (1 - step))
    job.end("failed")
    again = Job(tmp_path / "run", save_every=1).open()
    again.controller.facts["engine"] = "transformers"
    with pytest.raises(UserError, match=r"begun with engine vllm.*--engine\.kind vllm"):
        again.train(3)
    assert read_json(tmp_path / "run" / "config.json")["engine"] == "vllm"


def test_a_profile_window_is_asked_of_the_ranks(tmp_path: Path):
    job = Job(tmp_path / "run", profile="1:2").train(4)
    out = str((tmp_path / "run" / "profile").resolve())
    assert job.calls == [("profile_start", {}), ("profile_stop", {"out": out})]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_profile_window_ends_with_the_run(tmp_path: Path, stopped: bool):
    """A rank that exits within a trace dies of SIGSEGV."""
    job = Job(tmp_path / "run", profile="1:9").open()
    job.train(
        2 + 2 * stopped, during=lambda step: job.run.stop() if stopped and step == 1 else None
    )
    assert [verb for verb, _ in job.calls] == ["profile_start", "profile_stop"]
    assert "profile of steps 1:1: " in job.said.getvalue()


def test_a_profile_window_after_the_last_step_is_warned_of(tmp_path: Path):
    job = Job(tmp_path / "run", profile="2:3").train(2)
    assert not job.calls
    assert "--run.profile 2:3: no trace will be made: the last step is 1" in job.said.getvalue()


def test_a_run_resumed_inside_a_profile_window_traces_the_rest(tmp_path: Path):
    """Ranks that never began a trace have none to end."""
    killed_at(tmp_path / "run", 3, profile="1:4")
    job = Job(tmp_path / "run", profile="1:4").train()
    assert [verb for verb, _ in job.calls] == ["profile_start", "profile_stop"]


@pytest.mark.parametrize("failures", [2, 3])
def test_the_line_after_the_loop_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
):
    """No later step will write it. A run whose metrics have a hole is not finished."""
    out = tmp_path / "run"
    job = Job(out).train(3, end=False)
    job.run.log({"eval/reward": 0.5})
    write, left = job.run.lines._write, [failures]

    def full(sync: bool) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(sync)

    monkeypatch.setattr(job.run.lines, "_write", full)
    with (
        contextlib.nullcontext()
        if failures < 3
        else pytest.raises(UserError, match=r"metrics\.jsonl: No space left .* 3 times in a row")
    ):
        job.end()
    status = read_json(out / "status.json")
    if failures < 3:
        assert status["state"] == "finished"
        assert read_lines(out / "metrics.jsonl")[-1] == {"step": 3, "eval/reward": 0.5}
    else:
        assert (status["state"], status["saved"]) == ("failed", 3)
        assert "No space left on device" in status["cause"]


@pytest.mark.parametrize("text", ["x", "3:", "5:3", ":3", "-1:2"])
def test_profile_windows_that_are_none(text: str):
    with pytest.raises(UserError, match=r"--run.profile"):
        profile_window(text)


def test_spans_and_tokens_of_the_step_become_metrics(tmp_path: Path):
    job = Job(tmp_path / "run")
    job.controller.timeline.count("tokens", 1e9)  # before the first step: no part of it

    def during(step: int) -> None:
        with job.controller.timeline.span("rollout"):
            pass
        job.controller.timeline.count("tokens", 100.0)
        job.controller.timeline.count("reward/failed", step)
        job.controller.timeline.count("wire.sent", 7.0)

    job.train(2, during=during)
    for row in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert (row["tokens"], row["reward/failed"], row["wire/sent"]) == (100, row["step"], 7)
        assert row["e2e_tps"] == pytest.approx(100 / 2 / row["timing/all"])
        assert row["vllm_tps"] == pytest.approx(100 / 2 / row["timing/rollout"])
        assert 0 <= row["timing/controller_overhead"] <= 1


# ---- ends


@pytest.mark.parametrize(
    ("kind", "state"),
    [("died", "failed"), ("user", "failed"), ("interrupted", "interrupted")],
)
def test_the_status_says_how_it_ended(tmp_path: Path, kind: str, state: str):
    job = Job(tmp_path / "run")
    with pytest.raises(Killed):
        job.train(during=kill_at(3))
    job.end(kind, "rank 1 is gone", rank=1, host="h", phase="rollout")
    status = read_json(tmp_path / "run" / "status.json")
    expected = {
        "state": state, "kind": kind, "rank": 1, "host": "h", "phase": "rollout", "step": 3,
        "steps": 6, "cause": "rank 1 is gone", "resumable": True,
    }  # fmt: skip
    assert status | expected == status


def test_a_step_that_goes_on_behind_the_end_does_not_say_so(tmp_path: Path):
    """A deadline ends the job in a thread of its own, while the main one may begin to save."""
    job = Job(tmp_path / "run").open()
    job.end("died", "rank 1 died")
    job.run.folder.set_status("running", phase="save")
    assert read_json(tmp_path / "run" / "status.json")["state"] == "failed"


def test_stacks_of_a_stall_are_kept(tmp_path: Path):
    job = Job(tmp_path / "run")
    with pytest.raises(Killed):
        job.train(during=kill_at(3))
    stacks = {"rank 0 on h": "in barrier", "rank 1 on h": "in sleep"}
    job.end("stalled", "rank 1 is late", rank=1, host="h", phase="update", stacks=stacks)
    kept = (tmp_path / "run" / "stacks.txt").read_text()
    assert kept == "==== rank 0 on h\nin barrier\n\n==== rank 1 on h\nin sleep\n"
    assert "stacks of all ranks: " in job.said.getvalue()
    assert "stacks" not in read_json(tmp_path / "run" / "status.json")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save_every": -1}, "--run.save-every"),
        ({"keep": -1}, "--run.keep"),
        ({"skip_nonfinite": -1}, "--run.skip-nonfinite"),
        ({"log_every": 0}, "--run.log-every"),
        ({"profile": "a"}, "--run.profile"),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        Job(tmp_path / "run", **options).open()


def test_what_policies_ask_the_controller_for(tmp_path: Path):
    job = Job(tmp_path / "run", log_entropy=True, skip_nonfinite=3).open()
    assert job.controller.log_entropy is True and job.controller.may_skip == 3


def test_a_dry_run_prints_and_leaves_nothing(tmp_path: Path):
    job = Job(tmp_path / "run", dry=True).open()
    job.controller.report.append(("prompts", ["<user>1+1=", "<user>2+2="]))
    with pytest.raises(SystemExit) as caught:
        job.train()
    assert caught.value.code == 0
    said = job.said.getvalue()
    assert "config:\n  --model m\n  --lr 0.5\n" in said
    assert "12 optimizer steps" in said
    assert "prompts:\n  <user>1+1=\n  <user>2+2=\n" in said
    assert not (tmp_path / "run").exists()


def test_samples_before_and_after(tmp_path: Path):
    def train(killed: int) -> Job:
        job = Job(tmp_path / "run")

        def during(step: int) -> None:
            job.run.show(
                [
                    {
                        "prompt": f"{i}+1=",
                        "response": f"{step}.{i}",
                        "reward": float(step),
                        "row": 7,
                    }
                    for i in range(4)
                ]
            )
            kill_at(killed)(step)

        try:
            return job.train(during=during)
        finally:
            job.abandon()

    with pytest.raises(Killed):
        train(3)
    job = train(-1)
    shown = read_lines(tmp_path / "run" / "completions" / "shown.jsonl")
    assert [row["step"] for row in shown] == [step for step in range(6) for _ in range(4)]
    assert "row" not in shown[0]
    said = job.said.getvalue()
    assert "before (step 0) and after (step 5)" in said
    assert "  '2+1='\n    before '0.2'  reward 0\n    after  '5.2'  reward 5\n" in said
    assert "3+1=" not in said


def test_one_set_of_samples_has_no_after():
    assert before_and_after([]) == []
    assert before_and_after([{"step": 0, "prompt": "a", "response": "b"}]) == []
