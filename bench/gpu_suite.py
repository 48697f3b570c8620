"""Checks every GPU kernel against float64 on fresh random inputs, and compares its time with its floor and with torch.
Then the whole engine: decode steps and prompts of random-weight models, compared with their floors and transformers.
Then KV between processes on the GPU, and a prefill and a decode node on it, directly and through host memory.

    python bench/gpu_suite.py --output gpu.jsonl [--part attention,layers,...] [--budget SECONDS]

Each part is a process of its own: one that crashes or hangs does not take the others with it. Results are appended to
the file as they come, so that several runs may share it, and a run that is cut short leaves what it has; `--show FILE`
prints a file again. The floor of a case is the larger of two times, both from rates measured first: the bytes it must
move at the GPU's copy bandwidth, and its operations at the GPU's matrix rate. `--self-test` runs tiny shapes in
Triton's interpreter, where times mean nothing. The exit status is 1 when a result is wrong, or when there is none: what
is left out for lack of time or of a package does not count.
"""

import argparse
import faulthandler
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]  # it runs from a working tree, installed or not

import torch  # noqa: E402

from bench.arguments import drop_settings, positive  # noqa: E402
from bench.gpu.bars import judged  # noqa: E402
from bench.gpu.parts import PARTS, Suite  # noqa: E402
from bench.gpu.report import Record, Result, read_records, table  # noqa: E402
from bench.gpu.task import run_tasks  # noqa: E402

_END_SECONDS = 15.0  # that a part may take beyond its budget, to end the case it is in
_CASE_SECONDS = 300.0  # a case that takes longer hangs: its part is ended, so that the others still run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    drop_settings()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if args.show:
        return _show(args.show)
    parts = list(PARTS) if args.part == "all" else args.part.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--part: unknown: {', '.join(unknown)}; there are: all, {', '.join(PARTS)}")
    if args.self_test:
        if args.output is None:
            parser.error("--self-test needs --output")
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the cases do
    elif not torch.cuda.is_available():
        parser.error("no GPU that torch can use; --self-test runs without one")
    deadline = time.monotonic() + args.budget
    if args.self_test or args.in_this_process:
        for part in parts:
            _run_part(part, args, deadline)
        return 0 if args.in_this_process else _show(args.output)
    with tempfile.TemporaryDirectory() as directory:
        output = args.output or Path(directory) / "results.jsonl"
        for part in parts:
            _run_process(part, output, args, deadline)
        return _show(output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to append the results to, JSON lines")
    parser.add_argument("--part", default="all", help=f"what to measure, in this order: some of {','.join(PARTS)}")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which nothing new is begun")
    parser.add_argument("--repeats", type=positive, default=30, help="measurements of each case (default: 30)")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(2**32), help="seed of the inputs; a fresh one by default"
    )
    parser.add_argument("--self-test", action="store_true", help="tiny shapes on the CPU, interpreted; needs --output")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the results of FILE, and measure nothing")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    return parser


def _prepare_environment() -> None:
    """Sets what the processes of parts, and those that these start, need to know."""
    path = [*map(str, sys.path[:2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path).strip(os.pathsep)
    # Inductor would set a folder of its own, and the next part would have to compile the same kernels again.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))


def _run_process(part: str, output: Path, args: argparse.Namespace, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        Record(output, part).add(Result.failed(part, "left out: time is up", is_wrong=False))
        return
    command = [sys.executable, str(Path(__file__).resolve()), "--in-this-process", "--part", part]
    command += ["--output", str(output), "--budget", str(left), "--repeats", str(args.repeats)]
    command += ["--seed", str(args.seed)]
    with subprocess.Popen(command, cwd=_ROOT) as process:
        try:
            status = process.wait(left + 2 * _END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    if status != 0 and time.monotonic() >= deadline:
        Record(output, part).add(Result.failed(part, "cut off: time is up", is_wrong=False))
    elif status != 0:
        Record(output, part).add(Result.failed(part, f"its process ended with status {status}; what it said is above"))


def _run_part(part: str, args: argparse.Namespace, deadline: float) -> None:
    def look_out() -> None:
        """Lets a case that hangs print where it is, and ends the process."""
        if args.in_this_process:
            left = max(1.0, deadline - time.monotonic()) + _END_SECONDS
            faulthandler.dump_traceback_later(min(left, _CASE_SECONDS), exit=True)

    look_out()
    device = torch.device("cpu" if args.self_test else "cuda:0")
    torch.manual_seed(args.seed)
    record = Record(args.output, part)
    with tempfile.TemporaryDirectory() as directory:
        suite = Suite(device, args.seed, 1 if args.self_test else args.repeats, Path(directory))
        try:
            tasks = PARTS[part](suite)
        except ModuleNotFoundError as error:
            problem = f"left out: it needs the package {error.name!r}, which is not installed"
            record.add(Result.failed(part, problem, is_wrong=False))
            return
        record.begin(suite.rates, device, args.seed)
        run_tasks(tasks, record, deadline=deadline, on_begin=look_out)
    if args.in_this_process:
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True)  # for threads of libraries to end


def _show(path: Path) -> int:
    records = read_records(path)
    print(table(records.results))
    _say(records.runs)
    print("\n".join(judged(records.results)))
    if not any("H200" in device for device in records.devices):
        print("(the bars are for an H200)")
    return 0 if records.results and all(result.is_right for result in records.results) else 1


def _say(runs: Iterable[object]) -> None:
    for run in runs:
        assert isinstance(run, dict)
        print(
            f"{run['part']}: {run['date']} on {run['device']}, seed {run['seed']}, copy "
            f"{run['copy_bytes_per_second'] / 1e9:.0f} GB/s, matmul {run['matmul_operations_per_second'] / 1e12:.1f} "
            f"TFLOP/s, {run['versions']}"
        )


if __name__ == "__main__":
    _prepare_environment()
    sys.exit(main())
