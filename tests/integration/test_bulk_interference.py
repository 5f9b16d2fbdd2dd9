import json
import subprocess
import sys


def test_it_says_what_a_bulk_job_costs_realtime_callers() -> None:
    command = [sys.executable, "-m", "ops.bench.bulk_interference", "--seconds", "1", "--rounds", "1", "--callers", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert list(rows) == ["alone", "beside a bulk job"]
    assert all(row["requests"] >= 2 and 0 < row["ttft_ms_p50"] < row["e2e_ms_p50"] for row in rows.values())
