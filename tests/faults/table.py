"""The fault matrix as a table: what is injected, how the job must end, and whether it is whole again after."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import damage, mistakes

REWARD = "tests.faults.rewards:"
EVERYWHERE = (1, 2)


@dataclass(frozen=True)
class Row:
    """One trial of the matrix. Regular expressions are searched in all that the job said."""

    number: int
    name: str
    says: str = ""
    """What must be said; {last} stands for the last rank."""
    fault: str = ""
    """FSDPRL_FAULT; {last} as above."""
    flags: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    """Flags that the undisturbed run has as well."""
    recipe: str = "grpo"
    make: Callable[[Path], dict[str, Any]] | None = None
    """Makes what is wrong in a folder; returns the flags that point to it."""
    ends: int = 1
    """Exit code; 0 for a run that goes on."""
    within_s: float = 15.0
    """From the strike to the end (from the start where nothing strikes)."""
    resumes: bool = False
    """The same command again gives the undisturbed run, to the byte."""
    spoil: Callable[[Path], object] | None = None
    """What happens to the run folder before the same command is given again."""
    again: str = ""
    """What the second command must say."""
    once: str = ""
    """Said exactly once, whatever the number of ranks."""
    counted: str = ""
    """A metric that must be above 0 in some step."""
    status: dict[str, Any] = field(default_factory=dict)
    """Fields of status.json."""
    ranks: tuple[int, ...] = EVERYWHERE
    quick: bool = False
    """Among those that always run, with its first number of ranks."""
    marks: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.number:02}-{self.name}"


def refused(number: int, name: str, says: str, make: Any, **more: Any) -> Row:
    """A user's mistake, found at one process. That flags are read before torch is imported: test_config."""
    return Row(
        number, name, says, make=make, ends=2, within_s=10, ranks=(1,), once="fsdprl: |error: ", **more
    )  # fmt: skip


def mended(number: int, name: str, says: str, fault: str, **more: Any) -> Row:
    """A fault that ends the run, and that the same command mends."""
    return Row(number, name, says, fault=fault, resumes=True, **more)


def survived(number: int, name: str, reward: str, **more: Any) -> Row:
    """A reward that goes wrong on one sample: the run goes on."""
    flags = {"rewards": f"{REWARD}{reward}", "reward.timeout-s": 2, "reward.max-failed-share": 0.2}
    return Row(number, name, flags=flags, ends=0, within_s=60, counted="reward/failed", **more)


MISTAKES = [
    refused(1, "flag", r"--lerning-rate.*--lr", mistakes.misspelt_flag, quick=True),
    refused(1, "toml", r"config\.toml:2.*grop_size", mistakes.misspelt_key, quick=True),
    refused(1, "type", r"--lr.*fast", mistakes.wrong_type, quick=True),
    refused(1, "range", r"--run\.keep.*at least 0", mistakes.out_of_range, quick=True),
    refused(1, "pair", r"--run\.forget.*--run\.resume", mistakes.impossible_pair),
    refused(2, "absent", r"--model .*nowhere: no such folder", mistakes.no_model),
    refused(2, "gated", r"--model nobody/nothing.*HF_TOKEN", mistakes.gated_model),
    refused(2, "pickled", r"only pytorch_model\.bin, a pickle.*convert", mistakes.pickled_model, quick=True),
    refused(2, "own code", r"code of its own \(auto_map\)", mistakes.own_code),
    refused(3, "template", r"no chat template.*--chat-template", mistakes.no_template),
    refused(4, "json", r"rows\.jsonl:3", mistakes.broken_json, quick=True),
    refused(4, "utf-8", r"rows\.jsonl:2.*UTF-8", mistakes.bad_utf8),
    refused(5, "missing", r"rows\.jsonl:2.*prompt", mistakes.missing_field),
    refused(5, "null", r"rows\.jsonl:2.*prompt", mistakes.null_field),
    refused(5, "mistyped", r"rows\.jsonl:2.*prompt.*7", mistakes.mistyped_field),
    refused(6, "empty", r"rows\.jsonl: (the file is empty|no rows)", mistakes.no_rows),
    refused(6, "filtered", r"longer than --max-prompt-length.*no prompt is left", mistakes.all_long),
    refused(7, "many long", r"prompts are longer than --max-prompt-length", mistakes.some_long),
    Row(7, "one long", "1 of 240 prompts are longer", make=mistakes.one_long, ends=0, within_s=90, ranks=(1,)),
    refused(8, "other config", r"another config.*\n.*--lr: 1e-06 there", mistakes.other_run, quick=True),
]  # fmt: skip

REWARDS = [
    Row(9, "raises", r"raises raised on sample 0.*response[\s\S]*no such column as gold",
        flags={"rewards": f"{REWARD}raises"}, within_s=60, quick=True),
    survived(10, "sleeps", "sleeps"),
    survived(10, "spins", "spins"),
    survived(10, "backtracks", "backtracks"),
    Row(10, "always", r"failed on .* more than --reward\.max-failed-share[\s\S]*--reward\.timeout-s",
        flags={"rewards": f"{REWARD}always_sleeps", "reward.timeout-s": 1}, within_s=60),
    survived(11, "segfaults", "segfaults"),
    survived(11, "killed", "is_killed"),
    *(Row(12, name, rf"reward .*{name} returned .* for", flags={"rewards": f"{REWARD}{name}"}, within_s=60,
          quick=name == "nan")
      for name in ("nan", "inf", "text", "too_few")),
    Row(15, "alike", flags={"rewards": "tests.recipes.grades:always"}, ends=0, within_s=60),
    Row(15, "barren", r"not one of 240 prompts, a whole pass.*too easy or too hard", recipe="dapo", ends=2,
        flags={"rewards": "tests.recipes.grades:always", "max-rounds": 0, "when-short": "error",
               "prompts-per-round": 60}, within_s=60),
    Row(16, "truncated", flags={"max-new-tokens": 1}, ends=0, within_s=60),
    Row(16, "empty", make=mistakes.mute_model, ends=0, within_s=60, counted="frac_reward_zero_std"),
]  # fmt: skip

STALL = {"run.stall-timeout-s": 8}
ENGINE = [
    mended(17, "raises", r"injected[\s\S]*rank {last} on \S+ raised in rollout",
           "phase=generate,rank={last},step=1,kind=raise", once="RuntimeError: injected"),
    mended(17, "oom", r"raised in rollout: out of memory \(its peak.*--engine\.",
           "phase=generate,rank={last},step=1,kind=oom"),
    mended(19, "stalls", r"rank {last} on \S+ stalled in rollout: no progress[\s\S]*stacks of all ranks|"
           r"stacks of all ranks[\s\S]*rank {last} on \S+ stalled in rollout",
           "phase=generate,rank={last},step=1,kind=hang", flags=STALL, within_s=18, status={"phase": "rollout"}),
    Row(20, "logits", r"non-finite logits at request \d+ \(prompt of",
        fault="phase=generate,rank={last},step=1,kind=nan_logits", quick=True),
    mended(21, "stale", r"weights of version 1 differ.*sent .*received", "phase=pull,rank={last},step=1,kind=stale"),
    mended(21, "lost", r"the update lacks weight", "phase=pull,rank={last},step=1,kind=lost"),
]  # fmt: skip

UPDATE = [
    mended(22, "gradient", r"step 1, update of policy, rows \d+.*gradient norm is nan.*no weight has changed.*"
           r"--run\.skip-nonfinite", "phase=optim_step,rank={last},step=1,kind=nan", within_s=10,
           status={"phase": "update", "step": 1}, quick=True, ranks=(1, 2, 4)),
    mended(22, "loss", r"step 1, update of policy, rows \d+.*the loss is not finite.*no weight has changed",
           "phase=forward_backward,rank={last},step=1,kind=nan_loss", within_s=10, once="fsdprl: "),
    Row(22, "skipped", r"left out, further ones are counted",
        fault="phase=forward_backward,rank={last},step=1,kind=nan_loss",
        flags={"run.skip-nonfinite": 1}, ends=0, within_s=60, counted="actor/skipped_updates"),
    mended(23, "backward", r"raised in update: out of memory \(its peak.*--sharding\.tokens-per-microbatch",
           "phase=forward_backward,rank={last},step=1,kind=oom"),
]  # fmt: skip

PHASES = {
    "model.build": "load", "engine.build": "engine", "pull": "resharding_to_infer", "generate": "rollout",
    "grade": "rule_reward", "forward": "old_log_p", "forward_backward": "update", "optim_step": "update",
    "save": "save",
}  # fmt: skip
"""Verb -> phase as messages and status.json name it."""
STEPLESS = ("model.build", "engine.build")


def at(verb: str, step: int = 1) -> str:
    return f"phase={verb}" + ("" if verb in STEPLESS else f",step={step}")


VLLM = {"engine.kind": "vllm", "engine.tensor-parallel-size": 2}
KILLED = {"state": "running", "resumable": True}
DEATHS = [
    *(mended(18, name, rf"rank 1 on \S+ died in {PHASES[verb]}: its process is gone", f"{at(verb)},rank=1,kind=sigkill",
             ranks=(2,), base=VLLM, marks=("vllm",))
      for name, verb in (("serving", "generate"), ("idle", "forward_backward"))),
    *(mended(24, verb, rf"rank 1 on \S+ died in {phase}: its process is gone", f"{at(verb)},rank=1,kind=sigkill",
             ranks=(2, 4) if verb in ("generate", "optim_step") else (2,), quick=verb == "forward_backward",
             status={"kind": "died", "rank": 1, "phase": phase})
      for verb, phase in PHASES.items()),
    # Who writes status.json is gone: it still says running, with the pid of nobody.
    mended(25, "generating", "rank 0, the controller, is gone", "phase=generate,rank=0,step=1,kind=sigkill",
           ranks=(2,), status=KILLED),
    mended(25, "between", "rank 0, the controller, is gone", "phase=step,step=2,kind=sigkill", ranks=(2,),
           status=KILLED),
    mended(25, "alone", "", "phase=optim_step,step=1,kind=sigkill", ranks=(1,), ends=-9, status=KILLED),
    mended(26, "stopped", r"rank 1 on \S+ is frozen in update", "phase=forward_backward,rank=1,step=1,kind=sigstop",
           ranks=(2,), within_s=30),
    mended(26, "absent", r"rank 1 on \S+ stalled in update[\s\S]*rank 0 on \S+ does not move either",
           "phase=optim_step,rank=1,step=1,kind=hang", ranks=(2,), flags=STALL, within_s=18, status={"rank": 1}),
    Row(27, "slow", r"rank 1 on \S+ is slow in rollout", fault=";".join(
        f"phase=generate,rank=1,step={step},kind=slow,seconds=3" for step in range(3)),
        ranks=(2,), ends=0, within_s=90, once="is slow in rollout"),
]  # fmt: skip


def signalled(verb: str, kind: str, code: int, **more: Any) -> Row:
    """A run that is asked to end: with torchrun the code is torchrun's own."""
    return mended(28, f"{kind} {verb}", "interrupted by SIG", f"{at(verb)},rank=0,kind={kind}",
                  ends=code, within_s=25, status={"state": "interrupted", "resumable": True}, **more)  # fmt: skip


SIGNALS = [
    *(signalled(verb, "term", 143, quick=verb == "generate") for verb in PHASES),
    *(signalled(verb, "int", 130) for verb in ("generate", "forward_backward")),
    *(signalled(verb, "usr1", 138) for verb in ("generate", "optim_step")),
]  # fmt: skip

SAVES = [
    *(mended(29, f"after {1000 * delay:g} ms", "", f"phase=save,step=1,rank=0,kind=sigkill,delay={delay}",
             ranks=(1,), ends=-9, quick=delay == 0.002) for delay in (0.0, 0.002, 0.01, 0.03)),
    mended(29, "other rank", "rank 1 on", "phase=save,step=1,rank=1,kind=sigkill,delay=0.005", ranks=(2,)),
]  # fmt: skip

KILL = "phase=commit,step=3,kind=sigkill"
"""As the last checkpoint is about to count: there are the one of two steps and the one of one."""
DAMAGES = [
    *(Row(number, name, fault=KILL, ends=-9, resumes=True, spoil=spoil, again=again, quick=quick)
      for number, name, spoil, again, quick in (
          (31, "truncated", damage.truncate, r"step-000002 is damaged: model\.safetensors has \d+ bytes", False),
          (31, "flipped", damage.flip, r"step-000002 is damaged: the contents of trainer/optimizer\.safetensors", True),
          (31, "missing", damage.remove, r"step-000002 is damaged: trainer/optimizer\.safetensors is missing", False),
          (31, "swapped", damage.swap, r"step-000002 is damaged: .*(config|generation_config)\.json", False),
      )),
    Row(32, "pickle", fault=KILL, ends=-9, resumes=True, spoil=damage.plant_pickles,
        again=r"step-000002 is damaged: .* of a kind that can hold code"),
]  # fmt: skip

TABLE = [*MISTAKES, *REWARDS, *ENGINE, *UPDATE, *DEATHS, *SIGNALS, *SAVES, *DAMAGES]
