"""The result of a run, on file too."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import pandas as pd

from . import archive
from ._types import Key, Theta
from .algorithms import Spent
from .convergence import Check, Convergence
from .diagnostics import Check as DiagnosticCheck
from .diagnostics import Diagnosis
from .diagnostics.importance import check_importance, check_size
from .diagnostics.optimum import check_optimum
from .diagnostics.predictive import check_predictive
from .diagnostics.rounds import check_rounds
from .engines.logbook import History
from .errors import ArchiveError, OptionError
from .families import AbstractGlobalFamily
from .model import StructuredModel
from .model.graph import ModelGraph, model_graph
from .posterior import SILO_KIND, GlobalPosterior, SiloPosterior
from .provenance import Provenance
from .report import server_report, write

FIT_KIND = "fit"


class Fit:
    """The result of a run.

    Attributes:
        posterior: The global posterior.
        trace: For every round the ELBO estimate (NaN where silos did not disclose it), and what else the algorithm
            reports.
        path: Where the global posterior was on the way: means and sds of the unconstrained global latents, by round.
        communication: What was exchanged: by algorithm the rounds, and bytes to and from a silo in one of them.
        noise_error: With `FixedNoise(replicates=...)`, how much the global posterior owes to its draws; not on file.
        convergence: Evidence of the stopping rule, or None if none was asked for.
        seconds: Time spent in rounds, compilation left out; None for a loaded fit.
        provenance: Algorithm, options, key, precision and versions; None for files that do not have it.
    """

    def __init__(
        self,
        posterior: GlobalPosterior,
        silos: Mapping[str, SiloPosterior],
        trace: Mapping[str, np.ndarray],
        *,
        path: pd.DataFrame,
        communication: pd.DataFrame,
        noise_error: pd.DataFrame | None = None,
        present: np.ndarray | None = None,
        convergence: Convergence | None = None,
        seconds: float | None = None,
        fitted: list[str] | None = None,
        provenance: Provenance | None = None,
        graph: ModelGraph | None = None,
    ):
        self.posterior = posterior
        self._silos = dict(silos)
        self._fitted = list(silos) if fitted is None else list(fitted)
        self.trace = dict(trace)
        self.path = path
        self.communication = communication
        self.noise_error = noise_error
        self._present = present
        self.convergence = convergence
        self.seconds = seconds
        self.provenance = provenance
        self._graph = graph

    def __repr__(self) -> str:
        recent = self.elbo[-min(100, max(1, len(self.elbo) // 10)) :]
        draws = self.posterior.bound.num_draws
        name = "ELBO" if draws == 1 else f"bound with {draws} draws"
        level = f", {name} {recent.mean():,.2f}" if len(self.elbo) and np.isfinite(recent).all() else ""
        verdict = "" if self.convergence is None else f"; {self.convergence.verdict}"
        silos, rounds = len(self._fitted), len(self.elbo)
        size = f"{silos} silo{'' if silos == 1 else 's'}, {rounds} round{'' if rounds == 1 else 's'}"
        private = "" if self.privacy is None else f". {self.privacy}"
        return f"<Fit: {size}{level}{verdict}{private}>"

    @property
    def elbo(self) -> np.ndarray:
        """The ELBO estimate of every round; it rises, with noise."""
        return self.trace["elbo"]

    @property
    def participation(self) -> pd.DataFrame:
        """Who took part when: a row for each round, a column for each silo."""
        rounds = len(self.elbo)
        present = np.ones((rounds, len(self._fitted)), bool) if self._present is None else self._present
        return pd.DataFrame(present, pd.RangeIndex(rounds, name="round"), self._fitted)

    @property
    def theta(self) -> Theta:
        r"""The fitted $\theta$ in the model's own space."""
        return self.posterior.theta

    @property
    def privacy(self) -> Spent | None:
        r"""$\epsilon$ and $\delta$ of what left the silos; None if that was not differentially private."""
        return None if self.provenance is None else self.provenance.privacy

    @property
    def graph(self) -> ModelGraph:
        """The sites of the model and what depends on what; silo programs if silos' data were here or on file."""
        if self._graph is None or (not self._graph.programs and self._silos):
            data = {name: silo.data for name, silo in self._silos.items()}
            self._graph = model_graph(self.posterior.model, data)
        return self._graph

    @property
    def silo_names(self) -> list[str]:
        """Names of the silos."""
        return list(self._silos)

    def silo(self, name: str) -> SiloPosterior:
        """The posterior of one silo's latents."""
        if name not in self._silos:
            there = ", ".join(map(repr, self._silos)) or "none: those of a deployed run stay at the silos"
            raise OptionError(f"There is no silo {name!r} here; there are {there}.")
        return self._silos[name]

    def diagnose(
        self, *, key: Key | int = 0, num_samples: int = 1000, num_draws: int = 64, disclose: Sequence[str] = ()
    ) -> Diagnosis:
        r"""Can this posterior be believed? Checks of the global one, each with a verdict; print the result.

        "convergence" looks at the rounds; "optimum" at the bound's gradient; "importance" at how well $q(z_G)$ agrees
        with the posterior, the silos' latents integrated out. The last two need all silos: where they are
        elsewhere, see `SiloPosterior.evidence` and `GlobalPosterior.check_importance`. What concerns single units and
        data is in `SiloPosterior.diagnose`.

        Args:
            key: Of all draws.
            num_samples: Draws of the global latents, at least 100.
            num_draws: Draws of each unit's latents, at each of them; a power of two.
            disclose: Silos that let the verdict of their posterior predictive check be seen here.
        """
        check_size(num_samples)
        unknown = [name for name in disclose if name not in self._silos]
        if unknown or isinstance(disclose, str):
            raise OptionError(f"disclose is {disclose!r}; give a list of silos among {', '.join(self._silos)}.")
        checks: list[DiagnosticCheck] = [check_rounds(self.elbo, self.path, self.convergence)]
        absent = [name for name in self._fitted if name not in self._silos]
        if absent:
            others = f" and {len(absent) - 1} more silo{'s' if absent[2:] else ''}" if absent[1:] else ""
            note = f"optimum, importance: not checked, since the data of {absent[0]!r}{others} are not here."
            return Diagnosis(tuple(checks), (note,))
        notes = []
        if not self.posterior.model.population.layout.size:
            notes.append("optimum, importance: not checked, since there are no global latents.")
        else:
            if self.posterior.bound.over == "everything":
                notes.append("optimum: not checked, since all latents are weighted together (importance_weighted).")
            else:
                checks.append(check_optimum(self.posterior, self._silos, key=key, num_samples=num_samples))
            silos = self._silos.items()
            found = {n: s.evidence(key=key, num_samples=num_samples, num_draws=num_draws) for n, s in silos}
            checks.append(check_importance(self.posterior, found, key=key))
        for name in disclose:
            one = check_predictive(self._silos[name], key=key)
            checks.append(dataclasses.replace(one, name=f"predictive, {name}", table=one.disclosed()))
        return Diagnosis(tuple(checks), tuple(notes))

    def report(self, path: str | os.PathLike, *, diagnosis: Diagnosis | Literal[False] | None = None) -> None:
        """Write the server's report: one HTML file of the model, the posterior, its diagnosis and what left the silos.

        It holds nothing local, so it may go where the global posterior may.

        Args:
            path: The file.
            diagnosis: What `diagnose()` returned; by default it is made now. False for none.
        """
        if diagnosis is None:
            diagnosis = self.diagnose()
        write(path, server_report(self, None if diagnosis is False else diagnosis))

    def save(self, folder: str | os.PathLike) -> None:
        """Write `global.npz`, `fit.npz` (ELBO and evidence) and `silos/<name>.npz`, each complete by itself.

        Files of silos that an earlier fit left in the folder and this one does not have are removed.
        """
        folder = Path(folder)
        self.posterior.save(folder / "global.npz")
        evidence = None
        if self.convergence is not None:
            checks = [check._asdict() for check in self.convergence.checks]
            evidence = {**self.convergence._asdict(), "checks": checks}
        header = {
            "kind": FIT_KIND,
            "silos": self._fitted,
            "convergence": evidence,
            "communication": self.communication.to_dict("split"),
            "provenance": None if self.provenance is None else self.provenance.to_json(),
            "graph": self.graph.to_json(),
        }
        arrays = {f"trace.{name}": values for name, values in self.trace.items()}
        arrays |= {"path.rounds": self.path.index.to_numpy(), "path.values": self.path.to_numpy()}
        if self._present is not None:
            arrays["present"] = self._present
        archive.write(folder / "fit.npz", arrays, header)
        for name, silo in self._silos.items():
            silo.save(folder / "silos" / _file_name(name))
        _remove_stale(folder / "silos", {_file_name(name) for name in self._fitted})


def _remove_stale(folder, names):
    """Remove the silo posteriors in a folder that do not have one of these names, and nothing but those."""
    for path in folder.glob("*.npz"):
        if path.name in names:
            continue
        try:
            _, header = archive.read(path, kind=SILO_KIND)
        except ArchiveError:
            continue  # not a file of ours
        if _file_name(header["silo"]) == path.name:
            path.unlink()


def path_frame(model: StructuredModel, rounds: np.ndarray, values: np.ndarray) -> pd.DataFrame:
    """Means and sds of the global latents after some rounds, as a table."""
    labels = model.labels()
    columns = pd.MultiIndex.from_product([["mean", "sd"], labels])
    return pd.DataFrame(values, pd.Index(rounds, name="round"), columns)


def joined_trace(histories: Sequence[History]) -> dict[str, np.ndarray]:
    """What was said of every round of several stages, one after the other; NaN where a stage says nothing."""
    lengths = [len(history.elbo) for history in histories]
    names = sorted(set().union(*(history.trace for history in histories)))
    return {
        name: np.concatenate([h.trace.get(name, np.full(n, np.nan)) for h, n in zip(histories, lengths, strict=True)])
        for name in names
    }


def joined_path(model: StructuredModel, histories: Sequence[History]) -> pd.DataFrame:
    """Where several stages were on their way, rounds counted through."""
    before = np.cumsum([0, *(len(history.elbo) for history in histories)])[:-1]
    rounds = np.concatenate([h.snapshots + n for h, n in zip(histories, before, strict=True)])
    values = np.concatenate([np.concatenate([h.means, h.sds], axis=1) for h in histories])
    return path_frame(model, rounds.astype(int), values)


def noise_error(
    model: StructuredModel, main: AbstractGlobalFamily, replicates: Sequence[AbstractGlobalFamily]
) -> pd.DataFrame:
    """How much a maximum owes to its draws, from others with half as many.

    With S draws the bias is about b / S, so maxima with S / 2 are off by twice as much: their mean distance from the
    one with S is its own bias. Their variance is twice its own.
    """
    mean, sd = (np.asarray(part) for part in main.marginals())
    others = [family.marginals() for family in replicates]
    means = np.array([(np.asarray(m) - mean) / sd for m, _ in others])
    sds = np.array([np.log(np.asarray(s) / sd) for _, s in others])
    columns = {"bias of mean, in sds": means.mean(0), "bias of log sd": sds.mean(0)}
    if len(others) > 1:
        columns |= {
            "noise of mean, in sds": means.std(0, ddof=1) / np.sqrt(2),
            "noise of log sd": sds.std(0, ddof=1) / np.sqrt(2),
        }
    return pd.DataFrame(columns, index=model.labels())


def _file_name(silo):
    """A file name for any silo name; long ones are cut and told apart by a number."""
    quoted = quote(silo, safe="", errors="surrogatepass")
    if len(quoted) > 100:
        quoted = f"{quoted[:80]}-{hashlib.sha256(silo.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return f"{quoted}.npz"


def load(
    folder: str | os.PathLike,
    model: StructuredModel,
    silos: Mapping[str, Any],
    *,
    local_family: Callable | None = None,
) -> Fit:
    """Read a fit written by `Fit.save`, for the model and data that made it.

    Args:
        folder: Where it was saved.
        model: The model.
        silos: Data of the silos to load; some or all of those fitted.
        local_family: The `families.amortized(...)` of the fit, if it had one; the file holds its weights.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ArchiveError(
            f"{str(folder)!r} is a file; sfvi.load takes the folder that Fit.save wrote. A single file is read by "
            "GlobalPosterior.load or SiloPosterior.load."
        )
    posterior = GlobalPosterior.load(folder / "global.npz", model, local_family=local_family)
    arrays, header = archive.read(folder / "fit.npz", kind=FIT_KIND)
    loaded = {
        name: SiloPosterior.load(folder / "silos" / _file_name(name), model, data, local_family=local_family)
        for name, data in silos.items()
    }
    evidence = header["convergence"]
    if evidence is not None:
        checks = tuple(Check(**check) for check in evidence["checks"])
        evidence = Convergence(**{**evidence, "checks": checks})
    trace = {name.removeprefix("trace."): values for name, values in arrays.items() if name.startswith("trace.")}
    path = path_frame(model, arrays["path.rounds"], arrays["path.values"])
    communication = pd.DataFrame(**header["communication"])
    return Fit(
        posterior,
        loaded,
        trace,
        path=path,
        communication=communication,
        present=arrays.get("present"),
        convergence=evidence,
        fitted=header["silos"],
        provenance=Provenance.from_json(header.get("provenance")),
        graph=None if header.get("graph") is None else ModelGraph.from_json(header["graph"]),
    )
