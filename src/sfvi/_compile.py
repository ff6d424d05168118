"""How XLA is told to compile.

jaxlib's LAPACK kernels, batched, hand their work to the pool of threads on which they run themselves, and wait. If as
many of them run at once as there are threads, nobody is left to do the work, and the program hangs for good; on two
cores that takes two. NumPyro's MultivariateNormal inside a plate is enough. So programs with such kernels are compiled
for one thread.
"""

import functools
from typing import Any

import equinox as eqx
import jax

OPTIONS: dict[str, Any] = {"compiler_options": {"xla_cpu_multi_thread_eigen": False}}
on_one_thread: Any = functools.partial(eqx.filter_jit, **OPTIONS)
KERNELS = {"cholesky", "eig", "eigh", "geqrf", "geqp3", "hessenberg", "householder_product", "lu", "schur", "svd"}
KERNELS |= {"triangular_solve", "tridiagonal", "tridiagonal_solve"}


def calls_lapack(function: Any, *args: Any) -> bool:
    """Whether a function calls a kernel of LAPACK on arguments of these shapes."""
    return _has_kernel(jax.make_jaxpr(function)(*args).jaxpr)


def _has_kernel(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name in KERNELS:
            return True
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(part) and _has_kernel(getattr(part, "jaxpr", part)):
                return True
    return False


def _is_jaxpr(part):
    return hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns")
