"""Putting an engine together from its settings: model files, runner, tokenizer, scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pagemill.engine.admission import Limits
from pagemill.engine.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.grammar import GrammarCompiler
from pagemill.engine.loader import Progress, no_progress, resolve_model
from pagemill.engine.model_runner import ModelRunner
from pagemill.engine.quantization import keeps_gguf
from pagemill.engine.speculation import NgramProposer, Speculation
from pagemill.engine.speculation_gain import DraftGain
from pagemill.engine.tokenizer import Tokenizer
from pagemill.engine.wiring import make_scheduler


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine turned out to be. Sizes in tokens; `num_blocks` without the null block; `weight_bytes` by
    form: a dtype, 4-bit or 8-bit."""

    model_name: str
    dtype: str
    quantization: str
    weight_bytes: Mapping[str, int]
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """One engine, ready to step."""

    config: EngineConfig
    info: EngineInfo
    limits: Limits
    core: EngineCore
    tokenizer: Tokenizer | None
    compiler: GrammarCompiler | None
    threads: Callable[[], int]
    """How many threads compute at present."""


def build(config: EngineConfig, progress: Progress = no_progress) -> EngineParts:
    """Load the model and make the pool. `progress` hears of everything that takes time.

    Raises `ConfigError` where a setting, the model or the machine's memory does not allow it.
    """
    folder = resolve_model(config.model, config.cache_dir, progress, convert_weights=not keeps_gguf(config))
    with ThreadPoolExecutor(1) as beside:
        # Reading a tokenizer takes a second of a start that should take five.
        reading = None if config.skip_tokenizer_init else beside.submit(Tokenizer.from_folder, folder.path)
        runner = ModelRunner(config, folder, progress)
        tokenizer = None if reading is None else reading.result()
    spec = runner.spec
    scheduler = make_scheduler(
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        num_host_blocks=runner.num_host_blocks,
        sliding_window=spec.sliding_window or 0,
        enable_prefix_caching=config.enable_prefix_caching,
        model_name=config.model_name,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        admission=config.admission,
        preemption_mode=config.preemption_mode,
        scheduling_policy=config.scheduling_policy,
        block_move_s=runner.measure_move_s(),
        speculation=_speculation(config, sorted(spec.eos_token_ids)),
    )
    num_blocks = scheduler.cache.num_usable
    info = EngineInfo(
        model_name=config.model_name,
        dtype=runner.dtype_name,
        quantization=runner.quantization,
        weight_bytes=runner.weight_bytes,
        device=runner.device,
        vocab_size=spec.vocab_size,
        max_model_len=runner.max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        bytes_per_block=runner.bytes_per_block,
        eos_token_ids=_end_token_ids(spec.eos_token_ids, tokenizer, spec.vocab_size),
    )
    limits = Limits(
        vocab_size=spec.vocab_size,
        max_model_len=runner.max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        default_max_tokens=config.default_max_tokens,
        max_num_seqs=min(config.max_num_seqs, runner.max_num_batched_tokens),
        eos_token_ids=info.eos_token_ids,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    core = EngineCore(scheduler, runner, tokenizer, info.eos_token_ids)
    compiler = None if tokenizer is None else GrammarCompiler(tokenizer, spec.vocab_size, info.eos_token_ids)
    return EngineParts(config, info, limits, core, tokenizer, compiler, lambda: runner.ops.threads)


def _end_token_ids(of_model: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: the model's, and the tokenizer's own. A model that was taught to chat often keeps the former
    of the model it came from, and ends its turns by the latter."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(sorted({*of_model, *(() if own is None or own >= vocab_size else (own,))}))


def _speculation(config: EngineConfig, eos_token_ids: Sequence[int]) -> Speculation | None:
    if not config.num_speculative_tokens:
        return None
    longest, shortest = config.prompt_lookup_max, config.prompt_lookup_min
    return Speculation(
        config.num_speculative_tokens, lambda request: NgramProposer(longest, shortest), DraftGain(), eos_token_ids
    )
