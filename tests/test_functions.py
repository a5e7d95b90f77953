"""Functions travel by name: what may, what may not, and what the refusal says."""

import json
import re
import sys
from functools import partial

import msgspec
import pytest

from fsdprl.errors import UserError
from fsdprl.functions import FunctionRef, function_ref, positional_names, resolve


def scale(value, *, by: float = 2.0, names: list[str] | None = None):
    return value * by


class Tasks:
    @staticmethod
    def double(value):
        return 2 * value

    def method(self, value):
        return value


def loss(logp, advantage, *, clip_low: float, clip_high: float = 0.2):
    return logp * advantage * clip_low * clip_high


def over_the_wire(fn):
    return resolve(
        msgspec.msgpack.decode(msgspec.msgpack.encode(function_ref(fn)), type=FunctionRef)
    )


def test_a_function_arrives_as_itself():
    assert over_the_wire(scale) is scale
    assert over_the_wire(json.dumps)([1]) == "[1]"
    assert over_the_wire(Tasks.double)(4) == 8


def test_keywords_travel_and_the_outer_partial_wins():
    arrived = over_the_wire(partial(partial(scale, by=3.0, names=["a"]), by=5.0))
    assert arrived(2) == 10.0
    assert arrived.keywords == {"by": 5.0, "names": ["a"]}


def test_main_is_the_recipe_of_this_process(monkeypatch):
    recipe = type(sys)("__main__")
    exec_body = {"reward": scale}
    recipe.__dict__.update(exec_body)
    monkeypatch.setitem(sys.modules, "__main__", recipe)
    assert resolve(FunctionRef("__main__", "reward", {"by": 4.0}))(2) == 8.0


def redefined(value):
    return value


first_definition = redefined


def redefined(value):
    return -value


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda value: value, "a lambda"),
        (Tasks().method, "bound method"),
        (partial(scale, 3), "positional arguments (3,)"),
        (partial(scale, by=object()), "by is a object"),
        (first_definition, "is now something else"),
        (3, "is not a function"),
    ],
)
def test_refusals_name_the_function_and_the_remedy(fn, says):
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        function_ref(fn)
    if callable(fn):
        assert "test_functions.py:" in str(caught.value)


def test_a_closure_is_refused():
    offset = 1

    def inner(value):
        return value + offset

    with pytest.raises(UserError, match="defined inside another function"):
        function_ref(inner)


def test_a_name_missing_on_this_rank():
    with pytest.raises(UserError, match="cannot import no_such_plugin"):
        resolve(FunctionRef("no_such_plugin", "reward"))
    with pytest.raises(UserError, match="json:no_such is not a function"):
        resolve(FunctionRef("json", "no_such"))


def test_positional_parameters_are_columns():
    assert positional_names(partial(loss, clip_low=0.1)) == ("logp", "advantage")
    assert positional_names(partial(loss, clip_low=0.1, clip_high=0.3)) == ("logp", "advantage")


def hides(*columns):
    return columns


def hides_keywords(logp, **options):
    return logp, options


def defaulted(logp, beta=0.1):
    return logp, beta


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (hides, "*columns"),
        (hides_keywords, "**options"),
        (defaulted, "'beta' has a default"),
        (loss, "no value for clip_low"),
        (partial(loss, clip_low=0.1, clip_hihg=0.3), "binds clip_hihg"),
        (partial(loss, clip_low=0.1, advantage=0.3), "binds advantage"),
    ],
)
def test_signatures_that_leave_a_question_open(fn, says):
    with pytest.raises(UserError, match=re.escape(says)):
        positional_names(fn)
