"""A row of logits to a token: penalties, temperature, top-k, top-p, min-p and a counter-based random choice.

One program does all of it for one row, step by step as the host's sampler does, so that a seed means the same tokens
here and there. Nothing is sorted: the score at which top-k or top-p ends is searched for among ever fewer tokens, and
ties there are decided for the lowest ids. Scores are computed anew from the logits in each step that needs them. Loops
keep a result for each lane of a tile and reduce them at the end, since threads wait for each other in a reduction.
"""

import triton
import triton.language as tl

EXCLUDED = tl.constexpr(-80.0)
LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest float32
GROUP = tl.constexpr(128)  # tokens; part of what a seed means
EVERY_KEY = tl.constexpr(0x7FFFFFFF)
GROUPS = tl.constexpr(1024)  # whose noise is computed at a time
STAGES = tl.constexpr(6)  # tiles that a loop loads ahead
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
    """Returns the largest logit, the lowest id that has it, and how many lanes have seen a NaN."""
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = lanes
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        ids = start + lanes
        logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        best_id = tl.where(logits > best, ids, best_id)
        best = tl.maximum(best, logits, propagate_nan=tl.PropagateNan.ALL)
    num_nan = tl.sum((best != best).to(tl.int32), 0)
    row_best = tl.max(tl.where(best != best, float("-inf"), best), 0)
    return row_best, tl.min(tl.where(best == row_best, best_id, EVERY_KEY), 0), num_nan


@triton.jit
def load_scores(row, ids, vocab_size, best, temperature):
    """Returns logits after temperature, from EXCLUDED to 0; EXCLUDED for what is outside the vocabulary.

    The quotient is that of a division, rounded to nearest (Markstein, 1990, "Computation of elementary functions on the
    IBM RISC System/6000 processor"), in a fraction of the instructions.
    """
    logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
    shifted = tl.maximum(logits - best, temperature * (2.0 * EXCLUDED))  # finite
    inverse = tl.div_rn(1.0, temperature)
    quotient = shifted * inverse
    quotient = tl.fma(tl.fma(quotient, -temperature, shifted), inverse, quotient)
    quotient = tl.fma(tl.fma(quotient, -temperature, shifted), inverse, quotient)
    return tl.maximum(quotient, EXCLUDED)


@triton.jit
def key_of(score):
    """Returns scores as integers that grow as the score falls from 0."""
    return (0.0 - score).to(tl.int32, bitcast=True)


@triton.jit
def weight_of(key):
    """Returns exp(score), float64."""
    return tl.exp(0.0 - key.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def write_keys(keys, row, vocab_size, best, temperature, TILE: tl.constexpr):
    """Writes the keys of a row, and EVERY_KEY up to the end of the last tile. Returns each lane's smallest key."""
    lanes = tl.arange(0, TILE)
    smallest = tl.full([TILE], EVERY_KEY, tl.int32)
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        ids = start + lanes
        key = key_of(load_scores(row, ids, vocab_size, best, temperature))
        key = tl.where(ids < vocab_size, key, EVERY_KEY)
        tl.store(keys + ids, key)
        smallest = tl.minimum(smallest, key)
    tl.debug_barrier()
    return smallest


@triton.jit
def total_weight(keys, counts, limit, TILE: tl.constexpr):
    """Returns the weight of the keys below `limit`. Each lane of a tile has `counts` keys, one in each tile of
    `keys`."""
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    for step in tl.range(0, tl.max(counts, 0), num_stages=STAGES):
        key = tl.load(keys + step * TILE + lanes)
        total += tl.where((step < counts) & (key < limit), weight_of(key), 0.0)
    return tl.sum(total, 0)


@triton.jit
def nth_smallest(keys, n):
    """Returns the n-th smallest of a tile of keys, EVERY_KEY if there are fewer."""
    found = tl.full([], 0, tl.int32)
    for step in tl.range(0, 31):
        limit = found + (1 << (30 - step))
        found = tl.where(tl.sum((keys < limit).to(tl.int32), 0) < n, limit, found)
    return found


@triton.jit
def quarters(low, high):
    """Returns three keys that split an interval of scores in four, all above `low` and up to `high`."""
    nearest, farthest = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    quarter = (farthest - nearest) * 0.25
    first = tl.minimum(tl.maximum((nearest + quarter).to(tl.int32, bitcast=True), low + 1), high)
    second = tl.minimum(tl.maximum((nearest + quarter * 2).to(tl.int32, bitcast=True), first), high)
    third = tl.minimum(tl.maximum((nearest + quarter * 3).to(tl.int32, bitcast=True), second), high)
    return first, second, third


@triton.jit
def find_key(keys, counts, last_key, goal, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Returns the largest key, up to `last_key`, below which there is less than `goal`; what there is below it, the
    number of tokens or their weight; how many tokens have the key; and `counts` for the keys that are left.

    Each lane of a tile has `counts` keys, one in each tile of `keys`. A pass over them splits the interval in which the
    key must be in four. The next pass moves the keys of the quarter that it is in to the front, and drops the others;
    where tokens are counted it keeps those below, so that what top-k leaves is left in the end.
    """
    lanes = tl.arange(0, TILE)
    low, high = last_key * 0, last_key  # the interval
    smallest, largest = low - 1, high  # of the keys that a pass has found in it; different, so that there is a pass
    before = goal * 0
    while smallest < largest:
        first, second, third = quarters(low, high)
        num_kept = tl.zeros([TILE], tl.int32)
        minima = tl.full([TILE], EVERY_KEY, tl.int32)
        maxima = tl.zeros([TILE], tl.int32)
        sums1 = tl.zeros([TILE], goal.dtype)
        sums2 = tl.zeros([TILE], goal.dtype)
        sums3 = tl.zeros([TILE], goal.dtype)
        for step in tl.range(0, tl.max(counts, 0), num_stages=STAGES):
            key = tl.load(keys + step * TILE + lanes)
            kept = (step < counts) & (key <= high)
            inside = kept & (key >= low)
            if COUNT:
                weight = inside.to(tl.int32)
            else:
                weight = tl.where(inside, weight_of(key), 0.0)
                kept = inside
            tl.store(keys + num_kept * TILE + lanes, key, mask=kept)  # never beyond where it was
            num_kept += kept.to(tl.int32)
            minima = tl.minimum(minima, tl.where(inside, key, EVERY_KEY))
            maxima = tl.maximum(maxima, tl.where(inside, key, 0))
            sums1 += tl.where(key < first, weight, 0)
            sums2 += tl.where(key < second, weight, 0)
            sums3 += tl.where(key < third, weight, 0)
        tl.debug_barrier()
        counts = num_kept
        smallest, largest = tl.min(minima, 0), tl.max(maxima, 0)
        below1, below2, below3 = before + tl.sum(sums1, 0), before + tl.sum(sums2, 0), before + tl.sum(sums3, 0)
        # A bound above all keys inside is never passed: sums of one pass and the next may differ in their last bits.
        passed1 = (below1 < goal) & (first <= largest)
        passed2 = (below2 < goal) & (second <= largest)
        passed3 = (below3 < goal) & (third <= largest)
        high = tl.where(passed3, high, tl.where(passed2, third - 1, tl.where(passed1, second - 1, first - 1)))
        low = tl.where(passed3, third, tl.where(passed2, second, tl.where(passed1, first, low)))
        before = tl.where(passed3, below3, tl.where(passed2, below2, tl.where(passed1, below1, before)))
        low, high = tl.maximum(low, smallest), tl.minimum(high, largest)
    num_tied = tl.sum(counts, 0)
    if COUNT:
        num_tied -= before
    return smallest, before, num_tied, counts


@triton.jit
def find_ties(row, ids, vocab_size, best, temperature, tied_key):
    """Returns 1 where a token has the key, else 0."""
    key = key_of(load_scores(row, ids, vocab_size, best, temperature))
    return ((ids < vocab_size) & (key == tied_key)).to(tl.int32)


@triton.jit
def find_tie(row, vocab_size, best, temperature, tied_key, rank, TILE: tl.constexpr):
    """Returns the id of token number `rank`, from 1, of those that have the key. Bisects the row until one tile is
    left."""
    lanes = tl.arange(0, TILE)
    begin, end = rank * 0, tl.cdiv(vocab_size, TILE)  # in tiles
    while end - begin > 1:
        middle = (begin + end) // 2
        counts = tl.zeros([TILE], tl.int32)
        for step in tl.range(begin, middle, num_stages=STAGES):
            counts += find_ties(row, step * TILE + lanes, vocab_size, best, temperature, tied_key)
        num_ties = tl.sum(counts, 0)
        beyond = num_ties < rank
        rank = tl.where(beyond, rank - num_ties, rank)
        begin, end = tl.where(beyond, middle, begin), tl.where(beyond, end, middle)
    ids = begin * TILE + lanes
    ties = find_ties(row, ids, vocab_size, best, temperature, tied_key)
    return tl.sum(tl.where((ties != 0) & (tl.cumsum(ties, 0) == rank), ids, 0), 0)


@triton.jit
def find_limits(keys, row, vocab_size, best, temperature, top_k, top_p, TILE: tl.constexpr):
    """Returns what top-k and top-p leave: tokens whose key is smaller than the first number, and those that have that
    key and an id up to the second."""
    last_key = tl.full([], EVERY_KEY, tl.int32)
    last_tie = vocab_size + 0
    by_count = (top_k > 0) & (top_k < vocab_size)
    by_weight = top_p < 1.0
    if by_count | by_weight:
        smallest = write_keys(keys, row, vocab_size, best, temperature, TILE)
        counts = tl.zeros([TILE], tl.int32) + tl.cdiv(vocab_size, TILE)
        high = key_of(tl.full([], EXCLUDED, tl.float32))
        num_ties = vocab_size + 0  # how many tokens at `last_key` stay
        num_tied = vocab_size + 0  # of how many
        if by_count:
            high = tl.minimum(high, nth_smallest(smallest, top_k))  # top_k lanes have a key up to this one
            last_key, num_before, num_tied, counts = find_key(keys, counts, high, top_k, True, TILE)
            num_ties = top_k - num_before
        if by_weight:
            total = total_weight(keys, counts, last_key, TILE)
            if by_count:
                total += num_ties.to(tl.float64) * weight_of(last_key)
            goal = top_p * total
            # Tokens less likely than (1 - top_p) / vocab_size are never needed. The margin is for rounding.
            lowest = tl.log(total * (1.0 - top_p) / vocab_size) - 0.01
            high = tl.minimum(tl.minimum(high, last_key), key_of(lowest.to(tl.float32)))
            nucleus_key, before, num_tied, counts = find_key(keys, counts, high, goal, False, TILE)
            wanted = tl.maximum(tl.ceil((goal - before) / weight_of(nucleus_key)), 1.0).to(tl.int32)
            num_ties = tl.where(nucleus_key == last_key, tl.minimum(wanted, num_ties), wanted)
            last_key = nucleus_key
        if num_ties < num_tied:
            last_tie = find_tie(row, vocab_size, best, temperature, last_key, num_ties, TILE)
    return last_key, last_tie


@triton.jit
def load_kept(row, ids, vocab_size, best, temperature, last_key, last_tie, log_min_p):
    """Returns scores, EXCLUDED where top-k, top-p or min-p exclude a token."""
    score = load_scores(row, ids, vocab_size, best, temperature)
    key = key_of(score)
    kept = (key < last_key) | ((key == last_key) & (ids <= last_tie))
    return tl.where(kept & (score >= log_min_p), score, EXCLUDED)


@triton.jit
def weigh_groups(totals, row, vocab_size, best, temperature, last_key, last_tie, log_min_p, TILE: tl.constexpr):
    """Writes the total weight of each GROUP of tokens to `totals`."""
    num_groups = tl.cdiv(vocab_size, GROUP)
    for first_group in tl.range(0, num_groups, TILE // GROUP, num_stages=STAGES):
        groups = first_group + tl.arange(0, TILE // GROUP)
        ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        scores = load_kept(row, ids, vocab_size, best, temperature, last_key, last_tie, log_min_p)
        tl.store(totals + groups, tl.sum(tl.exp(scores), 1), mask=groups < num_groups)
    tl.debug_barrier()


@triton.jit
def draw_group(totals, num_groups, seed, position, choice):
    """Returns a group drawn by its total weight: the Gumbel-max trick."""
    best = tl.full([], float("-inf"), tl.float64)
    best_group = tl.full([], 0, tl.int32)
    for first_group in tl.range(0, num_groups, GROUPS):
        groups = first_group + tl.arange(0, GROUPS)
        total = tl.load(totals + groups, mask=groups < num_groups, other=1.0).to(tl.float64)
        noisy = tl.log(total) + gumbel_noise(seed, position, choice, groups, STREAM_GROUP)
        noisy = tl.where(groups < num_groups, noisy, float("-inf"))
        tile_best, tile_index = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
        best_group = tl.where(tile_best > best, first_group + tile_index, best_group).to(tl.int32)
        best = tl.maximum(best, tile_best)
    return best_group


@triton.jit
def sample_kernel(
    token_ids,  # [num_rows] int64; -1 for a row whose largest logit is not finite
    logits,  # [num_rows, vocab_size] float32
    edited_logits,  # [num_rows, vocab_size] float32, contiguous; scratch, as the next two
    keys,  # [num_rows, vocab_size rounded up to whole tiles] int32, contiguous
    totals,  # [num_rows, number of groups] float32, contiguous
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
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * logits_stride
    best, best_id, num_nan = best_of(row, vocab_size, TILE)
    if (num_nan > 0) | (best == float("inf")) | (best == float("-inf")):
        tl.store(token_ids + index, -1)
        return
    edits_begin, edits_end = tl.load(edit_starts + index), tl.load(edit_starts + index + 1)
    if edits_end > edits_begin:
        original, row = row, edited_logits + index.to(tl.int64) * vocab_size
        for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
            ids = start + tl.arange(0, TILE)
            copied = tl.load(original + ids, mask=ids < vocab_size, other=0.0)
            tl.store(row + ids, copied, mask=ids < vocab_size)
        tl.debug_barrier()
        repetition = tl.load(repetitions + index)
        edit_row(
            original,
            row,
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
        best, best_id, num_nan = best_of(row, vocab_size, TILE)
        if best == float("-inf"):  # every token would end the output: then none is banned
            edit_row(
                original,
                row,
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
            best, best_id, num_nan = best_of(row, vocab_size, TILE)
    temperature = tl.load(temperatures + index)
    if temperature == 0.0:
        tl.store(token_ids + index, best_id.to(tl.int64))
        return

    temperature = tl.maximum(temperature, 1.0e-5)
    top_k, top_p, log_min_p = tl.load(top_ks + index), tl.load(top_ps + index), tl.load(log_min_ps + index)
    keys += index.to(tl.int64) * tl.cdiv(vocab_size, TILE) * TILE
    last_key, last_tie = find_limits(keys, row, vocab_size, best, temperature, top_k, top_p, TILE)

    totals += index.to(tl.int64) * tl.cdiv(vocab_size, GROUP)
    weigh_groups(totals, row, vocab_size, best, temperature, last_key, last_tie, log_min_p, TILE)
    seed, position, choice = tl.load(seeds + index), tl.load(positions + index), tl.load(choices + index)
    first_id = draw_group(totals, tl.cdiv(vocab_size, GROUP), seed, position, choice) * GROUP
    ids = first_id + tl.arange(0, GROUP)
    scores = load_kept(row, ids, vocab_size, best, temperature, last_key, last_tie, log_min_p).to(tl.float64)
    noisy = scores + gumbel_noise(seed, position, choice, ids, STREAM_TOKEN)
    tl.store(token_ids + index, (first_id + tl.argmax(noisy, 0)).to(tl.int64))
