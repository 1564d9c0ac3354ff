"""How many terms the loss of a step has: what its gradients are divided by.

A program may count samples, or something that differs from sample to sample, such as tokens that are not padding. Where
every sample has the same number, it is known from the first step on; otherwise the ranks sum it in every step.
"""

from __future__ import annotations

from shoal.engine.replica import Replica
from shoal.errors import UsageError
from shoal.sync.replicas import gather_integers
from shoal.sync.step_stats import sum_over_world


class LossTerms:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def samples(self) -> int:
        """The samples of a step's loss: of all ranks, or this rank's own where replicas train alone."""
        replica = self._replica
        return replica.share if replica.outer.replicas_differ else replica.global_batch

    @property
    def expected(self) -> int:
        """The terms of this step's loss, or the number of its samples if they vary."""
        return self.samples * (self._replica.steps.terms_per_sample or 1)

    def learn(self, terms: int | None, samples: int) -> None:
        """Agree on the terms of a sample, before the first backward of this world: all later ones are divided by it."""
        steps = self._replica.steps
        if steps.terms_per_sample is None:
            steps.terms_per_sample = 1 if terms is None else self._agree(terms, samples)

    def start(self, terms: int) -> None:
        """Start the sums that the step needs beside the gradients, before its last backward."""
        replica, per_sample = self._replica, self._replica.steps.terms_per_sample
        if per_sample and terms != per_sample * replica.share:
            raise UsageError(
                f"step {replica.progress.step + 1}: {replica.share} samples have {terms} terms, and the first ones "
                f"had {per_sample} each",
                why="ranks that count differently from step to step must exchange their counts in every step",
                fix="say so: shoal.Session(..., count_varies=True)",
            )
        totals = replica.exchanges.totals
        if not replica.outer.replicas_differ and (per_sample == 0 or totals.has_buffers):
            totals.start(terms)

    def finish(self, terms: int) -> int:
        """Wait for the sums; return the terms of all ranks' losses.

        Where their number varies, the gradients were divided by the number of samples: correct that.
        """
        replica = self._replica
        total = replica.exchanges.totals.finish()
        if not replica.steps.terms_per_sample:
            self._divide_by(terms if replica.outer.replicas_differ else total)
        return total

    def finish_part(self, terms: int) -> None:
        """Divide the gradients of a part of a step by its terms; they were divided by the number of samples."""
        replica = self._replica
        is_alone = replica.outer.replicas_differ or replica.world.size == 1
        self._divide_by(terms if is_alone else round(sum_over_world(replica.world, [float(terms)])[0]))

    def own_part(self, mean_loss: float, terms: int, total: int) -> float:
        """Return this rank's part of the world's mean loss."""
        replica = self._replica
        if replica.steps.terms_per_sample or replica.outer.replicas_differ:
            return mean_loss * replica.weight
        return mean_loss * max(1, terms) / max(1, total)

    def _divide_by(self, terms: int) -> None:
        if terms == self.samples:
            return
        for parameter in self._replica.state.summed_parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.samples / max(1, terms))

    def _agree(self, terms: int, samples: int) -> int:
        """Return how many terms every sample has on all ranks; 0 if that differs."""
        rows = gather_integers(self._replica.world, [terms, samples])
        per_sample = {divmod(own_terms, own_samples) for own_terms, own_samples in rows}
        if self._replica.config.train.count_varies or len(per_sample) > 1:
            return 0
        [(quotient, rest)] = per_sample
        return 0 if rest else quotient
