"""Work that is killed at random moments ends with the bits of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import kill_worker
from support.small_runs import ENVIRONMENT, SOURCE

#: For each of the seven kinds of work: more than 100 in all.
KILLS = 15


@pytest.mark.slow
@pytest.mark.parametrize("case", kill_worker.CASES)
def test_work_that_is_killed_at_random_moments_ends_with_the_same_bits(case, tmp_path):
    command = [sys.executable, kill_worker.__file__, case, str(tmp_path), str(KILLS)]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([SOURCE, str(Path(__file__).parent)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["killed"] >= KILLS and len(result["digests"]) >= 2
    assert set(result["statuses"]) == {0}, done.stderr
    assert len(set(result["digests"])) == 1
