"""Which queue serves which model, and where a request lies.

One queue serves one model. With the setting `models` names are mapped to queues; without it there is one queue, and its
engines say what it serves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.http.errors import ApiError, not_found
from pagemill.ingest.allowances import Allowances
from pagemill.ingest.async_client import AsyncClient
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.keys import is_request_id
from pagemill.ingest.overview import Overview
from pagemill.ingest.records import Record
from pagemill.ingest.shelf import Shelf

FRESH_S = 1.0  # how long an overview is used again


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for. `queue_model`: the name to send along; None where the queue goes by another."""

    name: str
    client: AsyncClient
    queue_model: str | None


class Queues:
    """The clients of all queues that this gateway serves. Belongs to one event loop."""

    def __init__(self, gateway: GatewayConfig, queue: QueueConfig) -> None:
        self._aliases = gateway.queues
        names = dict.fromkeys(self._aliases.values()) if self._aliases else {queue.queue: None}
        self.clients: Mapping[str, AsyncClient] = {name: AsyncClient(queue.replace(queue=name)) for name in names}
        self._overviews: dict[str, tuple[float, Overview]] = {}

    @property
    def shelf(self) -> Shelf:
        """Where files and batches lie: beside the first queue, which has to be the same for all replicas."""
        return next(iter(self.clients.values())).shelf

    @property
    def allowances(self) -> Allowances:
        """The books of what tenants may do, beside the first queue too."""
        return next(iter(self.clients.values())).allowances

    async def aclose(self) -> None:
        for client in self.clients.values():
            await client.aclose()

    async def overview(self, queue: str) -> Overview:
        """What a queue says of itself, at most a second old. Raises `QueueUnavailableError`."""
        at, known = self._overviews.get(queue, (float("-inf"), None))
        if known is None or time.monotonic() - at > FRESH_S:
            known = await self.clients[queue].overview()
            self._overviews[queue] = time.monotonic(), known
        return known

    async def models(self) -> list[Model]:
        """What can be asked for now. Without the setting `models`, what living engines serve."""
        if self._aliases:
            return [Model(name, self.clients[queue], None) for name, queue in self._aliases.items()]
        ((queue, client),) = self.clients.items()
        overview = await self.overview(queue)
        living = overview.living(client.config.heartbeat_timeout_s)
        names = dict.fromkeys(engine.model for engine in living if engine.model)
        return [Model(name, client, name) for name in names]

    async def find(self, name: str | None) -> Model:
        """The model to use for a request's `model`; None is the first one.

        Raises `ApiError` 404 for what is not served. While no engine lives nobody knows, so the request may wait.
        """
        models = await self.models()
        if name is None:
            return models[0] if models else Model("", next(iter(self.clients.values())), None)
        for model in models:
            if model.name == name:
                return model
        if models:
            served = ", ".join(model.name for model in models[:8])
            raise ApiError(404, f"no model {name[:128]!r}; served: {served}", code="model_not_found", param="model")
        return Model(name, next(iter(self.clients.values())), name)

    async def locate(self, request_id: str, tenant: str) -> tuple[AsyncClient, Record]:
        """A request of `tenant`, wherever it lies. Raises `ApiError` 404."""
        if is_request_id(request_id):
            for client in self.clients.values():
                record = await client.record(request_id)
                if record is not None and record.tenant == tenant:
                    return client, record
        raise not_found("request", request_id[:128])
