"""An algorithm of one's own: local steps of equal length, and momentum on the server.

undrift run --algorithm my_algorithm:NormalisedM --rounds 30     (from this folder)
python my_algorithm.py
"""

from __future__ import annotations

from dataclasses import dataclass

import undrift
from undrift.algorithms.base import Down, GradientOracle, Nothing, Work, Worker
from undrift.algorithms.fedavgm import ServerMomentum
from undrift.core.vec import norm


@dataclass(frozen=True)
class NormalisedSteps(Worker):
    """x_i^{k+1} = x_i^k - eta_l g / (|g| + eps): only the direction of a gradient counts, not its length."""

    eps: float = 1e-8

    def local_step(self, down: Down, client: Nothing, work: Work, oracle: GradientOracle) -> Work:
        g = oracle.grad(work.x)  # [..., P]
        return self.move(work, g / (norm(g) + self.eps), oracle)  # norm(g) is [..., 1]


@dataclass(frozen=True)
class NormalisedM(NormalisedSteps, ServerMomentum):
    """Normalised local steps; the server follows their momentum."""

    beta1: float = 0.5


if __name__ == "__main__":
    settings = {"clients": 20, "cohort": 5, "rounds": 30, "model": "logreg"}
    for algorithm in ("fedavg", NormalisedM(lr=0.1)):
        result = undrift.run(algorithm=algorithm, **settings)
        print(f"{result.config.algorithm:22} accuracy {result.accuracy:.4f}")
