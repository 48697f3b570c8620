"""What the router's policies make of a cluster, in virtual time: the policies and the index of blocks are the router's,
the nodes compute nothing and take as long as the options say. Minutes of a cluster of GPUs take seconds here, but how
long work takes is assumed, not measured, and bench/placement/nodes.py says what is left out.

    python -m bench.placement --topology 4P+8D --workload shared-prefix --num-prefixes 16 --prefix-len 4096 \\
        --input-len 64-512 --output-len 64-256 --requests 2000 --request-rate 40
    python -m bench.placement --topology 8P+8D --workload trace --trace conversation_trace.jsonl --limit 2000

All other options are the load, those of `kvrelay bench serve`. The default costs are about those of an 8B model in
bfloat16 on an H100 (docs/kernels.md), with 128 KiB of KV a token that moves at 50 GB/s.
"""

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence

from bench.arguments import positive, script_parser
from bench.placement.cluster import VirtualCluster
from bench.placement.nodes import NodeCosts, NodeLimits, Request
from bench.topology import Topology
from kvrelay.bench.plan import plans_of
from kvrelay.bench.settings import ServeBenchSettings
from kvrelay.bench.summary import Distribution
from kvrelay.core.config.settings import load_settings
from kvrelay.core.errors import ConfigurationError
from router.policies.by_load import LeastLoaded, RoundRobin
from router.policies.placement import Policy
from router.policies.prefix_aware import PrefixAware

_COLUMNS = ("TTFT p50", "p99", "TPOT p50", "p99", "held", "fetched", "computed", "busiest")
_WIDTH = 9


def main(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("placement", __doc__)
    parser.add_argument("--topology", type=_topology, default="4P+8D", help="prefill and decode nodes")
    text = "prices of a sequence, in prompt tokens, to compare prefix_aware with; default: its own"
    parser.add_argument("--sequence-price", type=float, nargs="+", default=[], metavar="PRICE", help=text)
    parser.add_argument("--step-ms", type=float, default=7.0, help="what a step takes")
    parser.add_argument("--sequence-ms", type=float, default=0.05, help="and each sequence that decodes in it")
    parser.add_argument("--prompt-token-ms", type=float, default=0.025, help="and each token of a prompt in it")
    parser.add_argument("--moved-token-ms", type=float, default=0.0026, help="what it takes to fetch a token's KV")
    parser.add_argument("--block-size", type=positive, default=16, help="tokens of a block")
    parser.add_argument("--num-blocks", type=positive, default=25_000, help="blocks of a node's pool")
    parser.add_argument("--max-num-seqs", type=positive, default=256, help="sequences of a step, at most")
    parser.add_argument("--max-num-batched-tokens", type=positive, default=2048, help="prompt tokens of a step")
    parser.add_argument("--tokens-beside-decodes", type=positive, default=128, help="and of one that decodes, too")
    options, load = parser.parse_known_args(arguments)
    settings = load_settings(ServeBenchSettings, load, prog=parser.prog)
    if settings.concurrency is not None:
        parser.error("--concurrency: nothing holds requests back here; give --request-rate alone")
    if not settings.draws_prompts:
        parser.error(f"--workload {settings.workload}: nobody counts the tokens of its prompts here")
    try:
        [plan] = plans_of(settings)
    except ConfigurationError as error:
        parser.error(str(error))
    costs = NodeCosts(
        step=options.step_ms / 1e3,
        sequence=options.sequence_ms / 1e3,
        prompt_token=options.prompt_token_ms / 1e3,
        moved_token=options.moved_token_ms / 1e3,
    )
    limits = NodeLimits(
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        tokens_beside_decodes=options.tokens_beside_decodes,
    )
    policies: dict[str, Policy] = {
        "prefix_aware": PrefixAware(),
        **{f"price {price:g}": PrefixAware(sequence_price=price) for price in options.sequence_price},
        "least_loaded": LeastLoaded(),
        "round_robin": RoundRobin(),
    }
    print("times in ms; of the prompts' tokens: held, fetched and computed by the nodes that prefilled;")
    print("busiest: tokens of the decode node that made the most, of the mean")
    print(f"{'':14}" + "".join(f"{column:>{_WIDTH}}" for column in _COLUMNS))
    for name, policy in policies.items():
        try:
            requests = VirtualCluster(policy, options.topology, costs, limits).run(plan.sessions)
        except ValueError as error:
            parser.error(f"--num-blocks: {error}")
        row = _row(requests, options.topology.decode_nodes)
        print(f"{name:14}" + "".join(f"{value:>{_WIDTH}}" for value in row), flush=True)


def _topology(text: str) -> Topology:
    try:
        return Topology.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _row(requests: Sequence[Request], num_decode_nodes: int) -> list[str]:
    ttft = Distribution.of(request.first_token - request.arrived for request in requests)
    tpot = Distribution.of(
        (request.last_token - request.first_token) / (request.num_output_tokens - 1)
        for request in requests
        if request.num_output_tokens > 1
    )
    times = [
        "-" if found is None else f"{1e3 * getattr(found, percentile):.1f}"
        for found in (ttft, tpot)
        for percentile in ("p50", "p99")
    ]
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    parts = (
        sum(request.num_held_tokens for request in requests),
        sum(request.num_fetched_tokens for request in requests),
        sum(request.num_computed_tokens for request in requests),
    )
    made = Counter[str]()
    for request in requests:
        made[request.decode_node] += request.num_output_tokens
    busiest = max(made.values()) * num_decode_nodes / made.total()
    return [*times, *(f"{part / num_tokens:.1%}" for part in parts), f"{busiest:.2f}"]


if __name__ == "__main__":
    main()
