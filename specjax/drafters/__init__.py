"""Ways to propose tokens; each is the three functions of :class:`specjax.types.Drafter`."""

from specjax.drafters.either import EitherDrafter
from specjax.drafters.features import FeatureDrafter
from specjax.drafters.lookup import LookupDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.silent import SilentDrafter

__all__ = ["EitherDrafter", "FeatureDrafter", "LookupDrafter", "ModelDrafter", "SilentDrafter"]
