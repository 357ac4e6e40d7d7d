"""Which directories are taken, how the file is opened, and what is said when it cannot be."""

import errno
import fcntl
import os
import stat

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.storage import DirectStore, HostBuffer, linux, opening
from ssdtrain.storage.linux import DirectAlignment

from .helpers import address_of, descriptor, free_bytes, look_under, open_descriptors, run_script

MIB = 1 << 20


def refusal(directory, **options):
    """The error's one line."""
    before = open_descriptors()
    with pytest.raises(ConfigError) as caught:
        DirectStore(directory, **options)
    assert open_descriptors() == before
    text = str(caught.value)
    assert "\n" not in text
    return text


class TestDirectories:
    def test_a_missing_one_is_named_and_not_created(self, tmp_path):
        missing = tmp_path / "missing"
        what_to_do = "does not exist; create it, or name another directory on an SSD"
        assert refusal(missing) == f"spill_dir: '{missing}' {what_to_do}"
        assert not missing.exists()

    def test_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        assert "is not a directory" in refusal(tmp_path / "file")

    def test_the_empty_string_is_refused(self):
        assert refusal("") == "spill_dir: expected a directory, got ''"

    def test_a_null_byte_is_refused(self):
        assert "expected a directory" in refusal("a\0b")

    def test_a_file_system_without_files_is_not_called_missing(self):
        assert "cannot hold a spill file" in refusal("/proc")

    def test_a_read_only_mount_is_named(self, mounted):
        assert "read-only" in refusal(mounted("tmpfs", "-o", "ro"))

    def test_a_full_disk_is_named(self, mounted):
        directory = mounted("tmpfs", "-o", "size=64k")
        (directory / "filler").write_bytes(bytes(64 << 10))
        assert "has no room" in refusal(directory)

    def test_a_directory_of_somebody_else_is_named(self, tmp_path):
        if os.geteuid() != 0:
            pytest.skip("changing the user needs root")
        script = """
import os, sys
from ssdtrain.storage import DirectStore
from ssdtrain.errors import ConfigError
os.setgid(65534); os.setuid(65534)
try:
    DirectStore(sys.argv[1])
except ConfigError as error:
    print(error)
"""
        tmp_path.chmod(0o700)
        assert "not writable by this user" in run_script(script, tmp_path)

    def test_ram_is_warned_of(self, mounted):
        directory = mounted("tmpfs", "-o", "size=4m")
        with pytest.warns(UserWarning, match="tmpfs, which is RAM"):
            DirectStore(directory).close()

    def test_a_disk_is_not_warned_of(self, tmp_path):
        DirectStore(tmp_path).close()


class TestTheFile:
    @pytest.fixture(params=["O_TMPFILE", "unlinked", "no such flag"])
    def store(self, request, tmp_path, monkeypatch):
        if request.param == "unlinked":
            refuse_open(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
        elif request.param == "no such flag":
            monkeypatch.delattr(os, "O_TMPFILE")
        store = DirectStore(tmp_path)
        yield store
        store.close()

    def test_it_has_no_name(self, store, tmp_path):
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(descriptor(store)).st_nlink == 0

    def test_it_is_for_its_owner_alone(self, store):
        assert stat.S_IMODE(os.fstat(descriptor(store)).st_mode) == 0o600

    def test_it_is_not_inherited_by_programs(self, store):
        assert fcntl.fcntl(descriptor(store), fcntl.F_GETFD) & fcntl.FD_CLOEXEC

    def test_it_is_empty_after_the_probe(self, store):
        assert os.fstat(descriptor(store)).st_size == 0

    def test_its_passing_name_tells_run_and_rank(self, tmp_path, monkeypatch):
        names = refuse_open(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run/7")
        monkeypatch.setenv("RANK", "3")
        DirectStore(tmp_path).close()
        (name,) = (str(name) for name in names if "ssdtrain" in str(name))
        assert name.startswith(f"{tmp_path}/ssdtrain-run_7-rank3-")

    def test_no_name_is_left_when_o_direct_is_refused_after_creation(self, tmp_path, monkeypatch):
        real = os.open

        def create_and_refuse(path, flags, *rest):
            if flags & os.O_DIRECT:
                os.close(real(path, flags & ~os.O_DIRECT, *rest))
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, *rest)

        monkeypatch.delattr(os, "O_TMPFILE")
        monkeypatch.setattr(os, "open", create_and_refuse)
        DirectStore(tmp_path).close()
        assert list(tmp_path.iterdir()) == []

    def test_an_unlink_that_fails_leaves_no_descriptor(self, tmp_path, monkeypatch):
        monkeypatch.delattr(os, "O_TMPFILE")

        def refuse(*_arguments, **_options):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(opening.Path, "unlink", refuse)
        refusal(tmp_path)

    def test_two_hundred_stores_leave_no_descriptor(self, tmp_path):
        before = open_descriptors()
        for _ in range(200):
            DirectStore(tmp_path).close()
        assert open_descriptors() == before

    def test_a_forgotten_store_leaves_no_descriptor(self, tmp_path):
        before = open_descriptors()
        store = DirectStore(tmp_path)
        assert open_descriptors() == before + 1
        del store
        assert open_descriptors() == before

    def test_disk_space_comes_back_on_close(self, small_ext4):
        free = free_bytes(small_ext4)
        store = DirectStore(small_ext4)
        store.allocate(4 * MIB)
        assert free_bytes(small_ext4) < free
        store.close()
        assert free_bytes(small_ext4) == free

    def test_disk_space_comes_back_when_the_process_is_killed(self, small_ext4):
        free = free_bytes(small_ext4)
        script = """
import os, signal, sys
if os.fork() == 0:
    from ssdtrain.storage import DirectStore
    store = DirectStore(sys.argv[1])
    store.allocate(4 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        assert run_script(script, small_ext4) == "-9"
        assert free_bytes(small_ext4) == free
        assert [entry.name for entry in small_ext4.iterdir()] == ["lost+found"]


class TestWhichBackend:
    def test_a_disk_is_direct(self, tmp_path):
        store = DirectStore(tmp_path)
        assert store.backend == "direct"
        assert fcntl.fcntl(descriptor(store), fcntl.F_GETFL) & os.O_DIRECT
        store.close()

    def test_buffered_can_be_asked_for(self, tmp_path):
        store = DirectStore(tmp_path, direct=False)
        assert store.backend == "buffered"
        assert not fcntl.fcntl(descriptor(store), fcntl.F_GETFL) & os.O_DIRECT
        store.close()

    @pytest.fixture(
        params=["at open", "at write", "by statx", "by a wish for more", "by silence", "no such flag"]
    )
    def without_direct(self, request, monkeypatch):
        """Six ways of having no O_DIRECT."""
        match request.param:
            case "at open":
                refuse_open(monkeypatch, os.O_DIRECT, errno.EINVAL)
            case "at write":
                refuse_write(monkeypatch, errno.EINVAL)
            case "by statx":
                monkeypatch.setattr(linux, "direct_alignment", lambda _fd: DirectAlignment(0, 0))
            case "by a wish for more":
                monkeypatch.setattr(linux, "direct_alignment", lambda _fd: DirectAlignment(512, 65536))
            case "by silence":
                lose_writes(monkeypatch)
            case "no such flag":
                monkeypatch.delattr(os, "O_DIRECT")

    @pytest.mark.usefixtures("without_direct")
    def test_auto_falls_back(self, tmp_path):
        before = open_descriptors()
        store = DirectStore(tmp_path)
        assert store.backend == "buffered"
        assert open_descriptors() == before + 1
        store.close()

    @pytest.mark.usefixtures("without_direct")
    def test_required_direct_is_an_error(self, tmp_path):
        text = refusal(tmp_path, direct=True)
        assert text.startswith('backend: "direct" was asked for')
        assert str(tmp_path) in text

    def test_a_kernel_that_says_nothing_is_probed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(linux, "direct_alignment", lambda _fd: None)
        store = DirectStore(tmp_path)
        assert store.backend == "direct"
        store.close()

    def test_alignment_is_what_statx_says(self, tmp_path):
        store = DirectStore(tmp_path)
        alignment = linux.direct_alignment(descriptor(store))
        store.close()
        if alignment is None:
            pytest.skip("this kernel does not tell")
        assert all(value in (512, 1024, 2048, 4096) or value < 512 for value in alignment)

    def test_what_falls_back_reaches_the_file(self, tmp_path, monkeypatch):
        refuse_open(monkeypatch, os.O_DIRECT, errno.EINVAL)
        store = DirectStore(tmp_path)
        memory = bytearray(b"abc")
        extent = store.allocate(3)
        store.write(extent, HostBuffer(address_of(memory), 3, memory))
        with look_under(store) as fd:
            assert os.pread(fd, 3, extent.offset) == b"abc"
        store.close()


def refuse_open(monkeypatch, flag, code):
    """`os.open` fails where it is called with `flag`; returns the list of paths that it was called with."""
    real, paths = os.open, []

    def refusing(path, flags, *rest, **options):
        paths.append(path)
        if flags & flag == flag:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)
    return paths


def refuse_write(monkeypatch, code):
    real = os.pwrite

    def refusing(fd, *rest):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(fd, *rest)

    monkeypatch.setattr(os, "pwrite", refusing)


def lose_writes(monkeypatch):
    """Direct writes succeed and change nothing but the file's length."""
    real = os.pwrite

    def losing(fd, view, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            os.ftruncate(fd, offset + len(view))
            return len(view)
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", losing)
