"""The policy that a setting names."""

from router.policies.by_load import LeastLoaded, RoundRobin
from router.policies.placement import Policy
from router.policies.prefix_aware import PrefixAware


def make_policy(name: str, *, local_prefill_max_tokens: int) -> Policy:
    """Returns the policy that the setting `policy` names."""
    policies: dict[str, Policy] = {
        "round_robin": RoundRobin(),
        "least_loaded": LeastLoaded(),
        "prefix_aware": PrefixAware(local_prefill_max_tokens),
    }
    return policies[name]
