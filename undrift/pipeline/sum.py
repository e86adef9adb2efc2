"""SUM: stochastic unified momentum, which contains heavy ball and Nesterov's method (thesis, Eq. (1-4)).

    y = x - alpha G,  y^s = x - s alpha G,  x <- y + beta (y^s - y^s_previous),  y^s_previous = x^0 at first

s = 0 is heavy ball and s = 1 Nesterov's method; at a constant rate they equal torch.optim.SGD with momentum and
nesterov. s = 1 / (1 - beta) is plain SGD with the rate alpha / (1 - beta). When the rate changes, torch scales the
whole momentum by the new rate, while SUM keeps the past rates in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor


@final
class SUM(torch.optim.Optimizer):
    """Stochastic unified momentum; weight decay is added to the gradient."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, beta: float = 0.9, s: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "s": s, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step with the gradients that the parameters hold."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                g = x.grad + group["weight_decay"] * x if group["weight_decay"] else x.grad
                state = self.state[x]
                before = state.setdefault("y_s", x.clone())
                y_s = x - group["s"] * group["lr"] * g
                x.sub_(group["lr"] * g).add_(group["beta"] * (y_s - before))
                state["y_s"] = y_s
        return loss
