"""Prompts: a dataset on the controller. Which prompts a step takes is a pure function of the seed."""

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from fsdprl.controller import current
from fsdprl.data import order
from fsdprl.data.chat import Conversations, Messages, PromptFormat, load_tokenizer, text_or_file
from fsdprl.data.mixture import REWARDS, read_as
from fsdprl.data.prompt import Prompt
from fsdprl.data.rows import field, open_rows
from fsdprl.errors import UserError
from fsdprl.tools import schemas

MOST_DROPPED = 0.01
"""Share of prompts that may be too long before that must be asked for."""
_CHUNK = 4096

LongPrompts = Literal["error", "drop", "truncate", "truncate_left"]
"""Of prompts that are too long: up to 1 % are dropped (error), all are (drop), their first (truncate) or last
(truncate_left) tokens are kept."""

_log = logging.getLogger(__name__)


class Prompts:
    """The prompts of a file, a folder or a hub dataset (see `data.rows.open_rows`), tokenised.

    Attributes: `seed`; `tokenizer`; `counts`, how many rows were read and dropped, by reason.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer_path: str,
        prompt_key: str = "prompt",
        answer_key: str = "",
        system: str = "",
        chat_template: str = "",
        prompt_format: PromptFormat = "auto",
        max_prompt_length: int = 1024,
        long_prompts: LongPrompts = "error",
        tools: Sequence[str] = (),
        seed: int = 0,
        flag: str = "--data",
    ) -> None:
        """Read, check and tokenise every row.

        prompt_key: column with a string or a list of chat messages (`a.b` reaches into objects). Where it and
        answer_key are left at `prompt` and `answer`, rows in the forms of other tools are read as they are
        (data/handlers.py).
        prompt_format: whether a string is a user's message (`chat`), the text itself (`raw`), or a
        message where the tokenizer has a chat template (`auto`). answer_key: column of the reference
        answer; empty for none. system: text, or a file with it, for conversations that bring no
        system message of their own. chat_template: Jinja file in place of the tokenizer's.

        Prompts of more than max_prompt_length tokens are dropped, counted and warned of once; above 1 % of them that
        is an error. long_prompts: `drop` allows more, `truncate` keeps their first tokens instead, `truncate_left`
        the last ones, which cuts into the template's beginning. tools: those that the chat template shall tell the
        model of, by name (see `tools.named_tool`). flag: how errors name the dataset.

        Raises UserError with file:line, field and value for the first row that cannot be used.
        """
        self.seed = seed
        self.tokenizer = load_tokenizer(tokenizer_path, chat_template=chat_template)
        self._conversations = Conversations(
            self.tokenizer,
            prompt_format=prompt_format,
            system=text_or_file(system, "--system") if system else "",
            tools=schemas(tools),
        )
        if tools and not self._conversations.tells_of_tools():
            _log.warning(
                "--tools: the chat template says nothing of tools: describe them with --system"
            )
        self._prompt_key, self._answer_key = prompt_key, answer_key
        rows = open_rows(path, flag=flag)
        by_columns = prompt_key == "prompt" and answer_key in ("", "answer")
        self._rows = read_as(rows, "prompt") if by_columns else rows
        self._ids, self._ends = self._tokenise()
        self._warn_of_unknown(f"{flag} {path}")
        self._limit, self._policy = max_prompt_length, long_prompts
        lengths = np.diff(self._ends, prepend=0)
        fits = lengths <= max_prompt_length
        cut = long_prompts.startswith("truncate")
        self._kept = np.flatnonzero(fits | cut).astype(np.int64)
        long = int((~fits).sum())
        self.counts = {"rows": len(lengths), "cut" if cut else "too_long": long}
        if long:
            worst = int(np.argmax(lengths))
            text = (
                f"{flag} {path}: {long} of {len(lengths)} prompts are longer than "
                f"--max-prompt-length {max_prompt_length} tokens "
                f"(longest: {lengths[worst]}, {self._rows.where(worst)})"
            )
            if not len(self._kept):
                raise UserError(f"{text}: no prompt is left")
            if long > MOST_DROPPED * len(lengths) and long_prompts == "error":
                raise UserError(
                    f"{text}: raise it, or choose --long-prompts drop, truncate or truncate_left"
                )
            _log.warning("%s: %s", text, "cut" if cut else "dropped")

    def __len__(self) -> int:
        return len(self._kept)

    def at(self, step: int, count: int) -> list[Prompt]:
        """The prompts of a step when every step takes `count`: `take(step * count, count)`."""
        return self.take(step * count, count)

    def take(self, cursor: int, count: int) -> list[Prompt]:
        """`count` prompts after the first `cursor` ones: a pure function of (seed, cursor).

        Every pass over the dataset has its own order; a step may reach into the next pass.
        """
        return self.rows(self._kept[order.window(len(self), self.seed, cursor, count)])

    def first(self, count: int) -> list[Prompt]:
        """The first `count` prompts in the order of the file (all, if there are fewer)."""
        return self.rows(self._kept[:count])

    def rows(self, indices: Iterable[int]) -> list[Prompt]:
        """The prompts of these dataset rows (`Prompt.index`), in this order."""
        return [self._prompt(int(index)) for index in indices]

    def split(self, share: float) -> tuple["Prompts", "Prompts"]:
        """(to train on, held out): a share of the rows, at least one, drawn by seed alone.

        Raises UserError if the share does not lie between 0 and 1 or takes every row.
        """
        try:
            parts = order.split(self._kept, share, self.seed)
        except ValueError as error:
            raise UserError(f"--eval-share: {error}") from None
        train, held_out = copy.copy(self), copy.copy(self)
        train._kept, held_out._kept = parts
        return train, held_out

    def _tokenise(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of all rows back to back, int32, and where each row ends, int64 [rows]."""
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for start in range(0, len(self._rows), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(self._rows)))
            prompts = [self._read(index)[1] for index in chunk]
            texts = self._texts(prompts, start)
            for ids in self._conversations.encode(texts, rendered=self._conversations.chat):
                lengths.append(len(ids))
                parts.append(np.array(ids, dtype=np.int32))
        return np.concatenate(parts), np.cumsum(lengths, dtype=np.int64)

    def _warn_of_unknown(self, what: str) -> None:
        """Say so where the tokenizer has no words for what prompts say: the model reads something else."""
        t = self.tokenizer
        if t.unk_token_id is None or t.unk_token_id in (
            t.eos_token_id,
            t.bos_token_id,
            t.pad_token_id,
        ):
            return
        unknown = np.flatnonzero(self._ids == t.unk_token_id)
        if len(unknown):
            row = int(np.searchsorted(self._ends, unknown[0], side="right"))
            _log.warning(
                "%s: %.2g %% of the prompts' tokens are unknown to the tokenizer and read as %s, the first in %s",
                what, 100 * len(unknown) / len(self._ids), t.unk_token, self._rows.where(row),
            )  # fmt: skip

    def _texts(self, prompts: list[str | Messages], start: int) -> list[str]:
        messages = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if not messages:
            return [prompt for prompt in prompts if isinstance(prompt, str)]
        return self._conversations.render(messages, lambda i: self._rows.where(start + i))

    def _read(self, index: int) -> tuple[dict[str, Any], str | Messages, Any]:
        """A row, its prompt and its answer, checked."""
        row, where = self._rows[index], self._rows.where(index)
        value = field(row, self._prompt_key, where, "--prompt-key")
        prompt = self._conversations.of(value, where, self._prompt_key)
        answer = None
        if self._answer_key:
            answer = field(row, self._answer_key, where, "--answer-key")
        return row, prompt, answer

    def _prompt(self, index: int) -> Prompt:
        row, prompt, answer = self._read(index)
        start = self._ends[index - 1] if index else 0
        where = self._rows.where(index)
        ids, text = self._ids[start : self._ends[index]], self._texts([prompt], index)[0]
        if len(ids) > self._limit:
            ids = ids[-self._limit :] if self._policy == "truncate_left" else ids[: self._limit]
            text = self.tokenizer.decode(ids.tolist())
        return Prompt(
            ids=ids,
            text=text,
            messages=None if isinstance(prompt, str) else prompt,
            answer=plain(answer, where),
            meta={
                name: plain(value, f"{where}: field {name!r}")
                for name, value in row.items()
                if name not in (self._prompt_key, REWARDS)
            },
            index=index,
            rewards=row.get(REWARDS),
            tools=self._conversations.tools,
        )


def plain(value: Any, where: str) -> Any:
    """A value made of what a message can carry: dates and decimals become strings, as do integers
    beyond 64 bits. Raises UserError for others, such as images."""
    if isinstance(value, bool | float | str | bytes | None):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, dict):
        return {str(name): plain(part, where) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, where) for part in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "Decimal":
        return str(value)
    raise UserError(
        f"{where}: a {type(value).__name__} cannot travel to rewards: remove the column"
    )


ASKED = (
    "prompt_key", "answer_key", "prompt_format", "chat_template", "system", "max_prompt_length", "long_prompts", "seed",
)  # fmt: skip
"""Fields of a recipe that Prompts takes under the same names."""


def prompt_sets(cfg: Any) -> tuple[Prompts, Prompts]:
    """(prompts to train on, held-out prompts): from cfg.eval_data if there is one, else a share of cfg.data.

    cfg: a recipe's Config, with data, eval_data, eval_share, model (its tokenizer), those of ASKED and, if it has any,
    tools. Raises UserError as Prompts does. With --dry-run the first two prompts of the first step are shown as the
    model would read them.
    """
    options = {name: getattr(cfg, name) for name in ASKED} | {"tokenizer_path": cfg.model}
    options["tools"] = getattr(cfg, "tools", ())
    train = Prompts(cfg.data, **options)
    if cfg.eval_data:
        held_out = Prompts(cfg.eval_data, flag="--eval-data", **options)
    else:
        train, held_out = train.split(cfg.eval_share)
    controller = current()
    if controller.flags.dry_run:
        for prompt in train.at(0, min(2, len(train))):
            title = f"prompt of row {prompt.index} ({len(prompt.ids)} tokens)"
            controller.report.append((title, prompt.text.splitlines()))
    return train, held_out
