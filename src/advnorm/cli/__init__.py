"""The command ``advnorm``."""

import sys


def main() -> None:
    """Run the command and leave the process with its exit status."""
    from advnorm.cli.process import run_command  # imports little: signals are handled before verbs are imported

    sys.exit(run_command())
