"""Reading a formula with `formulae`, and refusing what would depend on more than a silo's own rows."""

import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..errors import OptionError, first_line

SILO = "silo"  # the name behind the bar that stands for the silo itself
FUNCTIONS = ("abs", "cos", "exp", "expm1", "log", "log10", "log1p", "log2", "sin", "sqrt", "tanh")
CATEGORICAL = ("C", "S", "T")
SCALERS = ("center", "scale", "standardize")
PROPORTION = ("p", "prop", "proportion")
OF_ALL_ROWS = ("bs", "cc", "cr", "hsgp", "poly", "tp")
CODINGS = ("Sum", "Treatment")
USABLE = f"np.<function of one number>, {', '.join(FUNCTIONS)}, I, {', '.join(SCALERS + CATEGORICAL)} and offset"


class Block(NamedTuple):
    """The effects of one grouping factor.

    Attributes:
        name: As written behind the bar, without the silo.
        columns: That make up a group's id; none for the silo itself.
        terms: What has an effect in each group, as formulae's terms.
    """

    name: str
    columns: tuple[str, ...]
    terms: tuple[Any, ...]


class Parsed(NamedTuple):
    """A formula that has been read and found usable.

    Attributes:
        text: The formula.
        response: Its left side: a variable or a call of formulae.
        description: formulae's description of the right side, without its group terms.
        blocks: Those, by grouping factor.
        columns: All columns of a data frame that are needed.
    """

    text: str
    response: Any
    description: Any
    blocks: tuple[Block, ...]
    columns: tuple[str, ...]

    def components(self) -> Iterator[Any]:
        """All variables and calls of the right side."""
        for term in (*self.description.common_terms, *(t for block in self.blocks for t in block.terms)):
            yield from getattr(term, "components", ())


def parse(formula: str) -> Parsed:
    """Read a formula; every call makes terms anew, since formulae keeps data in them."""
    description = _described(formula)
    blocks = _blocks(description.group_terms)
    description.group_terms = []
    response = description.response.term.components[0]
    description.response = None
    parsed = Parsed(formula, response, description, blocks, ())
    _check_response(response)
    for term in (*description.common_terms, *(t for block in blocks for t in block.terms)):
        _check_term(term)
    _check_names(parsed)
    if not description.common_terms and not blocks:
        raise OptionError(f"The formula {formula!r} has nothing on its right side; add 1 for an intercept.")
    if not hasattr(response, "call") and response.name in {n for part in parsed.components() for n in variables(part)}:
        raise OptionError(f"The outcome {response.name!r} is a predictor of itself; take it from the right side.")
    used = {name: None for part in (response, *parsed.components()) for name in variables(part)}
    used |= dict.fromkeys(column for block in blocks for column in block.columns)
    if SILO in used:
        raise OptionError(
            f"'{SILO}' stands for the silo itself and only behind a bar, as in (1 | {SILO}); for fixed effects of "
            "silos give each a column with its name, called otherwise."
        )
    return parsed._replace(columns=tuple(used))


def is_call(component: Any, *callees: str) -> bool:
    """Whether a component is a call of one of these functions."""
    return getattr(getattr(component, "call", None), "callee", None) in callees


def variables(component: Any) -> list[str]:
    """Columns that a variable or a call is computed from."""
    if not hasattr(component, "call"):
        return [component.name]
    return [node.name for node in _nodes(component.call) if _kind(node) == "LazyVariable" and node.name not in CODINGS]


def chosen_levels(component: Any) -> list[Any]:
    """Levels that a categorical component names, as `T(x, 'a')` does."""
    if not hasattr(component, "call"):
        return []
    _, *others = [*component.call.args, *component.call.kwargs.values()]
    return [node.value for other in others for node in _nodes(other) if _kind(node) == "LazyValue"]


def measured(component: Any) -> Any:
    """The part of a numeric component whose mean and sd are agreed: what a scaler is applied to, else all of it."""
    if is_call(component, "offset", *SCALERS):
        return component.call.args[0]
    return component.call if hasattr(component, "call") else component


def values(part: Any, frame: pd.DataFrame) -> np.ndarray:
    """Evaluate a variable, a call or a part of one on the rows of a frame."""
    if not hasattr(part, "eval"):
        return np.asarray(frame[part.name])
    with np.errstate(all="ignore"):
        found = part.eval(frame, environment())
    array = np.asarray(found)
    return np.full(len(frame), array) if array.ndim == 0 else array


def environment() -> Any:
    """What a formula may use: the same in every silo, so nothing of where it was called."""
    formulae = _formulae()
    known = {**formulae.transforms.TRANSFORMS, **formulae.categorical.ENCODINGS}
    return formulae.environment.Environment([known, {"np": np, **{name: getattr(np, name) for name in FUNCTIONS}}])


def settle(component: Any, mean: float, sd: float) -> None:
    """Give `scale(x)` or `center(x)` the agreed statistics instead of those of the rows at hand."""
    transform = _formulae().transforms.TRANSFORMS[component.call.callee]()
    transform.mean, transform.std, transform.params_set = mean, sd, True
    component.call.stateful_transform = transform


@functools.cache
def _formulae() -> Any:
    try:
        import formulae
        import formulae.categorical
        import formulae.environment
        import formulae.parser
        import formulae.scanner
        import formulae.transforms
    except ImportError as error:
        raise OptionError("Formulas need the package formulae; pip install 'sfvi[formula]'.") from error
    return formulae


def _described(formula):
    formulae = _formulae()
    if not isinstance(formula, str):
        raise OptionError(f"The formula is {formula!r}; give a text like 'y ~ x + (1 | group)'.")
    left, tilde, right = formula.partition("~")
    if not left.strip() or not tilde:
        raise OptionError(f"The formula {formula!r} has no outcome; write it as 'outcome ~ predictors'.")
    if not right.strip():
        raise OptionError(f"The formula {formula!r} has nothing on its right side; add 1 for an intercept.")
    heard = _Listener()
    logger = logging.getLogger("formulae")
    logger.addHandler(heard)
    before, logger.propagate = logger.propagate, False
    try:
        parser = formulae.parser.Parser(formulae.scanner.Scanner(formula).scan())
        parser.parse()
        description = formulae.model_description(formula)
    except Exception as error:
        hint = "; for slopes of a group write (x | group)" if "||" in formula else ""
        raise OptionError(f"The formula {formula!r} cannot be read ({first_line(error)}){hint}.") from error
    finally:
        logger.removeHandler(heard)
        logger.propagate = before
    if not parser.at_end():  # formulae would leave the rest out without a word
        raise OptionError(
            f"The formula {formula!r} cannot be read from {parser.peek().lexeme!r} on; effects of groups stand in "
            "parentheses, as in (1 | group)."
        )
    if heard.said:
        raise OptionError(f"The formula {formula!r}: {' '.join(heard.said.split())}")
    # Terms share their components in formulae, which keep the coding of the term that was set last.
    description.common_terms = [copy.deepcopy(term) for term in description.common_terms]
    for term in description.group_terms:
        term.expr = copy.deepcopy(term.expr)
    return description


class _Listener(logging.Handler):
    """Hears what formulae only warns of, such as x**2 being read as x."""

    said = ""

    def emit(self, record):
        self.said = record.getMessage()


def _blocks(terms):
    blocks: dict[str, Block] = {}
    for term in terms:
        columns = []
        for component in term.factor.components:
            if hasattr(component, "call"):
                raise OptionError(
                    f"The groups of ({term.name}) are computed; name a column behind the bar, without {component.name}."
                )
            if component.name != SILO:
                columns.append(component.name)
        name = ":".join(columns) or SILO
        known = blocks.setdefault(name, Block(name, tuple(columns), ()))
        blocks[name] = known._replace(terms=(*known.terms, term.expr))
    return tuple(blocks.values())


def _check_response(response):
    if is_call(response, *PROPORTION):
        call = response.call
        if len(call.args) != 2 or call.kwargs or _kind(call.args[0]) != "LazyVariable":
            raise OptionError(f"{response.name} needs two columns, successes and trials: prop(successes, trials).")
        return
    if hasattr(response, "call"):
        _check_elementwise(response.call, response.name)


def _check_term(term):
    for component in getattr(term, "components", ()):
        if not isinstance(component.name, str):
            raise OptionError(f"The formula adds the number {component.name}; only 0, 1 and -1 mean something there.")
        if not hasattr(component, "call"):
            if component.reference is not None:
                raise OptionError(
                    f"{component.name}[...] chooses a level of the outcome; of predictors use T({component.name}, ...)."
                )
        elif is_call(component, *CATEGORICAL):
            _check_categorical(component)
        elif is_call(component, "offset", *SCALERS):
            call = component.call
            if len(call.args) != 1 or call.kwargs:
                raise OptionError(f"{component.name} takes one column or expression and nothing else.")
            if call.callee == "offset" and len(term.components) > 1:
                raise OptionError(f"{component.name} is part of an interaction; an offset stands alone.")
            _check_elementwise(call.args[0], component.name)
        else:
            _check_elementwise(component.call, component.name)


def _check_categorical(component):
    call = component.call
    first, *others = [*call.args, *call.kwargs.values()] or [None]
    coded = all(
        _kind(arg) == "LazyValue" or getattr(arg, "callee", getattr(arg, "name", None)) in CODINGS for arg in others
    )
    if _kind(first) != "LazyVariable" or not coded or "levels" in call.kwargs:
        raise OptionError(
            f"{component.name} is not understood; give a column, and at most a reference level: T(x, 'a'). The levels "
            "are agreed by all silos."
        )


def _check_elementwise(node, where):
    """Refuse functions that look at more than one row."""
    for inner in _nodes(node):
        if _kind(inner) != "LazyCall":
            continue
        callee = inner.callee
        if inner.kwargs and callee not in OF_ALL_ROWS:
            raise OptionError(
                f"{where} gives {callee} options; only plain functions of columns can be computed alike in silos."
            )
        if callee in ("I", *FUNCTIONS) or _is_ufunc(callee):
            continue
        if callee in OF_ALL_ROWS:
            why = "is computed from all rows, which no silo has; compute its columns beforehand, from agreed numbers"
        elif callee in SCALERS + CATEGORICAL + ("offset",):
            why = "must stand by itself, not inside another function"
        elif callee in PROPORTION:
            why = "belongs to the left side"
        elif callee in ("B", "binary"):
            why = "depends on the levels at hand; write I(x == 'level'), or outcome['level'] on the left side"
        else:
            why = f"is not known to be computed row by row; a formula may use {USABLE}"
        raise OptionError(f"The term {where}: {callee} {why}.")


def _is_ufunc(callee):
    module, _, name = callee.partition(".")
    found = getattr(np, name, None) if module in ("np", "numpy") else None
    return isinstance(found, np.ufunc) and found.nout == 1


def _check_names(parsed):
    """Names lack the parentheses inside, so I((x + y) * 2) and I(x + y * 2) look the same."""
    known: dict[str, Any] = {}
    for component in parsed.components():
        call = known.setdefault(component.name, getattr(component, "call", None))
        if call is not None and call != component.call:
            raise OptionError(
                f"Two different terms are both written {component.name}; compute one as a column beforehand."
            )


def _nodes(node) -> Iterator[Any]:
    yield node
    for child in (*getattr(node, "args", ()), *getattr(node, "kwargs", {}).values()):
        yield from _nodes(child)


def _kind(node):
    return type(node).__name__
