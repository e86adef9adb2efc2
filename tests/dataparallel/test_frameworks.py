"""The examples of islands inside Accelerate, the Trainer of transformers and Lightning, on two ranks; skipped without them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.test_examples import FOLDER, torchrun

NEEDED = {"with_accelerate": "accelerate", "with_trainer": "transformers", "with_lightning": "lightning"}
PARAMETERS = 64 * 100 + 100 + 100 * 10 + 10  # of the examples' model
STEPS = 20 * 22.5  # epochs of digits' 1438 training samples on two islands, in batches of 32: 22 or 23 steps each


def test_there_is_an_example_for_each() -> None:
    assert {path.stem for path in (FOLDER / "frameworks").glob("*.py")} == set(NEEDED)


@pytest.mark.parametrize("name", NEEDED)
def test_islands_in_a_framework(name: str, tmp_path: Path) -> None:
    """The model is learnt, as often as it should the islands exchange, and nothing but these exchanges is sent by us."""
    package = NEEDED[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    printed = torchrun(str(FOLDER / "frameworks" / f"{name}.py"), cwd=tmp_path)
    found = re.search(r"2 islands, (\d+) exchanges, (\d+) bytes, accuracy (\d\.\d+)", printed)
    assert found, printed
    exchanges, sent, accuracy = int(found[1]), int(found[2]), float(found[3])
    assert accuracy > 0.85 and abs(exchanges - STEPS / 20) <= 1
    each = -(-PARAMETERS // 8) * 8 * 4 if name != "with_accelerate" else -(-PARAMETERS // 2) + -(-PARAMETERS // 256) * 4
    assert sent == exchanges * 2 * (each + 4)
