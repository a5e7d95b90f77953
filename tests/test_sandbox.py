"""Programs in the sandbox: what they may, what they may not, and that nothing of them is left."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from fsdprl import sandbox
from fsdprl.errors import UserError
from fsdprl.rewards import code, code_tests
from fsdprl.sample import Sample
from fsdprl.sandbox import Limits, Ran, run_python

QUICK = Limits(timeout_s=5.0, cpu_s=2, memory_mb=256, disk_mb=8)


def run(program: str, stdin: str = "", limits: Limits = QUICK) -> Ran:
    try:
        return run_python(program, stdin, limits)
    except UserError as error:
        pytest.skip(str(error))


def test_input_output_and_errors():
    ran = run("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3\n")
    assert ran == Ran(0, "6\n", "", False)
    assert run("print('ä'); raise SystemExit(3)").code == 3
    assert "ZeroDivisionError" in run("1 / 0").err
    assert run("import os; os.abort()").code == 128 + 6
    big = "x" * 200_000
    assert run("print(len(input()))", big).out == "200000\n"


ESCAPES = {
    "environment": "import os; print(os.environ); print(open('/proc/1/environ').read())",
    "parent": "import os, signal\nprint(os.getppid())\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "files": "import os; print(os.listdir('HERE')); print(open('HERE/secret').read())",
    "write": "open('/usr/mine', 'w')",
    "root": "import os; os.setuid(0); print('root')",
    "mount": "import ctypes; print(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 or 1/0)",
    "chroot": "import os; os.chroot('/tmp'); print('CANARY')",
    "disk": "f = open('/tmp/big', 'wb')\nfor _ in range(64): f.write(b'0' * (1 << 20))\nf.flush()",
    "memory": "x = bytearray(10 << 30)",
    "descriptors": "import os\nfor fd in range(3, 64):\n  try: print('CANARY', os.read(fd, 9))\n  except OSError: pass",
    "ptrace": "import ctypes; print('CANARY' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else '')",
    "hostname": "import socket; socket.sethostname('mine')",
    "devices": "import os; os.mknod('/tmp/kmsg', 0o20600, os.makedev(1, 11)); print('CANARY')",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_contained(name: str, tmp_path: Path, monkeypatch):
    (tmp_path / "secret").write_text("CANARY")
    monkeypatch.setenv("SECRET_KEY", "CANARY-key")
    ran = run(ESCAPES[name].replace("HERE", str(tmp_path)))
    assert "CANARY" not in ran.out and not ran.timed_out
    if name not in ("environment", "parent", "descriptors", "ptrace"):
        assert ran.code != 0, ran


def test_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('in')")
    assert ran.out == "" and ("Network is unreachable" in ran.err or "refused" in ran.err)


def test_fork_bomb_and_children_end_with_the_program():
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    began = time.monotonic()
    ran = run(bomb, limits=Limits(timeout_s=2.0, processes=8))
    assert ran.timed_out and time.monotonic() - began < 30
    run("import subprocess; subprocess.Popen(['sleep', '987']); print('left')")
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"sleep\x00987" not in entry.read_bytes()
        except OSError:
            continue


def test_time_and_output_are_bounded():
    assert run("import time; time.sleep(60)", limits=Limits(timeout_s=1.0)).timed_out
    spin = run("while True: pass", limits=Limits(timeout_s=30.0, cpu_s=1))
    assert spin.code == 128 + 9 and not spin.timed_out
    flood = run("while True: print('x' * 1000)")
    assert len(flood.out) <= 1 << 20


def test_refuses_without_namespaces_unless_told(tmp_path: Path, monkeypatch):
    denied = tmp_path / "denied.py"
    source = Path(sandbox.__file__).with_name("sandbox_cell.py").read_text()
    denied.write_text(
        source.replace(
            "def _leave() -> None:", "def _leave() -> None:\n    raise OSError('denied')"
        )
    )
    monkeypatch.setattr(sandbox, "_CELL", denied)
    with pytest.raises(UserError, match=r"denied.*not run.*allow_unsandboxed=True"):
        run_python("print(1)")
    monkeypatch.setenv("SECRET_KEY", "CANARY")
    ran = run_python(
        "import os; print(len(os.environ), 'SECRET_KEY' in os.environ)", allow_unsandboxed=True
    )
    assert ran.out.endswith("False\n") and ran.code == 0
    assert run_python("x = bytearray(10 << 30)", allow_unsandboxed=True).code == 1


# ---- the reward ----------------------------------------------------------------------------------

DOUBLE = "Here:\n```python\ndef f(x):\n    return 2 * x\n```\nand\n```python\nn = int(input())\nprint(2 * n)\n```"
FUNCTION = (
    "<think>```python\n1/0\n```</think>```py\ndef f(x):\n    return 2 * x if x < 5 else 0\n```"
)


@pytest.mark.parametrize(
    ("response", "tests", "whole", "share"),
    [
        (FUNCTION, ["assert f(1) == 2", "assert f(7) == 14"], 0.0, 0.5),
        (FUNCTION, '["assert f(1) == 2"]', 1.0, 1.0),
        (FUNCTION, "assert f(1) == 2\nassert f(2) == 4", 1.0, 1.0),
        (DOUBLE, {"inputs": ["4\n", "5\n"], "outputs": ["8\n", "10"]}, 1.0, 1.0),
        (DOUBLE, [{"input": "4", "output": "8"}, {"input": "x", "output": "8"}], 0.0, 0.5),
        ("f = lambda x: 2 * x", ["assert f(1) == 2"], 0.0, 0.0),
        ("```python\nimport os\nos._exit(0)\n```", ["assert f(1) == 2"], 0.0, 0.0),
        ("```python\nwhile True: pass\n```", ["assert True"], 0.0, 0.0),
    ],
)
def test_code_reward(response: str, tests, whole: float, share: float):
    run("pass")
    sample = Sample("", response, tests)
    assert code_tests(sample, timeout_s=2.0) == whole
    assert code_tests(sample, partial=True, timeout_s=2.0) == share


def test_gold_answers_without_tests():
    for answer in ("72", None, [], {"tests": 1}, [1]):
        with pytest.raises(ValueError, match=r"(answer-key|a test is)"):
            code.tests_of(answer)


def test_sandbox_works_off_the_main_thread():
    found: list[Ran] = []
    thread = threading.Thread(
        target=lambda: found.append(run_python("print(1)", allow_unsandboxed=True))
    )
    thread.start()
    thread.join(30)
    assert found[0].out == "1\n" and os.getpid() and sys.platform


AS_SOMEONE = """
import sys
sys.path.insert(0, {source!r})
from fsdprl.errors import UserError
from fsdprl.sandbox import run_python
try:
    print(run_python("import os; print(6 * 7, os.getuid())").out, end="")
    ran = run_python("import socket; socket.create_connection(('127.0.0.1', 9), 1)")
    print("Network is unreachable" in ran.err or "refused" in ran.err)
    print(run_python("print(open('{secret}').read())").code)
except UserError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="changes its user")
def test_the_same_for_a_user_without_privileges(tmp_path: Path):
    """Nobody runs programs in a jail of their own, or not at all."""
    everyones = shutil.which("python3", path="/usr/bin:/bin")  # this one may lie in root's home
    if everyones is None:
        pytest.skip("no python3 in /usr/bin")
    home = Path(tempfile.mkdtemp(prefix="fsdprl-nobody-"))
    package = Path(sandbox.__file__).parent
    (home / "fsdprl").mkdir()
    for name in ("__init__.py", "errors.py", "sandbox.py", "sandbox_cell.py"):
        shutil.copy(package / name, home / "fsdprl" / name)
    (home / "secret").write_text("CANARY")
    subprocess.run(["chmod", "-R", "a+rX", home], check=True)
    script = AS_SOMEONE.format(source=str(home), secret=home / "secret")
    ran = subprocess.run(
        [everyones, "-c", script], capture_output=True, text=True, timeout=60, cwd=home,
        user=65534, group=65534, extra_groups=[],
    )  # fmt: skip
    shutil.rmtree(home)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    if lines and lines[0].startswith("refused:"):
        assert "namespaces" in lines[0] and len(lines) == 1
    else:
        assert lines[0].startswith("42 ") and lines[1] == "True" and lines[2] != "0", ran
        assert "CANARY" not in ran.stdout
