"""How many tokens a step may have, and how prompts share them.

A step that computes prompts and decodes makes every sequence that decodes wait for the prompts' tokens, and one that
leaves prompts too little makes new requests wait for their first token. (Cf. Sarathi-Serve, Agrawal et al., 2024,
section 4.3, on the token budget of such steps.)
"""

from kvrelay.engine.sequence import Sequence
from kvrelay.engine.step_costs import StepCosts

SMALLEST_CHUNK = 16  # the least room for prompt tokens in a step that is to have some, whatever else it computes
MIXED_PARTS = 4  # the least number of steps that a prompt takes beside decodes where such steps are to be short
MUCH_LONGER = 4  # how many times as many tokens a prompt has left that shares its steps with the next one
MIXED_TOKENS = 128  # the limit of a step that also decodes, decodes included, if none is given and no more are cheap


class StepBudget:
    """The budgets of steps, in tokens. A step has at most `most` tokens, and one that also decodes at most `limit`,
    decodes included, though prompts always get `SMALLEST_CHUNK`. `limit` 0: `MIXED_TOKENS`, or more as long as the
    prompts' tokens are cheap by what steps have cost (`costs`)."""

    def __init__(self, most: int, limit: int, costs: StepCosts) -> None:
        self._most = most
        self._limit = limit
        self._costs = costs

    def num_tokens(self, prompt: Sequence | None, num_decodes: int, num_queued: int, *, on_borrowed_cores: bool) -> int:
        """Returns the most tokens of a step with `num_decodes` decodes, while `num_queued` prompts wait behind the
        first (`prompt`). If such steps are to be short, the first takes at least `MIXED_PARTS` of them, since a short
        prompt would otherwise make one step long in place of several less so. But prompts get as many tokens as decodes
        if the limit allows it, as many as are cheap if no limit was given, and at least `SMALLEST_CHUNK`, or none in a
        step that is to decode only. One that yields to decodes gets no more than are cheap, unless a limit was
        given."""
        most, limit, costs = self._most, self._limit, self._costs
        if num_decodes == 0 or limit >= most:
            return most
        if not limit and costs.need_decode_step():
            return min(most, num_decodes)
        cheap = 0 if limit else costs.num_cheap_tokens(num_decodes, num_queued, on_borrowed_cores=on_borrowed_cores)
        least = num_decodes + max(cheap, SMALLEST_CHUNK)
        if prompt is not None and prompt.request.yields_to_decodes and not limit:
            return min(most, least)
        part = 0 if prompt is None else -(-prompt.num_given_tokens // MIXED_PARTS)
        ceiling = limit or MIXED_TOKENS
        wanted = num_decodes + max(part, num_decodes)
        return min(most, max(least, min(ceiling, wanted)))


def without_share(room: int, prompt: Sequence, next_prompt: Sequence | None) -> int:
    """Returns how many of a step's `room` tokens a prompt may have. A much shorter one that comes next would otherwise
    wait for all of it; one that lacks blocks or a place would leave them unused."""
    if next_prompt is None or next_prompt.lacks_room or next_prompt.priority != prompt.priority:
        return room
    missing = next_prompt.num_missing_tokens
    return room - min(room // 2, missing) if missing * MUCH_LONGER <= prompt.num_missing_tokens else room
