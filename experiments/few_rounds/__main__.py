"""The answer of pooled MCMC in a handful of exchanges: `python -m experiments.few_rounds`."""

import json
import time
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
import typer
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import unconstrain_fn

import sfvi
from sfvi import baselines, bounds, families

from . import picture
from .cases import Split, problems, splits

FOLDER = Path(__file__).parent
NUM_DRAWS = 4000
STEPS = 20_000  # of the long SFVI runs


def main(
    output: Annotated[Path, typer.Option(help="Folder for results, table and picture.")] = FOLDER,
    fresh: Annotated[bool, typer.Option(help="Forget what earlier runs have found.")] = False,
):
    """Fit every split by all methods, compare with NUTS on pooled data. What is in results.json is not run again."""
    output.mkdir(parents=True, exist_ok=True)
    store = Store(output / "results.json", fresh=fresh)
    for name in problems():
        store.get("NUTS, pooled", name, lambda name=name: nuts(problems()[name].model, problems()[name].data))
        for draws in (10, 50) if name == "six cities" else (10,):
            method = f"SFVI, K = {draws}"
            silos = next(split.silos for split in splits().values() if split.problem == name)
            store.get(method, name, lambda n=name, s=silos, k=draws: run(problems()[n].model, s, sfvi_of(k), STEPS))
        if name == "six cities":
            store.get(
                "SFVI, the paper's ELBO", name, lambda n=name, s=silos: run(problems()[n].model, s, paper(), STEPS)
            )
        store.get("SFVI's optimum, K = 10", name, lambda n=name, s=silos: optimum(problems()[n].model, s))
    for name, split in splits().items():
        model = problems()[split.problem].model
        bound = bounds.locally_enhanced(10)
        average = sfvi.SFVIAvg(num_local_steps=300, bound=bound)
        store.get("Sites, K = 10", name, lambda m=model, s=split: run(m, s.silos, sfvi.Sites(), s.num_rounds))
        store.get("SFVI-Avg, K = 10", name, lambda m=model, s=split, a=average: run(m, s.silos, a, 100))
        if name in ("six cities, 2 silos", "six cities, 19 silos of 28 children"):
            store.get("meta-analysis", name, lambda m=model, s=split: meta_analysis(m, s))
    table = make_table(store)
    (output / "table.md").write_text(table)
    print(table)
    picture.draw(store.content, output / "picture.png")


class Store:
    """Results on file, by method and case: an interrupted run goes on where it was."""

    def __init__(self, path: Path, *, fresh: bool):
        self.path = path
        self.content = json.loads(path.read_text()) if path.exists() and not fresh else {}

    def get(self, method, case, make):
        """What is known, or else what `make` finds."""
        results = self.content.setdefault(case, {})
        if method not in results:
            begin = time.perf_counter()
            results[method] = make()
            results[method]["seconds"] = round(time.perf_counter() - begin, 1)
            self.path.write_text(json.dumps(self.content, indent=1) + "\n")
            print(f"{case}: {method}, {results[method]['seconds']} s", flush=True)
        return results[method]


def sfvi_of(num_draws):
    """The long run that stands for SFVI's own optimum."""
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, STEPS))
    return sfvi.SFVI(bound=bounds.locally_enhanced(num_draws), optimizer=optimizer)


def paper():
    """SFVI as the paper has it: the ELBO, and local means that follow the global latents, not scales."""
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, STEPS))
    return sfvi.SFVI(bound=bounds.elbo(), local_family=families.block(coupling="mean"), optimizer=optimizer)


def optimum(model, silos):
    """Where SFVI leads, the noise of single runs averaged out: the mean of four."""
    ends = [run(model, silos, sfvi_of(10), STEPS, key=key) for key in (1, 2, 3, 4)]
    mean, sd = (np.array([end[part] for end in ends]) for part in ("mean", "sd"))
    error = {"mean, in sds": mean.std(0, ddof=1) / 2 / sd.mean(0), "sd, relative": sd.std(0, ddof=1) / 2 / sd.mean(0)}
    error = {name: values.round(4).tolist() for name, values in error.items()}
    return {"mean": mean.mean(0).tolist(), "sd": sd.mean(0).tolist(), "standard error": error}


def run(model, silos, algorithm, num_rounds, *, key=0):
    """Means and sds of the unconstrained global latents, on the way too, and what was exchanged."""
    try:
        fit, broke = sfvi.fit(model, silos, key=key, num_rounds=num_rounds, algorithm=algorithm), None
    except sfvi.DivergenceError as error:
        fit, broke = error.fit, error.round
    mean, sd = (np.asarray(part, float) for part in fit.posterior.family.marginals())
    rounds, there, back = (int(value) for value in fit.communication.iloc[0, 1:])
    path = {
        "rounds": fit.path.index.tolist(),
        "mean": fit.path["mean"].to_numpy().round(6).tolist(),
        "sd": fit.path["sd"].to_numpy().round(6).tolist(),
    }
    found = {"mean": mean.tolist(), "sd": sd.tolist(), "rounds": rounds, "bytes": rounds * (there + back)}
    found |= {} if broke is None else {"broke": broke}
    return found | {"path": path}


def nuts(model, data, num_draws=NUM_DRAWS):
    """Means and sds of the unconstrained global latents of two long chains on all data."""
    sampler = MCMC(
        NUTS(model.as_one_program({"all": data}), target_accept_prob=0.9),
        num_warmup=num_draws // 2,
        num_samples=num_draws,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jax.random.key(2))
    names = [site.name for site in model.population.layout.sites]
    draws = {name: value for name, value in sampler.get_samples().items() if name in names}
    free = jax.vmap(lambda values: unconstrain_fn(model.population.program, (), {}, values))(draws)
    columns = np.concatenate([np.asarray(free[name]).reshape(2 * num_draws, -1) for name in names], axis=1)
    return {"mean": columns.mean(0).tolist(), "sd": columns.std(0).tolist(), "rounds": None, "bytes": None}


def meta_analysis(model, split: Split):
    """Two stages: NUTS in every silo alone, then the inverse-variance weighted mean of each parameter."""
    found = [nuts(model, data, 1000) for data in split.silos.values()]
    mean, sd = baselines.meta_analysis(*(np.array([f[key] for f in found]) for key in ("mean", "sd")))
    return {"mean": mean.tolist(), "sd": sd.tolist(), "rounds": 1, "bytes": len(mean) * 2 * 4}


def errors(found, gold):
    """Largest error of a mean, in sds, and of an sd, relative."""
    mean, sd, gold_mean, gold_sd = (np.array(part) for f in (found, gold) for part in (f["mean"], f["sd"]))
    return float(np.abs((mean - gold_mean) / gold_sd).max()), float(np.abs(sd / gold_sd - 1).max())


def first_round_within(found, best, limits):
    """The first round from which on the errors against SFVI's optimum stay within limits."""
    path = found["path"]
    rows = zip(path["rounds"], path["mean"], path["sd"], strict=True)
    good = [(r, errors({"mean": m, "sd": s}, best)) for r, m, s in rows]
    late = [r for r, e in good if e[0] > limits[0] or e[1] > limits[1]]
    return (max(late) if late else 0) + 1


def make_table(store):
    """All results, a line for each method on each case."""
    lines = [
        "| case | method | rounds | kB per silo | mean off NUTS, sd | sd off NUTS | mean off SFVI, sd | sd off SFVI |",
        "|---|---|---|---|---|---|---|---|",
    ]
    whole = problems()
    for case, results in store.content.items():
        problem = case if case in whole else splits()[case].problem
        gold, best = (store.content[problem][method] for method in ("NUTS, pooled", "SFVI's optimum, K = 10"))
        for method, found in results.items():
            if "rounds" not in found or found["rounds"] is None:
                continue
            figures = [*errors(found, gold), *errors(found, best)]
            rounds = f"{found['rounds']:,}"
            if method.startswith("Sites"):
                rounds += f" (there after {first_round_within(found, best, (0.1, 0.03))})"
            if "broke" in found:
                rounds += " (then it diverged)"
            cells = [case, method, rounds, f"{found['bytes'] / 1000:,.1f}"]
            cells += [f"{figures[0]:.2f}", f"{100 * figures[1]:.1f}%", f"{figures[2]:.2f}", f"{100 * figures[3]:.1f}%"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
