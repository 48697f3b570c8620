"""The engine's state for one output: tokens, block table, counters.

Invariant: the first `num_computed_tokens` tokens have their KV in `block_table`; launched steps write that of the next
`num_launched_tokens`. The first `num_named_blocks` entries of `block_table` are full and named in the pool, unless they
are distrusted or come of a tainted block.
"""

from array import array
from collections.abc import Set
from enum import Enum

from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.block_hash import BlockHash, block_hashes, next_block_hash
from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.sampling.fixed_edits import FixedEdits, fixed_edits
from kvrelay.engine.sampling.penalties import seen_tokens
from kvrelay.engine.sampling.seen_tokens import SeenTokens


class SequenceState(Enum):
    RESERVING = "reserving"  # waits for blocks for its given tokens, whose KV will arrive from outside
    RECEIVING = "receiving"  # holds its blocks while their KV arrives
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One output of a request. The first output of a request also computes the given tokens for its siblings.

    `token_ids` holds the prompt, output tokens that were sampled elsewhere before the request came here, and new output
    tokens. The first two are the given tokens: `num_prompt_tokens` in the prompt, `num_given_tokens` in both. After
    `token_ids` come `num_unknown_tokens` tokens that launched steps sample; the last of them is in row `sampled_row` of
    the newest such step. The output ends at `max_num_tokens` at the latest, with the KV of all but its last token in
    `max_num_blocks` blocks."""

    __slots__ = (
        "_block_hashes",
        "_fixed",
        "_root",
        "_seen",
        "arrival",
        "block_size",
        "block_table",
        "first_tokens",
        "index",
        "lacks_room",
        "max_num_blocks",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_given_tokens",
        "num_launched_tokens",
        "num_named_blocks",
        "num_prompt_tokens",
        "num_reported_blocks",
        "num_unknown_tokens",
        "priority",
        "prompt_logprobs",
        "prompt_reported",
        "request",
        "sampled_row",
        "state",
        "token_ids",
        "was_preempted",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        index: int,
        root: BlockHash,
        block_size: int,
        max_model_len: int,
        arrival: int,
        priority: int,
        token_ids: list[int] | None = None,
    ) -> None:
        self.request = request
        self.priority = priority
        self.index = index
        self.arrival = arrival
        self.block_size = block_size
        given_token_ids = request.given_token_ids
        self.token_ids = list(given_token_ids) if token_ids is None else token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_given_tokens = len(given_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
        self.max_num_blocks = num_blocks_for(self.max_num_tokens - 1, block_size)
        self.num_computed_tokens = 0
        self.num_launched_tokens = 0
        self.num_unknown_tokens = 0
        self.sampled_row = 0
        self.num_cached_tokens = 0
        self.block_table = array("i")  # copied into every plan, and from there into the arrays of the step
        self.num_named_blocks = 0
        self.num_reported_blocks = 0  # leading blocks that a PRODUCE request has reported as progress
        self.state = SequenceState.RESERVING if request.receive else SequenceState.WAITING
        self.lacks_room = False  # while waiting: it was preempted, or blocks or running sequences were too few for it
        self.was_preempted = False
        self.prompt_logprobs = PromptLogprobs()
        self.prompt_reported = False
        # Those of several outputs (index, token), sampled elsewhere, while given tokens are still to be computed.
        self.first_tokens: list[tuple[int, int]] = []
        self._root = root
        self._block_hashes: list[BlockHash] = []
        self._fixed: FixedEdits | None = None
        self._seen: SeenTokens | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Counts the known tokens and the unknown ones."""
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def next_position(self) -> int:
        """Returns the position of the first token of the next step."""
        return self.num_computed_tokens + self.num_launched_tokens

    @property
    def num_output_tokens(self) -> int:
        """Counts the known output tokens of the request, including those sampled elsewhere."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_new_tokens(self) -> bool:
        """Tells whether a token was sampled here. Siblings are forked off with the first one."""
        return len(self.token_ids) > self.num_given_tokens

    @property
    def order(self) -> tuple[int, int, int]:
        """Returns the sort key of the queues: lower priority value first, then earlier arrival, then lower index."""
        return (self.priority, self.arrival, self.index)

    @property
    def num_cacheable_blocks(self) -> int:
        """Counts the leading full blocks that may be taken from the cache. The last token must be computed, because its
        logits are needed, unless its successor will come from elsewhere (CONSUME). If log-probabilities of the prompt
        are wanted, every prompt token must be computed."""
        if self.request.role is KVRole.CONSUME and not self.has_new_tokens and not self.first_tokens:
            return self.num_given_tokens // self.block_size
        if self.request.sampling.prompt_logprobs is not None and not self.prompt_reported:
            return 0
        return (self.num_tokens - 1) // self.block_size

    @property
    def num_missing_tokens(self) -> int:
        """Counts the tokens whose KV is still to be computed: 1 for a sequence that decodes."""
        return len(self.token_ids) + self.num_unknown_tokens - self.num_computed_tokens - self.num_launched_tokens

    @property
    def waits_for_result(self) -> bool:
        """Tells whether the next step of this sequence can be planned only after its newest token is known: the output
        ends with that token, splits into `n`, or continues on another node."""
        if self.num_unknown_tokens == 0:
            return False
        request = self.request
        splits = request.sampling.n > 1 or request.role is KVRole.PRODUCE
        return self.num_expected_tokens >= self.max_num_tokens or (splits and not self.has_new_tokens)

    @property
    def width(self) -> int:
        """Counts the running sequences that this one stands for, with the siblings that its first token will fork
        off."""
        return 1 if self.has_new_tokens else self.request.sampling.n

    def block_hashes(self, num_blocks: int) -> list[BlockHash]:
        """Returns the names of the first `num_blocks` full blocks, whose tokens must be known."""
        num_named, size = len(self._block_hashes), self.block_size
        if num_named < num_blocks:
            parent = self._block_hashes[-1] if self._block_hashes else self._root
            self._block_hashes += block_hashes(parent, self.token_ids[num_named * size : num_blocks * size], size)
        return self._block_hashes[:num_blocks]

    def block_hash(self, place: int) -> BlockHash:
        """Returns the name of the full block at `place`, whose tokens must be known."""
        if place >= len(self._block_hashes):
            self.block_hashes(place + 1)
        return self._block_hashes[place]

    def names(self) -> list[BlockHash]:
        """Returns every name that a block of its known tokens can have."""
        tail = self.given_tail()
        return self.block_hashes(self.num_tokens // self.block_size) + ([] if tail is None else [tail[0]])

    def fixed_edits(self) -> FixedEdits:
        """Returns the biases and stop tokens of the request, as arrays that are built once."""
        if self._fixed is None:
            self._fixed = fixed_edits(self.request.sampling)
        return self._fixed

    def seen_tokens(self) -> SeenTokens | None:
        """Returns what penalties read of the known tokens, None if there is no penalty."""
        if self._seen is None:
            self._seen = seen_tokens(self.request.sampling, self.request.prompt_token_ids)
        if self._seen is not None:
            self._seen.add(self.token_ids[self.num_prompt_tokens + self._seen.num_output_tokens :])
        return self._seen

    def finish_reason(
        self, token_id: int, num_output_tokens: int, eos_token_ids: Set[int]
    ) -> tuple[FinishReason | None, int | None]:
        """Returns why the output ends with `token_id`, its `num_output_tokens`-th token, and the token that stops it.
        Both are None if the output goes on."""
        ended = token_id in eos_token_ids and not self.request.sampling.ignore_eos
        if ended or token_id in self.fixed_edits().stop_token_ids:
            return FinishReason.STOP, token_id
        if self.num_prompt_tokens + num_output_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def given_tail(self) -> tuple[BlockHash, int] | None:
        """Returns the name and the number of tokens of the given tokens' partial last block, or None if their last
        block is full."""
        num_full, num_tail = divmod(self.num_given_tokens, self.block_size)
        if num_tail == 0:
            return None
        full = self.block_hashes(num_full)
        parent = full[-1] if full else self._root
        start = num_full * self.block_size
        return next_block_hash(parent, self.token_ids[start : self.num_given_tokens]), num_tail

    def missing_blocks(self) -> list[NamedBlock]:
        """Returns the blocks of an admitted sequence that wait for KV. The last given token's is not among them if it
        has to be computed here anyway."""
        wanted = self.block_hashes(self.num_cacheable_blocks)
        missing = [
            NamedBlock(self.block_table[place], wanted[place], self.block_size)
            for place in range(self.num_named_blocks, len(wanted))
        ]
        if self.request.role is KVRole.CONSUME and (tail := self.given_tail()) is not None:
            missing.append(NamedBlock(self.block_table[-1], *tail))
        return missing

    def fork(self, index: int, token_id: int) -> "Sequence":
        """Returns a sibling with the same tokens and then `token_id`, and the same blocks. The caller takes the
        references to the blocks."""
        sibling = Sequence(
            self.request,
            index=index,
            root=self._root,
            block_size=self.block_size,
            max_model_len=self.max_num_tokens,
            arrival=self.arrival,
            priority=self.priority,
            token_ids=[*self.token_ids, token_id],
        )
        sibling.num_computed_tokens = self.num_computed_tokens
        sibling.block_table = self.block_table[:]
        sibling.num_named_blocks = self.num_named_blocks
        sibling.prompt_reported = True
        sibling._block_hashes = self._block_hashes.copy()
        sibling._fixed = self._fixed
        sibling._seen = None if self._seen is None else self._seen.copy()
        return sibling
