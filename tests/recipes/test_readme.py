"""recipes/README.md is true: it has every recipe, and every flag and default that it names."""

import dataclasses
import re

from tests.recipes.processes import RECIPES, ROOT
from tests.recipes.stage import recipe

TEXT = (ROOT / "recipes" / "README.md").read_text()
FIELDS = {name: {f.name: f for f in dataclasses.fields(recipe(name).Config)} for name in RECIPES}


def rows(heading: str) -> dict[str, list[str]]:
    """First cell of each row of the table under a heading -> all its cells."""
    part = TEXT.split(heading, 1)[1].split("\n## ", 1)[0]
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {row[0].split("`")[1]: row for row in cells[1:] if "`" in row[0]}


def test_every_recipe_has_a_line_and_a_source():
    linked = re.findall(r"^\| \[`(\w+)\.py`\]\((\w+)\.py\)", TEXT, re.MULTILINE)
    assert sorted(linked) == [(name, name) for name in RECIPES]
    assert sorted(rows("## Defaults")) == [f"{name}.py" for name in RECIPES]


def test_flags_exist():
    known = {field.replace("_", "-") for fields in FIELDS.values() for field in fields} | {"help"}
    for flag in re.findall(r"--([a-z][a-z-]*)", TEXT):
        assert flag in known, flag


def test_learning_rates_are_the_defaults():
    for name, row in rows("## Defaults").items():
        said = re.match(r"(?:lr|actor) (\S+?),", row[1])
        if said:
            assert FIELDS[name.removesuffix(".py")]["lr"].default == float(said[1]), name
    assert FIELDS["ppo"]["critic_lr"].default == 5e-6
    assert (
        FIELDS["gspo"]["clip_low"].default == 3e-4 and FIELDS["gspo"]["clip_high"].default == 4e-4
    )
    assert (FIELDS["dapo"]["group_size"].default, FIELDS["grpo"]["group_size"].default) == (16, 8)
