"""Lists of servers that change while a run goes on (R40): files and commands of every kind. With real servers:
tests/unit/learner/test_failover.py."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from learner.config.sections.servers import FileOrCommand
from learner.rollout import control
from learner.rollout.control import MAX_BYTES, Discovery, ServerRequest, parse, read
from learner.rollout.membership import Member, Membership
from shared.errors import ConfigError, DeadlineError
from tests.servers import wait_gone
from tests.tiers import slow

A, B, C = (f"http://10.0.0.{i}:8000" for i in range(1, 4))


def members(*urls: str) -> Membership:
    return Membership(members=tuple(Member(base_url=url, group_port=51216) for url in urls))


def add(url: str) -> ServerRequest:
    return ServerRequest(action="add", base_url=url, group_port=51216)


def remove(url: str) -> ServerRequest:
    return ServerRequest(action="remove", base_url=url)


class Listed:
    """A discovery whose list is read in every call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._discovery = Discovery(str(path), every_s=1e-9)

    def take(self, membership: Membership, *urls: str) -> list[ServerRequest]:
        self._path.write_text("\n".join(urls))
        self._discovery.take(membership)  # begins to read
        while self._discovery._reading is not None and not self._discovery._reading.done():
            time.sleep(0.001)
        self._discovery._due = math.inf  # nothing reads while the next list is written
        asked = self._discovery.take(membership)
        self._discovery._due = 0.0
        return asked


def test_who_appears_is_added_and_who_disappears_is_removed(tmp_path: Path) -> None:
    listed = Listed(tmp_path / "list")
    assert listed.take(members(A), B) == [add(B)]
    assert listed.take(members(A, B), B) == []
    assert listed.take(members(A, B), B, C) == [add(C)]
    assert listed.take(members(A, B, C), C) == [], "the file may just be written"
    assert listed.take(members(A, B, C), B, C) == []
    assert listed.take(members(A, B, C), C) == []
    assert listed.take(members(A, B, C), C) == [remove(B)]
    assert listed.take(members(A, B, C), C) == [remove(B)], "as long as it is there"
    assert listed.take(members(A, C), C) == []
    assert listed.take(members(A, C), B, C) == [add(B)]


def test_a_server_that_the_list_never_named_stays(tmp_path: Path) -> None:
    listed = Listed(tmp_path / "list")
    assert listed.take(members(A)) == []
    assert listed.take(members(A, B), A) == [add(A)], "nothing, if it is a member"
    assert listed.take(members(A, B)) == []
    assert listed.take(members(A, B)) == [remove(A)]


def test_a_list_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = Listed(tmp_path / "list")
    assert listed.take(members(A), A, B) == [add(A), add(B)]
    assert listed.take(members(A, B), "<html>502 Bad Gateway</html>") == []
    assert "502" in caplog.text
    assert listed.take(members(A, B), B) == []
    assert listed.take(members(A, B), B) == [remove(A)]


def test_a_line_is_a_server() -> None:
    content = f"# servers\n\n{A}\n  {B}/ 40000  # spot\n".encode()
    assert parse(content) == {A: 51216, B: 40000}


WRONG = ["10.0.0.1", "ftp://a", "http://a:b", f"{A} 0", f"{A} 70000", f"{A} x", f"{A} 1 2", "http://u:p@a", "\xff\x00"]


@pytest.mark.parametrize("line", WRONG)
def test_lines_that_are_no_servers(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        parse(f"{A}\n{line}\n".encode("latin-1"))


def test_a_wrong_line_is_shown_without_what_may_be_secret() -> None:
    for line in ("http://u:geheim@a 1", "http://a/?token=geheim", "u:geheim@a", "http://u:geh/eim@a"):
        with pytest.raises(ConfigError) as raised:
            parse(line.encode())
        assert "eheim" not in str(raised.value)
        assert "line 1" in str(raised.value)


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def test_a_command_lists_servers() -> None:
    assert read(python(f"print({A!r})")) == {A: 51216}


def test_commands_that_list_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exit code 3: no resolver"):
        read(python("import sys; sys.stderr.write('no resolver'); sys.exit(3)"))
    with pytest.raises(ConfigError, match="bytes"):
        read(python("print('# ' + 'x' * 2_000_000)"))
    missing: FileOrCommand
    for missing in ([str(tmp_path / "no")], str(tmp_path / "no")):
        with pytest.raises(ConfigError, match="No such file"):
            read(missing)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody writes to the pipe, and the thread that waited kept the process from ending."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=r"no file|directory"):
            read(str(path))


@pytest.mark.parametrize("stream", ["stdout", slow("stderr")])
def test_a_command_that_never_stops_talking_is_ended(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """946 MB were read in 3 s, before the limit was looked at."""
    monkeypatch.setattr(control, "COMMAND_S", 2.0)
    program = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError if stream == "stdout" else DeadlineError):
        read(python(program))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_file_that_is_too_long_is_no_list(tmp_path: Path) -> None:
    """Its first part would look as if the servers of the rest had gone."""
    path = tmp_path / "list"
    text = f"{A}\n#".ljust(MAX_BYTES, "x")
    path.write_text(text)
    assert read(str(path)) == {A: 51216}
    path.write_text(text + "x")
    with pytest.raises(ConfigError, match="more than"):
        read(str(path))


def test_a_command_that_does_not_end_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "COMMAND_S", 1.0)
    child = tmp_path / "child"
    start = "import subprocess; p = subprocess.Popen(['sleep', '60'])"
    program = f"{start}; open({str(child)!r}, 'w').write(str(p.pid)); p.wait()"
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match="running"):
        read(python(program))
    assert time.monotonic() - begin < 60.0
    assert wait_gone([int(child.read_text())], 30.0) == []


def test_a_list_is_read_again_only_when_it_is_due(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(A)
    discovery = Discovery(str(path), every_s=60.0)

    def take() -> list[ServerRequest]:
        found = discovery.take(members())
        while discovery._reading is not None and not discovery._reading.done():
            time.sleep(0.001)
        return found

    assert take() == [], "nothing was read before"
    assert take() == [add(A)]
    path.write_text(f"{A}\n{B}")
    assert [take() for _ in range(3)] == [[], [], []]
    discovery._due = time.monotonic()
    take()
    assert take() == [add(B)]
