"""Exit statuses of the command, for scripts and job schedulers."""

from __future__ import annotations

OK = 0
#: One of several runs, targets or cells failed.
FAILED = 1
#: The command line, a setting or a file is wrong.
USAGE = 2
#: An internal error (EX_SOFTWARE of sysexits.h); 1 would read as the verdict "false" of an audit.
CRASHED = 70
#: Stopped before the end with a checkpoint: run the same command again (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75
#: Stopped by Ctrl-C: 128 plus the number of SIGINT.
INTERRUPTED = 130

#: Verdicts of an audit; 2 stays a usage error.
VERDICTS = {"real": 0, "false": 1, "inconclusive": 3, "none": 4}


class Terminated(BaseException):
    """SIGTERM arrived: the command exits with PREEMPTED. A training handles it itself and stops at a checkpoint."""
