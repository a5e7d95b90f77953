"""A language model as judge, over any endpoint that speaks OpenAI's chat completions."""

import asyncio
import json
import os
import random
import re
import urllib.error
import urllib.request
from typing import Any

from fsdprl.errors import UnscoredError, UserError
from fsdprl.sample import Sample

PROMPT = """Judge an answer to a question.

Question:
{prompt}

Reference answer (may be empty):
{answer}

Answer to judge:
{response}

Is the answer correct and helpful? Think briefly, then end with one line "Score: N", 0 (useless) to 10 (perfect)."""

_SCORE = re.compile(r"score\W*?(-?\d+(?:\.\d+)?)", re.IGNORECASE)


async def judge(
    sample: Sample,
    *,
    url: str = "",
    model: str = "",
    prompt: str = PROMPT,
    scale: float = 10.0,
    retries: int = 4,
    wait_s: float = 1.0,
    request_timeout_s: float = 20.0,
    max_tokens: int = 512,
    key_variable: str = "OPENAI_API_KEY",
) -> float:
    """What a judge says after its last "Score:", divided by `scale`, between 0 and 1.

    url: of the endpoint up to /v1 (empty: $OPENAI_BASE_URL). prompt: what the judge is asked, with {prompt},
    {response} and {answer} filled in. The key is read from the environment variable `key_variable`, never from
    settings. Answers 408, 409, 429 and 5xx, no connection, no answer within request_timeout_s, broken JSON and a
    verdict without a score are retried with waits of wait_s, 2 wait_s, 4 wait_s and so on, or what Retry-After says.

    Raises UnscoredError when no try gave a score (the sample is then masked, never 0), UserError for a missing url
    or model and for an answer that no retry can mend (401, 404).
    """
    url = url or os.environ.get("OPENAI_BASE_URL", "")
    if not url or not model:
        raise UserError(
            'the judge needs an endpoint and a model: --rewards \'judge(url="http://host:port/v1", model="name")\''
        )
    said = prompt
    for name, value in (
        ("prompt", sample.prompt),
        ("answer", "" if sample.answer is None else str(sample.answer)),
        ("response", sample.response),
    ):
        said = said.replace("{" + name + "}", value)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": said}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    request = urllib.request.Request(
        url.rstrip("/") + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    if key := os.environ.get(key_variable):
        request.add_header("Authorization", f"Bearer {key}")
    reason = ""
    for attempt in range(retries + 1):
        reply, reason, wait = await asyncio.to_thread(_asked, request, request_timeout_s)
        if reply is not None:
            scores = _SCORE.findall(reply)
            if scores:
                return min(1.0, max(0.0, float(scores[-1]) / scale))
            reason = f"no score in {reply[-80:]!r}"
        if attempt < retries:
            pause = wait_s * 2**attempt * random.uniform(0.75, 1.25)
            await asyncio.sleep(max(wait, pause) if wait_s else 0.0)
    raise UnscoredError(f"the judge gave no score in {retries + 1} tries: {reason}")


def _asked(request: urllib.request.Request, timeout_s: float) -> tuple[str | None, str, float]:
    """(what the judge says, why it does not, seconds after which to try again)."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            reply: Any = json.load(answer)["choices"][0]["message"]["content"]
            return (reply, "", 0.0) if isinstance(reply, str) else (None, "an empty message", 0.0)
    except urllib.error.HTTPError as error:
        if error.code not in (408, 409, 429) and error.code < 500:
            text = error.read(200).decode("utf-8", "replace")
            raise UserError(
                f"the judge at {request.full_url} answers {error.code}: {text}"
            ) from None
        after = error.headers.get("Retry-After", "")
        return None, f"status {error.code}", min(float(after), 60.0) if after.isdigit() else 0.0
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return None, f"an answer of another form ({type(error).__name__})", 0.0
    except OSError as error:
        return None, str(error) or type(error).__name__, 0.0
