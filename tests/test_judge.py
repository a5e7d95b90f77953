"""The judge, against a server on this machine that answers as told."""

import asyncio
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fsdprl.errors import UnscoredError, UserError
from fsdprl.functions import function_ref
from fsdprl.grading import Grader, RewardError
from fsdprl.options import RewardOptions
from fsdprl.rewards import judge
from fsdprl.rewards.names import named
from fsdprl.sample import Sample


class Handler(BaseHTTPRequestHandler):
    """Answers from `server.script`: a status, or what the judge says; the last one again and again."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append((self.path, dict(self.headers), body))
            asked = body["messages"][0]["content"]
            script = self.server.script
            step = (
                script(asked)
                if callable(script)
                else script.pop(0)
                if len(script) > 1
                else script[0]
            )
        if step == "hang":
            self.server.over.wait(20)
            return
        status, text = (step, "no") if isinstance(step, int) else (200, step)
        if status == 200 and not text.startswith("{"):
            text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.seen, made.lock, made.script, made.over = (
        [],
        threading.Lock(),
        ["Score: 7"],
        threading.Event(),
    )
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    made.server_close()


def ask(server, sample=None, **settings) -> float:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    settings = {"url": url, "model": "m", "wait_s": 0.001, "request_timeout_s": 1.0} | settings
    return asyncio.run(judge(sample or Sample("2+2?", "{4}", "4"), **settings))


def test_the_last_score_counts_and_the_request_is_openais(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "canary")
    server.script = ["Score: 2? No.\n**Score:** 7.5"]
    assert ask(server, key_variable="JUDGE_KEY") == 0.75
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer canary"
    assert body["model"] == "m" and body["messages"][0]["role"] == "user"
    assert "2+2?" in body["messages"][0]["content"] and "{4}" in body["messages"][0]["content"]
    assert ask(server, prompt="{response}|{answer}", scale=5.0) == 1.0
    assert server.seen[1][2]["messages"][0]["content"] == "{4}|4"


@pytest.mark.parametrize(
    "trouble", [429, 500, 503, "{not json", '{"choices": []}', "I cannot say", "hang"]
)
def test_trouble_is_retried(server, trouble):
    server.script = [trouble, trouble, "Score: 10"]
    assert ask(server) == 1.0
    assert len(server.seen) == 3


def test_no_verdict_is_unscored_and_never_zero(server):
    server.script = [500]
    with pytest.raises(UnscoredError, match="no score in 3 tries: status 500"):
        ask(server, retries=2)
    assert len(server.seen) == 3
    with pytest.raises(UnscoredError, match="refused"):
        ask(server, url="http://127.0.0.1:9/v1", retries=1)


def test_mistakes_end_at_once(server, monkeypatch):
    server.script = [401]
    with pytest.raises(UserError, match="answers 401"):
        ask(server)
    assert len(server.seen) == 1
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UserError, match="needs an endpoint"):
        asyncio.run(judge(Sample("", ""), model="m"))


def test_in_the_reward_processes_concurrently_with_masks(server):
    """40 answers in one process; two of them get no verdict."""
    server.script = lambda asked: (
        503 if "answer 3." in asked or "answer 33." in asked else f"Score: {len(asked)}"
    )
    samples = [Sample("q", f"answer {i}.") for i in range(40)]
    fn = partial(judge, url=f"http://127.0.0.1:{server.server_port}/v1", model="m", wait_s=0.001,
                 prompt="{response}", scale=100.0)  # fmt: skip
    with Grader(RewardOptions(timeout_s=20.0)) as grader:
        graded = grader.grade(function_ref(fn), samples)
        assert [failure.index for failure in graded.failures] == [3, 33]
        assert "status 503" in graded.failures[0].cause
        assert graded.scores[3] is None and graded.scores[0] == pytest.approx(0.09)
        assert graded.scores[10] == pytest.approx(0.1)
        server.script = [503]
        with pytest.raises(RewardError, match="failed on 3 of 40"):
            grader.grade(function_ref(fn), samples)


def test_by_name_on_the_command_line():
    fn = named("judge(url='http://h/v1', model='m')")
    assert fn.keywords == {"url": "http://h/v1", "model": "m"}
