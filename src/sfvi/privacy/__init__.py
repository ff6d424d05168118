"""What may leave a silo: the policy that it sets itself, and the record of what left."""

from .audit import Audit
from .gate import Gate
from .policy import Policy
from .secret import Secret

__all__ = ["Audit", "Gate", "Policy", "Secret"]
