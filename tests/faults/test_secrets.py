"""Row 35: secrets that a run is given are in nothing that it says or writes."""

import json
import secrets
from pathlib import Path

import pytest

from tests.faults import trial

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def places(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("ranks", "end"),
    [
        (1, "raised"),
        pytest.param(1, "finished", marks=pytest.mark.faults),
        pytest.param(2, "finished", marks=pytest.mark.faults),
        pytest.param(2, "raised", marks=pytest.mark.faults),
    ],
)
def test_row_35_secrets_are_nowhere(
    ranks: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Canaries in the environment, the command line, a URL, the config and the prompts; in a traceback as well."""
    known = secrets.token_hex(12)
    others = [f"hf_{secrets.token_hex(16)}", f"sk-{secrets.token_hex(16)}"]
    others += [secrets.token_hex(12) for _ in range(3)]
    monkeypatch.setenv("HF_TOKEN", known)
    monkeypatch.setenv("CANARY_API_KEY", others[2])
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{i} {known} {others[1]}", "answer": others[2]} for i in range(240)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "config.toml"
    config.write_text(f'system = "use {others[0]} at https://me:{others[3]}@host/"\n')
    reward = f"tests.faults.rewards:{'keyed' if end == 'finished' else 'reveals'}"
    reward += f"(url='http://me:{others[3]}@host/v1', api_key='{others[4]}')"
    out = tmp_path / "run"
    flags = {"data": data, "config": config, "rewards": reward, "max-prompt-length": 200}
    ended = trial.run(out, ranks, **flags)
    assert (ended.code == 0) == (end == "finished"), ended.said
    assert end == "finished" or "[HF_TOKEN]" in ended.said, ended.said
    for canary in (known, *others):
        assert canary not in ended.said
        for path in places(out):
            assert canary.encode() not in path.read_bytes(), path
