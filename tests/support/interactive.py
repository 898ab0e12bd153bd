"""Interactive interpreters as people use them: `python -i`, IPython, and a kernel of Jupyter."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

from support.processes import gone
from support.waiting import PATIENCE_S, eventually


class Interactive(Protocol):
    """An interpreter that runs one cell after the other."""

    pid: int

    def run(self, cell: str, *, interrupt_at: str = "") -> str:
        """Run a cell and return its output, errors included, once it has ended.

        interrupt_at: Ctrl-C when it has printed this.
        """

    def kill(self) -> None:
        """SIGKILL."""

    def close(self) -> None:
        """The end that a person would make."""


class Typed:
    """An interpreter that reads its standard input."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._cells = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def run(self, cell: str, *, interrupt_at: str = "") -> str:
        assert self._process.stdin is not None
        self._cells += 1
        end = f"<end of {self._cells}>"
        # One line each: what it says at an error is then read as the next cell, as by a person.
        self._process.stdin.write(f"exec(compile({cell!r}, 'cell', 'exec'))\n")
        if not interrupt_at:
            self._process.stdin.write(f"print({end[:5]!r} + {end[5:]!r})\n")
        output = ""
        while end not in output:
            output += self._lines.get(timeout=PATIENCE_S)
            if interrupt_at and interrupt_at in output:
                self._process.send_signal(signal.SIGINT)
                interrupt_at = ""
                self._process.stdin.write(f"print({end[:5]!r} + {end[5:]!r})\n")
        return output.replace(end, "")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            if self._process.poll() is None:
                self._process.stdin.write("exit()\n")
            self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join()
        self._process.stdout.close()


class Kernel:
    """A kernel of Jupyter, as a notebook has it."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(kernel_name="python3", transport="ipc")
        self._manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._connect()

    def _connect(self) -> None:
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_S)
        self.pid: int = self._manager.provisioner.pid

    def run(self, cell: str, *, interrupt_at: str = "") -> str:
        output = ""

        def hear(message: dict[str, Any]) -> None:
            nonlocal output, interrupt_at
            content = message["content"]
            if message["msg_type"] == "stream":
                output += content["text"]
            elif message["msg_type"] == "execute_result":
                output += content["data"]["text/plain"] + "\n"
            elif message["msg_type"] == "error":
                output += f"{content['ename']}: {content['evalue']}\n"
            if interrupt_at and interrupt_at in output:
                interrupt_at = ""
                self._manager.interrupt_kernel()

        # Otherwise the kernel may also drop the next cell if this one ends with an error.
        reply = self._client.execute_interactive(
            cell, timeout=PATIENCE_S, output_hook=hear, stop_on_error=False
        )
        assert reply["content"]["status"] != "aborted"
        return output

    def kill(self) -> None:
        self._manager.signal_kernel(signal.SIGKILL)
        eventually(lambda: gone(self.pid))

    def restart(self, *, now: bool) -> None:
        """now: by SIGKILL; else the kernel first ends all processes that it has started."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=now)
        self._connect()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)
        self._manager.cleanup_resources()


def start(kind: str, directory: Path) -> Interactive:
    """kind: python, ipython or jupyter. directory: for files of its own."""
    if kind == "python":
        return Typed("-i", "-q", "-u")
    if kind == "ipython":
        where = ["--ipython-dir", str(directory)]
        return Typed(
            "-u", "-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", *where
        )
    return Kernel()
