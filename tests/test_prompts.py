"""Prompts: rendering, order, length limit, and rows that cannot be prompts."""

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
from datafiles import given, write_lines

from fsdprl.errors import UserError
from fsdprl.prompts import Prompts, plain

ROWS = [{"prompt": f"what is {i}?", "answer": i, "level": {"hard": i > 3}} for i in range(10)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the character tokenizer and its ChatML template."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bare(chat: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = None
    folder = tmp_path_factory.mktemp("bare")
    tokenizer.save_pretrained(folder)
    return str(folder)


def made(folder: Path, rows: list[Any], tokenizer: str, **options: Any) -> Prompts:
    path = write_lines(folder / "rows.jsonl", rows)
    return Prompts(path, tokenizer_path=tokenizer, **options)


def test_a_string_becomes_a_users_message(tmp_path: Path, chat: str):
    prompt = made(tmp_path, ROWS, chat, answer_key="answer").first(3)[2]
    assert prompt.text == "<|im_start|>user\nwhat is 2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.messages == [{"role": "user", "content": "what is 2?"}]
    assert (prompt.answer, prompt.index) == (2, 2)
    assert prompt.meta == {"answer": 2, "level": {"hard": False}}
    assert str(prompt.ids.dtype) == "int32"
    words = tiny.tokenizer()
    assert words.decode(prompt.ids.tolist()) == prompt.text
    assert len(prompt.ids) == len(prompt.text) - 2 * 11 - 9  # three specials are one token each


def test_without_template_or_on_demand_it_is_the_text(tmp_path: Path, chat: str, bare: str):
    for prompts in (
        made(tmp_path, ROWS, bare),
        made(tmp_path, ROWS, chat, prompt_format="raw"),
    ):
        prompt = prompts.first(1)[0]
        assert prompt.text == "what is 0?" and prompt.messages is None and prompt.answer is None
        assert tiny.tokenizer().decode(prompt.ids.tolist()) == "what is 0?"


def test_messages_and_system(tmp_path: Path, chat: str):
    user, bot = {"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}
    own = {"role": "system", "content": "own"}
    rows = [{"prompt": turns} for turns in ([user], [own, user], [user, bot], [user, bot, user])]
    (tmp_path / "system.txt").write_text("be brief\n")
    prompts = made(tmp_path, rows, chat, system=str(tmp_path / "system.txt"))
    start, end = "<|im_start|>", "<|im_end|>\n"
    brief, said = f"{start}system\nbe brief{end}", f"{start}user\nq{end}"
    assert [prompt.text for prompt in prompts.first(4)] == [
        f"{brief}{said}{start}assistant\n",
        f"{start}system\nown{end}{said}{start}assistant\n",
        f"{brief}{said}{start}assistant\nso",  # left open, to be continued
        f"{brief}{said}{start}assistant\nso{end}{said}{start}assistant\n",
    ]
    assert prompts.first(1)[0].messages == [{"role": "system", "content": "be brief"}, user]


def test_another_template(tmp_path: Path, bare: str):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}>")
    assert made(tmp_path, ROWS, bare, chat_template=str(template)).first(1)[0].text == (
        "[what is 0?]>"
    )
    with pytest.raises(UserError, match=r"--chat-template .*x\.jinja: no such file"):
        made(tmp_path, ROWS, bare, chat_template=str(tmp_path / "x.jinja"))
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the chat template refuses .*alternate"):
        made(tmp_path, ROWS, bare, chat_template=refusing)


def test_messages_need_a_template(tmp_path: Path, bare: str, chat: str):
    rows = [{"prompt": [{"role": "user", "content": "q"}]}]
    for tokenizer, options, message in [
        (bare, {}, r"rows\.jsonl:1: field 'prompt' holds messages, but the tokenizer of .*bare.* "
         r"has no chat template; give one with --chat-template FILE"),
        (chat, {"prompt_format": "raw"}, "holds messages, but --prompt-format is raw"),
        (bare, {"prompt_format": "chat"}, "--prompt-format chat: the tokenizer of"),
        (bare, {"system": "be brief"}, "--system needs chat messages, but the tokenizer of"),
        (bare, {"system": "no/such.txt"}, r"--system no/such\.txt: no such file"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=message):
            made(tmp_path, rows, tokenizer, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None, "answer": 1}, r":2: field 'prompt' is null"),
        ({"prompt": 7, "answer": 1}, r":2: field 'prompt' is 7 \(int\), but must be a string or"),
        ({"prompt": "", "answer": 1}, r":2: field 'prompt' is an empty string"),
        ({"prompt": [], "answer": 1}, r":2: field 'prompt' is \[\] \(list\)"),
        ({"promt": "a", "answer": 1}, r":2: no field 'prompt'; the row has promt, answer; did you "
         r"mean --prompt-key promt\?"),
        ({"prompt": "a", "answer": None}, r":2: field 'answer' is null"),
        ({"prompt": "a"}, r":2: no field 'answer'"),
        ({"prompt": [{"content": "a"}], "answer": 1}, r":2: prompt\[0\] is .* a message with a role"),
        ({"prompt": [{"role": "user", "content": 3}], "answer": 1},
         r":2: prompt\[0\]\.content is 3 \(int\), but must be a string"),
        ('{"prompt": ', r":2: not valid JSON"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path: Path, chat: str, row: Any, message: str):
    with pytest.raises(UserError, match=rf"rows\.jsonl{message}"):
        made(tmp_path, [ROWS[0], row, ROWS[1]], chat, answer_key="answer")


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"--model .*nothing: no such folder"):
        made(tmp_path, ROWS, str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"--model \S+: no tokenizer can be loaded: "):
        made(tmp_path, ROWS, str(tmp_path))


def test_order_is_a_function_of_seed_and_cursor(tmp_path: Path, chat: str):
    prompts = made(tmp_path, ROWS, chat, seed=3)
    steps = [[prompt.index for prompt in prompts.at(step, 4)] for step in range(5)]
    flat = [*itertools.chain(*steps)]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10))
    again = made(tmp_path, ROWS, chat, seed=3)
    assert [p.index for p in again.at(3, 4)] == steps[3]
    assert [p.index for p in again.take(6, 9)] == flat[6:15]
    assert [p.index for p in made(tmp_path, ROWS, chat, seed=4).take(0, 10)] != flat[:10]
    assert [p.index for p in prompts.rows([7, 2, 7])] == [7, 2, 7]
    assert len(prompts.first(99)) == 10


def test_split(tmp_path: Path, chat: str):
    prompts = made(tmp_path, ROWS, chat)
    train, held_out = prompts.split(0.2)
    indices = [prompt.index for prompt in held_out.first(99)]
    assert (len(train), len(held_out), len(prompts)) == (8, 2, 10)
    seen = {prompt.index for prompt in train.take(0, 24)}
    assert seen == set(range(10)) - set(indices)
    assert [len(part) for part in prompts.split(0.0)] == [10, 0]
    for share in (-0.1, 1.0):
        with pytest.raises(UserError, match="--eval-share"):
            prompts.split(share)


def test_long_prompts(tmp_path: Path, bare: str, caplog: pytest.LogCaptureFixture):
    rows = [{"prompt": "x" * (11 if i in (5, 150) else 10)} for i in range(200)]
    with caplog.at_level(logging.WARNING):
        prompts = made(tmp_path, rows, bare, max_prompt_length=10)
    assert len(prompts) == 198 and prompts.counts == {"rows": 200, "too_long": 2}
    assert "2 of 200 prompts are longer than --max-prompt-length 10" in caplog.text
    assert "longest: 11" in caplog.text and "rows.jsonl:6" in caplog.text
    assert [prompt.index for prompt in prompts.first(6)] == [0, 1, 2, 3, 4, 6]
    assert {prompt.index for prompt in prompts.take(0, 198)} == set(range(200)) - {5, 150}
    rows[7] = {"prompt": "x" * 12}  # above one per cent
    with pytest.raises(
        UserError,
        match=r"3 of 200 .* \(longest: 12, .*:8\): raise it, or choose --long-prompts drop",
    ):
        made(tmp_path, rows, bare, max_prompt_length=10)
    assert len(made(tmp_path, rows, bare, max_prompt_length=10, long_prompts="drop")) == 197
    with pytest.raises(UserError, match=r"200 of 200 .*no prompt is left"):
        made(tmp_path, rows, bare, max_prompt_length=9, long_prompts="drop")


def test_unknown_words_are_warned_of(tmp_path: Path, bare: str, caplog: pytest.LogCaptureFixture):
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(bare)
    unknown = words.decode([words.unk_token_id])
    # 2 of 7 tokens
    for rows, warned in ((["aaa", "aa\u4e2d", "\u4e2d"], True), (["aaa"], False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made(tmp_path, [{"prompt": text} for text in rows], bare)
        said = f"29 % of the prompts' tokens are unknown to the tokenizer and read as {unknown}"
        assert (f"{said}, the first in {tmp_path}/rows.jsonl:2" in caplog.text) == warned


def test_plain_values():
    import datetime
    import decimal

    value = {"when": datetime.date(2026, 1, 2), 3: (1, 2**70, b"x", None, decimal.Decimal("0.50"))}
    assert plain(value, "f:1") == {"when": "2026-01-02", "3": [1, str(2**70), b"x", None, "0.50"]}
    with pytest.raises(UserError, match="f:1: a object cannot travel"):
        plain(object(), "f:1")


def test_gsm8k_loads(tmp_path: Path, chat: str):
    lines = given("gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:1000]
    prompts = made(tmp_path, lines, chat, prompt_key="question", answer_key="answer")
    assert len(prompts) == 1000
    for prompt in prompts.at(2, 3):
        assert prompt.answer.rpartition("####")[2].strip()
        assert prompts.tokenizer.encode(prompt.text, add_special_tokens=False) == list(prompt.ids)
