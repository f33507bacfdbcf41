"""The gateway's application: every route in one place."""

from __future__ import annotations

from aiohttp import web

from pagemill.adapters.http import (
    batches,
    dashboard,
    files,
    middleware,
    native,
    openai_routes,
    openapi,
    operations,
    playground,
    responses,
)
from pagemill.adapters.http.gateway import GATEWAY, Gateway


def make_app(gateway: Gateway) -> web.Application:
    """The application of one gateway. Paths may end with a slash: base URLs are often joined carelessly."""
    app = web.Application(middlewares=[middleware.observe], client_max_size=gateway.config.http_max_body_bytes)
    app[GATEWAY] = gateway
    app.on_response_prepare.append(middleware.add_headers)
    gets = {
        "/v1/models": openai_routes.list_models,
        # A model's name may hold slashes, as those of Hugging Face do.
        "/v1/models/{model:.+?}": openai_routes.get_model,
        "/v1/requests/{id}": native.show,
        "/v1/requests/{id}/events": native.events,
        "/v1/responses/{id}": responses.show,
        "/v1/files": files.list_files,
        "/v1/files/{id}": files.show,
        "/v1/files/{id}/content": files.content,
        "/v1/batches": batches.list_batches,
        "/v1/batches/{id}": batches.show,
        "/openapi.json": openapi.openapi,
        "/overview.json": dashboard.data,
        "/dashboard.js": dashboard.script,
        playground.PATH: playground.page,
        "/playground.js": playground.script,
        "/healthz": operations.healthz,
        "/readyz": operations.readyz,
        "/metrics": operations.metrics,
    }
    posts = {
        "/v1/completions": openai_routes.completions,
        "/v1/chat/completions": openai_routes.chat_completions,
        "/v1/responses": responses.create,
        "/v1/responses/{id}/cancel": responses.cancel,
        "/v1/files": files.upload,
        "/v1/batches": batches.create,
        "/v1/batches/{id}/cancel": batches.cancel,
        "/v1/requests": native.submit,
        "/v1/requests/{id}/cancel": native.cancel,
    }
    app.router.add_get("/", dashboard.page)
    for path, get in gets.items():
        # A HEAD of a stream would wait for its end.
        has_head = get not in (native.events, responses.show)
        app.router.add_get(path, get, allow_head=has_head)
        app.router.add_get(f"{path}/", get, allow_head=has_head)
    for path, post in posts.items():
        app.router.add_post(path, post)
        app.router.add_post(f"{path}/", post)
    app.router.add_delete("/v1/responses/{id}", responses.delete)
    app.router.add_delete("/v1/files/{id}", files.delete)
    return app
