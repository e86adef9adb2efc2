"""Real federations without their processes: letters, states on disk, and the same result as the simulator's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.small import SIZES, path, simulation
from undrift.deploy.client import Client
from undrift.deploy.messages import Encoded, Letter, Refused
from undrift.deploy.server import Deployment, Remote, Visit
from undrift.registry import algorithm_class, names

NAMES = [str(id) for id in range(len(SIZES))]


class Direct:
    """Carries letters to clients in this process; each client is made anew for every letter, as Flower does it."""

    def __init__(self, make: Any, root: Path) -> None:
        self.make, self.root = make, root
        self.lost: set[tuple[int, str]] = set()  # (round, client) whose answer does not arrive
        self.spoil: Any = lambda letter: letter

    def exchange(self, letters: Mapping[str, Letter]) -> dict[str, Letter | str]:
        answers: dict[str, Letter | str] = {}
        for name, letter in letters.items():
            answer = Client(name, self.make(), self.root / name).answer(letter)
            gone = (letter.facts["round"], name) in self.lost
            answers[name] = "no answer in time" if gone else self.spoil(answer)
        return answers


class Federation:
    """A deployment whose clients are called directly."""

    def __init__(self, root: Path, make: Any, least: int = 1, token: str = "a1") -> None:
        self.said: list[str] = []
        self.visits: list[Visit] = []
        self.post = Direct(make, root)
        self.run = make()
        self.remote = Remote(self.post, NAMES, token, least, self.said.append)
        self.deployment = Deployment(self.run, self.remote, self.visits.extend)

    def path(self, rounds: int) -> Tensor:
        points = []
        for _ in range(rounds):
            self.record = self.deployment.rounds(1)[0]
            points.append(self.run.net.layout.sent(self.run.state.x))
        return torch.stack(points)


def maker(name: str, module: Any = None, **settings: Any) -> Any:
    fields = {"lr": 0.1} | settings.pop("fields", {})
    return lambda: simulation(algorithm_class(name)(**fields), None if module is None else module(), **settings)


@pytest.mark.parametrize("name", names("algorithms"))
def test_a_federation_equals_the_simulator(name: str, tmp_path: Path) -> None:
    make = maker(name, cohort=4, weights="size")
    torch.testing.assert_close(Federation(tmp_path, make).path(4), path(make(), 4), rtol=1e-9, atol=1e-12)


