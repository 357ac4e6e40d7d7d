"""scripts/gpu_check as far as it goes without a GPU: its sections train on the CPU, the rest is arithmetic."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "scripts" / "gpu_check"))


@pytest.fixture
def report():
    from check_report import Report

    return Report(600)


class Clock:
    """Stands still until it is told."""

    now = 100.0

    def __call__(self):
        return self.now


def run(*options, **environment):
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check"), *map(str, options)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment, timeout=100
    )


def tiny():
    from gpu_models import Size

    return Size(width=64, layers=2, sequence=32, batch=2, vocabulary=128, head=32)


class TestWithoutAGpu:
    def test_says_so_in_one_line(self):
        done = run(CUDA_VISIBLE_DEVICES="")
        assert (done.returncode, done.stdout, done.stderr) == (3, "no GPU here: nothing was checked\n", "")

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            (["--seconds", "0"], "--seconds: expected more than 0"),
            (["--width", "1000"], "--width: expected a power of two from 256 on, got 1000"),
            (["--dir", "/nowhere"], "--dir: expected a directory, got /nowhere"),
            (["--wheels", "/nowhere"], "--wheels: expected a directory, got /nowhere"),
        ],
    )
    def test_a_wrong_option_is_named(self, options, error):
        done = run(*options)
        assert done.returncode == 2
        assert error in done.stderr


class TestReport:
    def test_a_section_without_time_is_a_row(self):
        from check_report import OUT_OF_TIME, Report

        clock = Clock()
        report = Report(10, clock)
        ran = []
        report.section("one", 5, lambda: ran.append(1))
        clock.now += 6
        report.section("two", 5, lambda: ran.append(2))
        assert ran == [1]
        assert [(row.section, row.result) for row in report.rows] == [("two", OUT_OF_TIME)]
        assert not report.failed

    def test_an_error_is_a_row_and_a_traceback(self, report, capsys):
        def fail():
            report.add("before")
            raise ValueError("first line\nsecond line")

        report.section("one", 0, fail)
        report.section("two", 0, lambda: report.add("after"))
        assert [(row.name, row.result, row.text) for row in report.rows] == [
            ("before", "ok", ""),
            ("", "FAIL", "ValueError: first line"),
            ("after", "ok", ""),
        ]
        assert report.failed
        assert "second line" in capsys.readouterr().err

    def test_the_table_has_columns(self, report):
        report.section("long name", 0, lambda: report.add("a", text="some text"))
        report.section("b", 0, lambda: report.add("longer", "FAIL"))
        assert report.table() == "long name  a       ok    some text\nb          longer  FAIL"

    def test_numbers_go_to_json(self, report, tmp_path):
        report.section("one", 0, lambda: report.add("a", seconds=[1.5]))
        report.write_json(tmp_path / "result.json")
        document = json.loads((tmp_path / "result.json").read_text())
        assert document["failed"] is False
        assert document["rows"][0]["numbers"] == {"seconds": [1.5]}

    def test_what_hangs_is_ended_with_the_table_so_far(self):
        code = f"""
            import sys, threading
            sys.path.insert(0, {str(ROOT / "benchmarks")!r})
            import check_report
            check_report.GRACE_SECONDS = 0.5
            report = check_report.Report(0.1)
            with report.watched(lambda: print(report.table())):
                report.section("one", 0, lambda: report.add("done"))
                report.section("two", 0, threading.Event().wait)
        """
        command = [sys.executable, "-c", "\n".join(line.strip(" ") for line in code.splitlines())]
        code = code.replace("\n            ", "\n")
        done = subprocess.run([*command[:2], code], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1
        assert done.stdout.splitlines()[0].split() == ["one", "done", "ok"]
        assert "FAIL" in done.stdout.splitlines()[1]
        assert "Thread" in done.stderr


class TestOverlap:
    def test_union_joins_what_touches(self):
        from overlap import Interval, union

        spans = [Interval(5, 6), Interval(0, 2), Interval(1, 3), Interval(3, 4)]
        assert union(spans) == [(0, 4), (5, 6)]

    @pytest.mark.parametrize(
        ("copies", "kernels", "share"),
        [
            ([], [(0, 1)], None),
            ([(0, 10)], [], 0),
            ([(0, 10)], [(0, 10)], 1),
            ([(0, 10)], [(2, 4), (3, 6), (20, 30)], 0.4),
            ([(0, 4), (2, 10)], [(9, 12)], 0.1),
            ([(0, 2), (4, 6), (8, 10)], [(1, 9)], 4 / 6),
            ([(4, 6)], [(0, 1), (1, 2), (5, 5.5), (5.5, 9)], 0.5),
        ],
    )
    def test_share_of_the_copies_during_which_kernels_run(self, copies, kernels, share):
        from overlap import Interval, hidden_share

        got = hidden_share([Interval(*one) for one in copies], [Interval(*one) for one in kernels])
        assert got == pytest.approx(share)

    def test_only_the_device_counts(self):
        from overlap import activity

        events = [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 5},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1, "dur": 2},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 4, "dur": 2},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 4, "dur": 2},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 9},
            {"ph": "M", "name": "process_name"},
        ]
        assert activity({"traceEvents": events}) == ([(10, 15)], [(1, 3)], [(4, 6)])


class TestSizes:
    def test_the_widest_model_that_leaves_room(self):
        from gpu_models import Size

        large, small = (
            Size.that_fits(device=device, host=128 << 30, disk=64 << 30) for device in (139 << 30, 16 << 30)
        )
        assert (large.width, small.width) == (8192, 4096)
        assert small.needed <= 8 << 30 < Size.of_width(8192).needed

    def test_host_memory_and_disk_bound_it_too(self):
        from gpu_models import Size

        room = {"device": 139 << 30, "host": 128 << 30, "disk": 64 << 30}
        for name in ("host", "disk"):
            assert Size.that_fits(**room | {name: 4 << 30}).width < 4096


class TestGradients:
    @pytest.fixture
    def check(self, report, tmp_path, monkeypatch):
        import gpu_sections

        def check(own, until=0):
            options = {"spill_dir": tmp_path, "min_tensor_bytes": 1, "min_free_bytes": 0, **own}
            gpu_sections.check_gradients(report, CPU, {"mine": options}, until=until, size=tiny())
            return {row.name: row for row in report.rows}

        return check

    @pytest.mark.parametrize("backend", ["direct", "host"])
    def test_equal_ones_are_ok(self, check, backend):
        rows = check({"backend": backend})
        names = [f"{kind} {how}, mine" for kind in ("gpt2", "llama") for how in ("float32", "autocast")]
        assert {name: rows[name].result for name in names} == dict.fromkeys(names, "ok")
        assert not torch.are_deterministic_algorithms_enabled()

    def test_nothing_offloaded_fails(self, check):
        rows = check({"min_tensor_bytes": "1GiB"})
        assert rows["gpt2 float32, mine"].result == "FAIL"
        assert rows["gpt2 float32, mine"].text.startswith("nothing was read back")

    def test_other_bits_fail(self, check, monkeypatch):
        import gpu_sections

        calls = iter(range(100))
        compare = gpu_sections.same_bits
        monkeypatch.setattr(gpu_sections, "same_bits", lambda *pair: next(calls) % 2 == 0 and compare(*pair))
        rows = check({})
        assert rows["llama autocast, mine"].result == "FAIL"
        assert rows["llama autocast, mine"].text.startswith("other bits than plain torch")

    def test_without_time_every_model_is_named(self, check, report):
        rows = check({}, until=10_000)
        assert len([row for row in rows.values() if row.result.startswith("not run")]) == 4


class TestSteps:
    @pytest.fixture
    def steps(self, report, tmp_path, monkeypatch):
        import gpu_sections

        # What needs a GPU, or an option that only devices have.
        usable = ("keep", "recompute", "ssdtrain host", "ssdtrain SSD")
        monkeypatch.setattr(gpu_sections, "MODES", usable)
        return gpu_sections.Steps(report, CPU, tmp_path, size=tiny(), steps=2)

    def test_every_mode_has_a_row(self, steps, report):
        steps.costs(rounds=1, until=0)
        rows = {row.name: row for row in report.rows}
        assert list(rows) == ["model", "keep", "recompute", "ssdtrain host", "ssdtrain SSD"]
        assert {row.result for row in rows.values()} == {"ok"}
        assert len(rows["keep"].numbers["seconds"]) == 2
        assert rows["keep"].numbers["step_to_keep"] == 1
        assert rows["ssdtrain SSD"].numbers["stats"]["live_blocks"] == 0

    def test_rounds_end_when_the_time_does(self, steps, report, monkeypatch):
        import gpu_sections

        monkeypatch.setattr(report, "_clock", clock := Clock())
        report._end = clock.now + 100

        def measure(costs, *_):
            clock.now += 30
            costs.seconds.append(1.0)

        monkeypatch.setattr(gpu_sections, "measure", measure)
        steps.costs(rounds=5, until=20)
        rows = {row.name: row for row in report.rows}
        assert rows["ssdtrain SSD"].result == "not run: out of time"
        assert [rows[name].numbers["seconds"] for name in ("keep", "recompute", "ssdtrain host")] == [
            [1.0]
        ] * 3

    def test_a_mode_that_fails_does_not_stop_the_others(self, steps, report, monkeypatch):
        import gpu_sections

        monkeypatch.setattr(gpu_sections, "MODES", ("keep", "no such mode", "recompute"))
        steps = gpu_sections.Steps(report, CPU, Path("/nowhere"), size=tiny(), steps=1)
        steps.costs(rounds=1, until=0)
        rows = {row.name: row.result for row in report.rows}
        assert rows == {"model": "ok", "no such mode": "FAIL", "keep": "ok", "recompute": "ok"}

    def test_the_profiler_sees_no_copies_on_a_cpu(self, steps, report, tmp_path):
        steps.overlap(tmp_path / "trace.json")
        rows = {row.name: row.text for row in report.rows}
        assert rows["ssdtrain SSD"] == "to host no copies, to device no copies"


class TestWheels:
    def test_only_what_is_missing_is_installed(self, script, tmp_path):
        for name in ("pytest-9.9-py3-none-any.whl", "no_such_package-1.0-py3-none-any.whl"):
            zipfile.ZipFile(tmp_path / name, "w").close()
        assert [wheel.name for wheel in script["missing_wheels"](tmp_path)] == [
            "no_such_package-1.0-py3-none-any.whl"
        ]

    def test_what_was_missing_can_be_imported(self, script, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])
        name = "no_such_package"
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "ANSWER = 42\n")
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        assert script["install"](tmp_path, tmp_path / "site") == name
        assert __import__(name).ANSWER == 42
        assert script["install"](tmp_path, tmp_path / "site") == "nothing was missing"

    def test_an_empty_directory_installs_nothing(self, script, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])
        assert script["install"](tmp_path, tmp_path / "site") == "nothing was missing"


class TestDeviceTests:
    @pytest.fixture
    def tests(self, script, report, tmp_path, monkeypatch):
        """Runs the section over a folder of tests that a test writes."""

        def run_tests(code):
            folder = tmp_path / "checkout"
            (folder / "tests" / "device").mkdir(parents=True)
            (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
            (folder / "tests" / "device" / "test_some.py").write_text(f"import pytest\n{code}")
            function = script["device_tests"]
            monkeypatch.setitem(function.__globals__, "ROOT", folder)
            function(report, tmp_path, tmp_path)
            return [(row.name, row.result, row.text) for row in report.rows]

        return run_tests

    def test_passing_ones_are_counted(self, tests):
        ((name, result, text),) = tests("@pytest.mark.gpu\ndef test_one(): pass\n")
        assert (name, result) == ("all", "ok")
        assert text.startswith("1 passed")

    def test_failing_ones_are_named(self, tests, capsys):
        rows = tests("@pytest.mark.gpu\ndef test_one(): assert 'this' == 'that'\n")
        assert rows == [("tests.device.test_some::test_one", "FAIL", ""), ("all", "FAIL", "exit code 1")]
        assert "this" in capsys.readouterr().err

    def test_none_is_a_failure(self, tests):
        assert tests("") == [("all", "FAIL", "exit code 5")]


def test_wheels_need_a_directory_to_go_to():
    done = subprocess.run([ROOT / "scripts" / "gpu_wheels"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert done.stderr.endswith("gpu_wheels DIR\n")
