"""TorchTitan's optimizer slot in its three forms: parameter groups, a list of typed optimizers, and neither."""

from typing import Any

RULES = "rules, such as rules=(Rule(match='*.bias', optimizer='adamw', options={'lr': 1e-3}),)"


def check_unread_fields(config: Any) -> None:
    """Raise ValueError for a field of TorchTitan's own that HybridOptimizers does not read.

    The installed form of the slot lacks some of the fields.
    """
    unread: dict[str, str] = {}
    if getattr(config, "param_groups", ()):
        unread["param_groups"] = f"{RULES}: globs in place of regular expressions"
    if named := getattr(config, "optimizer_factory_kwargs_by_name", ()):
        unread[f"optimizer_factory_kwargs_by_name ({', '.join(named)})"] = "tables"
    if typed := getattr(config, "optimizers", ()):
        names = ", ".join(type(optimizer).__qualname__ for optimizer in typed)
        unread[f"optimizers ({names})"] = f"{RULES}, and each optimizer's options in tables"
    if getattr(config, "implementation", None) == "fused_opt_states_bf16":
        unread["implementation = 'fused_opt_states_bf16'"] = "tables={'adamw': {'state_dtype': 'bfloat16'}}"
    for field, instead in unread.items():
        raise ValueError(f"{field} is not read by HybridOptimizers; write {instead}")
