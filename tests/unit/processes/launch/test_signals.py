"""SIGINT and SIGTERM, whenever they come: exit code, one line, nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools.scenario_cases import written
from tests.tools.stream_cases import soon

LONG_S = 300.0
ENDS = {"SIGINT": (130, "jdag: interrupted\n"), "SIGTERM": (143, "jdag: terminated\n")}
NUMBERS = pytest.mark.parametrize("number", ENDS)

# A module of this name, found before the real one, is a signal as that is imported.
PRESSES = """
import contextlib, os, signal, sys, time
if sys.argv[0].endswith(os.environ["ENTRY"]):
    with contextlib.suppress(BaseException):  # As modules that try to import others.
        os.kill(os.getpid(), signal.Signals[os.environ["NUMBER"]])
        time.sleep(60 if "processes" in os.environ["ENTRY"] else 0)  # A thread ends it.
    print("the import goes on")
here = sys.path.pop(0)
del sys.modules["msgspec"]
import msgspec
sys.path.insert(0, here)
"""


def ended(*command: str, cwd: Path, **variables: str):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=LONG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def played(
    place: Path, program: str, *arguments: str, number: str = "", command: str = "run"
):
    file = written(
        place,
        *(["[settings]", f'number = "{number}"'] * bool(number)),
        program=f'program = "tests.tools.signal_cases:{program}"',
    )
    here = place / "here"
    temporary = place / "temporary"
    here.mkdir()
    temporary.mkdir()
    arguments = ("-m", "jdag", command, str(file), *arguments)
    code, _, err = ended(*arguments, cwd=here, TMPDIR=str(temporary))
    assert list(here.iterdir()) == []
    # Workers remove their folder when their parent has gone.
    soon(lambda: list(temporary.iterdir()) == [])
    return code, err


# ------------------------------------------------------------------- while it imports


@NUMBERS
def test_a_signal_during_imports_is_one_line(tmp_path: Path, number: str):
    (tmp_path / "msgspec.py").write_text(PRESSES)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    variables = {"NUMBER": number, "ENTRY": "jdag/__main__.py", "PYTHONPATH": path}
    result = ended("-m", "jdag", "run", cwd=tmp_path, **variables)
    assert result == (ENDS[number][0], "", ENDS[number][1])


@pytest.mark.parametrize(
    ("number", "when"),
    [
        ("SIGTERM", "before"),
        pytest.param("SIGINT", "before", marks=pytest.mark.second),
        pytest.param("SIGINT", "in its imports", marks=pytest.mark.second),
    ],
)
def test_a_worker_that_is_stopped_as_it_becomes_a_process_of_its_own_is_one_line(
    tmp_path: Path, number: str, when: str
):
    """What comes between `jdag worker` and its worker process waits for the latter."""
    (tmp_path / "msgspec.py").write_text(PRESSES)
    press = f"signal.pthread_kill(threading.get_ident(), signal.{number})"
    become = (
        "import os, signal, sys, threading\n"
        "from jdag.processes.launch import worker\n"
        "execve = os.execve\n"
        "def exec_after_a_signal(*args):\n"
        f"    {press if when == 'before' else 'pass'}\n"
        "    execve(*args)\n"
        "os.execve = exec_after_a_signal\n"
        "options = dict(worker='b', node='', control='')\n"
        "worker.become(worker.WorkerOptions(**options))\n"
    )
    entry = "jdag/processes/__main__.py" if when == "in its imports" else "none"
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    variables = {"NUMBER": number, "ENTRY": entry, "PYTHONPATH": path}
    result = ended("-c", become, cwd=tmp_path, **variables)
    assert result == (ENDS[number][0], "", ENDS[number][1])


# ---------------------------------------------------------------------- while it runs


@pytest.mark.parametrize(
    ("program", "number", "driver"),
    [
        ("interrupted", "SIGINT", "sim"),
        ("interrupted", "SIGTERM", "rpc"),
        pytest.param("swallowed", "SIGTERM", "sim", marks=pytest.mark.second),
        pytest.param("twice", "SIGINT", "sim", marks=pytest.mark.second),
    ],
)
def test_a_signal_in_a_run_is_one_line_and_nothing_is_left(
    tmp_path: Path, program: str, number: str, driver: str
):
    found = played(tmp_path, program, "--driver", driver, number=number)
    assert found == ENDS[number]


@pytest.mark.second
def test_ctrl_c_in_a_terminal_ends_a_check_and_the_run_that_it_started(tmp_path: Path):
    assert played(tmp_path, "terminal", command="check") == ENDS["SIGINT"]


# ------------------------------------------------------------------ without a command

COMMAND = """import atexit, os, signal, sys
from jdag.processes.launch import signals
signals.handle()
"""


def snippet(place: Path, *lines: str):
    return ended("-c", COMMAND + "\n".join(lines), cwd=place)


@NUMBERS
def test_a_signal_after_the_work_is_done_waits_until_all_is_written(
    tmp_path: Path, number: str
):
    code, out, err = snippet(
        tmp_path,
        "def command():",
        "    signals.finish()",
        f"    os.kill(os.getpid(), signal.{number})",
        "    sys.stdout.write('whole\\n')",
        "    sys.exit(0)",
        "signals.run_command(command)",
    )
    assert (code, out, err) == (ENDS[number][0], "whole\n", ENDS[number][1])


@NUMBERS
def test_what_a_swallowed_signal_was_to_end_is_not_kept(tmp_path: Path, number: str):
    code, out, err = snippet(
        tmp_path,
        "from contextlib import suppress",
        "def command():",
        "    with suppress(BaseException):",
        f"        os.kill(os.getpid(), signal.{number})",
        "    signals.finish()",
        "    sys.stdout.write('kept\\n')",
        "signals.run_command(command)",
    )
    assert (code, out, err) == (ENDS[number][0], "", ENDS[number][1])


def test_of_two_signals_the_first_is_told_and_what_ends_the_process_cleans_up(
    tmp_path: Path,
):
    """Here the main thread is kept in C, where no handler of Python's runs."""
    code, out, err = snippet(
        tmp_path,
        "import ctypes, threading",
        "from pathlib import Path",
        "(made := Path('made')).mkdir()",
        "signals.undo.append(made.rmdir)",
        "signals._GRACE_S = 0.1",
        "def press():",
        "    os.kill(os.getpid(), signal.SIGTERM)",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "def command():",
        "    threading.Timer(0.1, press).start()",
        "    lock = ctypes.CDLL(None).pthread_mutex_lock",
        "    mutex = ctypes.create_string_buffer(64)",
        "    lock(mutex)",
        "    lock(mutex)  # For ever.",
        "signals.run_command(command)",
    )
    assert (code, out, err) == (143, "", ENDS["SIGTERM"][1])
    assert list(tmp_path.iterdir()) == []


def test_a_signal_after_the_command_is_one_line_until_python_itself_ends(
    tmp_path: Path,
):
    press = f"os.kill(os.getpid(), {signal.SIGTERM:d})"
    during = f"atexit.register(lambda: {press})"
    run = "signals.run_command(lambda: sys.exit(3))"
    assert snippet(tmp_path, f"{during}\n{run}")[0] == 3  # Called after all else.
    code, _, err = snippet(
        tmp_path,
        f"def command():\n    {during}\n    sys.exit(3)",
        "signals.run_command(command)",
    )
    assert (code, err) == ENDS["SIGTERM"]


def test_who_ignores_ctrl_c_goes_on_and_a_forked_child_has_the_signals_of_python(
    tmp_path: Path,
):
    lines = (
        "import warnings",
        "warnings.simplefilter('ignore')",  # From Python 3.12 on a fork may warn.
        "def command():",
        "    if not (child := os.fork()):",
        "        os.kill(os.getpid(), signal.SIGTERM)",
        "    sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]))",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signals.handle()",
        "os.kill(os.getpid(), signal.SIGINT)",
        "signals.run_command(command)",
    )
    code, out, err = ended(
        "-c", COMMAND.replace("signals.handle()\n", "") + "\n".join(lines), cwd=tmp_path
    )
    assert (code, out, err) == (signal.SIGTERM, "", "")


def test_sigterm_waits_where_ctrl_c_is_held_back(tmp_path: Path):
    """A node holds it back by a handler of SIGINT of its own."""
    code, out, err = snippet(
        tmp_path,
        "def command():",
        "    former = signal.getsignal(signal.SIGINT)",
        "    held = []",
        "    signal.signal(signal.SIGINT, lambda *came: held.append(came))",
        "    os.kill(os.getpid(), signal.SIGTERM)",
        "    sys.stdout.write('goes on\\n')",
        "    former(*held[0])",
        "signals.run_command(command)",
    )
    assert (code, out, err) == (143, "goes on\n", ENDS["SIGTERM"][1])


def test_the_cursor_of_a_terminal_is_shown_again(tmp_path: Path):
    master, terminal = os.openpty()
    command = f"{COMMAND}os.kill(os.getpid(), signal.SIGINT)"
    ended_by = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=terminal,
        timeout=LONG_S,
        check=False,
    )
    assert ended_by.returncode == 130
    os.write(terminal, b"over")
    seen = b""
    while not seen.endswith(b"over"):  # A terminal hands over piece by piece.
        seen += os.read(master, 64)
    assert seen == b"\x1b[?25h\r\nover"
    for one in (master, terminal):
        os.close(one)
