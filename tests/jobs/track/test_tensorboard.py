"""TensorBoard's files are read back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import undrift
from tests.small import QUICK

pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def test_the_files_hold_settings_and_numbers_of_a_run_and_of_what_was_resumed(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop = undrift.rounds(QUICK, rounds=6, eval_every=1, out=tmp_path / "o", track="tensorboard", checkpoint_every=2)
    for record in loop:
        if record["round"] == 3:
            break
    result = undrift.run(QUICK, rounds=6, eval_every=1, out=tmp_path / "o", resume=True, checkpoint_every=2)
    files = EventAccumulator(str(tmp_path / "o/tensorboard")).Reload()
    for name in ("loss", "accuracy", "bytes_up", "train_loss", "gradients"):
        read = [(event.step, event.value) for event in files.Scalars(name)]
        assert [step for step, _ in read] == [1, 2, 3, 4, 5, 6]
        assert all(math.isclose(v, r[name], rel_tol=1e-6) for (_, v), r in zip(read, result.records, strict=True))
    text = files.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"| clients | {QUICK['clients']} |" in text and f"| algorithm | {json.dumps('fedavg')} |" in text
    end = files.Tensors("end/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert end == f"stopped by rounds; the report is {tmp_path / 'o/report.html'}"
    assert "_hparams_/session_start_info" in files.summary_metadata
