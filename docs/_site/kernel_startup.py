# ruff: noqa
"""Run by the kernel of a tutorial before its first cell: the project's figure style, and commands without a terminal."""

import subprocess

import matplotlib
from IPython import get_ipython

from advnorm.analysis.plots import COLOURS, figure_style

_style = figure_style()
_style.__enter__()
matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=COLOURS)
matplotlib.rcParams["svg.fonttype"] = "path"  # letters as shapes: the same on every device


def _run(command):
    """Run a line that starts with "!". Its output is what a log file would contain; a command that fails stops the build."""
    done = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {command}")


get_ipython().system = _run
