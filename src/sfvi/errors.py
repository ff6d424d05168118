"""The errors a user can meet. Each carries one sentence: what is wrong, where, and what to do."""


class SfviError(Exception):
    """Base of every error that sfvi raises on purpose."""


class ModelError(SfviError, ValueError):
    """The two programs do not form a structured model."""


class DataError(SfviError, ValueError):
    """A silo's data cannot be used."""


class OptionError(SfviError, ValueError):
    """An option has a value that means nothing."""


class ArchiveError(SfviError, ValueError):
    """A saved file is damaged, or belongs to another model, data set or run."""


class WireError(SfviError, ValueError):
    """A message is malformed, too large, out of order, or of another run or model."""


class DeploymentError(SfviError, RuntimeError):
    """A deployed run cannot begin or go on: a silo is missing, refuses, or does not belong."""


class RefusalError(DeploymentError):
    """Why a silo does not do what the server asks: one of few fixed sentences, which hold nothing of its data."""


class DivergenceError(SfviError, RuntimeError):
    """The fit produced NaN, infinity or a runaway ELBO.

    Attributes:
        fit: What was reached at the last good round, with posteriors as usual.
        round: The round that failed, counted from 0.
        silo: Name of the silo where it happened, or None for the server.
        site: Name of the site.
    """

    def __init__(self, message, *, round, silo, site, fit=None):
        super().__init__(message)
        self.round = round
        self.silo = silo
        self.site = site
        self.fit = fit


def first_line(error: BaseException) -> str:
    """What a foreign error says, for use inside a sentence: its kind and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}" if lines else type(error).__name__
