"""The supervisor over small real processes: ready lines, children that end or do not, and its own sudden end."""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.cli.supervisor import (
    MAX_RESTARTS,
    ChildCommand,
    ChildFailedError,
    MakeSuccessor,
    ReadyLine,
    Supervisor,
)

# A child that reports ready and ends with its standard input, as nodes do. Its address is its process id.
SERVE = """
import json, os, sys
print(json.dumps({"event": "ready", "address": str(os.getpid())}), flush=True)
sys.stdin.buffer.read()
"""

# A child that ends while it loads, within its last line.
DIE_AT_START = """
import sys
sys.stderr.write("loading\\nweight model.norm is missing")
sys.exit(3)
"""

IGNORE_SIGTERM = """
import json, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(180)  # in case that nobody kills it
print(json.dumps({"event": "ready", "address": str(os.getpid())}), flush=True)
while True:
    signal.pause()
"""

# A child that drains for as long as it is asked once.
DRAIN = """
import json, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
print(json.dumps({"event": "ready"}), flush=True)
sys.stdin.buffer.read()
"""

# A child that ends when another process, which has its pipes, is under way. Its address is that process's id.
LEAVE_ANOTHER = """
import json, subprocess, sys
other = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.alarm(180); signal.pause()"])
print(json.dumps({"event": "ready", "address": str(other.pid)}), flush=True)
sys.exit(3)
"""

NEVER_READY = """
import sys
sys.stdin.buffer.read()
"""

# A child that is never ready the first time, and serves when it is started again. Its argument is a file of its own.
READY_THE_SECOND_TIME = """
import json, os, sys
if os.path.exists(sys.argv[1]):
    print(json.dumps({"event": "ready"}), flush=True)
open(sys.argv[1], "w").close()
sys.stdin.buffer.read()
"""

CHATTY = """
import json, sys
sys.stderr.write("10%\\r20%\\r\\n" + "x" * 200_000 + "\\n")
print("not a ready line")
print('{"event": "other"}')
print(json.dumps({"event": "ready"}), flush=True)
sys.stdin.buffer.read()
"""


def child(name: str, script: str, *, arguments: Sequence[str] = ()) -> ChildCommand:
    return ChildCommand(name, (sys.executable, "-I", "-S", "-c", script, *arguments), dict(os.environ))


async def wait_until_gone(*process_ids: int) -> None:
    """Returns when none of these processes runs; only the test's timeout limits the wait."""
    left = set(process_ids)
    while left:
        left = {pid for pid in left if _is_running(pid)}
        await asyncio.sleep(0.01)


def _is_running(process_id: int) -> bool:
    """Tells whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_ready_lines_come_in_the_order_of_the_commands_and_nobody_is_left() -> None:
    async with Supervisor(stop_timeout=5) as supervisor:
        ready = await supervisor.start([child("a", SERVE), child("b", SERVE)], timeout=20)
        process_ids = [one.process.pid for one in supervisor.children]
        assert [line["address"] for line in ready] == [str(pid) for pid in process_ids]
    assert all(not _is_running(pid) for pid in process_ids)


async def test_groups_end_in_reverse_order() -> None:
    ended: list[str] = []

    def note(name: str, _: asyncio.Task[int]) -> None:
        ended.append(name)

    async with Supervisor(stop_timeout=5) as supervisor:
        await supervisor.start([child("node", SERVE)], timeout=20)
        await supervisor.start([child("router", SERVE)], timeout=20)
        for one in supervisor.children:
            one.ended.add_done_callback(functools.partial(note, one.command.name))
    assert ended == ["router", "node"]


async def test_the_error_of_a_child_that_ends_at_start_has_its_last_lines() -> None:
    lines: list[tuple[str, str]] = []
    async with Supervisor(stop_timeout=5, on_line=lambda name, line: lines.append((name, line))) as supervisor:
        with pytest.raises(ChildFailedError, match=r"(?s)decode-0 .* exit code 3 .*model.norm is missing"):
            await supervisor.start([child("decode-0", DIE_AT_START), child("decode-1", SERVE)], timeout=20)
        process_ids = [one.process.pid for one in supervisor.children]
    assert ("decode-0", "loading") in lines
    assert all(not _is_running(pid) for pid in process_ids)


async def test_a_child_that_is_not_ready_in_time_is_named() -> None:
    async with Supervisor(stop_timeout=5) as supervisor:
        with pytest.raises(ChildFailedError, match=r"not ready after 0\.05 seconds: slow; a larger --start-timeout"):
            await supervisor.start([child("slow", NEVER_READY)], timeout=0.05)


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    async with Supervisor(stop_timeout=0.05) as supervisor:
        await supervisor.start([child("stubborn", IGNORE_SIGTERM)], timeout=20)
        [stubborn] = supervisor.children
    assert stubborn.ended.result() == -signal.SIGKILL


async def cancelled_stop(supervisor: Supervisor, *, times: int = 1) -> None:
    """Stops the supervisor, and cancels that as often while it waits, as a further Ctrl-C does."""
    stopping = asyncio.create_task(supervisor.stop())
    for _ in range(times):
        await asyncio.sleep(0)  # it has asked the children to end, and waits
        stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping


async def test_cancelling_the_orderly_end_has_children_end_without_draining() -> None:
    supervisor = Supervisor(stop_timeout=3600)
    await supervisor.start([child("node", DRAIN)], timeout=20)
    await supervisor.start([child("router", DRAIN)], timeout=20)
    await cancelled_stop(supervisor)
    assert [one.ended.result() for one in supervisor.children] == [0, 0], "a killed node would leave its pool behind"


async def test_a_child_that_does_not_hurry_is_killed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cli.supervisor._HURRY_SECONDS", 0.05)
    supervisor = Supervisor(stop_timeout=3600)
    await supervisor.start([child("stubborn", IGNORE_SIGTERM)], timeout=20)
    await cancelled_stop(supervisor)
    assert supervisor.children[0].ended.result() == -signal.SIGKILL


async def test_cancelling_the_hurried_end_kills_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cli.supervisor._HURRY_SECONDS", 3600.0)
    supervisor = Supervisor(stop_timeout=3600)
    await supervisor.start([child("stubborn", IGNORE_SIGTERM)], timeout=20)
    await cancelled_stop(supervisor, times=2)
    assert supervisor.children[0].ended.result() == -signal.SIGKILL


SAY_WHICH = """
import json, sys
print(json.dumps({"event": "ready", "address": sys.argv[1]}), flush=True)
sys.stdin.buffer.read()
"""


def second(command: ChildCommand, ready: ReadyLine) -> ChildCommand:
    assert ready["address"] == "first"
    return replace(command, arguments=(*command.arguments[:-1], "second"))


def run_by(python: Path) -> MakeSuccessor:
    """Returns what makes a successor of which `python` is the interpreter."""
    return lambda command, _: replace(command, arguments=(str(python), *command.arguments[1:]))


async def test_a_child_that_ends_is_started_again() -> None:
    events: asyncio.Queue[str] = asyncio.Queue()
    ended: list[str] = []
    async with Supervisor(stop_timeout=5) as supervisor:
        commands = [child(name, SAY_WHICH, arguments=["first"]) for name in ("decode-0", "decode-1")]
        await supervisor.start(commands, timeout=20)
        keeping = asyncio.create_task(
            supervisor.keep(
                make_successor=second,
                timeout=20,
                on_event=events.put_nowait,
                on_end=lambda command: ended.append(command.arguments[-1]),
            )
        )
        for wait in ("0.25", "0.5"):
            supervisor.children[0].kill()
            assert await events.get() == f"decode-0 was killed by SIGKILL and is started again in {wait} s."
            assert await events.get() == "decode-0 serves again."
            assert [one.ready.result()["address"] for one in supervisor.children] == ["second", "first"]
        assert not keeping.done()
        assert len(ended) == 2
        keeping.cancel()
        process_ids = [one.process.pid for one in supervisor.children]
    assert all(not _is_running(pid) for pid in process_ids)


async def test_a_child_that_ends_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it has loaded each time: that is no time in which it serves."""
    monkeypatch.setattr("kvrelay.cli.supervisor._LONGEST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("kvrelay.cli.supervisor._FIRST_WAIT_SECONDS", 0.01)

    def dies(command: ChildCommand, _: ReadyLine) -> ChildCommand:
        return replace(command, arguments=child("", DIE_AT_START).arguments)

    events = asyncio.Queue[str](MAX_RESTARTS)
    lines: list[str] = []
    now = asyncio.get_running_loop().time
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now() + 3600.0 * len(lines))  # an hour a line
    async with Supervisor(stop_timeout=5, on_line=lambda _, line: lines.append(line)) as supervisor:
        await supervisor.start([child("decode-0", SERVE)], timeout=20)
        supervisor.children[0].kill()
        with pytest.raises(ChildFailedError, match=r"(?s)exit code 3 again, after 5 restarts.*model.norm is missing"):
            await supervisor.keep(make_successor=dies, timeout=10**6, on_event=events.put_nowait)
    assert events.full()


async def test_a_child_that_has_served_for_a_while_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it has ended before, it is started again, and no later than the first time."""
    monkeypatch.setattr("kvrelay.cli.supervisor._SETTLED_SECONDS", 0.0)
    monkeypatch.setattr("kvrelay.cli.supervisor._FIRST_WAIT_SECONDS", 0.01)
    events: asyncio.Queue[str] = asyncio.Queue()
    async with Supervisor(stop_timeout=5) as supervisor:
        await supervisor.start([child("decode-0", SERVE)], timeout=20)
        keeping = asyncio.create_task(
            supervisor.keep(make_successor=lambda command, _: command, timeout=20, on_event=events.put_nowait)
        )
        for _ in range(MAX_RESTARTS + 2):
            supervisor.children[0].kill()
            async with asyncio.timeout(20):
                assert await events.get() == "decode-0 was killed by SIGKILL and is started again in 0.01 s."
                assert await events.get() == "decode-0 serves again."
        assert not keeping.done()
        keeping.cancel()


async def test_a_successor_that_is_not_ready_in_time_is_killed_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.cli.supervisor._LONGEST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("kvrelay.cli.supervisor._FIRST_WAIT_SECONDS", 0.01)
    stuck = child("decode-0", READY_THE_SECOND_TIME, arguments=[str(tmp_path / "has-started")])
    events: asyncio.Queue[str] = asyncio.Queue()
    ended: list[str] = []
    async with Supervisor(stop_timeout=5) as supervisor:
        await supervisor.start([child("decode-0", SERVE)], timeout=20)
        keeping = asyncio.create_task(
            supervisor.keep(make_successor=lambda *_: stuck, timeout=1.0, on_event=events.put_nowait)
        )
        supervisor.children[0].kill()
        async with asyncio.timeout(20):
            while (event := await events.get()) != "decode-0 serves again.":
                ended.append(event)
        killed, *late = ended
        assert killed == "decode-0 was killed by SIGKILL and is started again in 0.01 s."
        assert set(late) == {"decode-0 was not ready after 1 s (--start-timeout) and is started again in 0.01 s."}
        keeping.cancel()


async def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """As when the machine has no memory left for it."""
    python, events = tmp_path / "python", asyncio.Queue[str]()
    async with Supervisor(stop_timeout=5) as supervisor:
        await supervisor.start([child("decode-0", SERVE)], timeout=20)
        keeping = asyncio.create_task(
            supervisor.keep(make_successor=run_by(python), timeout=20, on_event=events.put_nowait)
        )
        supervisor.children[0].kill()
        assert await events.get() == "decode-0 was killed by SIGKILL and is started again in 0.25 s."
        event = await events.get()
        assert event.startswith("decode-0 could not be started ([Errno 2] No such file"), "not how the last one ended"
        assert event.endswith("and is started again in 0.5 s.")
        python.symlink_to(sys.executable)
        assert await events.get() == "decode-0 serves again."
        supervisor.children[0].kill()
        assert await events.get() == "decode-0 was killed by SIGKILL and is started again in 1 s."
        keeping.cancel()


async def test_a_child_that_can_never_be_started_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cli.supervisor._LONGEST_WAIT_SECONDS", 0.01)
    async with Supervisor(stop_timeout=5) as supervisor:
        await supervisor.start([child("decode-0", SERVE)], timeout=20)
        supervisor.children[0].kill()
        with pytest.raises(ChildFailedError, match=r"^decode-0 could not be started .* again, after 5 restarts\.$"):
            await supervisor.keep(make_successor=run_by(tmp_path / "python"), timeout=20, on_event=lambda event: None)


async def test_a_cluster_of_which_a_child_cannot_be_started_ends(tmp_path: Path) -> None:
    nothing = replace(child("decode-0", SERVE), arguments=(str(tmp_path / "python"),))
    async with Supervisor(stop_timeout=5) as supervisor:
        with pytest.raises(ChildFailedError, match=r"^decode-0 could not be started \(.*\) before the cluster"):
            await supervisor.start([child("prefill-0", SERVE), nothing], timeout=20)
        process_ids = [one.process.pid for one in supervisor.children]
    assert len(process_ids) == 1 and not _is_running(process_ids[0])


async def test_the_end_of_a_child_is_noticed_while_what_it_has_started_holds_its_pipes() -> None:
    """That is killed then."""
    async with Supervisor(stop_timeout=5) as supervisor:
        [ready] = await supervisor.start([child("decode-0", LEAVE_ANOTHER)], timeout=20)
        async with asyncio.timeout(20):
            assert await supervisor.children[0].ended == 3
            await wait_until_gone(int(str(ready["address"])))


async def test_output_is_passed_on_line_by_line() -> None:
    lines: list[str] = []
    async with Supervisor(stop_timeout=5, on_line=lambda _, line: lines.append(line)) as supervisor:
        await supervisor.start([child("chatty", CHATTY)], timeout=20)
    assert {"not a ready line", '{"event": "other"}', "10%", "20%"} <= set(lines)
    assert sum(len(line) for line in lines if set(line) == {"x"}) == 200_000


async def test_children_run_on_when_nobody_reads_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as unread:  # closing it would write what is left
        monkeypatch.setattr(sys, "stderr", unread)
        async with Supervisor(stop_timeout=5) as supervisor:
            await supervisor.start([child("chatty", CHATTY)], timeout=5)


async def test_children_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "supervise.py"
    script.write_text(f"""
import asyncio, json, os, sys
from kvrelay.cli.supervisor import ChildCommand, Supervisor

async def main() -> None:
    command = (sys.executable, "-I", "-S", "-c", {SERVE!r})
    async with Supervisor(stop_timeout=5) as supervisor:
        children = [ChildCommand(name, command, dict(os.environ)) for name in ("a", "b")]
        ready = await supervisor.start(children, timeout=20)
        print(json.dumps([int(str(line["address"])) for line in ready]), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
""")
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    process_ids = [int(pid) for pid in (await process.stdout.readline()).decode().strip(" []\n").split(",")]
    assert all(_is_running(pid) for pid in process_ids)
    process.kill()
    await process.wait()
    await wait_until_gone(*process_ids)
