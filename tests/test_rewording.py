"""Reward models with another tokenizer or template: what they read, and where it stands."""

import copy
from types import SimpleNamespace

import pytest
import tiny
import torch
from fake import install

from fsdprl import rewording
from fsdprl.batch import Lease
from fsdprl.errors import UserError
from fsdprl.policy import RewardModel
from fsdprl.sample import Sample
from fsdprl.telling import logprobs_told

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """The policy's tokenizer, and one with another template."""
    made = []
    for name in ("policy", "other"):
        words = copy.deepcopy(tiny.tokenizer())
        if name == "other":
            words.chat_template = TEMPLATE
        words.save_pretrained(folder := str(tmp_path_factory.mktemp(name)))
        made.append(folder)
    return made[0], made[1]


def test_conversations_are_rendered_by_the_models_own_template(folders):
    own = rewording._tokenizer(SimpleNamespace(state={}), folders[1])  # type: ignore[arg-type]
    sample = Sample("<rendered for the policy>", "4", messages=CHAT)
    assert own.decode(rewording.worded(own, sample)) == "[user] 2+2?\n[assistant] 4"
    assert own.decode(rewording.worded(own, Sample("2+2=", "4"))) == "2+2=4"
    assert len(rewording.worded(own, Sample("", ""))) == 2


def test_scores_of_reworded_rows_come_back_in_order(folders, monkeypatch):
    """Rows on two ranks; the pretended model scores a row by its number of tokens."""
    fake = install(monkeypatch, 2)
    fake.verbs |= rewording.VERBS
    batch = fake.batch([3] * 5, [1, 2, 3, 4, 5], [0, 1, 0, 1, 1])
    for worker in fake.workers:
        worker.state["tokenizer"] = copy.deepcopy(tiny.tokenizer())
        for row in worker.store.rows.values():
            row.info |= {"messages": CHAT}
    seen = []

    def run(self, rows, out):
        seen.append(rows)
        assert rows["loss_tokens"].tolist() == [1] * 5 if self.path == folders[1] else True
        return rows["tokens"].double()

    monkeypatch.setattr(RewardModel, "run", run)
    model = object.__new__(RewardModel)
    model.path, model.reads_rows = folders[0], None
    assert model.score(batch).tolist() == [4.0, 5.0, 6.0, 7.0, 8.0] and seen[-1] is batch
    model.path, model.reads_rows = folders[1], None
    scores = model.score(batch)
    assert seen[-1] is not batch and seen[-1].ranks.tolist() == [0, 1, 0, 1, 1]
    words = tiny.tokenizer()
    for row_id, score, ranks in zip(
        batch.row_ids.tolist(), scores.tolist(), [0, 1, 0, 1, 1], strict=True
    ):
        said = words.decode(
            fake.workers[ranks].store.rows[row_id].ids[3:].tolist(), skip_special_tokens=True
        )
        assert score == len(words(f"[user] 2+2?\n[assistant] {said}".rstrip("\n"))["input_ids"])
    kept = sum(len(worker.store) for worker in fake.workers)
    del seen[:]
    Lease.flush()  # the reworded rows are forgotten with their batch
    assert sum(len(worker.store) for worker in fake.workers) == kept - 5
    assert isinstance(scores, torch.Tensor)


FORM = "{prompt} It is {answer}: {answer}."


def test_a_prompt_is_told_again_with_more():
    """The last thing that the user said changes, nothing else; what the row brings is no form itself."""
    words = copy.deepcopy(tiny.tokenizer())
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}, *CHAT]
    read = words.decode(rewording.retold(words, {"messages": talk, "answer": "{prompt}"}, FORM))
    asked = [*talk[:2], {"role": "user", "content": "2+2? It is {prompt}: {prompt}."}]
    assert read == words.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    plain = rewording.retold(words, {"prompt": "2+2=", "answer": 4}, FORM)
    assert words.decode(plain, skip_special_tokens=True) == "2+2= It is 4: 4."
    with pytest.raises(UserError, match="give --answer-key"):
        rewording.retold(words, {"prompt": "2+2="}, FORM)


def test_log_probs_of_retold_rows_come_back_to_the_rows(monkeypatch):
    """Rows on two ranks; the pretended model gives each loss token the length of its row."""
    fake = install(monkeypatch, 2)
    fake.verbs |= rewording.VERBS
    batch = fake.batch([3] * 5, [1, 2, 3, 4, 0], [0, 1, 0, 1, 1])
    batch["temperature"] = 0.7
    for worker in fake.workers:
        worker.state["tokenizer"] = copy.deepcopy(tiny.tokenizer())
        for row in worker.store.rows.values():
            row.info |= {"messages": CHAT, "answer": "4"}
    seen = []

    def logprobs(told, out):
        seen.append(told)
        for worker in fake.workers:
            for row_id in told.row_ids.tolist():
                if row := worker.store.rows.get(row_id):
                    row.columns[out] = torch.full((row.loss_tokens,), float(len(row.ids)))

    logprobs_told(SimpleNamespace(logprobs=logprobs), batch, FORM)  # type: ignore[arg-type]
    (told,) = seen
    assert told["temperature"].tolist() == [0.7] * 5
    assert told["loss_tokens"].tolist() == [1, 2, 3, 4, 0]
    assert torch.equal(told.ranks, batch.ranks)
    rows = {i: row for worker in fake.workers for i, row in worker.store.rows.items()}
    for old, new, length in zip(batch.row_ids, told.row_ids, told["tokens"], strict=True):
        before, after = rows[int(old)], rows[int(new)]
        said = before.ids[before.mask]
        assert torch.equal(after.ids[after.mask], said) and len(after.ids) == length > 10
        assert before.columns["logp_told"].tolist() == [float(length)] * len(said)
    assert "logp_told" in batch.token_columns
    with pytest.raises(UserError, match="leaves the prompt out"):
        logprobs_told(SimpleNamespace(), batch, "{answer}")  # type: ignore[arg-type]
