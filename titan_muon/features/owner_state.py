"""`state="owner"`: replicas keep the momentum once, on the ranks that send it to the owner (`planner/owners.py`)."""

from __future__ import annotations

from ..engine.step.algorithm import PlanContext
from ..engine.step.feature import Feature
from ..options import OptionError


class OwnerStateFeature(Feature):
    """The planner chooses the ranks, and the engine makes the momentum there (`Parameter.state_ranks`)."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError if the momentum cannot be on the owner only, or is there already."""
        options = context.options
        if owned := context.owned():
            problem = f"{owned[0]} is owned, and its momentum is on its owner alone already"
            raise OptionError("state", f'= "owner": {problem}; set "replicated"')
        for name, needed in (("exchange", "all_to_all"), ("replicas", "split")):
            value = getattr(options, name)
            if value not in (needed, "auto"):
                problem = f"{name} = {value!r} needs the momentum of every replica; choose {needed!r}"
                raise OptionError("state", f"= 'owner': {problem}, or state = 'replicated'")
        if options.planner == "rule":
            raise OptionError("state", "= 'owner' needs planner = 'search', which balances its memory")
