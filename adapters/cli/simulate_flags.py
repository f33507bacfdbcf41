"""Flags of `pagemill bench simulate`. Light: nothing of the simulator is imported here."""

from __future__ import annotations

import argparse

DEVICE_NAMES = ("h200", "a100", "cpu")
POLICIES = ("fcfs", "priority", "fair")
ADMISSIONS = ("optimistic", "reserve")
FORECASTS = ("lengths", "none")
TENANTS = ("all", "others")
PREEMPTION_MODES = ("auto", "recompute", "swap")
SWEEPS = (
    "block_size",
    "pool_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_tokens",
    "prefix_caching",
    "policy",
    "admission",
    "forecast",
    "tenants",
    "ttl_ms",
    "refuse_late",
    "max_waiting_requests",
    "max_waiting_prompt_tokens",
    "preemption_mode",
    "swap_tokens",
    "rate_scale",
    "rate",
    "sessions",
)
TIMINGS = ("fixed", "prefill-token", "decode", "kv-token", "pair", "move")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The trace, how it arrives, the engine it meets, and what to compare it with."""
    parser.add_argument("trace", metavar="TRACE", help="trace file (formats: docs/simulator.md); may be gzipped")
    _traffic(parser.add_argument_group("traffic"))
    _engine(parser.add_argument_group("engine"))
    _device(parser.add_argument_group("device"))
    _output(parser.add_argument_group("comparison and output"))


def _traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    group.add_argument("--longest", type=int, metavar="N", help="only requests of at most N tokens, prompt and output")
    group.add_argument(
        "--from-s", type=float, default=0.0, metavar="S", help="leave out what came in the trace's first S seconds (0)"
    )
    group.add_argument(
        "--tenants", choices=TENANTS, default="all", help="others: leave out the tenant that sends most (all)"
    )
    group.add_argument(
        "--arrivals",
        choices=("trace", "backlog", "poisson", "sessions"),
        help="trace: at the recorded times; backlog: all at once; poisson: --rate a second; sessions: --sessions live "
        "at once, each calling again when it is answered. Default: trace, without times sessions, else backlog",
    )
    group.add_argument("--times-of", metavar="FILE", help="arrive at the recorded times of another trace")
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="recorded times X times as fast (1)")
    group.add_argument(
        "--rate", type=float, default=1.0, metavar="R", help="poisson: sessions or requests a second (1)"
    )
    group.add_argument("--sessions", type=int, default=16, metavar="N", help="sessions: so many live at once (16)")
    group.add_argument("--turns", choices=("first", "all"), default="first", help="of conversations (first)")
    group.add_argument("--clients", metavar="MODEL", help="ServeGen: the model whose clients to sample")
    group.add_argument(
        "--ttl-ms",
        type=float,
        metavar="MS",
        help="abort requests that have not ended by then, and refuse at once those that cannot start by then",
    )
    group.add_argument("--accept-late", action="store_true", help="with --ttl-ms: refuse nobody for a deadline")
    group.add_argument(
        "--classes", metavar="A,B,C", help="draw priorities 0 (high), 1, 2 with these shares, such as 10,60,30"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of whatever is drawn (0)")


def _engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block-size", type=int, nargs="+", default=[16], metavar="N", help="tokens in a block (16)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--pool-tokens", type=int, metavar="N", help="KV pool in tokens (default: the device's)")
    size.add_argument("--num-blocks", type=int, metavar="N", help="KV pool in blocks")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences at once (default: the device's)")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step (the device's)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt + output (default: no limit)")
    group.add_argument(
        "--max-tokens",
        default="1024",
        metavar="N",
        help="what requests ask for, at least their recorded output (1024); `exact`: the recorded output",
    )
    group.add_argument("--policy", choices=POLICIES, default="fcfs", help="who starts next, as of the engine (fcfs)")
    group.add_argument("--admission", choices=ADMISSIONS, default="optimistic", help="as of the engine (optimistic)")
    group.add_argument(
        "--forecast",
        choices=FORECASTS,
        default="lengths",
        help="what optimistic admission keeps free: what those who run should grow by, or 1 %% of the pool (lengths)",
    )
    group.add_argument("--preemption-mode", choices=PREEMPTION_MODES, default="auto", help="as of the engine (auto)")
    group.add_argument("--swap-tokens", type=int, metavar="N", help="host memory for swapping (the device's)")
    group.add_argument("--max-waiting-requests", type=int, metavar="N", help="refuse what would be more (no limit)")
    group.add_argument(
        "--max-waiting-prompt-tokens", type=int, metavar="N", help="refuse what would be more (no limit)"
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="keep and share no prefixes")


def _device(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", choices=DEVICE_NAMES, default="h200", help="timing model and defaults (h200)")
    for name in TIMINGS:
        group.add_argument(f"--{name}-us", type=float, metavar="US", help=argparse.SUPPRESS)
    group.description = (
        "Step time = fixed + prefill-token x tokens + decode x sequences + kv-token x cached tokens read + pair x "
        "query-key pairs of prefills + move x tokens swapped. Each may be set, in microseconds: "
        f"{', '.join(f'--{name}-us' for name in TIMINGS)}."
    )


def _output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--contiguous",
        default="max,pow2,exact",
        metavar="SIZES",
        help="twins that reserve memory in one piece: `max` (--max-model-len, or the longest request), a number of "
        "tokens, `pow2` (next power of two of the final size), `exact`; or `none` (max,pow2,exact)",
    )
    group.add_argument(
        "--naive",
        nargs="?",
        const="whole",
        choices=("whole", "chunks"),
        help="and a naive paged twin, preempting the last admitted; it computes prompts whole, or in chunks as the "
        "engine (whole)",
    )
    group.add_argument(
        "--overload",
        action="store_true",
        help="instead of twins: measure the capacity, then offer 0.5, 1 and 2 times that to the engine without a "
        "forecast, with it, with reserve, and both with a deadline (--ttl-ms, or 30 s)",
    )
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=A,B,...",
        help=f"a table over values of {', '.join(SWEEPS)}; several sweeps: every combination",
    )
    group.add_argument("--json", action="store_true", help="one JSON object for each system and setting, a line each")
    group.add_argument("--plot", metavar="FILE", help="draw to FILE.png or FILE.svg (needs pagemill[plots])")
