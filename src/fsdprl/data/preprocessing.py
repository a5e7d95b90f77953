"""Data sets turned into one parquet file that every recipe reads as it stands, and a manifest of how it came about.

    scripts/preprocess_data --input gsm8k_train.jsonl --output gsm8k.parquet --tokenizer Qwen/Qwen3-0.6B \\
        --template r1 --max-length 1024 --workers 8

Optional: the same handlers work on the fly in the recipes. What this adds is a look at every row before a run, its
length in tokens, and a file that is read at once.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdprl.data import templates
from fsdprl.data.chat import load_tokenizer
from fsdprl.data.handlers import HANDLERS, Handled, Purpose, adapted
from fsdprl.data.mixture import Mixture, read_as
from fsdprl.data.processes import data_processes
from fsdprl.data.rows import Rows, fingerprint, open_rows
from fsdprl.errors import UserError

_CHUNK = 512
_KEPT_PLACES = 3
_NO_MATTER = ("workers", "log_interval", "output")  # to what is written


@dataclass(frozen=True)
class Preprocess:
    """What to make of which rows."""

    input: str
    """A file, a folder, a hub name, or a TOML file that mixes several."""
    output: str
    """The parquet file; its manifest stands beside it with .json appended."""
    tokenizer: str = ""
    """Hugging Face tokenizer that measures rows; empty measures none."""
    purpose: Purpose = "prompt"
    """What the rows are for: prompt (sampling), example (supervised) or preference."""
    handler: str = "auto"
    """How rows are read: alpaca, math, pairwise, sharegpt, messages, prompt-completion, unpaired, text; auto: by
    their columns."""
    keys: tuple[str, ...] = ()
    """Columns for those that the handler reads, as prompt=question answer=gold."""
    template: str = "native"
    """native (the tokenizer's own chat template), empty (the text alone), r1, or a Jinja file."""
    max_length: int = 0
    """Most tokens of a row: one more and it is dropped (0: any length). Of a pair, each side counts with the prompt."""
    workers: int = 1
    """Processes."""
    log_interval: int = 10000
    """Rows between lines of progress; on a terminal a bar is shown instead."""


@dataclass
class Made:
    """What became of a stretch of rows."""

    rows: list[dict[str, Any]]
    dropped: dict[str, int]
    places: dict[str, list[str]]


def preprocess(options: Preprocess) -> dict[str, Any]:
    """Write the parquet file and its manifest; returns the manifest.

    The file does not depend on the number of workers. Raises UserError for wrong options and where no row is left.
    """
    templates.check(options.template)
    if options.handler != "auto" and options.handler not in HANDLERS:
        raise UserError(f"--handler {options.handler}: known are auto, {', '.join(HANDLERS)}")
    if options.max_length and not options.tokenizer:
        raise UserError("--max-length is in tokens: give a --tokenizer")
    rows = open_for(options)
    parts: list[Made] = []
    done, began = 0, time.monotonic()
    with _progress(len(rows), options.log_interval) as tell:
        for made in _chunks(options, len(rows)):
            parts.append(made)
            done += min(_CHUNK, len(rows) - done)
            tell(done)
    kept = [row for made in parts for row in made.rows]
    dropped, places = Counter[str](), {}
    for made in parts:
        dropped.update(made.dropped)
        for reason, where in made.places.items():
            places[reason] = (places.get(reason, []) + where)[:_KEPT_PLACES]
    if not kept:
        raise UserError(f"--input {options.input}: no row is left: {dict(dropped)}, as {places}")
    out = Path(options.output).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = write_parquet(kept, out)
    lengths = [row["tokens"] for row in kept if "tokens" in row]
    manifest: dict[str, Any] = {
        "options": {
            name: value for name, value in asdict(options).items() if name not in _NO_MATTER
        },
        "read_as": getattr(rows, "handler", "mixture" if isinstance(rows, Mixture) else "as it is"),
        "input_fingerprint": fingerprint(options.input),
        "rows_read": len(rows),
        "rows_written": len(kept),
        "dropped": dict(dropped),
        "dropped_places": places,
        "columns": columns,
        "tokens": {"mean": sum(lengths) / len(lengths), "max": max(lengths)} if lengths else {},
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    Path(f"{out}.json").write_text(text + "\n", encoding="utf-8")
    seconds = time.monotonic() - began
    print(f"{out}: {len(kept)} of {len(rows)} rows, {len(rows) / seconds:.0f} rows/s")
    for reason, count in dropped.items():
        print(
            f"  dropped as {reason}: {count}, the first at {places[reason][0]} (more in {out}.json)"
        )
    return json.loads(text)


def open_for(options: Preprocess) -> Rows:
    """The input's rows as the handler makes them."""
    rows = open_rows(options.input, flag="--input")
    keys = {}
    for pair in options.keys:
        name, equals, column = pair.partition("=")
        if not equals or not column:
            raise UserError(f"--keys {pair}: write name=column")
        keys[name] = column
    if options.handler != "auto":
        return Handled(rows, options.handler, options.purpose, keys)
    if keys:
        raise UserError("--keys needs a --handler")
    return (
        read_as(rows, options.purpose)
        if isinstance(rows, Mixture)
        else adapted(rows, options.purpose)
    )


def _chunks(options: Preprocess, count: int) -> Iterator[Made]:
    """The stretches of rows in order, made here or by processes."""
    starts = range(0, count, _CHUNK)
    if options.workers <= 1:
        yield from (make(options, start) for start in starts)
        return
    with ProcessPoolExecutor(options.workers, mp_context=data_processes()) as pool:
        yield from pool.map(functools.partial(make, options), starts)


@functools.lru_cache(maxsize=1)
def _opened(key: str) -> tuple[Rows, Any]:
    """This process's rows and tokenizer."""
    options = Preprocess(**json.loads(key))
    if options.workers > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of many
    logging.getLogger("transformers").setLevel(logging.ERROR)
    jinja = options.template if options.template not in templates.NAMES else None
    tokenizer = (
        load_tokenizer(options.tokenizer, chat_template=jinja, flag="--tokenizer")
        if options.tokenizer
        else None
    )
    return open_for(options), tokenizer


def make(options: Preprocess, start: int) -> Made:
    """Read, check and measure the rows from `start` on."""
    rows, tokenizer = _opened(json.dumps(asdict(options)))
    made, taken = Made([], {}, {}), []

    def drop(reason: str, index: int) -> None:
        made.dropped[reason] = made.dropped.get(reason, 0) + 1
        if len(places := made.places.setdefault(reason, [])) < _KEPT_PLACES:
            places.append(rows.where(index))

    for index in range(start, min(start + _CHUNK, len(rows))):
        try:
            row = dict(rows[index])
        except UserError:
            drop("unusable", index)
            continue
        if not _says_something(row, options.purpose):
            drop("empty", index)
            continue
        if "prompt" in row:
            row["prompt"] = templates.asked(row["prompt"], options.template)
        made.rows.append(row)
        taken.append(index)
    if tokenizer is None:
        return made
    read, made.rows = made.rows, []
    for index, row, tokens in zip(taken, read, _lengths(read, tokenizer, options), strict=True):
        if options.max_length and tokens > options.max_length:
            drop("too_long", index)
        else:
            made.rows.append(row | {"tokens": tokens})
    return made


def _says_something(row: dict[str, Any], purpose: Purpose) -> bool:
    """Whether there is a prompt (or conversation, or text) and, where one is learnt, a completion."""
    begins = next((row[key] for key in ("messages", "prompt", "text") if row.get(key)), None)
    if not begins or (isinstance(begins, str) and not begins.strip()):
        return False
    needed = {"prompt": (), "example": ("completion",), "preference": ("chosen", "rejected")}[
        purpose
    ]
    if purpose == "preference" and "label" in row:
        needed = ("completion",)
    return all(row[key] not in (None, "", []) for key in needed if key in row)


def _lengths(rows: Sequence[dict[str, Any]], tokenizer: Any, options: Preprocess) -> list[int]:
    """Tokens of each row, of the longer side of a pair. All are encoded at once: one by one takes twice as long."""
    texts = [_texts(row, tokenizer, options) for row in rows]
    flat = [text for some in texts for text in some]
    if not flat:
        return []
    bare = _bare(tokenizer, options)
    tokens = map(len, tokenizer(flat, add_special_tokens=bare)["input_ids"])
    return [max(itertools.islice(tokens, len(some))) for some in texts]


def _texts(row: dict[str, Any], tokenizer: Any, options: Preprocess) -> list[str]:
    """What is measured of a row: the prompt for sampling, with the completion for training, both sides of a pair."""
    if row.get("messages") and options.purpose == "example":
        return [_text(row["messages"], tokenizer, options, reply=False)]
    prompt = row.get("prompt", row.get("text", ""))
    if options.purpose == "prompt" or "prompt" not in row:
        return [_text(prompt, tokenizer, options, reply=True)]
    sides = [key for key in ("completion", "chosen", "rejected") if key in row]
    return [_text(_joined(prompt, row[key]), tokenizer, options, reply=False) for key in sides]


def _joined(prompt: Any, said: Any) -> Any:
    turns = said if isinstance(said, list) else [said] if isinstance(said, dict) else None
    if isinstance(prompt, str) and turns is None:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": said}]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*before, *(turns or [{"role": "assistant", "content": said}])]


def _bare(tokenizer: Any, options: Preprocess) -> bool:
    """Whether texts stand by themselves, without a chat template around them."""
    return options.template == "empty" or not tokenizer.chat_template


def _text(said: Any, tokenizer: Any, options: Preprocess, *, reply: bool) -> str:
    if _bare(tokenizer, options):
        return said if isinstance(said, str) else "\n".join(str(m["content"]) for m in said)
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)


def write_parquet(rows: list[dict[str, Any]], out: Path) -> list[str]:
    """Write rows; columns in their first order, what has no one type as JSON text. Returns the columns' names."""
    import pyarrow  # installed with `datasets`
    import pyarrow.parquet

    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            arrays.append(pyarrow.array(values))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            arrays.append(pyarrow.array([_as_text(value) for value in values]))
    pyarrow.parquet.write_table(pyarrow.table(arrays, names=names), out)
    return names


def _as_text(value: Any) -> str | None:
    return (
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


class _progress:
    """A bar on a terminal, else a line every `interval` rows. `with _progress(n, k) as tell: tell(done)`."""

    def __init__(self, total: int, interval: int) -> None:
        self._total, self._interval, self._next = total, interval, interval
        self._bar: Any = None

    def __enter__(self) -> Any:
        if sys.stderr.isatty():
            from rich.progress import Progress

            self._bar = Progress(transient=True)
            self._bar.start()
            self._task = self._bar.add_task("rows", total=self._total)
        return self.tell

    def tell(self, done: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done)
        elif self._interval and done >= self._next:
            print(f"{done} of {self._total} rows", file=sys.stderr, flush=True)
            self._next = done + self._interval

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
