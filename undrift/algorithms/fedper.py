"""FedPer: clients share the body of the model and keep its last layer for themselves.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from undrift.algorithms.base import Average, LocalSGD
from undrift.algorithms.kept_layers import KeptLayers
from undrift.core.layout import Layout, last_layer


@dataclass(frozen=True)
class OwnHead(KeptLayers, LocalSGD):
    """Local SGD on the shared body and the client's own head, the last layer, together."""

    def keeps(self, layout: Layout, like: Tensor) -> Tensor:
        return last_layer(layout, like)


@dataclass(frozen=True)
class FedPer(OwnHead, Average):
    """Own heads, and a weighted mean of the bodies."""
