"""The JSON file of results."""

import json
import tracemalloc
from pathlib import Path

from kvrelay.bench.offered import Offered
from kvrelay.bench.result import write_results
from kvrelay.bench.settings import LatencyBenchSettings
from tests.bench.records import record, run_of
from tests.pages import names, page, rows, section


def test_writing_every_request_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    settings = LatencyBenchSettings(json_file=path, save_requests=True)
    records = (record(*(index + piece / 7 for piece in range(100)), index=index) for index in range(500))
    result = run_of(*records, offered=Offered(2.2, 2.0, num_arrived=500, num_unfinished=1, was_sustained=True))
    tracemalloc.start()
    try:
        write_results(path, "latency", "m", settings, [result], knee=None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    [run] = json.loads(path.read_text())["runs"]
    assert [request["index"] for request in run["requests"]] == list(range(500))
    described = {name for row in rows(section(page("measuring.md"), "### The JSON file")) for name in names(row[0])}
    assert set(run) | set(run["summary"]) | set(run["offered"]) == described
    assert run["requests"][7]["arrivals"] == list(result.records[7].arrivals)
