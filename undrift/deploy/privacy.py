"""Central differential privacy for clients: the server clips every update and adds noise to their sum.

    d = (sum_i clip(d_i, C) + N(0, sigma^2 C^2 I)) / (q N)

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018, with a fixed
denominator. Each client takes part with probability q. A missing answer counts as zero, so that weights do not depend on who
answers. The noise comes from the operating system, because clients know the run's seed.
"""

from __future__ import annotations

import importlib.util

from undrift.algorithms.base import Worker
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.core.errors import BadSetting
from undrift.core.trees import leaves
from undrift.deploy.settings import Plan
from undrift.oracle.net import Net
from undrift.round.private import Private
from undrift.round.shapes import Forms

UNLIKELY = 0.01  # largest probability, over delta, of an empty cohort (which is drawn again) in the whole run


def make_private(plan: Plan) -> Private:
    """Replace the algorithm's weighted mean by a private sum."""
    return Private(plan.alg, plan.deploy.privacy_clip, plan.deploy.privacy_noise, float(plan.run.cohort))  # q N = S


def epsilon(rate: float, noise: float, rounds: int, delta: float) -> float:
    """The epsilon of so many rounds, for adding or removing one client, by Renyi differential privacy."""
    import dp_accounting

    add_or_remove = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(range(2, 257), add_or_remove)
    one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return float(accountant.compose(one, rounds).get_epsilon(delta))


def check_private(plan: Plan, net: Net) -> None:
    """Refuse settings under which the guarantee would not hold."""
    run, deploy, alg = plan.run, plan.deploy, plan.alg
    more = not alg.sends_updates or type(alg).gather is not Worker.gather or alg.measures
    stateful = alg.personalises or alg.keep_moments or bool(leaves(Forms.of(alg, net, run.clients).client))
    empty = run.rounds * (1 - run.cohort / run.clients) ** run.clients
    norms, bounded = net.buffer_layout.size > 0, deploy.privacy_noise > 0 and 0 < deploy.privacy_delta < 1
    for wrong, why in (
        (looks_at_single_uploads(alg), "its server looks at single updates"),
        (more, "its clients send more than their update"),
        (stateful, "its clients keep a state, which ties rounds together"),
    ):
        if wrong:
            sums = "use one that needs only the sum, such as fedavg"
            raise BadSetting(f"{run.algorithm} cannot be made private: {why}; {sums}")
    for wrong, why in (
        (run.sampling != "bernoulli", "give --sampling bernoulli: the promise is for clients drawn independently"),
        (run.weights != "uniform", "give --weights uniform: a weight by size would change a client's share"),
        (deploy.min_replies > 1, "leave min_replies at 1: a round must not depend on how many answer"),
        (norms, "the model has BatchNorm, whose statistics would go up without noise; use another normalisation"),
        (not bounded, "privacy_noise must be above 0 and privacy_delta between 0 and 1"),
        (empty > UNLIKELY * deploy.privacy_delta, "a round without any client is too likely; raise cohort or clients"),
        (importlib.util.find_spec("dp_accounting") is None, "install dp-accounting: pip install 'undrift[privacy]'"),
    ):
        if wrong:
            raise BadSetting(f"privacy_clip: {why}")
