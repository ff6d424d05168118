"""The one door of a silo: what does not fit the policy does not leave."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..accountant import LEAST_NOISE, Releases, spent
from ..algorithms.privacy import AbstractPrivacy
from ..errors import RefusalError
from ..model import SiloData
from ..model.observed import observations
from .audit import Audit
from .policy import Policy

log = logging.getLogger("sfvi")

NO_BUDGET = (
    "its record has replies without noise, so no budget can ever be kept in this folder; start the silo in another one "
    "(--folder) and give the other silos the key for secure sums that it has there (sfvi silo key --folder)"
)

# What the answers to each question may hold: names of fields, and beginnings of names of arrays.
CONTENTS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "join": ({"num_units", "groups", "tangled", "network", "theta", "key"}, ("theta.",)),
    "begin": ({"versions"}, ()),
    "start": (set(), ()),
    "round": ({"elbo", "shares"}, ("reply", "index", "values", "masked")),
    "unmask": ({"shares", "pairs"}, ()),
    "finish": ({"theta"}, ("theta.",)),
}


class Gate:
    """A policy, and the record of what passed.

    Args:
        policy: What may leave.
        audit: Where it is recorded.
    """

    def __init__(self, policy: Policy, audit: Audit):
        self.policy, self.audit = policy, audit

    def check_model(self, model: str) -> None:
        """Refuse a model that is not allowed."""
        allowed = self.policy.models
        if allowed is not None and not any(model.startswith(text) for text in allowed):
            raise RefusalError(
                f"its policy does not allow this model ({model[:12]}); who has read the code there may add this hash "
                "to the policy's models"
            )

    def check_record(self) -> None:
        """Refuse a budget where replies have left without noise: whatever is spent on top, there is no epsilon."""
        if self.policy.epsilon is None:
            return
        if any(each.noise_multiplier < LEAST_NOISE for each in self.audit.releases()):
            raise RefusalError(NO_BUDGET)

    def check_run(
        self,
        *,
        algorithm: str,
        silos: Sequence[str],
        discloses_elbo: bool,
        rounds: int,
        model: str,
        run: str,
        privacy: AbstractPrivacy | None,
        secure_sum: bool,
        min_silos: int | None,
    ) -> None:
        """Refuse a run that the policy does not allow, before anything has left.

        Args:
            algorithm: Which one.
            silos: All who take part.
            discloses_elbo: Whether the run asks for the silos' terms of the bound.
            rounds: At most.
            model: The hash of its code.
            run: Its name; what it has had already is not asked for again.
            privacy: Its differential privacy, with the noise that it will have.
            secure_sum: Whether only the sum of replies is seen.
            min_silos: How many it goes on with; None for all.
        """
        self.check_model(model)
        policy = self.policy
        if policy.algorithms is not None and algorithm not in policy.algorithms:
            raise RefusalError(f"its policy allows {', '.join(policy.algorithms) or 'no algorithm'}, not {algorithm}")
        if len(set(silos)) < policy.min_silos:
            raise RefusalError(f"its policy asks for at least {policy.min_silos} silos in a run")
        if policy.secure_sum and not secure_sum:
            raise RefusalError("its policy asks for secure sums; run with secure_sum")
        if secure_sum and min(len(set(silos)), min_silos or len(silos)) < policy.min_sum:
            raise RefusalError(
                f"its policy asks for a sum of at least {policy.min_sum} silos (with two, each can subtract itself)"
            )
        if discloses_elbo and "elbo" not in policy.disclose:
            raise RefusalError("its policy does not allow its ELBO to be told; run without disclose_elbo")
        if policy.max_rounds is not None and rounds > policy.max_rounds:
            raise RefusalError(f"its policy allows {policy.max_rounds} rounds, not {rounds}")
        if privacy is not None and privacy.shared_by > 1:
            self._check_shared(privacy.shared_by, min(len(set(silos)), min_silos or len(silos)), secure_sum)
        if privacy is not None and discloses_elbo:
            raise RefusalError("the ELBO has no noise; run without disclose_elbo")
        left = max(0, rounds - self.audit.given(run))
        if left:
            self._check_rounds(model)
        self._check_budget(None if privacy is None else privacy.releases_of_units(left))

    def _check_shared(self, shared_by, least, secure_sum):
        """Noise that several silos make together protects only in a sum, and only if the others make theirs."""
        if not secure_sum:
            raise RefusalError("silos that share their noise need a secure sum; run with secure_sum")
        if least < shared_by:
            raise RefusalError(f"noise that {shared_by} silos share needs as many in every round")
        if self.policy.epsilon is not None and shared_by > self.policy.max_shared_by:
            most = self.policy.max_shared_by
            raise RefusalError(
                f"its policy counts on noise that at most {most} silos make together (max_shared_by), not {shared_by}"
            )

    def check_keys(self, keys: Mapping[str, str], mine: str) -> None:
        """Refuse keys, and silos, that are not those that the policy knows; `mine` is this silo."""
        if not keys or self.policy.peers is None:
            return
        for name in sorted(set(keys) - {mine}):
            if self.policy.peers.get(name) != keys[name]:
                raise RefusalError(f"the server gives a key of silo {name!r} that is not the one in its policy")

    def check_data(self, data: SiloData, theta: Mapping[str, Any]) -> None:
        """Refuse to take part with too few units, or with units that have too few observations."""
        policy = self.policy
        layout = data.program.layout
        sizes = [group.plate.size for group in layout.groups]
        counted = sizes or [plate.size for plate in layout.plates]
        if min(counted, default=1) < policy.min_units:
            raise RefusalError(f"it has fewer units than its policy asks for ({policy.min_units})")
        if theta and "theta" not in policy.disclose:
            raise RefusalError("its policy does not allow its program's parameters to be told")
        if policy.min_rows > 0 and sizes and rows_per_unit(data, theta) < policy.min_rows:
            raise RefusalError(f"a unit has fewer observations than its policy asks for ({policy.min_rows})")

    def leave(
        self,
        kind: str,
        fields: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        *,
        run: str,
        model: str,
        step: int,
        size: int,
        request: str = "",
        release: Releases | None = None,
    ) -> None:
        """Let a message out, or refuse; what leaves is recorded before.

        Args:
            kind: Of the message.
            fields: Its JSON part.
            arrays: Its numbers.
            run: Of which run.
            model: The hash of its code.
            step: Number of the step.
            size: Bytes.
            request: Digest of what it answers.
            release: The noise in it; None if there is none.
        """
        self.check_model(model)
        if kind not in CONTENTS:
            raise RefusalError(f"its policy knows no message of kind {kind!r}")
        may, beginnings = CONTENTS[kind]
        odd = sorted(set(fields) - may) + sorted(name for name in arrays if not name.startswith(beginnings or "\0"))
        if "elbo" in fields and "elbo" not in self.policy.disclose:
            odd.append("elbo")
        if self.policy.secure_sum and kind == "round" and set(arrays) != {"masked"}:
            odd.append(min(set(arrays) - {"masked"}, default="a reply without a mask"))
        if odd:
            raise RefusalError(f"its policy does not allow {odd[0]!r} to leave")
        about: dict[str, Any] = {}
        if kind == "round":
            about = {"request": request, "release": release, "epsilon": self.check_reply(model, request, release)}
        self.audit.sent(kind=kind, run=run, model=model, step=step, fields=fields, arrays=arrays, size=size, **about)

    def check_reply(self, model: str, request: str, release: Releases | None) -> float | None:
        """Refuse a reply for which there is no room any more, also before it is computed; what is spent with it.

        A refusal must not depend on the reply: whether it broke would tell of it, and not be counted.
        """
        new = request not in self.audit.replies(model)
        if new:
            self._check_rounds(model)
        return self._check_budget(release, new=new)

    def _check_rounds(self, model):
        most = self.policy.max_rounds
        if most is not None and len(self.audit.replies(model)) >= most:
            raise RefusalError(f"its policy allows {most} replies about this model, and all of them were given")

    def _check_budget(self, release, *, new=True):
        """What has been spent with a release, or a refusal if that is more than there is."""
        budget, delta = self.policy.epsilon, self.policy.delta
        if budget is None:
            return None
        if release is None or release.noise_multiplier <= 0:
            raise RefusalError("its policy asks for differential privacy; run with privacy")
        total = spent(self.audit.releases(*([release] if new else [])), delta)
        if math.isinf(total):
            raise RefusalError(NO_BUDGET)
        if total > budget * (1 + 1e-9):
            before = spent(self.audit.releases(), delta)
            log.warning(
                "budget: %.3g of %g is spent at delta %g; this would make it %.3g", before, budget, delta, total
            )
            raise RefusalError(f"its policy has a privacy budget of {budget:g}, which this would exceed")
        return total


def rows_per_unit(data: SiloData, theta: Mapping[str, Any]) -> int:
    """The fewest observations that a unit with latents of its own has."""
    counted = {group.plate.name: np.zeros(group.plate.size, int) for group in data.program.layout.groups}
    ends = np.cumsum([0, *(group.plate.size for group in data.program.layout.groups)])
    for site, seen in observations(data, dict(theta)).items():
        plate = next((name for name in seen.dims if name in counted), None)
        if plate is not None:
            axis = seen.dims.index(plate)
            counted[plate] += np.moveaxis(seen.counts, axis, 0).reshape(len(counted[plate]), -1).sum(1)
        elif site in data.owners:
            owners = np.asarray(data.owners[site])
            weights = seen.counts.reshape(*owners.shape, -1).sum(-1).ravel()
            totals = np.bincount(owners.ravel(), weights, minlength=ends[-1] + 1).astype(int)
            for (name, rows), start in zip(counted.items(), ends[:-1], strict=True):
                counted[name] = rows + totals[start : start + len(rows)]
    return min((int(rows.min()) for rows in counted.values() if len(rows)), default=0)
