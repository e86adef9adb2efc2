"""FedSpeed: a proximal term whose bias is corrected, and gradients partly taken uphill.

Sun, Shen, Huang, Ding, Tao: FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy.
ICLR 2023, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, GradientOracle, Up, Vec, Work, Worker
from undrift.algorithms.checks import above, at_least
from undrift.core.errors import BadSetting
from undrift.core.vec import mean, norm


@dataclass(frozen=True)
class CorrectedProximal(Worker):
    """x_i^{k+1} = x_i^k - eta_l ( (1 - alpha) g_i(x_i^k) + alpha g_i(x_i^k + rho g_i / |g_i|) - G_i + (x_i^k - x_t) / lam ).

    G_i, the correction, sums up what the proximal term has held back: G_i <- G_i + (x_t - x_i^K) / lam.

    Differs: the paper's clients send x_i^K - lam G_i (`correct=cohort`); the authors' code adds -lam times the mean of all
    clients' G_i to the mean of x_i^K (`correct=all`), as in FedDyn. The paper's step uphill is rho g_i, the code's
    rho g_i / |g_i| (`normalize`); the code has alpha = 1.
    """

    alpha: float = 1.0  # the share of the gradient that is taken uphill
    radius: float = 0.1  # rho
    lam: float = 10.0  # lambda: the proximal term is 1 / (2 lambda) |x - x_t|^2
    normalize: bool = True
    correct: Literal["cohort", "all"] = "cohort"

    varies: ClassVar[tuple[str, ...]] = ("alpha", "radius", "lam")
    sends_updates: ClassVar[bool] = False

    class Companion(NamedTuple):
        G: Vec  # (1/N) sum of all G_i

    class Client(NamedTuple):
        G: Tensor  # G_i

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        g1 = oracle.grad(work.x)
        rho = self.radius / (norm(g1) + 1e-7) if self.normalize else self.radius
        g2 = oracle.grad(work.x + rho * g1, track=False)
        g = (1 - self.alpha) * g1 + self.alpha * g2
        return self.move(work, g - client.G + (work.x - down.x) / self.lam, oracle)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        d = down.x - work.x
        G = client.G + d / self.lam
        return Up(d + self.lam * G if self.correct == "cohort" else d), self.Client(G)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        d = mean(up.d, cohort.weight)
        if self.correct == "cohort":
            return d, companion
        G = companion.G + cohort.size / cohort.total * mean(up.d, cohort.uniform) / self.lam
        return d + self.lam * G, self.Companion(G)  # x_{t+1} = mean x_i^K - lambda G

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "alpha", "radius")
        above(self, 0.0, "lam")
        if self.alpha > 1:
            raise BadSetting(f"alpha must lie in [0, 1], not {self.alpha}")


@dataclass(frozen=True)
class FedSpeed(CorrectedProximal, Average):
    """Corrected proximal steps with gradients taken uphill, and a mean."""
