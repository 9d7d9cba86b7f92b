"""Files are replaced as a whole or not at all."""

from pathlib import Path

import pytest

from toma_diffusion import UsageError
from toma_diffusion.files import check_writable, replacing


def test_a_new_folder_and_any_letters(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with replacing(path) as file:
        file.write("é 苹果\r\n")
    assert path.read_bytes() == "é 苹果\r\n".encode()


def test_two_writers_at_once_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path) as first, replacing(path) as second:
        first.write("first")
        second.write("second")
        assert path.read_text() == "old"
    assert path.read_text() == "first"  # that which ended last
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail():
        with replacing(path) as file:
            file.write("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]
    assert path.read_text() == "old"


class TestCheckWritable:
    def test_leaves_nothing_but_the_folder(self, tmp_path):
        check_writable(tmp_path / "new" / "file.txt")
        assert [path.name for path in tmp_path.rglob("*")] == ["new"]

    def test_a_folder_in_the_file_s_place(self, tmp_path):
        with pytest.raises(UsageError, match="is a folder: give the name of a file"):
            check_writable(tmp_path)

    def test_a_file_in_the_folder_s_place(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match=r"image\.png' cannot be written: .*file'\. Give a path in a folder"):
            check_writable(tmp_path / "file" / "image.png")

    def test_a_folder_that_cannot_be_made(self):
        with pytest.raises(UsageError, match=r"'/proc/nowhere/image\.png' cannot be written"):
            check_writable(Path("/proc/nowhere/image.png"))


def test_a_full_disk_is_one_error_that_says_so():
    """/dev/full takes nothing: writing fails, and closing the file afterwards fails once more."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")

    class Full(type(full)):
        def with_name(self, name):
            return full

        def unlink(self, missing_ok=False):
            """It is a device."""

    with pytest.raises(UsageError, match="the disk is full") as raised, replacing(Full("/dev/full")) as file:
        file.write("x" * 100_000)
    assert raised.value.__suppress_context__
