"""Worker verbs for rows in other words: a reward model's own tokens, or a prompt that says more."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdprl.data.chat import Conversations, load_tokenizer
from fsdprl.errors import UserError
from fsdprl.rows import samples_of
from fsdprl.sample import Sample
from fsdprl.store import Row
from fsdprl.worker import Worker


def same_words(worker: Worker, *, path: str) -> bool:
    """Whether this checkpoint's tokenizer and chat template read rows as the policy's do."""
    mine, own = worker.state["tokenizer"], _tokenizer(worker, path)
    return mine.chat_template == own.chat_template and mine.get_vocab() == own.get_vocab()


def reword(worker: Worker, *, rows: Tensor, row_ids: Tensor, path: str) -> Tensor:
    """Keep what these rows say under new row ids, in the checkpoint's own tokens. Returns their lengths, int64 [R].

    A conversation is rendered by its own chat template, the answer as the assistant's last message; prompts that are
    texts, and all where there is no template, as prompt and answer one after the other. Only the last token is a loss
    token: where a reward model's score stands.
    """
    tokenizer = _tokenizer(worker, path)
    lengths = []
    for sample, row_id in zip(samples_of(worker, rows.tolist()), row_ids.tolist(), strict=True):
        ids = torch.tensor(worded(tokenizer, sample), dtype=torch.int32)
        mask = torch.arange(len(ids)) == len(ids) - 1
        worker.store.put(
            row_id, Row(ids, mask, {"prompt": sample.prompt, "prompt_length": len(ids) - 1})
        )
        lengths.append(len(ids))
        worker.progress()
    return torch.tensor(lengths, dtype=torch.int64)


def worded(tokenizer: Any, sample: Sample) -> list[int]:
    """A sample's conversation in these tokens, at least two."""
    if sample.messages and tokenizer.chat_template:
        said = [*sample.messages, {"role": "assistant", "content": sample.response}]
        text = tokenizer.apply_chat_template(said, tokenize=False)
        ids = tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(f"{sample.prompt}{sample.response}")["input_ids"]
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    return ids if len(ids) > 1 else [*ids, end, end][:2]


def retell(worker: Worker, *, rows: Tensor, row_ids: Tensor, form: str) -> Tensor:
    """Keep these rows under new row ids, the same answers behind prompts in this form: `{prompt}` in it is the last
    message of the user (or the whole text), `{answer}` the row's reference answer. Returns their lengths, int64 [R].
    """
    tokenizer, lengths = worker.state["tokenizer"], []
    for row, row_id in zip(worker.store.select(rows.tolist()), row_ids.tolist(), strict=True):
        prompt = torch.tensor(retold(tokenizer, row.info, form), dtype=torch.int32)
        behind = row.info["prompt_length"]
        ids = torch.cat([prompt, row.ids[behind:]])
        mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), row.mask[behind:]])
        info = row.info | {"prompt_length": len(prompt)}
        worker.store.put(row_id, Row(ids, mask, info, {}, row.loss_tokens))
        lengths.append(len(ids))
    return torch.tensor(lengths, dtype=torch.int64)


def retold(tokenizer: Any, info: dict[str, Any], form: str) -> list[int]:
    """The tokens of a row's prompt in this form. Raises UserError where it asks for an answer that there is none of."""
    if "{answer}" in form and info.get("answer") is None:
        raise UserError(
            f"the form {form!r} asks for a reference answer, and a prompt has none: give --answer-key"
        )

    def told(text: str) -> str:
        parts = {"{prompt}": text, "{answer}": str(info.get("answer"))}
        return re.sub(r"\{prompt\}|\{answer\}", lambda found: parts[found[0]], form)

    messages = info.get("messages")
    talks = Conversations(tokenizer, prompt_format="chat" if messages else "raw")
    if not messages:
        return talks.encode([told(info["prompt"])], rendered=False)[0]
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    asked = messages[last] | {"content": told(str(messages[last]["content"]))}
    texts = talks.render([[*messages[:last], asked, *messages[last + 1 :]]], lambda _: "a prompt")
    return talks.encode(texts, rendered=True)[0]


def adopt(worker: Worker, *, rows: Tensor, told: Tensor, column: str) -> None:
    """Give rows the token column that their retold ones have."""
    row_ids = rows.tolist()
    worker.store.set_column(column, row_ids, worker.store.column(column, told.tolist()))


def _tokenizer(worker: Worker, path: str) -> Any:
    known = worker.state.setdefault("reward_tokenizers", {})
    if path not in known:
        known[path] = load_tokenizer(path, flag="--reward-model")
    return known[path]


VERBS: dict[str, Callable[..., Any]] = {
    "rows.same_words": same_words,
    "rows.reword": reword,
    "rows.retell": retell,
    "rows.adopt": adopt,
}
