"""Topics of newsgroups over silos: ProdLDA (the paper's last experiment)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from .. import scores
from ..errors import OptionError
from ..topics import DIVERSE
from ..zoo.prod_lda import SPREAD
from . import topics_methods as methods
from .base import Cell, Result, Results, markdown, name
from .spec import Rounds, check_seeds
from .topics_claims import ELBO, OF_OURS, OF_THE_PAPER, RANDOM, Method, judged
from .topics_corpus import Source, compare_vocabularies, corpus
from .topics_methods import ALPHA, BETA, ELBO_DRAWS, Effort, Variant
from .topics_picture import draw

PUBLISHED, LEARNED, AMORTIZED, PRINTED = "published", "published, learned", "published, amortized", "printed"
VARIANTS = {
    PUBLISHED: Variant("published"),
    LEARNED: Variant("published", learned=True),
    AMORTIZED: Variant("published", amortized=True),
    PRINTED: Variant("printed", learned=True),
}
FREQUENCIES = (RANDOM[0], "word frequencies")
KEPT = {"AVITM": 0.4, "AVITM, less dropout": 0.8}  # by dropout: as published, and as later versions have it
OURS = ("SFVI", "SFVI-Avg", "Sites", "Independent", "pooled")
MOST_SHOWN = 21  # topics that are printed
VOCABULARY, THRESHOLDS = "vocabulary", (1, 5, 10, 20, 50, 100)
READ = ((PUBLISHED, "SFVI"), (PUBLISHED, "SFVI-Avg"), ("autoencoder", "AVITM"), ("LDA", "gensim"), (PRINTED, "SFVI"))
Model = Literal["published", "published, learned", "published, amortized", "printed"]


@dataclasses.dataclass(frozen=True)
class TopicsExperiment:
    """Settings.

    Attributes:
        corpus: Raw posts, or bags of words as they were published.
        num_posts: How many posts.
        num_words: Of the vocabulary, for posts.
        threshold: Documents of a silo that must hold a word before the silo tells of it.
        silos: How many.
        held_out: Documents to test with.
        seeds: Of the split into silos, and of the methods.
        models: Forms of ProdLDA that are fitted.
        topics: K.
        batch: Documents of each silo in a step.
        steps: Of SFVI, of silos alone and of pooled documents.
        average: Rounds of SFVI-Avg.
        sites: Rounds of Sites.
        step_size: Of Adam at the start; it falls to zero.
        document_step_size: Of documents' own parameters.
        encoder_step_size: Of everything where a network infers documents' latents.
        encoder_steps: Of SFVI there.
        epochs: Of AVITM.
        passes: Of LDA.
    """

    corpus: Source
    num_posts: int
    num_words: int
    threshold: int
    silos: int
    held_out: int
    seeds: tuple[int, ...]
    models: tuple[Model, ...]
    topics: int
    batch: int
    steps: int
    average: Rounds
    sites: Rounds
    step_size: float
    document_step_size: float
    encoder_step_size: float
    encoder_steps: int
    epochs: int
    passes: int

    def __post_init__(self):
        check_seeds("topics", self.seeds)
        if not 2 <= self.topics <= self.num_words:
            raise OptionError(f"topics: topics is {self.topics}; give at least 2, and at most num_words.")
        if self.num_words < DIVERSE:
            raise OptionError(f"topics: num_words is {self.num_words}; diversity takes at least {DIVERSE}.")

    @property
    def effort(self) -> Effort:
        """What our methods are told."""
        sizes = self.step_size, self.document_step_size, self.encoder_step_size, self.encoder_steps
        return Effort(self.topics, self.batch, self.steps, self.average, self.sites, *sizes)

    def methods(self) -> dict[Method, Callable[..., Result]]:
        """Each fills a cell for a seed; quick ones first."""
        found: dict[Method, Callable[..., Result]] = {
            RANDOM: methods.random_topics,
            FREQUENCIES: methods.word_frequencies,
            ("NMF", "scikit-learn"): methods.sklearn_nmf,
            ("LDA", "gensim"): partial(methods.gensim_lda, self.passes),
            ("LDA", "scikit-learn"): partial(methods.sklearn_lda, self.passes),
        }
        for method, keep in KEPT.items():
            found["autoencoder", method] = partial(methods.autoencoder, keep, self.epochs)
        for title in self.models:
            for method in OURS if title in (PUBLISHED, PRINTED) else OURS[:1]:
                run = partial(methods.federated, method, VARIANTS[title])
                found[title, method] = run if method != "Independent" else partial(methods.independent, VARIANTS[title])
        return found

    def cells(self) -> list[Cell]:
        """Seed by seed, so that a whole table is there early."""
        data = {
            "corpus": self.corpus,
            "posts": self.num_posts,
            "words": self.num_words,
            "threshold": self.threshold,
            "silos": self.silos,
            "held out": self.held_out,
            "topics": self.topics,
        }
        found = []
        if self.corpus == "posts":
            found.append(Cell(VOCABULARY, data | {"thresholds": list(THRESHOLDS)}, self._compare_vocabularies))
        for seed in self.seeds:
            sizes = self.num_words, self.silos, self.held_out, self.threshold
            load = partial(corpus, self.corpus, self.num_posts, *sizes, seed)
            for (model, method), run in self.methods().items():
                settings = data | self._settings(model, method)
                cell = name(model, method, f"seed {seed}")
                found.append(Cell(cell, settings, partial(run, self.effort, load, seed)))
        return found

    def report(self, results: Results) -> str:
        """The table, the paper's claims, and the words."""
        columns = ["model", "inference", "NPMI", "UMass", "diversity", "perplexity", "ELBO, thousands"]
        columns += ["rounds", "MB a silo", "minutes"]
        rows = []
        for method in self.methods():
            runs = self._runs(results, method)
            if not runs:
                continue
            shown = [_mean([np.mean(run[score]) for run in runs], 3) for score in ("npmi", "umass", "diversity")]
            shown.append(_mean([run["perplexity"] for run in runs if "perplexity" in run], 0))
            shown.append(_mean([run[ELBO] / 1e3 for run in runs if ELBO in run], 0, ","))
            broke = sum("broke" in run for run in runs)
            done = f"{runs[0]['rounds']:,}" if runs[0]["rounds"] else ""
            rounds = f"{broke} of {len(runs)} diverged" if broke else done
            sent = f"{runs[0]['bytes'] / 1e6:,.0f}" if runs[0]["bytes"] else ""
            rows.append([*method, *shown, rounds, sent, f"{np.mean([run['seconds'] for run in runs]) / 60:.1f}"])
        counts = [len(self._runs(results, method)) for method in self.methods()]
        note = f"Seeds: {max(counts)}" if len(set(counts)) == 1 else f"Seeds: {min(counts)} to {max(counts)}"
        text = f"{note}; mean ± standard error over them.\n\n" + markdown(columns, rows, names=2)
        text += self._vocabularies(results)
        for title, claims in (("The paper's claims", OF_THE_PAPER), ("Against others on pooled documents", OF_OURS)):
            said = self._claims(results, claims)
            text += f"\n{title}:\n\n{said}\n" if said else ""
        return text + self._words(results)

    def draw(self, results: Results, path: Path) -> None:
        """Coherence of every topic by method, and ELBO against rounds."""
        draw({method: self._runs(results, method) for method in self.methods()}, self.average.steps, path)

    def _settings(self, model, method):
        """What decides a cell beside the data."""
        if model not in VARIANTS:
            return {
                RANDOM[0]: {},
                "NMF": {},
                "LDA": {"passes": self.passes},
                "autoencoder": {"epochs": self.epochs, "keep": KEPT.get(method)},
            }[model]
        variant = VARIANTS[model]
        known = {**variant._asdict(), "batch": self.batch, "document step size": self.document_step_size}
        known["step size"] = self.encoder_step_size if variant.amortized else self.step_size
        known |= {"start": SPREAD} if variant.amortized else {}
        known |= {} if variant.learned else {"alpha": ALPHA, "beta": BETA}
        known |= {} if method == "Independent" else {"ELBO draws": ELBO_DRAWS}
        rounds = {"SFVI-Avg": self.average, "Sites": self.sites}.get(method)
        steps = self.encoder_steps if variant.amortized else self.steps
        return known | ({"steps": steps} if rounds is None else {"rounds": list(rounds)})

    def _compare_vocabularies(self, state):
        del state
        return compare_vocabularies(
            self.num_posts, self.num_words, self.silos, self.held_out, THRESHOLDS, self.seeds[0]
        )

    def _vocabularies(self, results):
        """How the silos' vocabulary differs from that of pooled texts."""
        if VOCABULARY not in results:
            return ""
        rows = []
        for threshold in THRESHOLDS:
            row = [str(threshold)]
            for found in results[VOCABULARY].values():
                told, same = found[str(threshold)]
                row += [f"{told:,}", f"{same:,}" if same else "too few"]
            rows.append(row)
        splits = [part for split in results[VOCABULARY] for part in (f"told, silos {split}", "in common")]
        title = f"Words that silos tell of, and how many of their {self.num_words:,} pooled texts would have given:"
        return f"\n{title}\n\n{markdown(['threshold', *splits], rows)}"

    def _claims(self, results, claims):
        """What is to be said of each claim; nothing of a single seed."""
        if len(self.seeds) == 1:
            return ""
        known = {method: self._by_seed(results, method) for method in self.methods()}
        said = (judged(each, known.get(each.one, {}), known.get(each.other, {})) for each in claims)
        return "\n".join(line for line in said if line is not None)

    def _words(self, results):
        """Topics of the first seed, the most coherent first."""
        text, shown = "", min(self.topics, MOST_SHOWN)
        which = "Topics" if shown == self.topics else f"The {shown} most coherent of {self.topics} topics"
        for method in READ:
            runs = self._runs(results, method)
            if runs:
                order = np.argsort(-np.array(runs[0]["npmi"]), kind="stable")[:shown]
                lines = [f"{runs[0]['npmi'][topic]:.2f}  {runs[0]['words'][topic]}" for topic in order]
                text += f"\n{which} of {', '.join(method)}, with their NPMI:\n\n```\n" + "\n".join(lines) + "\n```\n"
        return text

    def _runs(self, results, method):
        return list(self._by_seed(results, method).values())

    def _by_seed(self, results, method):
        cells = {seed: name(*method, f"seed {seed}") for seed in self.seeds}
        return {seed: results[cell] for seed, cell in cells.items() if cell in results}


def _mean(values, digits, form=""):
    """Mean and standard error of seeds."""
    if not values:
        return ""
    mean, error = scores.collected([{"score": float(value)} for value in values])["score"]
    return f"{mean:{form}.{digits}f}" + ("" if np.isnan(error) else f" ± {error:.{digits}f}")
