"""The prompts that a load of `kvrelay bench` sends, for engines that get them without a server."""

from kvrelay.bench.plan import plans_of
from kvrelay.bench.prompts import PromptBuilder, Vocabulary
from kvrelay.bench.settings import BenchSettings


def prompts_of(load: BenchSettings) -> list[list[int]]:
    """Returns the prompts of a load of one run, which has a `vocab_size`, session by session."""
    assert load.vocab_size is not None
    builder = PromptBuilder(Vocabulary.of_size(load.vocab_size), "token_ids", seed=load.seed)
    [plan] = plans_of(load)
    return [builder.token_ids(request.segments) for session in plan.sessions for request in session.requests]
