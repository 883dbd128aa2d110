"""``onecopy launch`` with real processes: environment, arguments, failures told last, ports, interruption."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


def launch(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onecopy.cli", "launch", *args]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)


def script(folder: Path, body: str, name: str = "job.py") -> str:
    (folder / name).write_text(textwrap.dedent(body))
    return name


def test_every_rank_gets_torchruns_environment_and_the_arguments(tmp_path: Path) -> None:
    body = """
        import json, os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        found = {name: os.environ[name] for name in names}
        found |= {"args": sys.argv[1:], "first_on_path": sys.path[0], "main": __name__, "torch": "torch" in sys.modules}
        open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(found))
    """
    (tmp_path / "sub").mkdir()
    path = script(tmp_path, body, "sub/job.py")
    done = launch("--nproc", "2", path, "--flag", "-x", "--nproc", "7", cwd=tmp_path, OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert found["args"] == ["--flag", "-x", "--nproc", "7"]
        assert found["first_on_path"] == str(tmp_path / "sub") and found["main"] == "__main__"
        assert found["OMP_NUM_THREADS"] == "3", "a number the user chose stays"
        assert found["MASTER_PORT"] != "29500"
        assert not found["torch"], "nothing is imported for the script"


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    script(tmp_path, "import sys\nprint('module', __name__, sys.argv[1:])", "job.py")
    done = launch("--nproc", "1", "-m", "job", "a", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "module __main__ ['a']\n", done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-m", "no.module"], "error: --module no.module cannot be run: .*No module named 'no'"),
        (["-m", "folder"], "error: --module folder cannot be run: .*'folder' is a package and cannot be directly executed"),
        (["-m", "job.py"], "error: --module job.py cannot be run: .*Try using 'job' instead of 'job.py'"),
        (["missing.py"], "error: script 'missing.py' does not exist; a module is run with --module missing.py"),
    ],
)
def test_nothing_to_run_is_one_line(args: list[str], says: str, tmp_path: Path) -> None:
    script(tmp_path, "")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").touch()
    done = launch("--nproc", "2", *args, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and re.match(says, done.stderr), done.stderr


@pytest.mark.parametrize("module", ["job", "folder.job"])
def test_an_import_that_fails_in_the_users_code_keeps_its_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    script(tmp_path, "import nowhere" if module == "job" else "", "job.py")
    script(tmp_path, "import nowhere", "folder/__init__.py")
    script(tmp_path, "", "folder/job.py")
    done = launch("--nproc", "1", "-m", module, cwd=tmp_path)
    assert done.returncode == 1 and "import nowhere" in done.stderr
    assert done.stderr.strip().endswith("ModuleNotFoundError: No module named 'nowhere'"), done.stderr


def test_the_end_of_a_script_is_that_of_a_program(tmp_path: Path) -> None:
    """Threads are waited for, pools are ended, exit functions run, output is flushed, ``sys.exit()`` is success."""
    body = """
        import atexit, concurrent.futures, sys, threading, time
        atexit.register(print, "exit function")
        pool = concurrent.futures.ThreadPoolExecutor(1)
        pool.submit(print, "pool")
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        sys.exit()
    """
    done = launch("--nproc", "1", script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.split("\n") == ["pool", "thread", "exit function", ""], done.stderr


FAILING = """
    import os, time
    def broken(rank):
        raise ValueError(f"rank {rank} broke")
    if os.environ["RANK"] == "1":
        broken(1)
    time.sleep(60)
"""


def test_the_failing_rank_and_its_traceback_come_last(tmp_path: Path) -> None:
    done = launch("--nproc", "2", "--json", script(tmp_path, FAILING), cwd=tmp_path)
    assert done.returncode == 1
    head, *trace = done.stderr.strip().splitlines()[-9:]
    assert head.startswith("error: rank 1 (pid ") and head.endswith("failed first:")
    assert trace[0] == "Traceback (most recent call last):" and trace[-1] == "ValueError: rank 1 broke"
    assert "job.py" in trace[1], "the first frame shown is the script's own"
    told = json.loads(done.stdout)
    assert told["ok"] is False and told["failure"]["rank"] == 1 and told["failure"]["message"] == "rank 1 broke"


def test_the_rank_that_failed_first_is_blamed(tmp_path: Path) -> None:
    # Rank 0 fails because rank 1 did, a moment later, as in a broken collective.
    body = """
        import os, time
        if os.environ["RANK"] == "1":
            open("mark", "w").close()
            raise RuntimeError("cause")
        while not os.path.exists("mark"):
            time.sleep(0.001)
        time.sleep(0.2)
        raise RuntimeError("consequence")
    """
    done = launch("--nproc", "2", script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.strip().endswith("RuntimeError: cause"), done.stderr


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [("sys.exit(7)", 7, "exit code 7"), ("os.kill(os.getpid(), 11)", 139, "signal 11 (SIGSEGV)")],
)
def test_a_rank_without_a_traceback_is_told_by_its_ending(ending: str, code: int, message: str, tmp_path: Path) -> None:
    body = f"import os, sys\nif os.environ['RANK'] == '0':\n    {ending}"
    done = launch("--nproc", "2", script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == code
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: rank 0") and last.endswith(message)


def test_a_given_port_is_used_and_a_taken_one_refused(tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nprint(os.environ['MASTER_PORT'])")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        done = launch("--nproc", "1", "--master_port", port, path, cwd=tmp_path)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.count("\n") == 1 and f"--master_port {port} is taken by pid {os.getpid()}" in done.stderr
    done = launch("--nproc", "1", "--master_port", port, path, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == f"{port}\n", done.stderr


def test_two_nodes_of_one_machine_form_one_job(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=2\n")
    body = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        open("rank" + os.environ["RANK"], "w").write(str(int(ranks)))
        dist.destroy_process_group()
    """
    path = script(tmp_path, body)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["launch", "--hostfile", "hosts", "--master_port", port]
    nodes = [
        subprocess.Popen([sys.executable, "-m", "onecopy.cli", *options, "--node_rank", str(n), path], cwd=tmp_path)
        for n in range(2)
    ]
    assert [node.wait(100) for node in nodes] == [0, 0]
    assert {p.name: p.read_text() for p in tmp_path.glob("rank*")} == {"rank0": "3", "rank1": "3", "rank2": "3"}


def test_interruption_is_one_line_and_ends_the_ranks(tmp_path: Path) -> None:
    body = "import os, time\nopen('pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(90)"
    command = [sys.executable, "-m", "onecopy.cli", "launch", "--nproc", "2", script(tmp_path, body)]
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(pids := [p for p in tmp_path.glob("pid*") if p.read_text()]) < 2:
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130 and err == "interrupted\n"
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


DEEPSPEED_SCRIPT = """
    import importlib.util, os, sys
    assert importlib.util.find_spec("deepspeed") is not None
    import deepspeed
    from deepspeed.ops.adam import FusedAdam
    assert deepspeed.__name__ == "onecopy.deepspeed" and FusedAdam.__module__ == "onecopy.deepspeed.ops.adam"
    names = ("RANK", "LOCAL_SIZE", "CROSS_SIZE")
    sys.stdout.write(f"{sys.argv[1:]} {[os.environ.get(name) for name in names]}\\n")
    sys.exit(7 if "fail" in sys.argv and os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.skipif(
    any("+onecopy" not in found.version for found in distributions(name="deepspeed")), reason="DeepSpeed is installed"
)
def test_the_name_deepspeed_in_every_rank(tmp_path: Path) -> None:
    """By ``onecopy launch --as-deepspeed``, and by the command with DeepSpeed's own flags."""
    path = script(tmp_path, DEEPSPEED_SCRIPT)
    done = launch("--nproc", "2", "--as-deepspeed", path, "--x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"['--x'] ['{rank}', None, None]" for rank in range(2)]
    command = [sys.executable, "-m", "onecopy.deepspeed.launcher.runner", "--include", "localhost:0,1", path, "fail"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 7 and "rank 1 (pid " in done.stderr
    assert "['--local_rank=0', 'fail'] ['0', '2', '1']" in done.stdout
    command[3:5] = ["--include", "localhost:0@localhost:9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and re.match("error: localhost has no device 9; it has 0, 1", done.stderr)
