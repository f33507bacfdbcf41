"""Several models, each on a queue of its own: names of models and the queues that serve them."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.engine.errors import ConfigError, RequestError, invalid
from pagemill.ingest.keys import is_queue_name


def read_models(models: Mapping[str, str] | str | None) -> dict[str, str]:
    """Model name -> queue, from a mapping or from `name=queue` pairs with commas between. Raises `ConfigError`."""
    if models is None:
        return {}
    if isinstance(models, str):
        parts = [item.rpartition("=") for item in models.split(",") if item.strip()]
        pairs = [(name.strip(), queue.strip()) for name, _, queue in parts]
    else:
        pairs = list(models.items())
    for name, queue in pairs:
        if not isinstance(name, str) or not name or not is_queue_name(queue):
            raise ConfigError(f"models must map names to queues, as in small=queue-a,large=queue-b; got {models!r}")
    return dict(pairs)


def queue_of(models: Mapping[str, str], model: str | None) -> str:
    """The queue of a model; without a name that of the only queue there is. Raises `RequestError`, naming `model`."""
    known = f"known: {', '.join(models)}"
    if model is None:
        if len(set(models.values())) > 1:
            raise invalid(f"several queues are mapped, so the model has to be named; {known}", "model")
        return next(iter(models.values()))
    if not isinstance(model, str) or model not in models:
        raise RequestError(
            "unsupported_model", f"no queue is mapped to model {str(model)[:128]!r}; {known}", param="model"
        )
    return models[model]
