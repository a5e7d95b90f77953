"""Examples: which tokens are learnt, to the character, and how rows are dropped and ordered."""

import itertools
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from datafiles import write_lines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fsdprl.data.example_rows import ExampleFormat, ExampleRows, TokenRow
from fsdprl.errors import UserError
from fsdprl.examples import Examples
from fsdprl.prompts import Prompts

# As Qwen3's template does: earlier answers lose their thinking, the last one gets an empty one.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "hello <b>"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "héllo, again  "},
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE that merges whatever stands together, newlines too."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    text = ["hello", "there", "\n\n", "be kind", "again", "user", "assistant", "system", "why"] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=list(tiny.SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(text, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=tiny.CHATML,
    )
    folder = tmp_path_factory.mktemp("words")
    made.save_pretrained(folder)
    return str(folder)


def form(folder: Path, rows: list[Any], words: str, **options: Any) -> ExampleFormat:
    path = write_lines(folder / "sft.jsonl", rows)
    return ExampleFormat(path, words, **{"max_length": 4096} | options)


def learnt(source: ExampleRows, row: TokenRow) -> list[str]:
    """The text of each stretch of learnt tokens."""
    assert row.ids.dtype == np.int32 and row.mask.dtype == bool and row.mask.shape == row.ids.shape
    assert not row.mask[0]
    edges = np.flatnonzero(np.diff(row.mask.astype(int), prepend=0, append=0))
    return [
        source.tokenizer.decode(row.ids[start:end].tolist())
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.parametrize("template", ["", TAGGED])
def test_the_assistants_turns_are_learnt(tmp_path: Path, words: str, template: str):
    rows = [{"messages": TURNS}, {"messages": TURNS[1:3]}]
    source = ExampleRows(form(tmp_path, rows, words, chat_template=template))
    both, single = source.rows([0, 1])
    assert learnt(source, both) == ["hello <b><|im_end|>", "héllo, again  <|im_end|>"]
    assert learnt(source, single) == ["hello <b><|im_end|>"]
    text = source.tokenizer.decode(both.ids.tolist())
    assert text == source.tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert both.ids.tolist() == source.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", ["", TAGGED, FORGETFUL])
def test_only_the_last_turn(tmp_path: Path, words: str, template: str):
    rows = [{"messages": TURNS}]
    options = {"chat_template": template, "assistant_turns": "last"}
    source = ExampleRows(form(tmp_path, rows, words, **options))
    think = "<think>\n\n</think>\n\n" if template == FORGETFUL else ""
    assert learnt(source, source.rows([0])[0]) == [f"{think}héllo, again  <|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path, words: str):
    rows = [{"messages": TURNS[:3]}, {"messages": TURNS}]
    source = ExampleRows(form(tmp_path, rows, words, chat_template=FORGETFUL))
    assert learnt(source, source.rows([0])[0]) == ["<think>\n\n</think>\n\nhello <b><|im_end|>"]
    with pytest.raises(
        UserError, match=r"sft\.jsonl:2: .*message 2 differently .*--assistant-turn"
    ):
        source.rows([1])


def test_a_token_across_the_start_is_not_learnt(tmp_path: Path, words: str):
    """A newline in front of the answer melts into the generation prompt's."""
    turns = [TURNS[1], {"role": "assistant", "content": "\nhello"}]
    source = ExampleRows(form(tmp_path, [{"messages": turns}], words))
    assert "\n\n" in {source.tokenizer.decode([i]) for i in source.rows([0])[0].ids.tolist()}
    assert learnt(source, source.rows([0])[0]) == ["hello<|im_end|>"]


@pytest.mark.parametrize("as_messages", [False, True])
def test_completions(tmp_path: Path, words: str, as_messages: bool):
    """Prompt and completion; in chat form the prompt's tokens are those that Prompts samples from."""
    row: dict[str, Any] = {"prompt": "why?", "completion": "hello there"}
    if as_messages:
        row = {
            "prompt": [{"role": "user", "content": "why?"}],
            "completion": [{"role": "assistant", "content": "hello there"}],
        }
    source = ExampleRows(form(tmp_path, [row], words, system="be kind"))
    example = source.rows([0])[0]
    assert source.kind == "completion" and learnt(source, example) == ["hello there<|im_end|>"]
    path = str(tmp_path / "sft.jsonl")
    prompt = Prompts(path, tokenizer_path=words, system="be kind").first(1)[0]
    assert example.ids[: len(prompt.ids)].tolist() == prompt.ids.tolist()
    assert not example.mask[: len(prompt.ids)].any() and example.mask[len(prompt.ids)]


def test_only_the_completions_turns_are_learnt(tmp_path: Path, words: str):
    rows = [{"prompt": TURNS[:4], "completion": TURNS[4:]}]
    for template in ("", TAGGED):
        source = ExampleRows(form(tmp_path, rows, words, chat_template=template))
        assert learnt(source, source.rows([0])[0]) == ["héllo, again  <|im_end|>"]


def test_raw_texts(tmp_path: Path, words: str):
    rows = [{"prompt": "what ", "completion": "hello"}]
    source = ExampleRows(form(tmp_path, rows, words, prompt_format="raw"))
    example = source.rows([0])[0]
    encode = source.tokenizer.encode
    assert example.ids.tolist() == [
        *encode("what "),
        *encode("hello"),
        source.tokenizer.eos_token_id,
    ]
    assert learnt(source, example) == ["hello<|im_end|>"]
    source = ExampleRows(form(tmp_path, [{"text": "x hello"}], words))
    assert learnt(source, source.rows([0])[0]) == [" hello<|im_end|>"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a"}], r":1: needs a field 'messages', or 'prompt' and 'completion', or"),
        ([{"messages": TURNS}, {"prompt": "a"}], r":2: no field 'messages'"),
        ([{"messages": "hi"}], r":1: field 'messages' is a string, not messages"),
        ([{"messages": TURNS[:2]}], r":1: no assistant message to learn from"),
        ([{"messages": TURNS[2:4]}], r":1: the conversation starts with the assistant's"),
        ([{"prompt": "a", "completion": ""}], r":1: field 'completion' is an empty string"),
        ([{"prompt": "a", "completion": 3}], r":1: field 'completion' is 3 \(int\)"),
        ([{"prompt": "a", "completion": None}], r":1: field 'completion' is null"),
        ([{"text": 5}], r":1: field 'text' is a int, but must be text"),
        ([{"text": "a"}, "{"], r":2: not valid JSON"),
    ],
)
def test_a_bad_row_is_named_before_any_rank_reads_it(
    tmp_path: Path, words: str, rows: list[Any], message: str
):
    with pytest.raises(UserError, match=rf"sft\.jsonl{message}"):
        Examples(form(tmp_path, rows, words))


def test_ranks_must_read_the_same_file(tmp_path: Path, words: str):
    examples = Examples(form(tmp_path, [{"text": "hello"}], words))
    sent = asdict(examples.form)
    assert ExampleFormat(**sent) == examples.form
    assert len(ExampleRows(ExampleFormat(**sent))) == 1
    write_lines(tmp_path / "sft.jsonl", [{"text": "hallo"}])
    with pytest.raises(UserError, match=r"sft\.jsonl: this rank reads another file than rank 0"):
        ExampleRows(ExampleFormat(**sent))


def lengths(examples: Examples) -> Examples:
    """As the ranks do it: each measures its share of the rows."""
    source = ExampleRows(ExampleFormat(**asdict(examples.form)))
    parts = [source.measure(range(rank, len(source), 2)) for rank in range(2)]
    both = [np.empty(len(source), dtype=np.int32) for _ in range(2)]
    for rank, part in enumerate(parts):
        for whole, values in zip(both, part, strict=True):
            whole[rank::2] = values
    return examples.measured(*both)


# Raw prompts of 1, 2, ..., 8 tokens, an x to learn and the end token.
RAW = [{"prompt": "z" * (i + 1), "completion": "q"} for i in range(8)]


def test_over_length_policies(tmp_path: Path, words: str, caplog: pytest.LogCaptureFixture):
    options: dict[str, Any] = {"prompt_format": "raw", "max_length": 6}
    with pytest.raises(
        UserError, match=r"4 of 8 rows .*--max-length 6 .*longest: 10, .*:8\): rais"
    ):
        lengths(Examples(form(tmp_path, RAW, words, **options)))
    dropping = Examples(form(tmp_path, RAW, words, over_length="drop", **options))
    with caplog.at_level(logging.WARNING):
        kept = lengths(dropping)
    assert kept.indices.tolist() == [0, 1, 2, 3] and len(dropping) == 8
    assert kept.counts == {"rows": 8, "too_long": 4, "nothing_to_learn": 0}
    assert "of 8 rows 4 are longer than --max-length 6" in caplog.text
    assert kept.tokens is not None and kept.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]

    cutting = form(tmp_path, RAW, words, over_length="truncate", **options)
    kept = lengths(Examples(cutting))  # a prompt of 6 tokens leaves nothing to learn
    assert kept.indices.tolist() == [0, 1, 2, 3, 4]
    assert kept.counts == {"rows": 8, "too_long": 0, "nothing_to_learn": 3}
    rows = ExampleRows(cutting).rows([3, 4, 7])
    assert [len(row.ids) for row in rows] == [6, 6, 6]
    assert [int(row.mask.sum()) for row in rows] == [2, 1, 0]
    with pytest.raises(UserError, match=r"sft\.jsonl:8: 10 tokens, more than --max-length 6"):
        ExampleRows(form(tmp_path, RAW, words, **options)).rows([0, 7])
    with pytest.raises(UserError, match="no row is left"):
        options["max_length"] = 2
        lengths(Examples(form(tmp_path, RAW, words, over_length="drop", **options)))


def test_order_and_split(tmp_path: Path, words: str):
    examples = Examples(form(tmp_path, [{"text": f"hello {i}"} for i in range(10)], words), seed=5)
    steps = [examples.at(step, 4).tolist() for step in range(5)]
    flat = [*itertools.chain(*steps)]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert examples.take(6, 9).tolist() == flat[6:15]
    train, held_out = examples.split(0.2)
    assert len(held_out) == 2 and {*train.indices, *held_out.indices} == set(range(10))
    assert set(train.take(0, 8)) == set(train.indices)
    assert examples.first(3).tolist() == [0, 1, 2]
    assert examples.preview(0).mask.sum() == len(examples.preview(0).ids) - 1
    with pytest.raises(UserError, match="--eval-share"):
        examples.split(1.0)
