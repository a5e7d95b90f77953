"""Worker verbs for reward models that read with other words: their own tokenizer and chat template."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdprl.data.chat import load_tokenizer
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


def _tokenizer(worker: Worker, path: str) -> Any:
    known = worker.state.setdefault("reward_tokenizers", {})
    if path not in known:
        known[path] = load_tokenizer(path, flag="--reward-model")
    return known[path]


VERBS: dict[str, Callable[..., Any]] = {"rows.same_words": same_words, "rows.reword": reword}
