"""Conversations of several turns with the built-in engine: token-exact, concurrent, replayed by the trainer."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import solo
import tiny
import torch
from transformers import AutoModelForCausalLM

from fsdprl import conversing, rollout
from fsdprl.conversing import Rollout, turn_seed
from fsdprl.engines import Request, Sampling
from fsdprl.errors import UnscoredError, UserError
from fsdprl.models import pack
from fsdprl.rows import samples_of
from fsdprl.stream import weight_stream
from fsdprl.worker import Worker

LIMIT = 240
SAMPLING = {
    "max_new_tokens": torch.tensor(LIMIT), "temperature": 1.3, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
    "repetition_penalty": 1.0, "stop": [],
}  # fmt: skip


# ---- environments


def three_turns(conversation):
    """A question behind each turn; three turns are worth their number of letters."""
    if conversation.turn == 3:
        return len(conversation.said)
    conversation.counts["asked"] += 1
    return {"role": "user", "content": f"and {conversation.turn}?"}


async def three_turns_async(conversation):
    await asyncio.sleep(0.001 * (conversation.row % 3))
    return three_turns(conversation)


class Counting:
    """Keeps something of its own from turn to turn."""

    def __init__(self, step: int = 1) -> None:
        self.step, self.heard = step, 0

    async def __call__(self, conversation):
        self.heard += self.step
        return (
            float(self.heard)
            if conversation.over
            else [{"role": "tool", "content": str(self.heard)}]
        )


def goes_on(conversation):
    return {"role": "user", "content": "go on"}


def ends(conversation):
    return None


def talks_on(conversation):
    return [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]


def long_winded(conversation):
    return {"role": "user", "content": "x" * LIMIT}


OTHERS: list[int] = []
FOUND: list[int] = []
LEFT, LATE = threading.Event(), threading.Semaphore(0)


def slow_for_the_first(conversation):
    """Row 0's answer to its first turn takes until the others have ended 15 turns: for ever, if they waited for it."""
    if conversation.row == 0 and conversation.turn == 1:
        begin = time.monotonic()
        while len(OTHERS) < 15 and time.monotonic() - begin < 30:
            time.sleep(0.01)
        FOUND.append(len(OTHERS))
    elif conversation.row:
        OTHERS.append(conversation.row)
    return None if conversation.over else {"role": "user", "content": "go on"}


async def never(conversation):
    await asyncio.sleep(60)


def stuck(conversation):
    LEFT.wait(60)
    conversation.counts["late"] += 1
    LATE.release()


def no_verdict(conversation):
    raise UnscoredError("the simulator is down")


def broken(conversation):
    return {}["key"]


def scribbles(conversation):
    """Writes into everything that it is shown."""
    assert conversation.messages[0]["content"].startswith("question") or conversation.turn > 1
    assert "seen" not in conversation.meta or conversation.turn > 1
    conversation.meta["seen"] = True
    for message in conversation.messages:
        message["content"] = "scribble"
    return {"role": "user", "content": "go on"}


def speaks_for_the_model(conversation):
    return {"role": "assistant", "content": "me"}


# ---- a rank


def worker(
    kind: str = "qwen3", slots: int = 512, path: Any = None, max_model_len: int = 320
) -> Worker:
    made = Worker()
    path = path or tiny.checkpoint(kind)
    rollout.build(
        made, kind="transformers", path=str(path), options={"max_num_seqs": slots}, dtype="float32",
        max_model_len=max_model_len, seed=0, chat_template="",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    made.engine.update_weights(
        weight_stream(SimpleNamespace(hf=model), dtype=torch.float32, bucket_bytes=1 << 20),
        0,  # type: ignore[arg-type]
    )
    return made


def converse(
    made: Worker, env: str, *, n: int = 2, count: int = 4, turns: Any = (), **sampling: Any
) -> dict[str, Any]:
    """Conversations from a few prompts; rows from 0 on."""
    words, infos, ids = tiny.tokenizer(), [], []
    for i in range(count):
        messages = [{"role": "user", "content": f"question {i}" + "!" * (3 * i)}]
        text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        infos.append({"prompt": text, "messages": messages, "answer": str(i), "meta": {"level": i}})
        ids.append(torch.tensor(words(text)["input_ids"], dtype=torch.int32))
    module, _, name = env.rpartition(":")
    return conversing.rollout(
        made, first_row=[i * n for i in range(count)], lengths=torch.tensor([len(i) for i in ids]), ids=torch.cat(ids),
        infos=infos, seeds=torch.arange(count * n) + 100, n=n, sampling=SAMPLING | sampling, version=0,
        env={"module": module or __name__, "qualname": name, "kwargs": {}}, turns=dict(turns), tools=[],
    )  # fmt: skip


def rows_of(made: Worker) -> list[tuple[list[int], list[bool]]]:
    return [(row.ids.tolist(), row.mask.tolist()) for _, row in sorted(made.store.rows.items())]


def spans(made: Worker, row: int) -> list[tuple[bool, str]]:
    """(said by the model, text) of each stretch behind the prompt."""
    kept = made.store.rows[row]
    start, found = kept.info["prompt_length"], []
    for token, mine in zip(kept.ids[start:].tolist(), kept.mask[start:].tolist(), strict=True):
        if not found or found[-1][0] != mine:
            found.append((mine, []))
        found[-1][1].append(token)
    return [(mine, tiny.tokenizer().decode(ids)) for mine, ids in found]


def test_a_row_is_what_was_sampled_and_what_the_template_wrote():
    made = worker()
    found = converse(made, "three_turns", n=3)
    assert found["turns"].max() == 3  # or the rest would show little
    assert bool((found["turns"] == 3).sum() >= 3) and not bool(found["truncated"].all())
    for row in range(12):
        parts = spans(made, row)
        turns, info = int(found["turns"][row]), made.store.rows[row].info
        assert [mine for mine, _ in parts] == [True, False] * (turns - 1) + [True]
        for turn, (mine, text) in enumerate(parts):
            if not mine:
                asked = f"and {(turn + 1) // 2}?"
                assert text == f"\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            elif turn < len(parts) - 1:
                assert text.endswith("<|im_end|>")
        said = [turn["content"] for turn in info["turns"] if turn["role"] == "assistant"]
        if turns == 3:
            assert found["env_reward"][row] == len(said[-1])
        else:
            assert found["truncated"][row] and torch.isnan(found["env_reward"][row])
        assert found["length"][row] <= LIMIT and found["counts"]["asked"][row] >= turns - 1
        kept = made.store.rows[row]
        assert found["loss_tokens"][row] == kept.loss_tokens == len(kept.columns["logp_sampler"])
        (sample,) = samples_of(made, [row])
        assert (
            sample.response == said[-1]
            and sample.turns == info["turns"]
            and sample.length == found["length"][row]
        )


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_tied", "qwen3_moe"])
def test_the_trainer_replays_the_engines_log_probs(kind: str):
    made = worker(kind, slots=3)  # turns join while others are under way
    converse(made, "three_turns", n=3)
    model = solo.load(tiny.checkpoint(kind))
    rows = [row for _, row in sorted(made.store.rows.items())]
    with torch.no_grad():
        packed = pack([(row.ids, row.mask, 1.3) for row in rows], solo.CPU)
        logp, _ = model(packed)
    sampled = torch.cat([row.columns["logp_sampler"] for row in rows])
    assert len(logp) == len(sampled) > 200
    assert (logp - sampled).abs().max() < 5e-5


def test_conversations_depend_on_seed_and_prompt_only():
    one, few, later = worker(), worker(slots=1), worker(slots=5)
    converse(one, "three_turns")
    converse(few, "three_turns")
    converse(later, "three_turns_async")
    assert rows_of(one) == rows_of(few) == rows_of(later)
    ids, mask = rows_of(one)[3]
    start = one.store.rows[3].info["prompt_length"]
    request = Request(ids[:start], 103)
    (alone,) = one.engine.generate([request], Sampling(LIMIT, temperature=1.3), lambda: None)
    first = [*mask, False][start:].index(False)
    assert alone.ids.tolist() == ids[start : start + first]  # the first turn is what generate gives
    assert (
        turn_seed(103, 0) == 103
        and len({turn_seed(s, t) for s in range(50) for t in range(4)}) == 200
    )


def test_a_slow_environment_keeps_nobody_waiting():
    OTHERS.clear()
    FOUND.clear()
    made = worker(max_model_len=500)
    converse(
        made, "slow_for_the_first", count=6, n=1, turns={"max_turns": 5}, max_new_tokens=torch.tensor(420),
        temperature=1.8,
    )  # fmt: skip
    assert FOUND[0] >= 15


def test_what_an_environment_writes_into_its_conversation_stays_there():
    made, told = worker(), worker()
    converse(made, "scribbles", turns={"max_turns": 3})
    converse(told, "goes_on", turns={"max_turns": 3})
    assert rows_of(made) == rows_of(told)
    assert [row.info["messages"] for row in made.store.rows.values()] == [
        row.info["messages"] for row in told.store.rows.values()
    ]


def test_the_loop_of_async_environments_is_closed():
    loops, new = [], asyncio.new_event_loop

    def noted() -> asyncio.AbstractEventLoop:
        loops.append(new())
        return loops[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", noted)
        converse(worker(), "three_turns_async")
        converse(worker(), "never", turns={"timeout_s": 0.3}, count=1)
    for thread in threading.enumerate():
        if thread.name == "environments":
            thread.join(60)
    assert len(loops) == 2 and all(loop.is_closed() for loop in loops)


def test_a_class_is_made_for_each_conversation():
    found = converse(worker(), "Counting", turns={"max_turns": 3})
    assert found["env_reward"].tolist() == found["turns"].tolist()


def test_limits_of_turns_and_tokens():
    found = converse(worker(), "ends")
    assert found["turns"].tolist() == [1] * 8 and not found["out_of_turns"].any()
    found = converse(
        made := worker(),
        "talks_on",
        turns={"max_turns": 2},
        temperature=1.8,
    )
    assert (found["turns"] == 2).any() and torch.equal(
        found["out_of_turns"], (found["turns"] == 2) & ~found["truncated"]
    )
    assert "".join(
        text for mine, text in spans(made, int(found["turns"].argmax())) if not mine
    ) == ("\n<|im_start|>tool\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    found = converse(worker(), "talks_on", turns={"max_turn_tokens": 3})
    assert all(length <= 4 * (3 + 60) for length in found["length"].tolist())
    assert (found["loss_tokens"] <= 3 * found["turns"]).all() and found["truncated"].any()
    found = converse(made := worker(), "long_winded")  # no room for a second turn behind that
    assert found["truncated"].all() and found["turns"].tolist() == [1] * 8
    assert torch.equal(found["length"], found["loss_tokens"])


def test_environments_that_fail():
    for env in ("never", "stuck"):
        begin = time.monotonic()
        found = converse(worker(), env, turns={"timeout_s": 0.3})
        assert time.monotonic() - begin < 50
        assert found["env_failed"].all() and found["lost"][0] == (0, "no answer within 0.3 s")
    LEFT.set()  # the threads may go
    found = converse(worker(), "no_verdict", count=1)
    assert found["lost"][0][1] == "the simulator is down" and found["env_reward"].isnan().all()
    with pytest.raises(UserError, match=r"after turn 1 of row \d(?s:.)*KeyError: 'key'"):
        converse(worker(), "broken")
    with pytest.raises(UserError, match="role 'assistant'"):
        converse(worker(), "speaks_for_the_model")


def test_what_a_call_left_behind_writes_is_not_seen():
    """The calls are overdue, and end before the columns are made."""
    made, rest = worker(), Rollout._hear_env

    def heard(self: Rollout, talk: Any, answer: Any) -> bool:
        goes_on = rest(self, talk, answer)
        LEFT.set()
        assert LATE.acquire(timeout=60)
        return goes_on

    LEFT.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollout, "_hear_env", heard)
        found = converse(made, "stuck", n=1, count=1, turns={"timeout_s": 0.3})
    assert found["env_failed"].all() and found["counts"] == {}


def test_more_plain_calls_than_threads():
    found = converse(worker(), "three_turns", count=10, turns={"concurrency": 1})
    assert (found["turns"] >= 1).all() and not found["env_failed"].any()
