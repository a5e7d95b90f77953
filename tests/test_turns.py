"""Between two turns: the chat template's own text, never a second encoding; templates that rewrite are found out."""

import copy
import json

import pytest
import tiny

from fsdprl.conversation import Conversation
from fsdprl.data.turns import Turns
from fsdprl.errors import UserError
from fsdprl.prompts import Prompts
from fsdprl.tools import calculator, call_tools, environment, named_tool, schemas

QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\nTOOLS ' }}
{%- for tool in tools %}{{ tool.function.name }}{% endfor %}{{ '<|im_end|>\n' }}{% endif -%}
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set parts = m.content.split('</think>') -%}
{{ '<|im_start|>assistant\n' }}
{%- if parts | length > 1 and loop.index0 > ns.last -%}
{{ '<think>\n' + parts[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' }}
{%- endif -%}
{{ parts[-1].lstrip('\n') + '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
"""What Qwen3's template does: thinking stays behind the last user's message only; a tool's is none."""

NO_TOOLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "[assistant]"
)
QUESTION = [{"role": "user", "content": "2+2?"}]
ASKED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def turns(template: str | None = None, **options) -> Turns:
    tokenizer = copy.copy(tiny.tokenizer())
    if template:
        tokenizer.chat_template = template
    return Turns(tokenizer, **options)


def between(known: Turns, said: str, role: str, end: str = "<|im_end|>", heard: str = "4"):
    messages = [*QUESTION, {"role": "assistant", "content": said}]
    return known.between(messages, [{"role": role, "content": heard}], ASKED + said + end, end)


def test_only_what_stands_between_is_encoded():
    found = between(turns(), "five", "user", heard="sure?")
    text = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert found.text == text and not found.rewritten
    assert found.ids == tiny.tokenizer()(text)["input_ids"]
    assert tiny.tokenizer().decode(found.ids) == text


def test_a_turn_without_its_end_token_gets_the_templates_behind_it():
    found = between(turns(), "5 </call>", "user", end="")
    assert found.text.startswith("<|im_end|>\n<|im_start|>user") and not found.rewritten
    foreign = between(
        turns(), "5", "user", end="<|endoftext|>"
    )  # not what the template ends a turn with
    assert foreign.text.startswith("<|im_end|>\n") and foreign.rewritten


def test_a_text_prompt_is_continued_as_it_is():
    found = turns(NO_TOOLS).between(None, [{"role": "tool", "content": " = 4\n"}], "2+2", "")
    assert found.text == " = 4\n" and found.ids == tiny.tokenizer()(" = 4\n")["input_ids"]


def test_thinking_that_the_template_keeps():
    found = between(turns(QWEN3), "<think>\nhm\n</think>\n\nfive", "tool")
    assert not found.rewritten
    assert found.text.startswith("\n<|im_start|>user\n<tool_response>\n4\n")


def test_thinking_that_the_template_takes_out_is_refused_or_kept():
    with pytest.raises(UserError, match=r"takes the thinking out.*--turns.history keep"):
        between(turns(QWEN3), "five", "user")
    kept = turns(QWEN3, history="keep")
    assert between(kept, "<think>\nhm\n</think>\n\nfive", "user").rewritten
    assert not between(kept, "five", "user").rewritten  # nothing was lost here
    assert between(kept, "<think>\n hm</think>five", "tool").rewritten  # another white space


def test_templates_without_the_role():
    with pytest.raises(UserError, match="leaves out messages of role 'tool'"):
        between(turns(NO_TOOLS), "five", "tool")
    strict = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"refuses a conversation of .*tool: no tools here"):
        between(turns(strict), "five", "tool")


def test_prompts_tell_of_tools_if_the_template_does(tmp_path, caplog):
    file, template = tmp_path / "asked.jsonl", tmp_path / "template.jinja"
    file.write_text('{"prompt": "2+2?"}\n')
    template.write_text(QWEN3)
    options = {"tokenizer_path": str(tiny.checkpoint("qwen3")), "tools": ["calculator"]}
    (prompt,) = Prompts(str(file), chat_template=str(template), **options).first(1)
    assert (
        prompt.text == "<|im_start|>system\nTOOLS calculator<|im_end|>\n" + ASKED and prompt.tools
    )
    assert not caplog.records
    Prompts(str(file), **options)
    assert "says nothing of tools" in caplog.text


def test_tools_are_told_as_in_the_prompt():
    known = turns(QWEN3, tools=schemas(["calculator"]))
    found = known.between(
        [*QUESTION, {"role": "assistant", "content": "x"}],
        [{"role": "tool", "content": "4"}],
        "<|im_start|>system\nTOOLS calculator<|im_end|>\n" + ASKED + "x<|im_end|>",
        "<|im_end|>",
    )
    assert not found.rewritten


# ---- tools


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def conversation(said: str, **fields) -> Conversation:
    messages = [*QUESTION, {"role": "assistant", "content": said}]
    return Conversation("", messages, **({"turn": 1, "turns_left": 3, "tokens_left": 99} | fields))


def heard(said: str, **settings) -> tuple[list[str], dict[str, int]]:
    talk = conversation(said)
    answer = call_tools(talk, tools=["calculator", "python"], **settings)
    return [message["content"] for message in answer or []], dict(talk.counts)


def test_calls_are_run_and_their_results_returned():
    said = (
        "let me see "
        + call("calculator", expression="12*(3+4)")
        + call("python", code="print(6*7)")
    )
    assert heard(said) == (["84", "42"], {"tool_calls": 2})
    assert call_tools(conversation("the answer is 84"), tools=["calculator"]) is None
    for over in ({"turns_left": 0}, {"truncated": True}, {"tokens_left": 0}):
        assert call_tools(conversation(said, **over), tools=["calculator"]) is None


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (call("search", query="x"), "Error: there is no tool 'search'; there are calculator, python"),
        (call("calculator", wrong=1), "Error: calculator: missing a required argument: 'expression'"),
        ("<tool_call>not json</tool_call>", "Error: a call is "),
        (call("calculator", expression="1/0"), "Error: division by zero"),
        (call("calculator", expression="__import__('os')"), "Error: \"__import__('os')\" is not arithmetic"),
        (call("python", code="raise KeyError('k')"), "Error: KeyError: 'k'"),
        (call("calculator", expression=3), "Error: TypeError"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_told_to_the_model(said: str, text: str):
    (told,), counts = heard(said)
    assert told.startswith(text) and counts == {"tool_calls": 1, "tool_errors": 1}


def test_limits_of_calls_and_results():
    told, counts = heard(call("calculator", expression="1+1") * 3, max_calls=2)
    assert told[:2] == ["2", "2"] and told[2] == "Error: no more than 2 calls are allowed"
    assert counts == {"tool_calls": 3, "tool_errors": 1}
    (long,), _ = heard(call("python", code="print('a' * 50 + 'b' * 50)"), max_result=10)
    assert long == "aaaaa ... bbbbb"


def test_calculator():
    expected = {
        "2**10": "1024",
        "7/2": "3.5",
        "-(3-10)%4": "3",
        "6/3": "2",
        "1.5*2": "3",
        "10**12//7": "142857142857",
    }
    assert {e: calculator(e) for e in expected} == expected
    for wrong in (
        "9**9**9",
        "a+1",
        "1+",
        "2**(1/2)*1j",
        "(" * 300 + ")" * 300,
        "1" * 500,
    ):
        with pytest.raises(ValueError):
            calculator(wrong)


def test_tools_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        'async def double(x: int) -> int:\n    """Double it.\n\n    Args:\n        x: What.\n    """\n'
        "    return 2 * x\n"
        "def bare(x):\n    return x\n"
    )
    (schema,) = schemas([f"{file}:double"])
    assert schema["function"]["parameters"]["properties"]["x"] == {
        "type": "integer",
        "description": "What.",
    }
    told = call_tools(conversation(call("double", x=21)), tools=[f"{file}:double"])
    assert told == [{"role": "tool", "name": "double", "content": "42"}]
    assert environment(["calculator"], max_calls=3).keywords["max_calls"] == 3
    for name, text in (
        ("calculater", "known are calculator, python"),
        (f"{file}:none", "has no function none"),
        ("no.such:fn", "cannot import"),
    ):
        with pytest.raises(UserError, match=text):
            named_tool(name)
    with pytest.raises(UserError, match=r"--tools .*bare: .*docstring"):
        schemas([f"{file}:bare"])
