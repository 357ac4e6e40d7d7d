from __future__ import annotations

import json
import mmap
import platform
import statistics

import pytest

from ssdtrain.launch.cli import main

KINDS = ["gpt2", "llama", "bert"]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_same_bits_in_every_mode(kind, run_tiny):
    runs = {
        mode: run_tiny("--model.kind", kind, "--mode", mode)["runs"][0]
        for mode in ("keep", "recompute", "offload")
    }
    assert runs["keep"]["losses"] == runs["offload"]["losses"] == runs["recompute"]["losses"]
    assert len(runs["keep"]["losses"]) == 4


def test_losses_follow_the_seed(run_tiny):
    one, same, other = (
        run_tiny("--mode", "keep", "--train.seed", seed)["runs"][0] for seed in ("3", "3", "4")
    )
    assert one["losses"] == same["losses"] != other["losses"]


def test_offloading_moves_bytes_there_and_back(run_tiny):
    (run,) = run_tiny()["runs"]
    assert run["bytes_written_per_step"] > 100_000
    assert run["bytes_read_per_step"] > 100_000
    assert run["most_bytes_on_disk"] > 100_000
    assert run["prefetch_hits"] + run["prefetch_misses"] > 0
    assert run["backend"]


def test_bfloat16_is_the_same_bits_too(run_tiny):
    keep, offload = (
        run_tiny("--train.dtype", "bfloat16", "--mode", mode)["runs"][0] for mode in ("keep", "offload")
    )
    assert keep["losses"] == offload["losses"]
    assert offload["bytes_written_per_step"] > 0


def test_training_learns(run_tiny):
    losses = run_tiny("--mode", "keep", "--train.steps", "30", "--train.learning_rate", "3e-3")["runs"][0][
        "losses"
    ]
    assert losses[-1] < losses[0] - 0.5


def test_json_holds_config_machine_and_run(run_tiny):
    document = run_tiny("--mode", "keep")
    assert {"config", "machine", "runs"} <= document.keys()
    assert document["config"]["model"]["layers"] == 2
    assert document["machine"]["cores"] >= 1
    assert platform.node() not in json.dumps(document["machine"])
    (run,) = document["runs"]
    assert run["mode"] == "keep"
    assert len(run["losses"]) == 4
    assert len(run["step_seconds"]) == 3
    assert run["median_step_seconds"] == statistics.median(run["step_seconds"])
    assert run["peak_above_static_bytes"] == max(run["peak_bytes"] - run["static_bytes"], 0)
    for name in ("bytes_written_per_step", "bytes_read_per_step", "prefetch_hits", "prefetch_misses"):
        assert run[name] == 0
    assert run["stall_seconds_per_step"] == 0


def test_output_reports_steps_and_ends_with_a_table(tiny, capsys):
    assert main(["train", str(tiny)]) == 0
    out, err = capsys.readouterr()
    assert "tokens of" in out
    assert "offload: step 1/4  loss" in out
    assert "on SSD" in out
    assert out.index("offload: step 4/4") < out.index("step time")
    assert err == ""


def test_loss_that_is_no_number_ends_the_run(tiny, capsys):
    options = ["--mode", "keep", "--train.learning_rate", "1e30", "--train.steps", "20"]
    assert main(["train", str(tiny), *options]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "lower train.learning_rate" in error


def test_spill_files_are_closed_when_training_fails(tiny, monkeypatch):
    import ssdtrain
    from ssdtrain.launch.train import _Trainer

    closed = []

    class Watched(ssdtrain.OffloadActivations):
        def close(self):
            closed.append(self)
            super().close()

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(ssdtrain, "OffloadActivations", Watched)
    monkeypatch.setattr(_Trainer, "_step", broken)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(tiny)])
    # The one that checks the directory before the work, and that of the run.
    assert len(closed) == 2


def test_global_settings_are_put_back(run_tiny):
    import torch

    run_tiny("--mode", "keep")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def _hold_for_a_while(nbytes):
    """Memory of its own: what is freed goes back to the system, however the heap is tuned."""
    with mmap.mmap(-1, nbytes) as memory:
        memory.write(b"x" * nbytes)


class TestPeakMemory:
    def test_counts_what_was_held_for_a_while(self):
        from ssdtrain.launch.memory import PeakMemory, resident_bytes

        peak = PeakMemory()
        before = resident_bytes()
        _hold_for_a_while(50_000_000)
        assert peak.bytes() - before > 45_000_000

    def test_forgets_what_was_before(self):
        from ssdtrain.launch.memory import PeakMemory

        before = PeakMemory()
        _hold_for_a_while(50_000_000)
        peak_before = before.bytes()
        peak = PeakMemory()
        if peak.source != "VmHWM":
            pytest.skip("the system does not reset the high-water mark")
        assert peak.bytes() < peak_before - 45_000_000
