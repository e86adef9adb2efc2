"""A loss for each sample, whatever a loss function returns; labels that do not count are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.oracle.segmentation import dice_loss, soft_dice_loss

Loss = Callable[..., Tensor]  # a function of outputs and targets
IGNORED = -100  # the label of what does not count, in PyTorch's cross-entropy


def batch_loss(loss: Loss) -> Loss:
    """Mark loss(outputs, targets, real) as one that sees a whole mini-batch, because it is no mean over samples.

    real [B] is 1 for a sample and 0 for padding, or None where all samples are real. The loss is one number, or a part for each
    sample [B], of which the mean over the real samples is taken. Padding must not change it.
    """
    vars(loss)["of_batch"] = True
    return loss


class SampleLosses:
    """The loss of a task, sample by sample, with the labels that do not count left out."""

    def __init__(self, loss: Loss, dtype: torch.dtype) -> None:
        if getattr(loss, "weight", None) is not None and getattr(loss, "reduction", "none") == "mean":
            raise BadSetting("a loss with class weights must not average by itself here; give it reduction='none'")
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise BadSetting(
                "the loss has parameters, which would not be trained; put them into the model, or call requires_grad_(False)"
            )
        self.loss = F.cross_entropy if plain_cross_entropy(loss) else loss
        self.of_batch: bool = getattr(loss, "of_batch", False)
        self.ignored: int = getattr(loss, "ignore_index", IGNORED)  # only with cross-entropy
        self.dtype = dtype

    def sample_losses(self, outputs: Tensor, targets: Tensor, real: Tensor | None = None) -> Tensor:
        """The loss of each sample [B]. A loss that returns one number is called for one sample at a time."""
        outputs = classes_first(outputs, targets)
        if self.of_batch:
            whole = self.loss(outputs, targets, real)
            if whole.numel() not in (1, len(outputs)):
                raise BadSetting(
                    f"a batch_loss gives one number, or one for each of {len(outputs)} samples, not {[*whole.shape]}"
                )
            return whole.flatten().expand(len(outputs))
        if self.loss is F.cross_entropy:
            each = F.cross_entropy(outputs, targets, reduction="none", ignore_index=self.ignored)
            return self.mean_over_labels(each, targets)
        if self.loss is dice_loss:
            return dice_loss(outputs, targets)
        counts = self.label_shares(targets) > 0
        if self.ignores:  # a sample without any label would be 0 / 0
            targets = torch.where(counts.view(-1, *[1] * (targets.dim() - 1)), targets, 1 if self.ignored == 0 else 0)
        losses: Tensor = torch.vmap(self._loss_of_one)(outputs, targets)
        return torch.where(counts, losses, 0.0) if self.ignores else losses

    def _loss_of_one(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Any = self.loss(output.unsqueeze(0), target.unsqueeze(0))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise BadSetting(
                f"the loss must give one number for outputs {[1, *output.shape]} and targets {[1, *target.shape]}, not {what}"
            )
        return loss.reshape(())

    @property
    def ignores(self) -> bool:
        """Whether a loss other than plain cross-entropy has labels that it leaves out."""
        return self.loss is not F.cross_entropy and hasattr(self.loss, "ignore_index")

    def mean_over_labels(self, values: Tensor, targets: Tensor) -> Tensor:
        """[B] the mean of a sample's values [B, *], zero for those ignored, over its labels; a sample without any has 0."""
        if values.dim() == 1:
            return values
        if targets.shape != values.shape:  # probabilities of classes, all of which count
            return values.flatten(1).mean(1)
        return values.flatten(1).sum(1) / (targets != self.ignored).flatten(1).sum(1).clamp(min=1)

    def label_shares(self, targets: Tensor) -> Tensor:
        """[B] the share of each sample's labels that count: below 1 only where the loss ignores some."""
        if not (self.loss is F.cross_entropy or self.ignores) or targets.is_floating_point():
            return torch.ones(len(targets), dtype=self.dtype, device=targets.device)
        labelled = (targets != self.ignored).to(self.dtype)
        return labelled.flatten(1).mean(1) if labelled.dim() > 1 else labelled

    def probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The probability of each class [B, C, *], or of each structure at each pixel."""
        return classes_first(outputs, targets).softmax(1) if self.loss is F.cross_entropy else outputs.sigmoid()

    def mixed_losses(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample [B] for given probabilities, such as a mixture of several models."""
        if self.loss is F.cross_entropy:
            scores = probabilities.clamp(min=1e-12).log()
            return self.mean_over_labels(
                F.nll_loss(scores, targets, reduction="none", ignore_index=self.ignored), targets
            )
        if self.loss is dice_loss:
            return soft_dice_loss(probabilities, targets)
        raise BadSetting("only cross-entropy and the Dice loss can mix models; use fedsm-extra, which chooses one")


def plain_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is cross-entropy, as a function or a module, with default options except for `ignore_index`."""
    if not isinstance(loss, nn.CrossEntropyLoss):
        return loss is F.cross_entropy
    return loss.weight is None and (loss.label_smoothing, loss.reduction) == (0.0, "mean")


def logits_of(outputs: Any) -> Tensor:
    """What a model returns: a tensor, or the `logits` of a dict or of an output object."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    outputs = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        names = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        raise BadSetting(
            f"the model must return one tensor, or a dict or an object with `logits`, not a {type(outputs).__name__}{names}"
        )
    return outputs


def classes_first(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs [B, T, V] for labels [B, T] as [B, V, T], as PyTorch's cross-entropy has them; all others unchanged.

    >>> classes_first(torch.zeros(2, 5, 7), torch.zeros(2, 5).long()).shape
    torch.Size([2, 7, 5])
    """
    if outputs.dim() != 3 or targets.dim() != 2 or targets.is_floating_point() or outputs.shape[:2] != targets.shape:
        return outputs
    if outputs.shape[1] == outputs.shape[2]:
        raise BadSetting(
            f"outputs {list(outputs.shape)} for labels {list(targets.shape)} may be [B, T, V] or [B, V, T]; "
            "let the number of classes differ from the length, by one more class or one position less"
        )
    return outputs.mT
