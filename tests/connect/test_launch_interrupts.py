"""`distca.launch` from a script that is killed or interrupted: the ranks end with it, or return."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BOTH = pytest.mark.parametrize("start_method", ["spawn", "forkserver"])


@contextlib.contextmanager
def _start_script(folder: Path, function: str, start_method: str) -> Iterator[subprocess.Popen[str]]:
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
            import distca
            from support import waiting_ranks
            if __name__ == "__main__":
                print(distca.launch(
                    waiting_ranks.{function}, {str(folder)!r}, ranks=2, threads=1, start_method={start_method!r}
                ))
            """
        )
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # where a test has failed: the end of `with` waits for it


def _wait_for(condition, what: str):
    """Polls, because the watched processes are not children of this one."""
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within 60 seconds"
        time.sleep(0.01)
    return value


def _rank_pids(folder: Path) -> list[int]:
    paths = [folder / f"{rank}.pid" for rank in range(2)]
    return [int(path.read_text()) for path in paths] if all(path.exists() for path in paths) else []


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@BOTH
def test_ranks_die_with_a_killed_parent(start_method: str, tmp_path: Path) -> None:
    with _start_script(tmp_path, "writes_pid_and_waits", start_method) as parent:
        pids = _wait_for(lambda: _rank_pids(tmp_path), "the start of the ranks")
        parent.kill()
    _wait_for(lambda: all(_gone(pid) for pid in pids), "the end of the ranks")


@BOTH
def test_ctrl_c_reaches_the_ranks_and_those_that_handle_it_still_return(start_method: str, tmp_path: Path) -> None:
    with _start_script(tmp_path, "finishes_on_interrupt", start_method) as parent:
        pids = _wait_for(lambda: _rank_pids(tmp_path), "the start of the ranks")
        parent.send_signal(signal.SIGINT)
        out, err = parent.communicate(timeout=60)
    said = [line for line in out.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 does this
    assert (parent.returncode, said, err) == (0, ["['stopped cleanly', 'stopped cleanly']"], "")
    assert all(_gone(pid) for pid in pids)


@BOTH
def test_ctrl_c_raises_keyboard_interrupt_where_ranks_do_not_handle_it(start_method: str, tmp_path: Path) -> None:
    with _start_script(tmp_path, "writes_pid_and_waits", start_method) as parent:
        pids = _wait_for(lambda: _rank_pids(tmp_path), "the start of the ranks")
        parent.send_signal(signal.SIGINT)
        _, err = parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGINT
    assert err.strip().endswith("KeyboardInterrupt")
    assert all(_gone(pid) for pid in pids)


@BOTH
def test_a_second_ctrl_c_kills_ranks_that_go_on(start_method: str, tmp_path: Path) -> None:
    with _start_script(tmp_path, "ignores_interrupts", start_method) as parent:
        pids = _wait_for(lambda: _rank_pids(tmp_path), "the start of the ranks")
        parent.send_signal(signal.SIGINT)
        _wait_for(lambda: len(list(tmp_path.glob("*.interrupted"))) == 2, "the interrupt of both ranks")
        parent.send_signal(signal.SIGINT)
        _, err = parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGINT
    assert err.strip().endswith("KeyboardInterrupt")
    assert all(_gone(pid) for pid in pids)


def test_other_processes_that_a_program_forks_end_when_they_are_told(tmp_path: Path) -> None:
    """Those of the fork server that a launch has started. The program terminates the daemon at its end."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, os, time
            import distca
            if __name__ == "__main__":
                distca.launch(os.getpid, ranks=1, threads=1, start_method="forkserver")
                context = multiprocessing.get_context("forkserver")
                told = context.Process(target=time.sleep, args=(100,))
                told.start()
                told.terminate()
                told.join()
                context.Process(target=time.sleep, args=(100,), daemon=True).start()
                print(told.exitcode)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(-signal.SIGTERM)
