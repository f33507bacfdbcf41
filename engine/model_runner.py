"""Runs the steps that the scheduler decided: the model on its device, the KV pool, the sampler.

The only part of the engine that knows torch. What device it is, and which kernels run there, is settled here once and
asked nowhere else.
"""

from __future__ import annotations

import time

import structlog
import torch

from pagemill.engine import openmp
from pagemill.engine.batch import BatchBuilder, PromptRows, StepBatch
from pagemill.engine.config import EngineConfig
from pagemill.engine.device import device_of
from pagemill.engine.errors import ConfigError
from pagemill.engine.kv_pool import KVPool
from pagemill.engine.loader import ModelFolder, Progress, no_progress
from pagemill.engine.logprobs import PositionLogprobs
from pagemill.engine.machine import available_cores, memory_limit, process_memory, processor_features
from pagemill.engine.memory import MIB, BudgetTable, CpuMemory, CudaMemory, MemoryMeter, size_pool
from pagemill.engine.models import check_architecture, load_model
from pagemill.engine.models.base import Loading
from pagemill.engine.models.spec import ModelSpec
from pagemill.engine.quantization import BYTES_PER_ELEMENT, settle
from pagemill.engine.request import Request
from pagemill.engine.sampler import position_logprobs, sample_step, share_draws
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduler_output import BlockMove, ScheduledSequence, SchedulerOutput, StepResult
from pagemill.engine.torch_import import complete
from pagemill.engine.weights import Checkpoint
from pagemill.kernels.layout import KVLayout
from pagemill.kernels.ops import LogitEdits, Ops, select_ops

_log = structlog.get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WARM_UP = "warming up"
_WARM_UP_PARAMS = SamplingParams(temperature=1.0, top_p=0.9)
_STEP_TOKENS = {"cpu": 512, "cuda": 4096}
_PROMPT_ROWS = 32  # rows of logits that are held at a time for a prompt's log-probabilities


class ModelRunner:
    """A loaded model with its KV pool. Made in one go: load, warm up, measure, size the pool, allocate.

    `num_blocks` counts the null block. `kernels` names a back end other than the device's own. Raises `ConfigError`
    where settings, model and machine do not go together.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: ModelFolder,
        progress: Progress = no_progress,
        *,
        kernels: str | None = None,
    ) -> None:
        check_architecture(folder)
        self.device = device_of(config)
        if self.device == "cuda":
            complete()  # operators of its own for GPUs are among what torch's import puts off
        self._dtype = _dtype(config, self.device)
        self.quantization = settle(config, folder, self.device)
        self.max_num_batched_tokens = config.max_num_batched_tokens or _STEP_TOKENS[self.device]
        self._config = config
        openmp.let_go()
        threads = config.threads or available_cores()
        torch.set_num_threads(threads)
        try:
            self._ops = select_ops(
                self.device,
                override=kernels,
                threads=threads,
                cache_dir=config.cache_dir,
                report=lambda kernel, done, seconds: progress(_compiling(kernel, done, seconds), 0.0),
            )
        except (ImportError, RuntimeError, ValueError) as error:
            raise ConfigError(f"the kernels for {kernels or self.device} cannot be used: {error}") from error
        meter: MemoryMeter = CudaMemory(self.device) if self.device == "cuda" else CpuMemory()
        before = meter.held()
        checkpoint = Checkpoint(folder.weight_files, progress)
        self._check_room(checkpoint, meter.limit() - before)
        loading = Loading(checkpoint, self._ops, self._dtype, self.device, self.quantization)
        with torch.inference_mode():
            self._model = load_model(folder, loading, config.max_model_len)
        self._batches = BatchBuilder(
            block_size=config.block_size,
            vocab_size=self.spec.vocab_size,
            device=self.device,
            sliding_window=self.spec.sliding_window or 0,
        )
        self.weight_bytes = dict(loading.loaded)
        del checkpoint, loading
        weights = meter.held() - before
        self.budget = self._size_pool(meter, weights, progress)
        self.num_host_blocks = self._host_blocks()
        try:
            self._pool = KVPool(self._layout(self.budget.num_blocks), self._ops, self.num_host_blocks)
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise the latter
            raise ConfigError(
                f"the system refused a KV pool of {self.budget.pool / MIB:.1f} MiB with {self.num_host_blocks} blocks "
                "to swap to (an address space limit?); "
                f"lower gpu_memory_utilization or swap_space, or set kv_cache_memory_bytes.\n{self.budget}"
            ) from error
        _log.info("memory budget", **self.budget.to_dict())

    @property
    def ops(self) -> Ops:
        return self._ops

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def num_blocks(self) -> int:
        return self._pool.layout.num_blocks

    @property
    def block_size(self) -> int:
        return self._pool.layout.block_size

    @property
    def bytes_per_block(self) -> int:
        return self._pool.layout.bytes_per_block

    @property
    def max_model_len(self) -> int:
        return self.spec.max_model_len

    @property
    def dtype_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Make the step's block moves in order, then compute it.

        A row whose logits were not usable (NaN) samples -1; its neighbours are not concerned. An exception means that
        the device failed.
        """
        copy_s = 0.0
        if output.moves:
            before = time.perf_counter()
            self._pool.move_blocks(output.moves)
            copy_s = time.perf_counter() - before
        with self._ops.step(output.num_tokens):
            result = self._compute(output.scheduled, self._pool)
        result.copy_s = copy_s
        return result

    def _compute(self, scheduled: list[ScheduledSequence], pool: KVPool) -> StepResult:
        if not scheduled:
            return StepResult()
        batch = self._batches.build(scheduled)
        compiled = self._model.compiled
        if batch.only_draws and batch.num_rows and compiled is not None:
            drawn = compiled.draw(
                batch.token_ids,
                batch.meta,
                pool.layers,
                batch.wanted,
                batch.sampling,
                advance=batch.advance is not None,
            )
            self._batches.drawn = drawn
            if batch.sampled is None:
                return StepResult(drawn=drawn)
            return StepResult(share_draws(batch.sampled, drawn))
        if batch.advance is not None:
            batch.advance()
        return self._compute_parts(batch, pool)

    @torch.inference_mode()
    def _compute_parts(self, batch: StepBatch, pool: KVPool) -> StepResult:
        hidden = self._model.forward(batch.token_ids, batch.meta, pool.layers, batch.wanted)
        result = StepResult()
        sampled = batch.num_rows
        if sampled and batch.sampled is None:
            result.drawn = self._ops.sample(self._model.logits(hidden), batch.sampling).tolist()
        elif batch.sampled:
            logits = self._model.logits(hidden[:sampled] if batch.prompts else hidden)
            result.sampled = sample_step(logits, batch, batch.sampled, self._ops)
        for prompt in batch.prompts:
            count = len(prompt.token_ids)
            result.prompt_logprobs[prompt.place] = self._prompt_logprobs(hidden[sampled : sampled + count], prompt)
            sampled += count
        return result

    def _prompt_logprobs(self, hidden: torch.Tensor, prompt: PromptRows) -> list[PositionLogprobs]:
        """A few rows at a time: the logits of a whole prompt may be larger than everything else of a step."""
        found: list[PositionLogprobs] = []
        for start in range(0, len(prompt.token_ids), _PROMPT_ROWS):
            chosen = prompt.token_ids[start : start + _PROMPT_ROWS]
            logits = self._model.logits(hidden[start : start + _PROMPT_ROWS])
            found += position_logprobs(logits, chosen, [prompt.top] * len(chosen), self._ops)
        return found

    def _check_room(self, checkpoint: Checkpoint, room: int) -> None:
        """Better refused than killed by the system half way through."""
        form, stored = self.dtype_name, checkpoint.num_stored_bytes
        needed = float(checkpoint.num_elements * self._dtype.itemsize)
        if self.quantization == "gguf" and stored is not None:
            form, needed = "the file's own types", float(stored)
        elif self.quantization in BYTES_PER_ELEMENT:
            form = self.quantization
            needed = checkpoint.num_elements * BYTES_PER_ELEMENT[form]
        if needed > room:
            raise ConfigError(
                f"the weights of {self._config.model} take {needed / MIB:.0f} MiB in {form}, and this "
                f"process may use {max(0, room) / MIB:.0f} MiB more on {self.device}"
            )

    def _layout(self, num_blocks: int, num_layers: int | None = None) -> KVLayout:
        spec = self.spec
        try:
            return KVLayout(
                num_blocks=num_blocks,
                num_layers=num_layers or spec.num_layers,
                block_size=self._config.block_size,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=self._dtype,
                device=self.device,
                form=self._ops.kv_form,
            )
        except ValueError as error:
            raise ConfigError(f"{self._config.model} cannot be served in {self.dtype_name}: {error}") from error

    def _size_pool(self, meter: MemoryMeter, weights: int, progress: Progress) -> BudgetTable:
        """Warm up with a tiny step, then measure the largest, unless the pool's size is given."""
        config = self._config
        progress(_WARM_UP, 0.0)
        self._compute(*self._step_of(tokens=2, rows=1))
        self._warm_up_rules()
        activations = 0
        if config.num_blocks_override is None and config.kv_cache_memory_bytes is None:
            progress(_WARM_UP, 0.5)
            # All layers on every core would be a tenth of a start.
            layers = self.spec.typical_layers if self.device == "cpu" else None
            scheduled, pool = self._step_of(
                tokens=self.max_num_batched_tokens, rows=config.max_sampled_rows, layers=layers
            )
            activations = meter.peak(lambda: self._compute(scheduled, pool))
            del scheduled, pool
        progress(_WARM_UP, 1.0)
        return size_pool(
            config,
            device=self.device,
            max_model_len=self.max_model_len,
            bytes_per_block=self._layout(1).bytes_per_block,
            limit=meter.limit(),
            weights=weights,
            quantization=self.quantization,
            held=meter.held(),
            activations=activations,
        )

    def _warm_up_rules(self) -> None:
        """What only some requests ask for: compiled on their first step, it would hold up everybody's."""
        logits = torch.zeros((1, self.spec.vocab_size), device=self.device)
        self._ops.edit_logits(logits, LogitEdits.one_of_each(self.spec.vocab_size))
        told = SamplingParams(temperature=1.0, logprobs=1)
        self._compute(*self._step_of(tokens=2, rows=1, layers=self.spec.typical_layers, params=told))

    def _host_blocks(self) -> int:
        """Blocks of the host pool. On the CPU the pool lies in host memory already: swapping is for those who ask."""
        gib = self._config.swap_space
        if gib is None:
            gib = 4.0 if self.device == "cuda" else 0.0
        room = memory_limit() - process_memory()
        if gib * 2**30 > room:
            raise ConfigError(f"swap_space is {gib:g} GiB, and this process may use {room / 2**30:.1f} GiB more")
        return int(gib * 2**30) // self._layout(1).bytes_per_block

    def measure_move_s(self) -> float | None:
        """Seconds to move one block out to the host, measured on blocks that nobody holds yet; None without a host
        pool."""
        count = min(self.num_host_blocks, self.num_blocks - 1, 32)
        if count < 1:
            return None
        moves = [BlockMove("out", block_id, block_id - 1) for block_id in range(1, count + 1)]
        self._pool.move_blocks(moves)  # the first time commits the memory
        before = time.perf_counter()
        self._pool.move_blocks(moves)
        return (time.perf_counter() - before) / count

    def _step_of(
        self, *, tokens: int, rows: int, layers: int | None = None, params: SamplingParams = _WARM_UP_PARAMS
    ) -> tuple[list[ScheduledSequence], KVPool]:
        """A step of so many tokens and sampled rows, and a pool of its own to run it on, of all layers or of the first,
        committed already."""
        rows = min(rows, tokens)
        scheduled: list[ScheduledSequence] = []
        blocks = 0
        for left in range(rows, 0, -1):
            length = min(tokens - (left - 1), self.max_model_len)
            needed = -(-length // self._config.block_size)
            request = Request("", [0] * length, params, seed=0, max_tokens=1)
            # All share the same blocks: what is read there does not matter, and the pool stays small.
            scheduled.append(ScheduledSequence(request, 0, length, list(range(1, needed + 1)), True))
            tokens -= length
            blocks = max(blocks, needed)
        pool = KVPool(self._layout(blocks + 1, layers), self._ops)
        pool.commit()
        return scheduled, pool


def _compiling(kernel: str, done: int, seconds: float) -> str:
    return f"compiling kernel {done + 1}: {kernel} (once on this machine; {seconds:.0f} s so far)"


def _dtype(config: EngineConfig, device: str) -> torch.dtype:
    if config.dtype != "auto":
        if config.dtype == "float16" and device == "cpu":
            raise ConfigError("dtype float16 is not supported on the CPU; use bfloat16 or float32")
        return _DTYPES[config.dtype]
    if device == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if processor_features() & _BFLOAT16_FEATURES else torch.float32


_BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
