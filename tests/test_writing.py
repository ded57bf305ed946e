"""What is written: whole or not at all, in the place of a plain file alone, whose links and mode stay."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import polars as pl
import pytest

from leap_rs import LeapError, TraceError
from leap_rs.writing import obstacle, reason, replacing

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make devices")


def write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_error_of_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """As on a file system that is read-only, where the temporary file cannot be removed either."""
    directory = tmp_path / "d"
    directory.mkdir()

    def fail() -> None:
        with replacing(directory / "out.parquet", TraceError):
            shutil.rmtree(directory)
            directory.touch()
            raise OSError(f"Read-only file system (os error {errno.EROFS}): d/.out.parquet.tmp")

    with pytest.raises(TraceError, match=r"out\.parquet: cannot be written: Read-only file system$"):
        fail()


def test_the_system_s_own_words_without_those_around_them() -> None:
    wrapped = f"parquet: File out of specification: underlying IO error: (os error {errno.ENOSPC})"
    assert reason(pl.exceptions.ComputeError(wrapped)) == "No space left on device"
    assert reason(pl.exceptions.ComputeError("two\nlines")) == "two lines"


def test_a_block_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("before")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert sorted(tmp_path.iterdir()) == sorted([path, temporary])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("there", "before")]


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    for mask in (0o022, 0o027, 0o077):
        before = os.umask(mask)
        try:
            write(tmp_path / f"{mask}", "")
        finally:
            os.umask(before)
        assert mode(tmp_path / f"{mask}") == 0o666 & ~mask


@pytest.mark.parametrize("had", [0o600, 0o640, 0o664, 0o444])
def test_a_file_keeps_its_mode_and_shows_nothing_on_the_way(had: int, tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.touch()
    path.chmod(had)
    with replacing(path) as temporary:
        temporary.write_text("secret")
        assert mode(temporary) == 0o600
    assert (mode(path), path.read_text()) == (had, "secret")


@AS_ROOT
def test_a_file_of_somebody_else_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.touch()
    os.chown(path, 12345, 54321)
    write(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid, path.read_text()) == (12345, 54321, "new")


def test_links_are_followed_to_what_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, near, further = tmp_path / "far" / "file", tmp_path / "near", tmp_path / "further"
    near.symlink_to("far/file")
    further.symlink_to(near)
    write(further, "made")  # the last link leads to nothing yet
    first = target.stat().st_ino
    write(further, "again")
    assert (near.is_symlink(), further.is_symlink(), target.read_text()) == (True, True, "again")
    assert target.stat().st_ino != first
    assert [one.name for one in (tmp_path / "far").iterdir()] == ["file"]


def test_links_in_a_circle_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(LeapError, match=r"/a: cannot be written: Too many levels of symbolic links$"):
        write(tmp_path / "a", "")
    assert obstacle(tmp_path / "a") == "Too many levels of symbolic links"


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "x" * 300_000  # more than a pipe holds at a time
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert obstacle(pipe) is None
    write(pipe, text)
    reader.join()
    assert read == [text]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_a_device_is_written_into_and_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    before = Path("/dev/null").stat().st_rdev
    for path in (Path("/dev/null"), link):
        assert obstacle(path) is None
        write(path, "nothing")
    now = Path("/dev/null").stat()
    assert stat.S_ISCHR(now.st_mode)
    assert now.st_rdev == before
    assert link.is_symlink()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_device_is_one_error() -> None:
    with pytest.raises(LeapError, match=r"^/dev/full: cannot be written: No space left on device$"):
        write(Path("/dev/full"), "x" * 100_000)
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


@AS_ROOT
def test_a_disk_is_no_place_for_a_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    try:
        os.mknod(disk, stat.S_IFBLK | 0o600, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("no devices may be made here")
    with pytest.raises(LeapError, match=r"disk: cannot be written: it is a disk$"):
        write(disk, "")
    assert obstacle(disk) == "it is a disk"
    assert stat.S_ISBLK(disk.stat().st_mode)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LeapError, match=r"cannot be written: it is a directory$"):
        write(tmp_path, "")
    assert obstacle(tmp_path) == "it is a directory"
    assert obstacle(tmp_path / "no" / "file") == f"there is no directory {tmp_path / 'no'}"


@pytest.mark.parametrize("given", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_is_named_as_stdout_goes_where_stdout_goes(given: str, tmp_path: Path) -> None:
    """Also where that is a file, which would else be replaced under the command's feet."""
    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from leap_rs.writing import replacing\n"
        "print('before')\n"
        "with replacing(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('within\\n')\n"
        "print('after')"
    )
    with out.open("w") as stdout:
        inode = out.stat().st_ino
        subprocess.run([sys.executable, "-c", code, given], stdout=stdout, check=True)
    assert out.stat().st_ino == inode
    assert out.read_text() == "before\nwithin\nafter\n"


@pytest.mark.parametrize("name", ["x" * 250, "é" * 125, os.fsdecode(b"\xff" * 250), "a\nb"])
def test_names_as_long_and_as_odd_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, "once")
    write(tmp_path / name, "twice")
    assert [one.name for one in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "twice"


def test_a_name_that_is_too_long_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(LeapError, match=r"cannot be written: File name too long$"):
        write(tmp_path / ("x" * 256), "")
    assert obstacle(tmp_path / ("x" * 256)) == "File name too long"
    assert list(tmp_path.iterdir()) == []
