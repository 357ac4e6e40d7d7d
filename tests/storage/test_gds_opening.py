"""When GPUDirect Storage is used: the trial, kvikio's settings, and what a config asks for."""

import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from ssdtrain import storage
from ssdtrain.config import OffloadConfig
from ssdtrain.errors import ConfigError, StoreError
from ssdtrain.storage import DirectStore, StripeStore, gds, kvikio_setup, open_store
from ssdtrain.storage.gds import GdsStore, open_gds_store
from ssdtrain.storage.kvikio_setup import SETTINGS, GdsRefusedError
from ssdtrain.testing.suite import content, filled, read_back, same

from .helpers import open_descriptors, run_script

MIB = 1 << 20


@pytest.fixture
def store(tmp_path):
    store = GdsStore(tmp_path)
    yield store
    store.close()


@pytest.fixture
def two(tmp_path):
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    return directories


@pytest.fixture
def gpu(monkeypatch):
    """Torch sees a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Puts a script in the place of the trial."""

    def put(text):
        script = tmp_path / "trial.py"
        script.write_text(text)
        monkeypatch.setattr(gds, "_PROBE", script)

    return put


def settings_of_kvikio():
    kvikio = kvikio_setup.load()
    return {name: kvikio.defaults.get(name) for name in (*vars(SETTINGS), "compat_mode")}


class TestTheTrial:
    def test_it_succeeds_where_the_chain_works(self, on_stand_in, store):
        store.open_device(0, compat=True)
        assert store.backend == "gds-compat"

    def test_it_is_made_on_the_device_that_is_asked_for(self, on_stand_in, store):
        with pytest.raises(GdsRefusedError, match="cuDevicePrimaryCtxRetain"):
            store.open_device(7, compat=True)

    def test_it_leaves_the_spill_file_empty(self, on_stand_in, store):
        store.open_device(0, compat=True)
        assert os.fstat(store._file._fd).st_size == 0

    def test_it_leaves_nothing_in_the_directory_nor_in_the_working_directory(
        self, on_stand_in, store, tmp_path, monkeypatch
    ):
        here = tmp_path / "here"
        here.mkdir()
        monkeypatch.chdir(here)
        store.open_device(0, compat=True)
        assert [list(here.iterdir()), list(tmp_path.iterdir())] == [[], [here]]

    def test_it_fails_without_a_driver(self, stand_in, store, monkeypatch):
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        with pytest.raises(GdsRefusedError, match=r"libcuda\.so\.1"):
            store.open_device(0, compat=True)

    def test_it_ends_when_cufile_does_not_answer(self, stand_in, store, trial, monkeypatch):
        trial("while True: pass")
        monkeypatch.setattr(gds, "PROBE_SECONDS", 0.2)
        with pytest.raises(GdsRefusedError, match=r"did not answer within 0\.2 s"):
            store.open_device(0, compat=True)

    def test_a_crash_is_a_refusal(self, stand_in, store, trial):
        trial("import os; os.abort()")
        with pytest.raises(GdsRefusedError, match=r"ended with -6 \(it said nothing\)"):
            store.open_device(0, compat=True)

    def test_an_exception_is_a_refusal_that_names_it(self, stand_in, store, trial):
        trial("raise SystemError('bad luck')")
        with pytest.raises(GdsRefusedError, match="bad luck"):
            store.open_device(0, compat=True)

    def test_noise_before_the_answer_does_not_matter(self, stand_in, store, trial):
        trial("print('cuFile greets you')\nprint('gds-compat')")
        store.open_device(0, compat=True)
        assert store.backend == "gds-compat"

    def test_bytes_that_do_not_come_back_are_a_refusal(self, on_stand_in, store, trial):
        trial(gds._PROBE.read_text().replace("file.pread(memory).get()", "NBYTES"))
        with pytest.raises(GdsRefusedError, match="did not come back"):
            store.open_device(0, compat=True)

    def test_a_refused_store_is_what_it_was(self, stand_in, store, trial):
        trial("print('no: 5030 (GPUDirect Storage not supported on current file)')")
        with pytest.raises(GdsRefusedError, match=r"^5030 "):
            store.open_device(0, compat=True)
        extent = store.allocate(MIB)
        store.write(extent, filled(MIB, seed=1))
        assert store.backend == "direct"
        assert store.device_store(extent) is None
        assert same(read_back(store, extent, MIB), content(filled(MIB, seed=1)))


class TestTheFile:
    @pytest.mark.usefixtures("untried", "stand_in")
    def test_it_is_neither_truncated_nor_replaced(self, store):
        extent = store.allocate(MIB)
        store.write(extent, filled(MIB, seed=2, skew=0))
        store.open_device(0, compat=True)
        assert os.path.samestat(os.fstat(store._device_file.fileno()), os.fstat(store._file._fd))
        assert same(read_back(store, extent, MIB), content(filled(MIB, seed=2)))

    @pytest.mark.usefixtures("untried")
    def test_what_it_grows_by_can_be_used(self, stand_in, store):
        """Kvikio remembers sizes of files."""
        store.open_device(0, compat=True)
        memory = stand_in.memory(MIB)
        for _ in range(2):
            extent = store.allocate(300 * MIB)
            for offset in (0, 299 * MIB):
                store.write_device(extent, memory.buffer, offset)
                store.read_device(extent, memory.buffer, offset)

    @pytest.mark.usefixtures("untried", "stand_in")
    def test_a_file_that_cufile_does_not_take_is_refused_and_not_done_slowly(self, store, monkeypatch):
        kvikio = kvikio_setup.load()
        modes = []

        def refuse(_path, flags):
            modes.append((kvikio.defaults.get("compat_mode"), flags))
            raise RuntimeError("cuFile error: 5030\nGPUDirect Storage not supported on current file")

        monkeypatch.setattr(kvikio, "CuFile", refuse)
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.AUTO):
            before = settings_of_kvikio()
            with pytest.raises(GdsRefusedError, match="5030 GPUDirect Storage not supported"):
                store.open_device(0, compat=True)
            assert modes == [(kvikio.CompatMode.OFF, "r+")]
            assert settings_of_kvikio() == before


@pytest.mark.usefixtures("untried", "stand_in")
class TestKvikiosSettings:
    def test_they_are_ours_while_a_store_is_open_and_put_back_after(self, store):
        before = settings_of_kvikio()
        store.open_device(0, compat=True)
        assert settings_of_kvikio() == {**vars(SETTINGS), "compat_mode": before["compat_mode"]}
        store.close()
        assert settings_of_kvikio() == before

    def test_the_last_of_several_stores_puts_them_back(self, two):
        before = settings_of_kvikio()
        first, second = (GdsStore(directory) for directory in two)
        first.open_device(0, compat=True)
        second.open_device(0, compat=True)
        first.close()
        assert settings_of_kvikio()["auto_direct_io_read"] is True
        second.close()
        assert settings_of_kvikio() == before

    def test_what_the_user_set_in_the_environment_stays(self, store, monkeypatch):
        monkeypatch.setenv("KVIKIO_TASK_SIZE", "1048576")
        monkeypatch.setenv("KVIKIO_NTHREADS", "2")
        kvikio = kvikio_setup.load()
        with kvikio.defaults.set({"task_size": MIB, "num_threads": 2}):
            store.open_device(0, compat=True)
            assert (settings_of_kvikio()["task_size"], settings_of_kvikio()["num_threads"]) == (MIB, 2)


class TestVersions:
    @pytest.mark.usefixtures("stand_in")
    @pytest.mark.parametrize("version", ["26.08.00", "25.12.01"])
    def test_an_old_kvikio_is_refused(self, monkeypatch, version):
        monkeypatch.setattr(kvikio_setup.load(), "__version__", version)
        with pytest.raises(GdsRefusedError, match=f"kvikio {version} is too old; install 26.10 or newer"):
            kvikio_setup.load()

    @pytest.mark.usefixtures("stand_in")
    @pytest.mark.parametrize("version", ["26.10.00", "26.12.00a3", "27.02.00"])
    def test_a_newer_one_is_taken(self, monkeypatch, version):
        monkeypatch.setattr(kvikio_setup.load(), "__version__", version)
        assert kvikio_setup.load().__version__ == version

    def test_one_that_cannot_be_imported_is_refused(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "kvikio", None)
        with pytest.raises(GdsRefusedError, match="cannot be imported"):
            kvikio_setup.load()


class TestAuto:
    @pytest.fixture
    def opened(self):
        stores = []

        def open_with(**options):
            stores.append(open_store(OffloadConfig(**options)))
            return stores[-1]

        yield open_with
        for store in stores:
            store.close()

    @pytest.fixture
    def native(self, stand_in, monkeypatch):
        """Kvikio is not told to copy through host memory; the stand-in can do no better, though."""
        kvikio = kvikio_setup.load()
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.AUTO):
            monkeypatch.setattr(kvikio, "CompatMode", SimpleNamespace(ON=None, OFF=kvikio.CompatMode.ON))
            yield

    @pytest.mark.usefixtures("gpu", "native", "untried")
    def test_it_is_used_where_it_works(self, opened, tmp_path):
        store = opened(spill_dir=tmp_path)
        assert isinstance(store, GdsStore)
        assert store.backend == "gds"

    @pytest.mark.usefixtures("gpu", "native")
    def test_it_is_not_used_where_cufile_would_copy(self, opened, tmp_path, trial):
        trial("print('gds-compat')")
        with pytest.warns(RuntimeWarning, match="nvidia-fs is not there"):
            assert opened(spill_dir=tmp_path).backend == "direct"

    @pytest.mark.usefixtures("gpu", "stand_in")
    def test_it_is_not_used_where_kvikio_is_told_to_copy(self, opened, tmp_path):
        with pytest.warns(RuntimeWarning, match="KVIKIO_COMPAT_MODE"):
            assert opened(spill_dir=tmp_path).backend == "direct"

    @pytest.mark.usefixtures("gpu", "native", "untried")
    def test_limits_reach_it(self, opened, tmp_path):
        store = opened(spill_dir=tmp_path, max_spill_bytes=MIB)
        with pytest.raises(StoreError, match="max_spill_bytes"):
            store.allocate(2 * MIB)

    @pytest.mark.usefixtures("gpu", "native")
    def test_a_refusal_is_one_line_for_each_directory(self, opened, two, trial):
        trial("print('no: nvidia-fs is not there')")
        with pytest.warns(RuntimeWarning) as caught:
            store = opened(spill_dir=two)
        lines = [str(warning.message) for warning in caught]
        assert [str(directory) in line for directory, line in zip(two, lines, strict=True)] == [True, True]
        assert all("direct instead" in line and "nvidia-fs is not there" in line for line in lines)
        assert store.backend == "direct"

    @pytest.mark.usefixtures("gpu", "native")
    def test_directories_fall_back_alone(self, opened, two, monkeypatch):
        answers = iter(["gds", GdsRefusedError("not here")])

        def answer(*_arguments, **_options):
            one = next(answers)
            if isinstance(one, str):
                return one
            raise one

        monkeypatch.setattr(gds, "_probe", answer)
        with pytest.warns(RuntimeWarning, match="not here"):
            store = opened(spill_dir=two)
        assert store.backend == "gds+direct"
        extents = [store.allocate(MIB) for _ in range(2)]
        assert [store.device_store(extent) is None for extent in extents] == [False, True]

    @pytest.mark.usefixtures("gpu")
    def test_a_missing_kvikio_is_no_news(self, opened, tmp_path, monkeypatch):
        monkeypatch.setattr(storage, "is_installed", lambda: False)
        assert opened(spill_dir=tmp_path).backend == "direct"

    @pytest.mark.usefixtures("gpu")
    def test_checksums_are_made_in_host_memory(self, opened, tmp_path, monkeypatch):
        pytest.importorskip("xxhash")
        monkeypatch.setattr(storage, "open_gds_store", pytest.fail)
        opened(spill_dir=tmp_path, verify=True)

    def test_without_a_gpu_nothing_is_tried(self, opened, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(storage, "open_gds_store", pytest.fail)
        assert type(opened(spill_dir=tmp_path)) is DirectStore

    def test_without_a_gpu_nothing_is_imported_nor_started(self, tmp_path):
        text = (
            "import subprocess, sys, torch\n"
            "torch.cuda.is_available = lambda: False\n"
            "subprocess.Popen = None\n"
            "from ssdtrain import OffloadConfig\n"
            "from ssdtrain.storage import open_store\n"
            "open_store(OffloadConfig(spill_dir=sys.argv[1])).close()\n"
            "print('kvikio' in sys.modules)"
        )
        assert run_script(text, tmp_path) == "False"


class TestRequired:
    @pytest.mark.usefixtures("on_stand_in")
    def test_it_needs_no_gpu_of_torch(self, tmp_path):
        store = open_store(OffloadConfig(spill_dir=tmp_path, backend="gds"))
        assert store.backend == "gds-compat"
        store.close()

    @pytest.mark.usefixtures("stand_in")
    def test_a_refusal_is_an_error_that_says_why_and_leaves_nothing_open(self, tmp_path, trial):
        trial("print('no: nvidia-fs is not there')")
        before = open_descriptors()
        with pytest.raises(ConfigError, match=r"nvidia-fs is not there.*use backend=\"auto\"") as caught:
            open_store(OffloadConfig(spill_dir=tmp_path, backend="gds"))
        assert str(tmp_path) in str(caught.value)
        assert open_descriptors() == before

    @pytest.mark.parametrize(
        ("cuda", "extra"), [("12.8", "gds-cu12"), ("13.0", "gds-cu13"), (None, "gds-cu13")]
    )
    def test_a_missing_kvikio_is_named_with_the_command(self, tmp_path, monkeypatch, cuda, extra):
        monkeypatch.setattr(storage, "is_installed", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(ConfigError, match=rf"kvikio.*pip install 'ssdtrain\[{extra}\]'"):
            open_store(OffloadConfig(spill_dir=tmp_path, backend="gds"))

    def test_checksums_go_with_it_not(self):
        with pytest.raises(ConfigError, match="verify: checksums are made in host memory"):
            OffloadConfig(backend="gds", verify=True)

    @pytest.mark.usefixtures("stand_in")
    def test_a_directory_that_cannot_be_used_is_the_error(self, tmp_path):
        with pytest.raises(ConfigError, match="does not exist"):
            open_gds_store(tmp_path / "missing", required=True)


class TestStripes:
    @pytest.fixture
    def stripe(self, untried, stand_in, two):
        members = [GdsStore(directory) for directory in two]
        for member in members:
            member.open_device(0, compat=True)
        stripe = StripeStore(members)
        yield stripe
        stand_in.fail_no_more()
        stripe.close()

    def test_blocks_go_to_the_extents_member(self, stripe, stand_in):
        memory = stand_in.memory(MIB)
        for fill in (1, 2):
            memory.fill(bytes([fill]) * MIB)
            extent = stripe.allocate(MIB)
            stripe.device_store(extent).write_device(extent, memory.buffer)
            memory.fill(bytes(MIB))
            stripe.device_store(extent).read_device(extent, memory.buffer)
            assert memory.content() == bytes([fill]) * MIB
            assert extent.member == fill - 1

    def test_a_failed_write_counts_against_the_member(self, stripe, stand_in):
        memory = stand_in.memory(MIB)
        extent = stripe.allocate(MIB)
        stand_in.fail_copy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(StoreError):
                stripe.device_store(extent).write_device(extent, memory.buffer)
        assert {stripe.allocate(MIB).member for _ in range(8)} == {1 - extent.member}

    def test_bytes_being_written_count(self, stripe, stand_in, monkeypatch):
        memory = stand_in.memory(MIB)
        extent = stripe.allocate(MIB)
        inner = stripe._stores[extent.member]
        placed = []
        monkeypatch.setattr(
            type(inner),
            "write_device",
            lambda *_arguments: placed.extend(stripe.allocate(MIB).member for _ in range(3)),
        )
        stripe.device_store(extent).write_device(extent, memory.buffer)
        assert placed == [1 - extent.member] * 3
