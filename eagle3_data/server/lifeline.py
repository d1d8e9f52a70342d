"""Run a command that must not outlive the process that started it: `lifeline.py FD COMMAND...`. Standard library alone.

FD is the reading end of a pipe whose writing end only that process holds. When it closes, however that process died,
the whole process group is killed. Run as a script, as the leader of its own group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    watched, command = int(sys.argv[1]), sys.argv[2:]
    # A handler, not SIG_IGN, which the command would inherit: the group is told to end, and we wait for it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    child = subprocess.Popen(command)

    def watch() -> None:
        while os.read(watched, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
