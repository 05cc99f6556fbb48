"""Ways to propose tokens; each is the three functions of :class:`specjax.types.Drafter`."""

from specjax.drafters.lookup import LookupDrafter
from specjax.drafters.model import ModelDrafter

__all__ = ["LookupDrafter", "ModelDrafter"]
