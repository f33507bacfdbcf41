"""A model whose step takes a millisecond: random weights, a byte-level tokenizer, half characters included."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from pagemill.engine.config import EngineConfig
from tests.engine.tiny_models import save_model

VOCAB = 320
CONTEXT = 256
_TEXT = (
    "a queue is a stream of requests, and a stream is a queue of tokens; the engine reads the one and writes the other"
)


def make_model(folder: Path) -> Path:
    """Save the model and its tokenizer in `folder`."""
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,  # wide logits: two tokens are rarely so close that a batch decides between them
        bos_token_id=None,
        eos_token_id=0,
        **shape,
    )
    save_model(config, folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [_TEXT],
        trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False),
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


def engine_config(folder: Path) -> EngineConfig:
    """A pool that a few requests fill, so that preemption is part of the run; one thread for each engine."""
    return EngineConfig(
        model=str(folder),
        served_model_name="tiny",
        dtype="float32",
        max_model_len=CONTEXT,
        block_size=8,
        num_blocks_override=96,
        max_num_seqs=16,
        threads=1,
    )
