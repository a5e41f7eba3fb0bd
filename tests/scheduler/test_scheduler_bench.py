"""The scheduler's benchmark runs and ends with its figures."""

import re
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "scheduler.py"


def test_the_last_line_holds_both_medians():
    result = subprocess.run([sys.executable, str(BENCH), "3"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"schedule_us \d+ update_us \d+", result.stdout.splitlines()[-1])
    assert "3 requests, 379 steps" in result.stdout
