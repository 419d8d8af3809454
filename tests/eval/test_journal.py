"""The journal: every crash leaves a good beginning, every flipped bit is found, and no good line is lost with it."""

import errno
import json
import os
import socket
import stat
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fengine.errors import ResumeMismatchError, StorageError
from fengine.eval.runs.folder import RunFolder
from fengine.eval.runs.index import RowIndex, RowTable, reopen
from fengine.eval.runs.journal import Damage, Entry, Journal, encode, header, read_at, scan
from fengine.eval.runs.output import InOrder, shown

RECORDS = [b'{"id": "r%d", "text": "\xc3\xa9 %s"}' % (i, b"x" * i) for i in range(5)]
LINES = [header("me"), *(encode([i, 1, 7 * i], record) for i, record in enumerate(RECORDS))]
WHOLE = b"".join(LINES)
STARTS = [sum(map(len, LINES[:i])) for i in range(len(LINES) + 1)]


def entries(found: list[Entry | Damage]) -> list[Entry]:
    return [f for f in found if isinstance(f, Entry)]


def scanned(path: Path, data: bytes) -> list[Entry | Damage]:
    path.write_bytes(data)
    return list(scan(path))


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        assert [journal.extend([line])[0] for line in LINES] == STARTS[:-1]
    found = entries(list(scan(path)))
    assert [e.offset for e in found] == STARTS[:-1] and [e.head for e in found][2] == [1, 1, 7]
    with path.open("rb") as file:
        assert read_at(file, STARTS[3]) == found[3] and found[3].record.startswith(b'{"id": "r2"')
        with pytest.raises(StorageError, match="changed"):
            read_at(file, STARTS[3] + 1)


def test_every_prefix_is_a_good_beginning(tmp_path: Path) -> None:
    for size in range(len(WHOLE) + 1):
        found = scanned(tmp_path / "j", WHOLE[:size])
        whole = sum(start <= size for start in STARTS) - 1
        assert [e.offset for e in entries(found)] == STARTS[:whole]
        rest = [f for f in found if isinstance(f, Damage)]
        torn = size - STARTS[whole]
        assert rest == ([Damage(STARTS[whole], torn, torn=True)] if torn else [])


def test_every_flipped_bit_is_found_and_costs_one_line_at_most(tmp_path: Path) -> None:
    for place in range(len(WHOLE)):
        for bit in (1, 32, 128) if WHOLE[place] != 10 else range(1, 256):
            flipped = bytearray(WHOLE)
            flipped[place] ^= bit
            found = scanned(tmp_path / "j", bytes(flipped))
            damage = [f for f in found if isinstance(f, Damage)]
            assert damage and all(d.offset <= place + 1 for d in damage), (place, bit)
            line = sum(start <= place for start in STARTS) - 1
            kept = {e.offset for e in entries(found)}
            assert kept >= {s for i, s in enumerate(STARTS[:-1]) if i != line}, (place, bit)
            assert all(e.record in WHOLE for e in entries(found))


def test_lines_that_come_together_are_one_write(tmp_path: Path) -> None:
    writes: list[bytes] = []

    def write(file: int, data: bytes) -> int:
        writes.append(data)
        return os.write(file, data)

    with Journal(tmp_path / "j", write=write) as journal:
        assert journal.extend(LINES[:4]) == STARTS[:4] and journal.extend([]) == []
        assert journal.extend([LINES[4]]) == [STARTS[4]] and journal.size == STARTS[5]
    assert writes == [WHOLE[: STARTS[4]], LINES[4]]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("room", range(0, STARTS[3] + 30, 13))
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, room: int, together: bool) -> None:
    """Writes that take only a part, then none: what is in the file stays good, and the writer says no from then on."""
    path, left = tmp_path / "j", [room]

    def write(file: int, data: bytes) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.write(file, data[: min(left[0], 20)])
        left[0] -= count
        return count

    journal = Journal(path, write=write)
    with pytest.raises(StorageError, match="No space left") as caught:
        for lines in [LINES] if together else [[line] for line in LINES]:
            journal.extend(lines)
    assert caught.value.errno == errno.ENOSPC and "same command" in str(caught.value)
    left[0] = 10_000
    with pytest.raises(StorageError):
        journal.extend([LINES[0]])
    journal.close()
    whole = sum(start <= room for start in STARTS) - 1
    assert path.read_bytes() == WHOLE[: STARTS[whole]]


def test_a_system_that_writes_nothing_is_not_asked_for_ever(tmp_path: Path) -> None:
    asked = list[int]()

    def write(file: int, data: bytes) -> int:
        asked.append(file)
        assert len(asked) < 3
        return 0

    journal = Journal(tmp_path / "j", write=write)
    with pytest.raises(StorageError, match="make room") as caught:
        journal.extend([encode([1, 2, 3], b"{}")])
    assert caught.value.errno == errno.ENOSPC and len(asked) == 1


def test_a_folders_files_and_then_their_names_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    calls, fsync, replace = list[str](), os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(f"name {new}"), replace(old, new)))
    with RunFolder(tmp_path / "run") as folder:
        folder.write_several({"a": "1", "b": {}})
        path = folder.path
        assert calls == [
            str(path / ".a.tmp"),
            str(path / ".b.tmp"),
            f"name {path / 'a'}",
            f"name {path / 'b'}",
            str(path),
        ]
        calls.clear()
        folder.write_several({"a": "2"}, durable=False)
        assert calls == [f"name {path / 'a'}"]


def test_a_folder_holds_texts_of_half_characters_and_tells_its_writer_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("123456789 a-host-with-a-long-name-that-had-it-before\n" * 3)
    with RunFolder(tmp_path / "run") as folder:
        folder.write("a", "half \udcff")
        assert (folder.path / "a").read_bytes() == b"half \xed\xb3\xbf"
        assert (folder.path / "lock").read_text().split() == [str(os.getpid()), socket.gethostname()]


def test_fsync_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    journal = Journal(tmp_path / "j", sync_seconds=1e9, sync_rows=2, fsync=synced.append)
    for line in LINES[:5]:
        journal.extend([line])
    assert len(synced) == 2
    journal.sync_if_due()
    assert len(synced) == 2
    journal.close()
    journal.close()
    assert len(synced) == 3
    eager = Journal(tmp_path / "j", sync_seconds=0.0, fsync=synced.append)
    eager.extend([LINES[0]])
    assert len(synced) == 4
    together = Journal(tmp_path / "j", sync_seconds=1e9, sync_rows=4, fsync=synced.append)
    for count in (4, 5, 5):
        together.extend(LINES[:2])
        assert len(synced) == count
    clock, counts = [100.0], list[int]()
    monkeypatch.setattr("fengine.eval.runs.journal.time.monotonic", lambda: clock[0])
    timed = Journal(tmp_path / "j", sync_seconds=2.0, fsync=synced.append)
    for moment in (101.0, 102.0, 103.0, 105.0, 106.0):
        clock[0] = moment
        timed.extend([LINES[0]])
        counts.append(len(synced))
    assert counts == [5, 6, 6, 7, 7]


def test_a_failed_fsync_is_final(tmp_path: Path) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal = Journal(tmp_path / "j", sync_rows=1, fsync=fsync)
    for _ in range(2):
        with pytest.raises(StorageError, match="Input/output"):
            journal.extend([LINES[0]])
    with pytest.raises(StorageError):
        journal.sync()


def test_the_limit_of_a_files_size(tmp_path: Path) -> None:
    """The system's own refusal, with a part of the line written."""
    resource = pytest.importorskip("resource")
    journal, before = Journal(tmp_path / "j"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (STARTS[2] + 9, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            for line in LINES:
                journal.extend([line])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "j").read_bytes() == WHOLE[: STARTS[2]]


def test_the_length_of_a_line_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without line ends is read in pieces, and costs no line behind it."""
    monkeypatch.setattr("fengine.eval.runs.journal.MAX_LINE", 100)
    junk = b"\0" * 1050
    found = scanned(tmp_path / "j", WHOLE + junk + b"\n" + LINES[1])
    damage = [f for f in found if isinstance(f, Damage)]
    assert all(d.length <= 100 for d in damage) and sum(d.length for d in damage) == len(junk) + 1
    assert not damage[-1].torn and [e.record for e in entries(found)] == [b"{}", *RECORDS, RECORDS[0]]
    torn = [f for f in scanned(tmp_path / "j", WHOLE + junk) if isinstance(f, Damage)]
    assert torn[0].offset == len(WHOLE) and all(d.torn for d in torn)


@pytest.mark.parametrize("head", [[], [0], 7, {"a": 1}, None])
def test_a_head_that_is_none_is_damage(tmp_path: Path, head: Any) -> None:
    found = scanned(tmp_path / "j", LINES[0] + encode(head, b"{}") + LINES[1])
    assert [type(f) for f in found] == [Entry, Damage, Entry]


def line(index: int, ok: bool = True, key: int = 10) -> bytes:
    return encode([index, int(ok), key + index, 1, 0.0, 0.0, 1, 1], b'{"id": "%d"}' % index)


@pytest.mark.parametrize(
    "data, known, notes, warnings",
    [
        (b"", [0, 0, 0], 0, 0),
        (header("mine")[:9], [0, 0, 0], 1, 0),
        (header("mine")[:-1], [0, 0, 0], 1, 0),
        (header("mine") + line(1), [0, 2, 0], 0, 0),
        (header("mine") + line(0, False) + line(2)[:-3], [1, 0, 0], 1, 0),
        (header("mine") + line(0) + line(1, key=90) + line(2), [2, 0, 2], 0, 1),
        (header("mine") + line(0) + line(1)[:-1] + b"x" + line(2), [2, 2, 2], 0, 1),
        (line(2)[:20] + header("mine") + line(2) + line(0)[:9], [0, 0, 2], 0, 1),
        (header("mine") + line(0) + b"x\n" + line(1)[:9], [2, 0, 0], 0, 1),
    ],
    ids=[
        "none",
        "torn head",
        "no newline",
        "good",
        "torn row",
        "another row",
        "no newline between",
        "damaged head",
        "damage and a torn row",
    ],
)
def test_a_journal_that_was_reopened_is_good(
    data: bytes, known: list[int], notes: int, warnings: int, tmp_path: Path
) -> None:
    """It begins with whose it is, holds nothing but good lines of these rows, and stays as it is the next time."""
    rows, told = RowIndex(array("Q", [10, 11, 12]), ""), (list[str](), list[str]())
    with RunFolder(tmp_path / "run") as folder:
        path = folder.path / "journal.log"
        path.write_bytes(data)
        for _ in range(2):
            table = reopen(folder, rows, "mine", told[0].append, told[1].append)
            assert [*table.known] == known and (len(told[0]), len(told[1])) == (notes, warnings)
            first, *found = scan(path)
            assert isinstance(first, Entry) and first.head[2] == "mine"
        assert [one.head[0] for one in entries(found)] == [i for i in range(3) if known[i]] and len(found) == sum(
            map(bool, known)
        )
        assert len(list(folder.path.glob("journal.damaged-*"))) == warnings


def test_a_journal_of_two_runs_is_neither_ones(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        for others in ("other", "mine"), ("mine", "other"):
            (folder.path / "journal.log").write_bytes(b"".join(map(header, others)) + line(0))
            with pytest.raises(ResumeMismatchError, match="another run"):
                reopen(folder, RowIndex(array("Q", [10]), ""), "mine", print, print)


def test_names_and_contents_outlive_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is synced, and then, behind their new names, the folder's names."""
    with RunFolder(tmp_path / "run") as folder:
        synced: list[bool] = []
        there = lambda: sorted(p.name for p in folder.path.iterdir() if p.name in ("a", "b"))  # noqa: E731
        monkeypatch.setattr(
            os, "fsync", lambda number: synced.append(stat.S_ISDIR(os.fstat(number).st_mode) and there())
        )
        folder.write("a", "1")
        folder.write_several({"a": "2", "b": "3"})
        folder.write_several({"b": "4"}, durable=False)
        assert synced == [False, ["a"], False, False, ["a", "b"]]


def test_rows_that_were_there_before_are_not_shown_again(tmp_path: Path) -> None:
    """The others are, in order."""
    record = b'{"id": "r", "error": {"type": "E", "message": "m"}}'
    lines, table = [encode([i, 1, 10 + i, 1, 0.0, 0.0, 1, 1], record) for i in range(4)], RowTable(4)
    (tmp_path / "j").write_bytes(b"".join(lines))
    put: Any = lambda i: table.put(i, True, sum(map(len, lines[:i])))  # noqa: E731
    put(0)
    put(2)
    shown = list[int]()
    view: Any = SimpleNamespace(row=lambda row: shown.append(row.number), note=lambda text: None)
    with InOrder(table, tmp_path / "j", 9, view) as order:
        for index, found in ((3, []), (1, [2, 4])):
            put(index)
            order.put(index)
            order.advance()
            assert shown == found


@pytest.mark.parametrize(
    ("data", "prompt", "told"),
    [
        ({"question": "What is it?"}, [3, 4], "What is it?"),
        ({}, [3, 4], "2 token ids"),
        ({}, [], ""),
        ({"prompt": "a"}, "b", "b"),
    ],
)
def test_a_row_is_shown_by_what_a_person_reads(data: dict[str, str], prompt: Any, told: str) -> None:
    answer = {"prompt": prompt, "text": "a", "output_ids": [1], "finish_reason": {"type": "stop"}}
    record = json.dumps({"id": "r", "data": data, "answers": [answer], "scores": {}}).encode()
    assert shown(Entry(0, [0, 0, 0, 0, 0.0, 0.0, 2, 1], record)).prompt == told
