"""How long a step takes: a model of a device in six numbers."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.errors import ConfigError


@dataclass(slots=True)
class StepLoad:
    """What a step computes. `kv_tokens`: cached tokens read, each sequence's context once. `pairs`: query and key pairs
    of prefill attention, which grow with the square of a prompt. `moved_tokens`: slots moved to or from the host."""

    prefill_tokens: int = 0
    decodes: int = 0
    kv_tokens: int = 0
    pairs: int = 0
    moved_tokens: int = 0

    def add_prefill(self, start: int, tokens: int) -> None:
        """`tokens` of a prompt after the `start` that are cached."""
        self.prefill_tokens += tokens
        self.kv_tokens += start + tokens
        self.pairs += tokens * start + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class TimingModel:
    """Seconds of a step = fixed + prefill_token x tokens + decode x sequences + kv_token x tokens read + pair x pairs
    + move x tokens moved.

    fixed: reading the weights, launching, sampling. prefill_token: the linear layers of one prompt token. decode: those
    of one decoding sequence, beyond the weights read anyway. kv_token: reading one token's keys and values of all
    layers. pair: one query and key pair of prefill attention, all layers and heads. move: taking one token's keys and
    values to the host or back.
    """

    fixed: float
    prefill_token: float
    decode: float
    kv_token: float
    pair: float
    move: float

    def __post_init__(self) -> None:
        times = (self.fixed, self.prefill_token, self.decode, self.kv_token, self.pair, self.move)
        if not all(0 <= time < 1e6 for time in times) or not any(times):
            raise ConfigError("step times must not be negative, and one of them must be above 0")

    def seconds(self, load: StepLoad) -> float:
        return (
            self.fixed
            + self.prefill_token * load.prefill_tokens
            + self.decode * load.decodes
            + self.kv_token * load.kv_tokens
            + self.pair * load.pairs
            + self.move * load.moved_tokens
        )


@dataclass(frozen=True, slots=True)
class Device:
    """A timing model, and what an engine on such a device would be started with. Sizes in tokens."""

    name: str
    timing: TimingModel
    pool_tokens: int
    swap_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int


# An 8B model with grouped-query attention (Llama 3: 32 layers, 8 KV heads of 128, so 128 KiB a token; 16 GB of weights
# in bf16). Derived from data sheets at shares that serving engines reach, not measured by us; docs/simulator.md has the
# arithmetic. The CPU numbers are SmolLM2-135M in bf16, measured on two Zen 4 cores.
DEVICES = {
    "h200": Device("h200", TimingModel(5.5e-3, 30e-6, 10e-6, 33e-9, 1.3e-9, 2.6e-6), 760_000, 32_768, 1024, 4096),
    "a100": Device("a100", TimingModel(11e-3, 85e-6, 20e-6, 82e-9, 3.5e-9, 5.2e-6), 390_000, 32_768, 1024, 4096),
    "cpu": Device("cpu", TimingModel(10.4e-3, 0.65e-3, 0.65e-3, 1.05e-6, 0.23e-6, 2.3e-6), 46_000, 0, 128, 512),
}
