from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ssdtrain
from ssdtrain.launch.cli import EXTRA, main

MODULE = [sys.executable, "-m", "ssdtrain"]


def test_module_prints_the_version():
    done = subprocess.run([*MODULE, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ssdtrain {ssdtrain.__version__}\n"


def test_module_reports_a_mistake_in_one_line(tmp_path):
    done = subprocess.run(
        [*MODULE, "train", str(tmp_path / "no.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == f"ssdtrain: error: {tmp_path}/no.yaml: no such config file; start from one of configs/*.yaml\n"
    )


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_the_command(arguments, capsys):
    assert main(arguments) == 0
    assert "train CONFIG.yaml" in capsys.readouterr().out


def test_train_help_lists_options_with_their_meaning(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for part in (
        "--compare",
        "--json",
        "--offload.spill_dir",
        "--model.kind {gpt2,llama,bert}",
        "Sequences in each step",
    ):
        assert part in out


def test_launcher_modules_import_nothing_heavy():
    modules = "cli config data train compare parse model report progress memory errors"
    code = f"""
import sys
for name in {modules.split()!r}:
    __import__("ssdtrain.launch." + name)
print([name for name in {[module for _, module in EXTRA]!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("package", "module"), EXTRA)
def test_missing_extra_is_one_line_with_the_pip_command(package, module, tiny, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["train", str(tiny)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"needs {package}, which is not installed: pip install 'ssdtrain[launch]'" in error


def test_mistake_of_our_own_keeps_its_traceback(tiny, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("ssdtrain.launch.train.train", broken)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(tiny)])


def test_interrupt_ends_with_130_and_no_traceback(tiny, tmp_path):
    command = [*MODULE, "train", str(tiny), "--train.steps", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "step 1/" in line:
            break
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "ssdtrain: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_spill_directory_in_memory_is_refused_in_one_line(tiny, capsys):
    assert main(["train", str(tiny), "--offload.spill_dir", "/dev/shm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"ssdtrain: error: offload.spill_dir: '/dev/shm' is tmpfs, which is RAM.*SSD", line)


def test_a_command_that_does_not_exist_is_named_whatever_follows(tiny, capsys):
    assert main(["trian", str(tiny)]) == 2
    assert capsys.readouterr().err == "ssdtrain: error: trian: no such command; the commands are: train\n"


def test_our_own_warnings_are_one_line(tiny):
    """Whatever line of other people's code they point at."""
    command = [*MODULE, "train", str(tiny), "--offload.max_spill_bytes", "4096"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.startswith("ssdtrain: warning: ssdtrain keeps activations in memory")
    assert done.stderr.count("\n") == 1
