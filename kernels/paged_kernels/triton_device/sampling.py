"""A row of logits to a token: penalties, temperature, top-k, top-p, min-p and a counter-based random choice.

One program does all of it for one row, step by step as the host's sampler does, so that a seed means the same tokens
here and there. Nothing is sorted: the score at which top-k or top-p ends is found digit by digit, over the bits of the
scores, and ties there are decided for the lowest ids. Scores are kept in a scratch row between the steps.
"""

import triton
import triton.language as tl

EXCLUDED = tl.constexpr(-80.0)
LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest float32
GROUP = tl.constexpr(128)  # tokens; part of what a seed means
EVERY_KEY = tl.constexpr(0x7FFFFFFF)
BANNED = tl.constexpr(1)  # flags of an edit
SEEN = tl.constexpr(2)
STREAM_TOKEN = tl.constexpr(0)
STREAM_GROUP = tl.constexpr(1)


@triton.jit
def gumbel_noise(seed, position, choice, index, STREAM: tl.constexpr):
    """Returns the standard Gumbel noise number `index` of one draw, float64."""
    same = index * 0
    word0, word1, word2, word3 = tl.philox(seed, index // 4, same + position, same + choice, same + STREAM)
    lane = index % 4
    bits = tl.where(lane == 0, word0, tl.where(lane == 1, word1, tl.where(lane == 2, word2, word3)))
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return -tl.log(-tl.log(1.0 - uniform))  # 1 - uniform is exact


@triton.jit
def edit_row(original, scratch, begin, end, tokens, biases, amounts, flags, repetition, BAN: tl.constexpr):
    """Writes the edited logits of tokens that have an edit; each has at most one."""
    for start in tl.range(begin, end, GROUP):
        entries = start + tl.arange(0, GROUP)
        mask = entries < end
        token = tl.load(tokens + entries, mask=mask, other=0)
        flag = tl.load(flags + entries, mask=mask, other=0)
        logit = tl.load(original + token, mask=mask, other=0.0).to(tl.float32)
        logit += tl.load(biases + entries, mask=mask, other=0.0)
        if BAN:
            logit = tl.where(flag & BANNED != 0, float("-inf"), logit)
        wide = logit.to(tl.float64)
        penalised = tl.where(wide > 0.0, wide / repetition, wide * repetition)
        penalised = tl.minimum(tl.maximum(penalised, -LARGEST), LARGEST).to(tl.float32)
        logit = tl.where((flag & SEEN != 0) & (logit != float("-inf")), penalised, logit)
        logit -= tl.load(amounts + entries, mask=mask, other=0.0)
        tl.store(scratch + token, logit, mask=mask)


@triton.jit
def best_of(row, vocab_size, TILE: tl.constexpr):
    """Returns the largest logit, the lowest id that has it, and how many logits are NaN."""
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32)
    num_nan = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        num_nan += tl.sum((logits != logits).to(tl.int32), 0)
        logits = tl.where(logits != logits, float("-inf"), logits)
        tile_best, tile_id = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
        best_id = tl.where(tile_best > best, start + tile_id, best_id).to(tl.int32)
        best = tl.maximum(best, tile_best)
    return best, best_id, num_nan


@triton.jit
def load_keys(scratch, ids, vocab_size):
    """Returns scores as integers that grow as the score falls from 0; what is outside the vocabulary comes last."""
    score = tl.load(scratch + ids, mask=ids < vocab_size, other=0.0)
    key = (0.0 - score).to(tl.int32, bitcast=True)
    return score, tl.where(ids < vocab_size, key, EVERY_KEY)


@triton.jit
def weight_below(scratch, vocab_size, limit, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Returns the number of the tokens whose key is below `limit`, or the sum of their exp(score); float64."""
    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, vocab_size, TILE):
        score, key = load_keys(scratch, start + tl.arange(0, TILE), vocab_size)
        if COUNT:
            total += tl.sum((key < limit).to(tl.int32), 0).to(tl.float64)
        else:
            total += tl.sum(tl.where(key < limit, tl.exp(score), 0.0).to(tl.float64), 0)
    return total


@triton.jit
def find_key(scratch, vocab_size, goal, last_key, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Returns the largest key, up to `last_key`, below which the weight is less than `goal`, found two bits a pass."""
    found = tl.full([], 0, tl.int32)
    for step in tl.range(0, 16):
        shift = 30 - 2 * step
        first, second, third = found + (1 << shift), found + (2 << shift), found + (3 << shift)
        # At the top digit 2 and 3 are beyond the largest key, and so negative.
        below1 = tl.full([], 0.0, tl.float64)
        below2 = tl.full([], 0.0, tl.float64)
        below3 = tl.full([], 0.0, tl.float64)
        for start in tl.range(0, vocab_size, TILE):
            score, key = load_keys(scratch, start + tl.arange(0, TILE), vocab_size)
            weight = tl.full([TILE], 1.0, tl.float32)
            if not COUNT:
                weight = tl.exp(score)
            weight = weight.to(tl.float64)
            below1 += tl.sum(tl.where(key < first, weight, 0.0), 0)
            below2 += tl.sum(tl.where(key < second, weight, 0.0), 0)
            below3 += tl.sum(tl.where(key < third, weight, 0.0), 0)
        inside1 = (first > 0) & (first <= last_key) & (below1 < goal)
        inside2 = (second > 0) & (second <= last_key) & (below2 < goal)
        inside3 = (third > 0) & (third <= last_key) & (below3 < goal)
        found = tl.where(inside3, third, tl.where(inside2, second, tl.where(inside1, first, found)))
    return found


@triton.jit
def sample_kernel(
    token_ids,  # [num_rows] int64; -1 for a row whose largest logit is not finite
    logits,  # [num_rows, vocab_size]
    scratch,  # [num_rows, vocab_size] float32, contiguous
    vocab_size,
    logits_stride,
    temperatures,  # [num_rows] float32, 0 is greedy
    top_ks,  # [num_rows] int32, 0 is off
    top_ps,  # [num_rows] float64
    log_min_ps,  # [num_rows] float32, -inf is off
    repetitions,  # [num_rows] float64
    seeds,  # [num_rows] int64, the bits of the unsigned seed
    positions,  # [num_rows] int32
    choices,  # [num_rows] int32
    edit_starts,  # [num_rows + 1] int32, into the arrays below
    edit_tokens,  # int32
    edit_biases,  # float32
    edit_amounts,  # float32, subtracted at last
    edit_flags,  # int32
    TILE: tl.constexpr,
):
    """Grid: (num_rows,)."""
    row = tl.program_id(0)
    original = logits + row.to(tl.int64) * logits_stride
    scratch += row.to(tl.int64) * vocab_size
    best, best_id, num_nan = best_of(original, vocab_size, TILE)
    if (num_nan > 0) | (best == float("inf")) | (best == float("-inf")):
        tl.store(token_ids + row, -1)
        return
    temperature = tl.load(temperatures + row)
    edits_begin, edits_end = tl.load(edit_starts + row), tl.load(edit_starts + row + 1)
    edited = edits_end > edits_begin
    if (temperature == 0.0) & (edits_end == edits_begin):
        tl.store(token_ids + row, best_id.to(tl.int64))
        return
    for start in tl.range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        copied = tl.load(original + ids, mask=ids < vocab_size, other=0.0)
        tl.store(scratch + ids, copied.to(tl.float32), mask=ids < vocab_size)
    tl.debug_barrier()
    if edited:
        repetition = tl.load(repetitions + row)
        edit_row(
            original,
            scratch,
            edits_begin,
            edits_end,
            edit_tokens,
            edit_biases,
            edit_amounts,
            edit_flags,
            repetition,
            True,
        )
        tl.debug_barrier()
        best, best_id, num_nan = best_of(scratch, vocab_size, TILE)
        if best == float("-inf"):  # every token would end the output: then none is banned
            edit_row(
                original,
                scratch,
                edits_begin,
                edits_end,
                edit_tokens,
                edit_biases,
                edit_amounts,
                edit_flags,
                repetition,
                False,
            )
            tl.debug_barrier()
            best, best_id, num_nan = best_of(scratch, vocab_size, TILE)
    if temperature == 0.0:
        tl.store(token_ids + row, best_id.to(tl.int64))
        return

    temperature = tl.maximum(temperature, 1.0e-5)
    for start in tl.range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        shifted = tl.load(scratch + ids, mask=ids < vocab_size, other=0.0) - best
        score = tl.maximum(tl.div_rn(shifted, temperature), EXCLUDED)
        tl.store(scratch + ids, score, mask=ids < vocab_size)
    tl.debug_barrier()
    truncate_row(scratch, vocab_size, tl.load(top_ks + row), tl.load(top_ps + row), tl.load(log_min_ps + row), TILE)
    tl.debug_barrier()
    token = draw_token(
        scratch, vocab_size, tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row), TILE
    )
    tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def truncate_row(scratch, vocab_size, top_k, top_p, log_min_p, TILE: tl.constexpr):
    """Sets what top-k, top-p or min-p exclude to EXCLUDED."""
    last_key = tl.full([], EVERY_KEY, tl.int32)
    num_ties = vocab_size + 0  # how many tokens at `last_key` stay
    by_count = (top_k > 0) & (top_k < vocab_size)
    by_weight = top_p < 1.0
    by_share = log_min_p > float("-inf")
    if by_count:
        last_key = find_key(scratch, vocab_size, top_k.to(tl.float64), last_key, True, TILE)
        num_ties = top_k - weight_below(scratch, vocab_size, last_key, True, TILE).to(tl.int32)
    if by_weight:
        total = weight_below(scratch, vocab_size, last_key, False, TILE)
        if by_count:
            tie_weight = tl.exp(0.0 - last_key.to(tl.float32, bitcast=True)).to(tl.float64)
            total += num_ties.to(tl.float64) * tie_weight
        goal = top_p * total
        nucleus_key = find_key(scratch, vocab_size, goal, last_key, False, TILE)
        before = weight_below(scratch, vocab_size, nucleus_key, False, TILE)
        tie_weight = tl.exp(0.0 - nucleus_key.to(tl.float32, bitcast=True)).to(tl.float64)
        wanted = tl.maximum(tl.ceil((goal - before) / tie_weight), 1.0).to(tl.int32)
        num_ties = tl.where(nucleus_key == last_key, tl.minimum(wanted, num_ties), wanted)
        last_key = nucleus_key
    if by_count | by_weight | by_share:
        num_before = tl.full([], 0, tl.int32)
        for start in tl.range(0, vocab_size, TILE):
            ids = start + tl.arange(0, TILE)
            score, key = load_keys(scratch, ids, vocab_size)
            ties = (key == last_key).to(tl.int32)
            rank = num_before + tl.cumsum(ties, 0)  # from 1
            num_before += tl.sum(ties, 0)
            kept = (key < last_key) | ((ties != 0) & (rank <= num_ties))
            kept = kept & (score >= log_min_p)
            tl.store(scratch + ids, tl.where(kept, score, EXCLUDED), mask=ids < vocab_size)


@triton.jit
def draw_token(scratch, vocab_size, seed, position, choice, TILE: tl.constexpr):
    """Draws a group of GROUP tokens by its total weight, then a token of it by its score: the Gumbel-max trick,
    twice."""
    GROUPS: tl.constexpr = TILE // GROUP
    best = tl.full([], float("-inf"), tl.float64)
    best_group = tl.full([], 0, tl.int32)
    num_groups = tl.cdiv(vocab_size, GROUP)
    members = tl.arange(0, GROUP)
    for first_group in tl.range(0, num_groups, GROUPS):
        groups = first_group + tl.arange(0, GROUPS)
        ids = groups[:, None] * GROUP + members[None, :]
        scores = tl.load(scratch + ids, mask=ids < vocab_size, other=EXCLUDED)
        totals = tl.sum(tl.exp(scores), 1).to(tl.float64)
        noisy = tl.log(totals) + gumbel_noise(seed, position, choice, groups, STREAM_GROUP)
        noisy = tl.where(groups < num_groups, noisy, float("-inf"))
        tile_best, tile_index = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
        best_group = tl.where(tile_best > best, first_group + tile_index, best_group).to(tl.int32)
        best = tl.maximum(best, tile_best)
    ids = best_group * GROUP + members
    scores = tl.load(scratch + ids, mask=ids < vocab_size, other=EXCLUDED).to(tl.float64)
    noisy = scores + gumbel_noise(seed, position, choice, ids, STREAM_TOKEN)
    return best_group * GROUP + tl.argmax(noisy, 0)
